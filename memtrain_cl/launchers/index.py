"""Launchers of kernels/index.cl that move, put and sum elements by index.

Operands are contiguous; indices are int64 or int32. An index outside its dimension is reported by the next
`faults.raise_pending` of the device. Where several indices name one element, the source of the highest place wins, and
sums are taken in ascending order of the source: results never depend on how a device shares out the work.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from memtrain_cl.device import DeviceInfo
from memtrain_cl.elements import ELEMENTS
from memtrain_cl.faults import faults_of
from memtrain_cl.launchers.index_build import index_kernel
from memtrain_cl.launchers.index_plan import Plan, flat_targets, make_plan
from memtrain_cl.operand import Operand
from memtrain_cl.tuning import (
    BLOCKS_PER_UNIT,
    LARGEST_GROUP,
    SIZE_LIMIT,
    ceil_div,
    groups_share_rows,
    power_of_two_at_least,
)

#: Columns that are worth a CPU's work-item of their own.
LEAST_SPAN = 1024
#: A scatter of at least so many fibres fills a GPU with a work-item a fibre; so does one of shorter fibres, in no time.
MANY_FIBRES = 4096
SHORT_FIBRE = 64

_WRAP = (np.int32(0), np.int32(1))
_STEP = (np.uint32(0), np.uint32(1))


@lru_cache(maxsize=4096)
def _tile(info: DeviceInfo, rows: int, columns: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[np.uint32, ...]]:
    """(global size, local size, kernel arguments rows, columns, a, b) of a launch over rows and columns."""
    if max(rows, columns) >= SIZE_LIMIT:
        raise ValueError(f"expected fewer than 2^31 rows and columns, got {rows} and {columns}")
    if groups_share_rows(info):
        items = 1 << (min(LARGEST_GROUP, info.max_work_group_size).bit_length() - 1)
        wide = min(items, power_of_two_at_least(columns))
        a, b = wide.bit_length() - 1, ceil_div(columns, wide)
        groups = b * ceil_div(rows, items // wide)
        if groups >= SIZE_LIMIT:
            raise ValueError(f"expected less than 2^31 work-groups, got {groups} for {rows} rows of {columns} columns")
        global_size: tuple[int, ...] = (groups * items,)
        local_size: tuple[int, ...] = (items,)
    else:
        wanted = info.compute_units * BLOCKS_PER_UNIT
        a = ceil_div(rows, wanted)
        b = max(LEAST_SPAN, ceil_div(columns, ceil_div(wanted, rows)))
        global_size, local_size = (ceil_div(rows, a), ceil_div(columns, b)), (1, 1)
    return global_size, local_size, (np.uint32(rows), np.uint32(columns), np.uint32(a), np.uint32(b))


@lru_cache(maxsize=4096)
def _split(shape: tuple[int, ...], dim: int) -> tuple[int, int, int]:
    """(elements before, at and after a dimension); a number is a list of one."""
    if not shape:
        return 1, 1, 1
    return math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])


def _unit(inner: int, *operands: Operand) -> int:
    """Bytes that can be moved at once where runs of `inner` elements are moved: 16, or an element's."""
    itemsize = ELEMENTS[operands[0].element].itemsize
    if inner * itemsize % 16:
        return itemsize
    for operand in operands:
        if operand.offset * itemsize % 16 or operand.array.alignment < 16:
            return itemsize
    return 16


def _require_room(size: int, index: Operand) -> None:
    """IndexError where every index is wrong, known without asking the device."""
    if size == 0:
        raise IndexError(f"expected no index into a dimension without elements, got {index.size}")


