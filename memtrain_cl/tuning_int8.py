"""How the products of whole numbers (kernels/matmul_int8.cl) run on a device: who forms the sums, and the tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from memtrain_cl.device import DeviceInfo
from memtrain_cl.tuning import TILE_M, WGMMA_TARGET, ceil_div, groups_share_rows
from memtrain_cl.tuning_cores import BAND, STAGE_BYTES, STAGES, WARPS, blocks_of, instruction_of

#: Who forms the sums. More ways of one device, its tensor cores say, are kinds of their own.
Kind = Literal["float", "dot", "vnni", "mma", "wgmma"]

#: Elements of K in a block whose sum a float32 holds: of products of 127 by 127, and of 127 by 1.
FLOAT_BLOCK, TERNARY_BLOCK = 1024, 131_072
#: Cells of a tile's row (GPU shape); cells of a block of K, and the columns whose panels fit beside it (CPU shape): of
#: floats at most 2^22 / 127^2 = 260 cells, of words 8 * 2^16 / 510, as kernels/_int8_cpu.cl counts them.
GPU_DEPTH = 16
_LARGE, _SMALL = (256, 128), (64, 32)
#: Local memory in bytes that the large blocks want.
_LARGE_LOCAL = 250_000
#: Columns of a panel, by kind and width of vectors.
_PANELS = {("vnni", 16): 32, ("float", 16): 64, ("float", 8): 16}
#: What filling a row of a tile, or a column of a panel, costs beside a sum of it.
_ROW_COST, _COLUMN_COST = 10.0, 20.0


#: The template's constants of a shape, all of them, where they have no meaning.
NOTHING: Mapping[str, Any] = {
    name: "" if name == "KIND" else 0
    for name in ("KIND", "GPU", "TILE", "SIDE", "WIDTH", "DEPTH", "TILE_N", "WARPS_M", "WARPS_N", "STAGES", "BAND")
}


@dataclass(frozen=True)
class Int8Shape:
    """constants: the template's. block: elements of K that one sum takes (GPU shape). per, columns: of the result, an
    item (CPU shape).
    """

    constants: dict[str, Any]
    gpu: bool
    global_size: tuple[int, ...]
    local_size: tuple[int, ...]
    block: int
    per: int
    columns: int

    def arguments(self, *, words: bool, pairs: bool) -> tuple[int, ...]:
        """The kernel's last ones. words: every row of both operands begins on four bytes. pairs: every row of the
        result begins on eight.
        """
        if self.constants["KIND"] in STAGES:
            return (pairs,)
        return (self.block, words) if self.gpu else (self.per, self.columns)


def int8_shape(info: DeviceInfo, M: int, N: int, K: int, *, ternary: bool, chunks: bool) -> Int8Shape:
    """The shape for a product [M, N] summed over K. ternary: b holds no more than -1, 0 and 1. chunks: every row of
    both operands begins on `tuning_cores.CHUNK` bytes.
    """
    if groups_share_rows(info) and info.tensor_cores and chunks:
        return _tensor_core_shape(info, M, N)
    if groups_share_rows(info) and info.max_work_group_size >= 256:
        return _gpu_shape(info, M, N, K, ternary)
    return _cpu_shape(info, M, N)


def _tensor_core_shape(info: DeviceInfo, M: int, N: int) -> Int8Shape:
    # Large blocks read least; small results need more groups than they give.
    down, across, groups = blocks_of(info, M, N, WARPS)
    kind = instruction_of(info, (down, across))
    own = {"WARPS_M": down, "WARPS_N": across, "DEPTH": STAGE_BYTES, "STAGES": STAGES[kind], "BAND": BAND}
    constants = {**NOTHING, "KIND": kind, "GPU": 1, **own}
    if kind == "wgmma":
        constants["PTX_TARGET"] = WGMMA_TARGET
    items = 32 * down * across
    return Int8Shape(constants, True, (groups * items,), (items,), 0, 1, 1)


def _gpu_shape(info: DeviceInfo, M: int, N: int, K: int, ternary: bool) -> Int8Shape:
    kind: Kind = "dot" if info.integer_dot else "float"
    # Both operands' tiles, with a pad of 4, wait in local memory. Small results need more groups than large tiles give.
    fits = info.local_mem_bytes >= 2 * GPU_DEPTH * (128 + 4) * 4
    tile = 128 if fits and ceil_div(M, 128) * ceil_div(N, 128) >= 2 * info.compute_units else 64
    side = 16
    constants = {**NOTHING, "KIND": kind, "GPU": 1, "TILE": tile, "SIDE": side, "DEPTH": GPU_DEPTH}
    if kind == "dot":
        constants["STANDARD"] = "CL3.0"
    block = max(K, 1) if kind == "dot" else TERNARY_BLOCK if ternary else FLOAT_BLOCK
    size = (ceil_div(N, tile) * side, ceil_div(M, tile) * side)
    return Int8Shape(constants, True, size, (side, side), block, 1, 1)


def _cpu_shape(info: DeviceInfo, M: int, N: int) -> Int8Shape:
    large = info.local_mem_bytes >= _LARGE_LOCAL
    kind: Kind = "vnni" if info.inline_vnni and large else "float"
    width = 16 if kind == "vnni" or (large and info.native_vector_width >= 16) else 8
    depth, tile_n = _LARGE if large else _SMALL
    panel = _PANELS[kind, width]
    per, columns = min(
        (
            (per, columns)
            for columns in range(panel, min(tile_n, ceil_div(N, panel) * panel) + 1, panel)
            for per in _row_blocks(M)
        ),
        key=lambda choice: _cpu_cost(info, M, N, *choice),
    )
    constants = {**NOTHING, "KIND": kind, "WIDTH": width, "DEPTH": depth, "TILE_N": tile_n}
    size = (ceil_div(N, columns), ceil_div(M, per))
    return Int8Shape(constants, False, size, (1, 1), 1, per, columns)


def _row_blocks(M: int) -> list[int]:
    """Sizes of blocks of rows worth a look, whole tiles."""
    return [ceil_div(ceil_div(M, number), TILE_M) * TILE_M for number in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)]


def _cpu_cost(info: DeviceInfo, M: int, N: int, per: int, columns: int) -> float:
    """Sums of the busiest compute unit, and what filling tiles and panels costs beside them."""
    # An item more, since the last ones end unevenly.
    turns = ceil_div(ceil_div(M, per) * ceil_div(N, columns), info.compute_units) + 1
    return turns * (per * columns + _ROW_COST * per + _COLUMN_COST * columns)
