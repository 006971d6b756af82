"""How products run on tensor cores (kernels/_core_copies.cl): blocks of work-groups, shapes of 16-bit products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from memtrain_cl.device import DeviceInfo
from memtrain_cl.tuning import MOST_SPLITS, MatmulShape, ceil_div, split_of

#: Bytes that tensor cores take at a time: rows begin on them. Bytes of K in a stage, and rows of blocks in a band.
CHUNK = 16
STAGE_BYTES, BAND = 128, 8
#: Warps of a group, down and across, with 64 x 64 of a block each; "wgmma" has the first alone.
WARPS = ((2, 4), (2, 2), (1, 2))
#: Stages in local memory, by the instruction.
STAGES: Mapping[str, int] = {"mma": 3, "wgmma": 4}
#: Elements of K that a part of a 16-bit product has at least: sums of parts cost a pass over the result each.
_LEAST_SPLIT = 256


def blocks_of(
    info: DeviceInfo, M: int, N: int, choices: Sequence[tuple[int, int]], batch: int = 1
) -> tuple[int, int, int]:
    """(warps down, across, blocks of a result [M, N]): the first of the choices that gives every compute unit a block,
    else the last. The first needs more local memory than "narrow" tensor cores have.
    """
    down, across, groups = 1, 1, 0
    for down, across in choices[info.tensor_cores == "narrow" :]:
        groups = ceil_div(M, 64 * down) * ceil_div(N, 64 * across)
        if groups * batch >= info.compute_units:
            break
    return down, across, groups


def instruction_of(info: DeviceInfo, warps: tuple[int, int]) -> Literal["mma", "wgmma"]:
    """The instruction for blocks of so many warps."""
    return "wgmma" if info.tensor_cores == "wgmma" and warps == WARPS[0] else "mma"


def core_shape(info: DeviceInfo, M: int, N: int, K: int, batch: int) -> MatmulShape:
    """The shape for `batch` products [M, N] of 16-bit numbers over K, where the device has tensor cores."""
    down, across, groups = blocks_of(info, M, N, WARPS[:2], batch)
    kind = instruction_of(info, (down, across))
    splits = min(MOST_SPLITS, K // _LEAST_SPLIT, info.compute_units // (groups * batch))
    k_per, splits = split_of(K, max(1, splits), STAGE_BYTES // 2)
    items = 32 * down * across
    return MatmulShape(
        gpu=1,
        global_size=(groups * items, 1, batch * splits),
        local_size=(items, 1, 1),
        k_per=k_per,
        splits=splits,
        cores=kind,
        warps=(down, across),
        stages=STAGES[kind],
        band=BAND,
    )
