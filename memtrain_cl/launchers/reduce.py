"""Launcher of kernels/reduce.cl: reductions over any dimensions of a strided operand.

An operand is seen as kept results (at most two strides) times one reduced run of elements; how the device shares that
work is planned once a geometry. Unproven: how the plans fare on GPUs other than NVIDIA's.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from memtrain_cl.device import Device, DeviceInfo
from memtrain_cl.memory import allocate
from memtrain_cl.operand import Operand
from memtrain_cl.program import Kernel, get_kernel
from memtrain_cl.tuning import BLOCKS_PER_UNIT, ceil_div, groups_share_rows, power_of_two_at_least

#: Numbers that a lane keeps, where it is not one.
FIELDS = {"argmax": 2, "argmin": 2, "max": 2, "min": 2, "aminmax": 2, "logsumexp": 2} | dict.fromkeys(
    ("var", "std", "var_mean", "std_mean"), 3
)
#: Operations whose result depends on the order of the elements, so that dimensions may not be reordered.
ORDERED = frozenset({"argmax", "argmin", "max", "min"})
#: Operations with a second result.
TWO_RESULTS = frozenset({"max", "min", "aminmax", "var_mean", "std_mean"})

#: Items of a GPU's group at most, and loads that each keeps on their way.
GROUP = 256
AHEAD = 8
#: Groups a compute unit gets of a reduction that is split into parts, and below which it is.
GROUPS_PER_UNIT = 32
FEW_GROUPS_PER_UNIT = 4
#: Columns of a panel on CPUs, and the elements that a part of a run has at least on either.
PANEL = 32
SMALLEST_PART = 4096

#: Results, and places counted, that a kernel can name: fewer than this.
MOST = 1 << 32


class Layout(NamedTuple):
    """x[q, k] lies at (q / inner) * outer_stride + (q % inner) * inner_stride + k * step, q < kept, k < length."""

    kept: int
    inner: int
    outer_stride: int
    inner_stride: int
    step: int
    length: int

    @property
    def columns(self) -> bool:
        """Whether neighbouring results lie closer than neighbours of a run."""
        return self.inner > 1 and self.inner_stride < self.step


def _coalesce(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The (size, stride) pairs, outermost first, with neighbours joined where one stride walks both."""
    joined: list[tuple[int, int]] = []
    for size, stride in dims:
        if size == 1:
            continue
        if joined and joined[-1][1] == stride * size:
            joined[-1] = (joined[-1][0] * size, stride)
        else:
            joined.append((size, stride))
    return joined


@functools.lru_cache(maxsize=4096)
def layout(shape: tuple[int, ...], strides: tuple[int, ...], dims: tuple[int, ...], *, ordered: bool) -> Layout | None:
    """How an operand is reduced over `dims` (each in 0..rank-1, none twice); None where it takes more strides than a
    kernel has. `ordered`: elements are counted in row-major order of `dims`.
    """
    reduced = [(shape[dim], strides[dim]) for dim in sorted(dims)]
    count = math.prod(size for size, _ in reduced)
    kept = [(shape[dim], strides[dim]) for dim in range(len(shape)) if dim not in dims]
    total = math.prod(size for size, _ in kept)
    if count == 0 or total == 0:
        return Layout(total, 1, 1, 1, 1, count)
    if not ordered:
        reduced.sort(key=lambda pair: -pair[1])
    runs, groups = _coalesce(reduced), _coalesce(kept)
    if len(runs) > 1 or len(groups) > 2:
        return None
    step = runs[0][1] if runs else 1
    if not groups:
        return Layout(1, 1, 0, 0, step, count)
    if len(groups) == 1 and groups[0][1] > step:
        # Rows: each result has a run of its own.
        return Layout(total, 1, groups[0][1], 0, step, count)
    inner, inner_stride = groups[-1]
    return Layout(total, inner, groups[0][1] if len(groups) == 2 else 0, inner_stride, step, count)


class _Plan(NamedTuple):
    kernel: Kernel
    merge: Kernel | None
    global_size: tuple[int, ...]
    local_size: tuple[int, ...]
    arguments: tuple[Any, ...]
    partial_bytes: int
    merge_size: tuple[int, ...]
    merge_arguments: tuple[Any, ...]


def _log2(value: int) -> int:
    return value.bit_length() - 1


