"""Launcher of kernels/sort.cl: stable sorts along one dimension, and the first few of them.

Tiles are sorted by themselves and merged in pairs, run by run; where only the first few are wanted no merged run grows
longer than that. Unproven: how it fares on GPUs beside a radix sort.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from memtrain_cl.device import Device
from memtrain_cl.elements import ELEMENTS
from memtrain_cl.launchers.reduce import GROUP, MOST, layout
from memtrain_cl.memory import allocate
from memtrain_cl.operand import Operand
from memtrain_cl.program import Kernel, get_kernel
from memtrain_cl.tuning import BLOCKS_PER_UNIT, ceil_div, groups_share_rows, power_of_two_at_least

#: Pairs of a tile at most: 16 KiB of a group's local memory on GPUs.
TILE = 1024
#: Pairs that an item merges on GPUs, and at least on CPUs.
SLICE = 16
SMALLEST_CPU_SLICE = 256
#: So few results of a run are picked on CPUs, and more are sorted.
FEW = 64


class _Plan(NamedTuple):
    tiles: Kernel
    merge: Kernel
    finish: Kernel
    tile_sizes: tuple[tuple[int], tuple[int]]
    tile_arguments: tuple[Any, ...]
    merges: tuple[tuple[tuple[int], tuple[Any, ...]], ...]
    finish_size: tuple[int]
    finish_layout: tuple[Any, ...]
    pair_bytes: int


@functools.lru_cache(maxsize=1024)
def _plan(
    device: Device,
    element: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dim: int,
    taken: int,
    descending: bool,
) -> _Plan:
    at = layout(shape, strides, (dim,), ordered=True)
    if at is None:
        raise ValueError(f"expected at most two strides beside dimension {dim} of {shape}, got strides {strides}")
    # The greatest place stands for no element.
    if at.kept >= MOST or at.length >= MOST - TILE:
        raise ValueError(f"expected fewer than 2^32 runs of fewer than 2^32 elements, got {at.kept} of {at.length}")
    info = device.info
    gpu = groups_share_rows(info)
    group = min(GROUP, power_of_two_at_least(info.max_work_group_size + 1) // 2) if gpu else 1
    # Half of the local memory at most, of which a driver keeps some for itself.
    largest = min(TILE, power_of_two_at_least(info.local_mem_bytes // 32 + 1) // 2) if gpu else TILE
    tile = min(largest, max(2, power_of_two_at_least(at.length)))
    size = min(tile, taken)
    if not gpu and taken <= FEW:
        # Tiles of any length, from which the few are picked.
        tile = max(4 * FEW, ceil_div(at.kept * at.length, info.compute_units * BLOCKS_PER_UNIT))
        tile, size = min(tile, max(at.length, taken + 1)), taken
    elif not gpu:
        # 16, 64, 256 or 1024 pairs, which end in the buffer where they began.
        tile = size = 16 << (max(0, tile.bit_length() - 4) // 2 * 2)
    tiles = ceil_div(at.length, tile)
    strided = (
        np.uint32(at.kept),
        np.uint32(at.inner),
        *(np.uint64(value) for value in (at.outer_stride, at.inner_stride, at.step)),
    )
    merges = []
    runs, first = tiles, size
    # A run without a partner is filled up, so merged runs may take more room than the tiles.
    most = runs * size
    while runs > 1:
        merged = min(2 * size, taken)
        halves = ceil_div(runs, 2)
        even = ceil_div(at.kept * halves * merged, info.compute_units * BLOCKS_PER_UNIT)
        slice_ = min(merged, SLICE if gpu else max(SMALLEST_CPU_SLICE, even))
        slices = ceil_div(merged, slice_)
        numbers = (np.uint32(value) for value in (at.kept, runs, size, merged, slice_, slices))
        merges.append(((at.kept * halves * slices,), tuple(numbers)))
        runs, size = halves, merged
        most = max(most, runs * size)
    itemsize = ELEMENTS[element].itemsize
    constants = {"GPU": int(gpu), "IN": element, "ITEMSIZE": itemsize, "WG_SIZE": group, "TILE": largest}
    return _Plan(
        get_kernel(device, "sort", "sort_tiles", **constants),
        get_kernel(device, "sort", "sort_merge", **constants),
        get_kernel(device, "sort", "sort_finish", **constants),
        ((at.kept * tiles * group,), (group,)),
        (*strided, *(np.uint32(value) for value in (at.length, tiles, tile, first, descending))),
        tuple(merges),
        (at.kept * taken,),
        (*strided, np.uint32(math.prod(shape[dim + 1 :])), np.uint32(size), np.uint32(taken)),
        at.kept * most * (16 if element == "int64" else 8),
    )


def sort(x: Operand, dim: int, values: Operand, places: Operand, *, descending: bool) -> None:
    """values = the first of x sorted along `dim` (0..rank-1), as many as values has there; places: where they stood.

    Stable; NaN counts as the greatest. values: x's element; places: int64; both contiguous, of x's shape but for `dim`.
    x: of any strides that `ops.reduce.layout` takes with dimension `dim`. ValueError for others, and for 2^32 runs or
    elements in one.
    """
    if values.size == 0:
        return
    device = x.device
    plan = _plan(device, x.element, x.shape, x.strides, dim, values.shape[dim], descending)
    pairs, spare = allocate(device, plan.pair_bytes), allocate(device, plan.pair_bytes)
    plan.tiles(*plan.tile_sizes, *x.place, pairs, spare, *plan.tile_arguments)
    for size, numbers in plan.merges:
        plan.merge(size, None, pairs, spare, *numbers)
        pairs, spare = spare, pairs
    plan.finish(plan.finish_size, None, pairs, *x.place, *values.place, *places.place, *plan.finish_layout)
