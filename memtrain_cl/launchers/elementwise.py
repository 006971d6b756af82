"""Launcher of kernels/elementwise.cl: any formula over strided, broadcast operands in one kernel.

A `Formula` is a piece of OpenCL C over elements; `launch` picks the kernel for its operands' geometry. The decision is
remembered, so that a training loop decides each geometry once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memtrain_cl.device import Device
from memtrain_cl.errors import UnsupportedDevice
from memtrain_cl.operand import Operand
from memtrain_cl.program import Kernel, get_kernel
from memtrain_cl.tuning import ceil_div, groups_share_rows, power_of_two_at_least

#: Work-items of a group.
GROUP = 256
#: Elements of one flat launch; longer ones are split.
FLAT_LIMIT = 1 << 31
#: Outer dimensions that the kernel walks: a few fixed numbers, so that few programs are built.
RANKS = (0, 1, 3, 7)
_ZERO = np.uint64(0)
_SCALAR_TYPES = {"float": np.float32, "int": np.int32, "long": np.int64, "uint": np.uint32}


@dataclass(frozen=True, eq=False)
class Formula:
    """y0, y1, ... from x0, x1, ... and scalars s0, s1, ..., in OpenCL C.

    casts: the C type in which `body` sees each input. results: the C types of the outputs before they are stored.
    Make each once: kernels are found by the object.
    """

    body: str
    casts: tuple[str, ...]
    results: tuple[str, ...]
    scalars: tuple[str, ...] = ()


@dataclass(frozen=True)
class Walk:
    """How a kernel walks operands: the inner and the outer sizes, and each operand's inner step and outer strides."""

    inner: int
    outer: tuple[int, ...]
    steps: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]