def select(x: Operand, dim: int, index: Operand, out: Operand, *, wrap: bool = False) -> None:
    """out[..., k, ...] = x[..., index[k], ...] along `dim`; `wrap`: indices below 0 count from the end.

    out has the shape of x but index.size at `dim` (index and out may be any views of those elements).
    """
    if out.size == 0:
        return
    outer, size, inner = _split(x.shape, dim)
    _require_room(size, index)
    unit = _unit(inner, x, out)
    itemsize = ELEMENTS[x.element].itemsize
    global_size, local_size, tile = _tile(x.device.info, outer * index.size, inner * itemsize // unit)
    index_kernel(x.device, "move", "select_rows", index=index.element, unit=unit)(
        global_size,
        local_size,
        x,
        np.uint64(x.offset * itemsize // unit),
        *index.place,
        out,
        np.uint64(out.offset * itemsize // unit),
        faults_of(x.device),
        np.uint64(size),
        np.uint32(index.size),
        _WRAP[wrap],
        *tile,
    )


def put(out: Operand, dim: int, index: Operand, values: Operand, *, wrap: bool = False, distinct: bool = False) -> None:
    """out[..., index[k], ...] = values[..., k, ...] along `dim`, in place; of equal indices the last counts.

    values: index.size elements at `dim`, or one element for all. distinct: no index occurs twice (saves the sorting).
    """
    outer, size, inner = _split(out.shape, dim)
    if outer * inner * index.size == 0:
        return
    _require_room(size, index)
    single = values.size == 1
    if not (single or distinct or index.size == 1):
        _put_sorted(out, outer, size, inner, make_plan(index, size, wrap=wrap), values)
        return
    itemsize = ELEMENTS[out.element].itemsize
    unit = itemsize if single else _unit(inner, out, values)
    global_size, local_size, tile = _tile(out.device.info, outer * index.size, inner * itemsize // unit)
    index_kernel(out.device, "move", "put_rows", index=index.element, unit=unit)(
        global_size,
        local_size,
        values,
        np.uint64(values.offset * itemsize // unit),
        *index.place,
        out,
        np.uint64(out.offset * itemsize // unit),
        faults_of(out.device),
        np.uint64(size),
        np.uint32(index.size),
        _WRAP[wrap],
        _STEP[not single],
        *tile,
    )


def _put_sorted(out: Operand, outer: int, size: int, inner: int, plan: Plan, values: Operand) -> None:
    itemsize = ELEMENTS[out.element].itemsize
    unit = _unit(inner, out, values)
    run = inner * itemsize // unit
    global_size, local_size, tile = _tile(out.device.info, plan.length, outer * run)
    index_kernel(out.device, "move", "put_sorted", unit=unit)(
        global_size,
        local_size,
        values,
        np.uint64(values.offset * itemsize // unit),
        plan.keys,
        plan.order,
        out,
        np.uint64(out.offset * itemsize // unit),
        np.uint64(size),
        np.uint32(run),
        *tile,
    )


def add(
    out: Operand,
    dim: int,
    index: Operand,
    values: Operand,
    *,
    scale: float = 1,
    wrap: bool = False,
    skipped: int | None = None,
) -> None:
    """out[..., index[k], ...] += scale * values[..., k, ...] along `dim`, in place, in ascending k.

    values: index.size elements at `dim`, or one element for all. skipped: an index that adds nothing. 16-bit types
    are summed in float32 and rounded once.
    """
    outer, size, inner = _split(out.shape, dim)
    if outer * inner * index.size == 0:
        return
    _require_room(size, index)
    _add_sorted(out, outer, size, inner, make_plan(index, size, wrap=wrap), values, scale, skipped)


def _add_sorted(
    out: Operand,
    outer: int,
    size: int,
    inner: int,
    plan: Plan,
    values: Operand,
    scale: float = 1,
    skipped: int | None = None,
) -> None:
    element = ELEMENTS[out.element]
    global_size, local_size, tile = _tile(out.device.info, plan.length, outer * inner)
    scalar = np.float32 if element.floating else np.int64 if element.name == "int64" else np.int32
    index_kernel(out.device, "sum", "sum_sorted", element=out.element)(
        global_size,
        local_size,
        *values.place,
        plan.keys,
        plan.order,
        *out.place,
        np.uint64(size),
        np.uint32(inner),
        scalar(scale),
        # No key has more than 32 bits.
        np.uint64(1 << 32 if skipped is None else skipped),
        _STEP[values.size != 1 or plan.length * outer * inner == 1],
        *tile,
    )


def gather(x: Operand, dim: int, index: Operand, out: Operand) -> None:
    """out[..., k, ...] = x[..., index[..., k, ...], ...] along `dim`; index and out of one shape, x too but there."""
    if out.size == 0:
        return
    _, size, _ = _split(x.shape, dim)
    outer, count, inner = _split(index.shape, dim)
    _require_room(size, index)
    itemsize = ELEMENTS[x.element].itemsize
    global_size, local_size, tile = _tile(x.device.info, outer * count, inner)
    index_kernel(x.device, "move", "gather", index=index.element, unit=itemsize)(
        global_size,
        local_size,
        *x.place,
        *index.place,
        *out.place,
        faults_of(x.device),
        np.uint64(size),
        np.uint32(count),
        *tile,
    )


def scatter(out: Operand, dim: int, index: Operand, values: Operand, *, reduce: str = "copy") -> None:
    """out[..., index[..., k, ...], ...] = values[..., k, ...] along `dim`, in place, in ascending k.

    index and values of one shape (or values of one element, for all), out too but for `dim`. reduce: copy, add,
    multiply, amax or amin combine what was there with each value; additions of 16-bit types are summed in float32.
    """
    _, size, _ = _split(out.shape, dim)
    outer, count, inner = _split(index.shape, dim)
    if index.size == 0:
        return
    _require_room(size, index)
    single = values.size == 1
    if single and reduce == "copy":
        _scatter_value(out, size, (outer, count, inner), index, values)
        return
    half = reduce == "add" and ELEMENTS[out.element].floating and ELEMENTS[out.element].itemsize == 2
    short = groups_share_rows(out.device.info) and outer * inner < MANY_FIBRES and count > SHORT_FIBRE
    if (half or (short and reduce in ("copy", "add"))) and max(out.size, index.size) < SIZE_LIMIT:
        targets = flat_targets(index, size, count, inner)
        plan = make_plan(targets, out.size)
        if reduce == "add":
            _add_sorted(out, 1, out.size, 1, plan, values)
        else:
            _put_sorted(out, 1, out.size, 1, plan, values)
        return
    global_size, local_size, tile = _tile(out.device.info, outer, inner)
    index_kernel(out.device, "walk", "scatter_walk", index=index.element, element=out.element, reduce=reduce)(
        global_size,
        local_size,
        *values.place,
        *index.place,
        *out.place,
        faults_of(out.device),
        np.uint64(size),
        np.uint32(count),
        _STEP[not single],
        *tile,
    )


def _scatter_value(out: Operand, size: int, split: tuple[int, int, int], index: Operand, value: Operand) -> None:
    outer, count, inner = split
    global_size, local_size, tile = _tile(out.device.info, outer * count, inner)
    index_kernel(out.device, "move", "scatter_value", index=index.element, unit=ELEMENTS[out.element].itemsize)(
        global_size,
        local_size,
        *value.place,
        *index.place,
        *out.place,
        faults_of(out.device),
        np.uint64(size),
        np.uint32(count),
        *tile,
    )


def search_sorted(boundaries: Operand, x: Operand, out: Operand, *, right: bool) -> None:
    """out[..., c] = how many elements of the ascending boundaries lie before x[..., c] (`right`: those equal too).

    boundaries [..., length] of x's leading sizes, or [length] for all of x; both of one type; out int64 or int32.
    """
    if out.size == 0:
        return
    length = boundaries.shape[-1]
    shared = len(boundaries.shape) == 1
    columns = 1 if not x.shape else x.size if shared else x.shape[-1]
    global_size, local_size, tile = _tile(x.device.info, x.size // columns, columns)
    index_kernel(x.device, "search", "search_sorted", index=out.element, element=x.element)(
        global_size,
        local_size,
        # Of no boundaries none is read.
        boundaries if length else x,
        np.uint64(boundaries.offset),
        *x.place,
        *out.place,
        np.uint32(length),
        np.uint32(0 if shared else length),
        _WRAP[right],
        *tile,
    )


__all__ = ["add", "gather", "put", "scatter", "search_sorted", "select"]