def _lanes(count: int, group: int) -> int:
    """Lanes for a run of `count` in a group: whole batches of loads where they come out even."""
    fair = min(group, max(1, power_of_two_at_least(count // AHEAD + 1) // 2))
    lanes = fair
    while lanes > max(1, fair // 8):
        if count % (lanes * AHEAD) == 0:
            return lanes
        lanes //= 2
    return fair


def _split(units: int, few: int, wanted: int, count: int, quantum: int) -> tuple[int, int]:
    """(parts, elements a part) of runs of `count` shared by `units` groups or items; parts are multiples of quantum."""
    parts = 1
    if units < few:
        parts = max(1, min(ceil_div(wanted, units), count // quantum))
    chunk = max(1, ceil_div(ceil_div(count, parts), quantum) * quantum)
    return max(1, ceil_div(count, chunk)), chunk


class _Shape(NamedTuple):
    global_size: tuple[int, int]
    wg_size: int
    parts: int
    chunk: int
    own: tuple[int, ...]
    merge_items: int
    merge_own: tuple[int, ...]


def _gpu_shape(info: DeviceInfo, at: Layout) -> _Shape:
    group = min(GROUP, power_of_two_at_least(info.max_work_group_size + 1) // 2)
    columns = at.columns
    units = info.compute_units
    if columns:
        held = min(32, power_of_two_at_least(at.inner), group)
        # Narrower strips of columns while they leave the device idle.
        while held > 8 and ceil_div(at.kept, held) < units and at.length > AHEAD * group // held:
            held //= 2
        lanes = group // held
    else:
        lanes = _lanes(at.length, group)
        held = group // lanes
    groups = ceil_div(at.kept, held)
    quantum = lanes * AHEAD * (1 if columns else 4)
    parts, chunk = _split(groups, FEW_GROUPS_PER_UNIT * units, GROUPS_PER_UNIT * units, at.length, quantum)
    own = (lanes, _log2(held) if columns else 0, 0 if columns else _log2(lanes))
    # The parts of a column lie a row apart, those of a row side by side: merging is the same problem, smaller.
    merge_lanes = min(group, power_of_two_at_least(parts)) if not columns else lanes
    merge_held = group // merge_lanes
    merge_own = (merge_lanes, _log2(merge_held) if columns else 0, 0 if columns else _log2(merge_lanes))
    return _Shape((groups * group, parts), group, parts, chunk, own, ceil_div(at.kept, merge_held) * group, merge_own)


def _cpu_shape(info: DeviceInfo, at: Layout) -> _Shape:
    paneled = at.columns and at.inner_stride == 1
    panels = ceil_div(at.inner, PANEL) if paneled else at.inner
    units = at.kept // at.inner * panels
    wanted = info.compute_units * BLOCKS_PER_UNIT
    quantum = SMALLEST_PART // (PANEL if paneled else 1)
    parts, chunk = _split(units, wanted, wanted, at.length, quantum)
    per = max(1, ceil_div(units, wanted))
    merge_per = max(1, ceil_div(at.kept, wanted))
    own = (int(paneled), per)
    return _Shape((ceil_div(units, per), parts), 1, parts, chunk, own, ceil_div(at.kept, merge_per), (merge_per,))


@functools.lru_cache(maxsize=4096)
def _plan(
    device: Device,
    op: str,
    element: str,
    out_element: str,
    geometry: tuple[Any, ...],
    divisor: float,
    power: float,
) -> _Plan:
    at = layout(*geometry, ordered=op in ORDERED)
    if at is None:
        shape, strides, dims = geometry
        raise ValueError(
            f"expected dimensions {dims} of shape {shape} to be one run of elements, got strides {strides}"
        )
    if at.kept >= MOST or (op in ORDERED and at.length >= MOST):
        raise ValueError(f"expected fewer than 2^32 results and counted places, got {at.kept} and {at.length}")
    gpu = groups_share_rows(device.info)
    how = _gpu_shape(device.info, at) if gpu else _cpu_shape(device.info, at)
    part_row, part_step = (1, at.kept) if at.columns else (how.parts, 1)
    fields = FIELDS.get(op, 1)
    constants = {
        "GPU": int(gpu),
        "OP": op,
        "IN": element,
        "OUT": out_element,
        "FIELDS": fields,
        "WG_SIZE": how.wg_size,
    }
    reals = (np.float32(divisor), np.float32(power))
    arguments = (
        np.uint32(at.kept),
        np.uint32(at.inner),
        *(np.uint64(value) for value in (at.outer_stride, at.inner_stride, at.step, at.length)),
        np.uint32(how.parts),
        *(np.uint64(value) for value in (how.chunk, part_row, part_step)),
        *(np.uint32(value) for value in how.own),
        *reals,
    )
    merge_arguments = (
        np.uint32(at.kept),
        np.uint32(how.parts),
        np.uint64(part_row),
        np.uint64(part_step),
        *(np.uint32(value) for value in how.merge_own),
        *reals,
    )
    split = how.parts > 1
    return _Plan(
        get_kernel(device, "reduce", "reduce", **constants),
        get_kernel(device, "reduce", "reduce_parts", **constants) if split else None,
        how.global_size,
        (how.wg_size, 1),
        arguments,
        at.kept * how.parts * fields * _number_bytes(op, element, out_element) if split else 0,
        (how.merge_items,),
        merge_arguments,
    )


def _number_bytes(op: str, element: str, out_element: str) -> int:
    """Bytes of each number that a lane keeps: kernels/_accumulate.cl checks it."""
    if op == "count":
        return 8
    if op in ("sum", "prod", "nansum"):
        return 8 if out_element == "int64" else 4
    wide = op in ("amax", "amin", "aminmax", "argmax", "argmin", "max", "min") and element == "int64"
    return 8 if wide else 4


def reduce(
    op: str,
    x: Operand,
    dims: tuple[int, ...],
    out: Operand,
    second: Operand | None = None,
    *,
    divisor: float = 1.0,
    power: float = 1.0,
) -> None:
    """out = op(x over dims), dims each in 0..rank-1; the operations stand at the head of kernels/reduce.cl.

    out, second: contiguous, the kept dimensions in their order (kept as 1 or dropped: the same bytes). second goes with
    the operations that have two results, int64 where it holds places. divisor: of floating sums and of the squares in a
    variance. power: of normp. ValueError where `layout` is None, or for 2^32 results or more.
    """
    if out.size == 0:
        return
    plan = _plan(x.device, op, x.element, out.element, (x.shape, x.strides, dims), divisor, power)
    # An empty run reads nothing, and has no buffer.
    source = x.array if x.array.buffer is not None else out.array
    results: tuple[Any, ...] = out.place
    if second is not None:
        results += second.place
    if plan.merge is None:
        plan.kernel(
            plan.global_size, plan.local_size, source, np.uint64(x.offset), *results, out.array, *plan.arguments
        )
        return
    partials = allocate(x.device, plan.partial_bytes)
    plan.kernel(plan.global_size, plan.local_size, source, np.uint64(x.offset), *results, partials, *plan.arguments)
    plan.merge(plan.merge_size, plan.local_size[:1], partials, *results, *plan.merge_arguments)
