"""How kernels/counter_matvec.cl runs on a device."""

from __future__ import annotations

from dataclasses import dataclass

from memtrain_cl.device import DeviceInfo
from memtrain_cl.tuning import BLOCKS_PER_UNIT, ceil_div, power_of_two_at_least, spreads_wide

#: Items of a group of the GPU shape.
_GROUP = 256
#: (rows, lanes at most) of a set by preference: rows share the numbers of x that an item reads; fewer rows, and at last
#: more lanes, make more groups of the same work.
_SETS = ((4, 128), (2, 128), (1, 128), (1, 256))
#: Groups a compute unit that keep memory busy, and turns of an item that are worth the sum over lanes.
_GROUPS_PER_UNIT, _TURNS = 1, 4
#: Weights that a CPU's item takes at least.
_LEAST = 1 << 14


@dataclass(frozen=True)
class CounterMatvecShape:
    """Template constants, launch sizes, and rows an item (CPU shape)."""

    constants: dict[str, int]
    global_size: tuple[int, ...]
    local_size: tuple[int, ...]
    per: int


def counter_matvec_shape(info: DeviceInfo, M: int, K: int, gated: bool, *, words: bool = True) -> CounterMatvecShape:
    """The shape for M results over K columns; gated: of 2M rows. words: the codes begin on four bytes."""
    parts = 1 + gated
    if not spreads_wide(info, _GROUP):
        items = max(1, min(info.compute_units * BLOCKS_PER_UNIT, parts * M * K // _LEAST))
        per = ceil_div(M, items)
        constants = {"GPU": 0, "LANES": 1, "ROWS": 1, "WORDS": 0, "FUSED": 0}
        return CounterMatvecShape(constants, (ceil_div(M, per),), (1,), per)
    words = words and K % 16 == 0
    useful = max(8, power_of_two_at_least(ceil_div(K // (16 if words else 4), _TURNS)))
    choices = [(max(rows, parts), min(lanes, useful)) for rows, lanes in _SETS]
    groups = [ceil_div(M, rows // parts * (_GROUP // lanes)) for rows, lanes in choices]
    wanted = _GROUPS_PER_UNIT * info.compute_units
    best = next((i for i, count in enumerate(groups) if count >= wanted), len(choices) - 1)
    rows, lanes = choices[best]
    # A processor may lack the instruction, and its compiler then calls a function for it.
    fused = int(info.type != "cpu")
    constants = {"GPU": 1, "LANES": lanes, "ROWS": rows, "WORDS": int(words), "FUSED": fused}
    return CounterMatvecShape(constants, (groups[best] * _GROUP,), (_GROUP,), 1)
