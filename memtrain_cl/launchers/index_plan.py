"""Launchers of kernels/index.cl that put indices in order: what sums and puts without races stand on.

A plan is a stable sort: keys ascending, and of equal keys the earlier first. Long lists take a radix sort of eight bits
a pass; short ones a single launch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memtrain_cl.array import DeviceArray
from memtrain_cl.faults import faults_of
from memtrain_cl.launchers.index_build import group_size, index_kernel
from memtrain_cl.memory import allocate
from memtrain_cl.operand import Operand, empty_operand
from memtrain_cl.tuning import BLOCKS_PER_UNIT, SIZE_LIMIT, ceil_div, groups_share_rows

#: Longest list of one launch on a GPU, where every item looks at every key.
SHORT_ON_GPU = 8192
#: Most turns of loops in all that one item takes on a CPU, where it sorts the whole list: llvmpipe leaves the loops of
#: an item without a word after 65535.
MOST_TURNS = 65000
#: Least keys a work-group sorts, and most groups.
LEAST_CHUNK = 2048
MOST_CHUNKS = 4096

_KEY_LIMIT = 1 << 32


class Plan(NamedTuple):
    """keys: uint32 [length], ascending. order: uint32 [length], where each key stood."""

    keys: DeviceArray
    order: DeviceArray
    length: int


def make_plan(index: Operand, size: int, *, wrap: bool = False) -> Plan:
    """The stable order of the indices 0 <= i < size (with `wrap` from -size); contiguous int64 or int32, not empty.

    ValueError for 2^31 indices or more, or a size above 2^32.
    """
    n = index.size
    if n >= SIZE_LIMIT or size > _KEY_LIMIT:
        raise ValueError(f"expected fewer than 2^31 indices below 2^32 or less, got {n} below {size}")
    device = index.device
    passes = max(1, ceil_div((size - 1).bit_length(), 8))
    gpu = groups_share_rows(device.info)
    if n > SHORT_ON_GPU if gpu else n * (1 + 2 * passes) + 512 * passes > MOST_TURNS:
        return _radix(index, size, passes, wrap=wrap)
    keys, order = allocate(device, 4 * n), allocate(device, 4 * n)
    group = group_size(device, "plan")
    index_kernel(device, "plan", "plan_short", index=index.element)(
        (ceil_div(n, group) * group if gpu else 1,),
        (group,),
        *index.place,
        keys,
        order,
        keys if gpu else allocate(device, 8 * n),
        faults_of(device),
        np.uint64(size),
        np.int32(wrap),
        np.uint32(n),
        np.uint32(passes),
    )
    return Plan(keys, order, n)


def _radix(index: Operand, size: int, passes: int, *, wrap: bool) -> Plan:
    device, n = index.device, index.size
    group = group_size(device, "radix")
    if groups_share_rows(device.info):
        chunk = max(LEAST_CHUNK, ceil_div(ceil_div(n, MOST_CHUNKS), group) * group)
    else:
        chunk = max(LEAST_CHUNK, ceil_div(n, device.info.compute_units * BLOCKS_PER_UNIT))
    chunks = ceil_div(n, chunk)
    keys, spare_keys, order, spare_order = (allocate(device, 4 * n) for _ in range(4))
    counts, total = allocate(device, 4 * 256 * chunks), allocate(device, 4)
    flat = (ceil_div(n, group) * group,)
    sizes = (np.uint32(n), np.uint32(chunk), np.uint32(chunks))
    index_kernel(device, "radix", "plan_keys", index=index.element)(
        flat,
        (group,) if group > 1 else None,
        *index.place,
        keys,
        faults_of(device),
        np.uint64(size),
        np.int32(wrap),
        sizes[0],
    )
    over = ((chunks * group,), (group,))
    for digit in range(passes):
        shift = np.uint32(8 * digit)
        index_kernel(device, "radix", "count_digits", index=index.element)(*over, keys, counts, *sizes, shift)
        index_kernel(device, "radix", "scan_counts", index=index.element)(
            (group,), (group,), counts, total, np.uint32(256 * chunks)
        )
        index_kernel(device, "radix", "move_digits", index=index.element)(
            *over, keys, order, spare_keys, spare_order, counts, *sizes, shift, np.int32(digit == 0)
        )
        keys, order, spare_keys, spare_order = spare_keys, spare_order, keys, order
    return Plan(keys, order, n)


def write_order(plan: Plan, out: Operand) -> None:
    """out[i] = plan.order[i] for contiguous `out` [plan.length]."""
    index_kernel(out.device, "plan", "write_order", element=out.element)(
        (plan.length,), None, plan.order, *out.place, np.uint32(plan.length)
    )


def join_index(indices: list[tuple[Operand, int]], *, wrap: bool = True) -> Operand:
    """int64 [n]: the place of (i, j, ...) in dimensions of the given sizes, row-major; (operand, size) pairs.

    The result is within the product of the sizes whatever the indices were.
    """
    first, _ = indices[0]
    device, n = first.device, first.size
    if n >= SIZE_LIMIT:
        raise ValueError(f"expected fewer than 2^31 indices, got {n}")
    out = empty_operand(device, (n,), "int64")
    for place, (index, size) in enumerate(indices):
        if n == 0:
            break
        if size == 0:
            raise IndexError(f"expected no index into a dimension without elements, got {n}")
        index_kernel(device, "plan", "join_index", index=index.element)(
            (n,),
            None,
            *index.place,
            out,
            faults_of(device),
            np.uint64(size),
            np.int32(wrap),
            np.int32(place == 0),
            np.uint32(n),
        )
    return out


def flat_targets(index: Operand, size: int, count: int, inner: int) -> Operand:
    """int64 [n]: (o*size + index[o, k, i])*inner + i for index [outer, count, inner]."""
    out = empty_operand(index.device, (index.size,), "int64")
    index_kernel(index.device, "plan", "flat_targets", index=index.element)(
        (index.size,),
        None,
        *index.place,
        out,
        faults_of(index.device),
        np.uint64(size),
        np.uint32(count),
        np.uint32(inner),
        np.uint32(index.size),
    )
    return out


__all__ = ["Plan", "flat_targets", "join_index", "make_plan", "write_order"]
