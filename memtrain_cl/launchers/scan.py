"""Launcher of kernels/scan.cl: running sums, products and extremes along one dimension.

Unproven: how the plans fare on GPUs. On CPUs columns are walked one by one, which costs a cache line an element.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from memtrain_cl.device import Device
from memtrain_cl.launchers.reduce import GROUP, MOST, layout
from memtrain_cl.memory import allocate
from memtrain_cl.operand import Operand
from memtrain_cl.program import Kernel, get_kernel
from memtrain_cl.tuning import BLOCKS_PER_UNIT, ceil_div, groups_share_rows, power_of_two_at_least

#: Operations with places as a second result.
WITH_PLACES = frozenset({"cummax", "cummin"})
#: Elements that an item of a GPU's group takes at a time, and that a part of a run has at least.
AHEAD = 8
SMALLEST_PART = 1 << 14
#: Groups a compute unit gets of runs that are cut into parts.
GROUPS_PER_UNIT = 4


class _Plan(NamedTuple):
    kernel: Kernel
    carry: Kernel | None
    global_size: tuple[int, int]
    local_size: tuple[int, int]
    arguments: tuple[Any, ...]
    carry_bytes: int
    carry_arguments: tuple[Any, ...]


@functools.lru_cache(maxsize=1024)
def _plan(
    device: Device, op: str, element: str, out_element: str, shape: tuple[int, ...], strides: tuple[int, ...], dim: int
) -> _Plan:
    at = layout(shape, strides, (dim,), ordered=True)
    if at is None:
        raise ValueError(f"expected at most two strides beside dimension {dim} of {shape}, got strides {strides}")
    if at.kept >= MOST or at.length >= MOST:
        raise ValueError(f"expected fewer than 2^32 runs of fewer than 2^32 elements, got {at.kept} of {at.length}")
    info = device.info
    gpu = groups_share_rows(info)
    group = min(GROUP, power_of_two_at_least(info.max_work_group_size + 1) // 2) if gpu else 1
    columns = gpu and at.columns
    per = 1 if gpu else max(1, ceil_div(at.kept, info.compute_units * BLOCKS_PER_UNIT))
    groups = ceil_div(at.kept, group) if columns else ceil_div(at.kept, per)
    wanted = info.compute_units * (GROUPS_PER_UNIT if gpu else 1)
    parts = max(1, min(wanted // groups, at.length // SMALLEST_PART))
    chunk = ceil_div(ceil_div(at.length, parts), group * AHEAD) * group * AHEAD
    parts = ceil_div(at.length, chunk)
    number = 8 if (element if op in WITH_PLACES else out_element) == "int64" else 4
    fields = 2 if op in WITH_PLACES else 1
    constants: dict[str, Any] = {"GPU": int(gpu), "OP": op, "IN": element, "OUT": out_element}
    constants |= {"FIELDS": fields, "WG_SIZE": group}
    arguments = (
        np.uint32(at.kept),
        np.uint32(at.inner),
        *(np.uint64(value) for value in (at.outer_stride, at.inner_stride, at.step, at.length)),
        np.uint32(math.prod(shape[dim + 1 :])),
        np.uint32(parts),
        np.uint64(chunk),
        np.uint32(columns),
        np.uint32(per),
    )
    return _Plan(
        get_kernel(device, "scan", "scan", **constants),
        get_kernel(device, "scan", "scan_carries", **constants) if parts > 1 else None,
        (groups * group, parts),
        (group, 1),
        arguments,
        at.kept * parts * fields * number,
        (np.uint32(at.kept), np.uint32(parts)),
    )


def scan(op: str, x: Operand, dim: int, out: Operand, places: Operand | None = None) -> None:
    """out[..., k, ...] = op over x[..., :k+1, ...] along `dim` (0..rank-1), op as at the head of kernels/scan.cl.

    out, and places (int64, with cummax and cummin): contiguous, of x's shape. x: of any strides that
    `ops.reduce.layout` takes with dimension `dim`. ValueError for others, and for 2^32 runs or elements in one.
    """
    if x.size == 0:
        return
    plan = _plan(x.device, op, x.element, out.element, x.shape, x.strides, dim)
    operands: tuple[Any, ...] = (*x.place, *out.place)
    if places is not None:
        operands += places.place
    if plan.carry is None:
        plan.kernel(plan.global_size, plan.local_size, *operands, out.array, *plan.arguments, np.uint32(0))
        return
    carries = allocate(x.device, plan.carry_bytes)
    plan.kernel(plan.global_size, plan.local_size, *operands, carries, *plan.arguments, np.uint32(1))
    plan.carry((int(plan.carry_arguments[0]),), None, carries, *plan.carry_arguments)
    plan.kernel(plan.global_size, plan.local_size, *operands, carries, *plan.arguments, np.uint32(0))