def broadcast_strides(shape: Sequence[int], own: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Strides of an operand of shape `own` read as one of `shape`."""
    lead = len(shape) - len(own)
    spread = [0] * lead
    spread += [0 if size == 1 else stride for size, stride in zip(own, strides, strict=True)]
    return spread


def plan_walk(shape: tuple[int, ...], strides: Sequence[Sequence[int]]) -> Walk:
    """Dimensions of `shape` in the order of the first operand's strides, neighbours merged where all operands allow."""
    kept = [axis for axis, size in enumerate(shape) if size != 1]
    kept.sort(key=lambda axis: -strides[0][axis])
    sizes: list[int] = []
    columns: list[list[int]] = []  # of each dimension the strides of all operands
    for axis in kept:
        column = [own[axis] for own in strides]
        if sizes and all(big == small * shape[axis] for big, small in zip(columns[-1], column, strict=True)):
            sizes[-1] *= shape[axis]
            columns[-1] = column
        else:
            sizes.append(shape[axis])
            columns.append(column)
    if not sizes:
        return Walk(1, (), tuple(1 for _ in strides), tuple(() for _ in strides))
    outer = tuple(tuple(columns[level][operand] for level in range(len(sizes) - 1)) for operand in range(len(strides)))
    return Walk(sizes[-1], tuple(sizes[:-1]), tuple(columns[-1]), outer)


_Launch = tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A kernel and its launches: (global size, first elements to add to each operand's, the arguments after those)."""

    kernel: Kernel
    launches: tuple[_Launch, ...]
    local_size: tuple[int, ...]
    scalar_types: tuple[Any, ...]


_Geometry = tuple[str, tuple[int, ...], tuple[int, ...], bool]


def _in_fours(walk: Walk, geometry: tuple[_Geometry, ...]) -> bool:
    """Whether four neighbours can be read at once: every row begins on a multiple of four elements and holds fours."""
    return walk.inner % 4 == 0 and all(
        step == 0 or (aligned and all(stride % 4 == 0 for stride in strides))
        for (_, _, _, aligned), step, strides in zip(geometry, walk.steps, walk.strides, strict=True)
    )


def _looped(walk: Walk) -> tuple[Walk, list[tuple[int, ...]]]:
    """The walk over the outer dimensions that a kernel takes, and each launch's first elements: beyond those, launches
    walk the smallest dimensions.
    """
    extra = len(walk.outer) - RANKS[-1]
    if extra <= 0:
        return walk, [(0,) * len(walk.steps)]
    order = sorted(range(len(walk.outer)), key=lambda axis: walk.outer[axis])
    looped, kept = order[:extra], sorted(order[extra:])
    begins = [
        tuple(sum(at * own[axis] for at, axis in zip(index, looped, strict=True)) for own in walk.strides)
        for index in itertools.product(*(range(walk.outer[axis]) for axis in looped))
    ]
    strides = tuple(tuple(own[axis] for axis in kept) for own in walk.strides)
    return Walk(walk.inner, tuple(walk.outer[axis] for axis in kept), walk.steps, strides), begins


@functools.lru_cache(maxsize=16384)
def _prepare(device: Device, formula: Formula, outputs: int, geometry: tuple[_Geometry, ...]) -> _Prepared:
    shape = geometry[0][1]
    walk = plan_walk(shape, [broadcast_strides(shape, own, strides) for _, own, strides, _ in geometry])
    walk, begins = _looped(walk)
    gpu = groups_share_rows(device.info)
    rank = next(rank for rank in RANKS if rank >= len(walk.outer))
    # One element alone may be read as any of the modes; the steps of a general walk travel as arguments.
    general = any(step not in (0, 1) for step in walk.steps)
    if general and rank == 0:
        rank = 1
    modes = "g" * len(geometry) if general else "".join("uz"[step == 0] for step in walk.steps)
    vector = 4 if gpu and not general and _in_fours(walk, geometry) else 1
    units = (2 if vector == 4 else 4) if gpu and rank == 0 else 1
    per = vector * units
    kernel = get_kernel(
        device,
        "elementwise",
        "elementwise",
        INPUTS=tuple(element for element, *_ in geometry[outputs:]),
        OUTPUTS=tuple(element for element, *_ in geometry[:outputs]),
        CASTS=formula.casts,
        RESULTS=formula.results,
        SCALARS=formula.scalars,
        BODY=formula.body,
        RANK=rank,
        MODES=modes,
        GPU=int(gpu),
        VEC=vector,
        UNITS=units,
    )
    group = min(GROUP, 1 << (device.info.max_work_group_size.bit_length() - 1))
    scalar_types = tuple(_SCALAR_TYPES[c] for c in formula.scalars)
    if rank == 0:
        launches: list[_Launch] = []
        for begin in range(0, walk.inner, FLAT_LIMIT):
            n = min(FLAT_LIMIT, walk.inner - begin)
            tail = (np.uint32(n), np.uint32(1), np.uint32(1), np.uint32(0))
            shifts = tuple(begin * step for step in walk.steps)
            launches.append(((ceil_div(n, group * per) * group,), shifts, tail))
        return _Prepared(kernel, tuple(launches), (group,), scalar_types)
    sizes = (1,) * (rank - len(walk.outer)) + walk.outer
    rows = 1
    for size in sizes:
        rows *= size
    if rows >= 1 << 32 or walk.inner >= 1 << 31:
        raise UnsupportedDevice(f"expected fewer than 2^32 rows of fewer than 2^31 elements, got shape {shape}")
    middle: list[Any] = [np.uint32(size) for size in sizes]
    for strides, step in zip(walk.strides, walk.steps, strict=True):
        middle += [np.int64(stride) for stride in (0,) * (rank - len(strides)) + strides]
        if general:
            middle.append(np.int64(step))
    columns = ceil_div(walk.inner, vector)
    width = min(group, power_of_two_at_least(columns))
    tiles = ceil_div(columns, width)
    tail = (np.uint32(walk.inner), np.uint32(rows), np.uint32(tiles), np.uint32(width.bit_length() - 1))
    if gpu:
        global_size: tuple[int, ...] = (tiles * ceil_div(rows, group // width) * group,)
        local_size: tuple[int, ...] = (group,)
    else:
        global_size, local_size = (tiles * width, rows), (width, 1)
    launches = [(global_size, begin, (*middle, *tail)) for begin in begins]
    return _Prepared(kernel, tuple(launches), local_size, scalar_types)


def launch(formula: Formula, outputs: Sequence[Operand], inputs: Sequence[Operand], *scalars: float) -> None:
    """Enqueue `formula`: outputs of one shape, inputs that broadcast to it, all on one device.

    An output may be one of the inputs; it may not share memory with one in another geometry, nor with itself.
    """
    first = outputs[0]
    if first.size == 0:
        return
    operands = (*outputs, *inputs)
    geometry = tuple([(o.element, o.shape, o.strides, o.offset % 4 == 0 and o.array.alignment >= 32) for o in operands])
    prepared = _prepare(first.array.device, formula, len(outputs), geometry)
    values = [kind(value) for kind, value in zip(prepared.scalar_types, scalars, strict=True)] if scalars else ()
    for global_size, shifts, tail in prepared.launches:
        arguments: list[Any] = []
        for operand, shift in zip(operands, shifts, strict=True):
            first_element = operand.offset + shift
            arguments += (operand.buffer, np.uint64(first_element) if first_element else _ZERO)
        prepared.kernel.enqueue(global_size, prepared.local_size, [*arguments, *values, *tail])
