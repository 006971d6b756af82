"""How kernels/stochastic.cl is launched: rows that are contiguous, whole or in parts, and rows that lie as columns do.

Unproven: how the plans fare on GPUs other than NVIDIA's.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from memtrain_cl.array import DeviceArray
from memtrain_cl.device import Device, DeviceInfo
from memtrain_cl.errors import UnsupportedDevice
from memtrain_cl.launchers.rows import GROUP, row_shape
from memtrain_cl.program import get_kernel
from memtrain_cl.tuning import BLOCKS_PER_UNIT, SIZE_LIMIT, ceil_div, groups_share_rows

#: Elements of a part of a row at least, where few rows leave a device's units without work, and a multiple of it.
LEAST_PART = 1 << 14
#: Work-items of a GPU that keep a row in registers, few sizes since each is a program to build, and vectors of four
#: that an item keeps: what it does once for a row takes as long as a few of them.
LANES, HELD = (4, 16, 64, 128, 256, 512), 8
#: Work-items of a GPU's group that share a column, most and fewest; columns side by side.
DEEP = (8, 2)
WIDE = 32
#: Groups that a compute unit of a GPU gets of columns, where the rows' length allows, to find maxima and to make codes.
GROUPS_PER_UNIT, CODING_GROUPS = 8, 16
#: Elements of a chunk of a column that an item takes at least.
LEAST_CHUNK = 16
#: Tiles of transposed codes, [length, columns], and a CPU item's columns; as kernels/_stochastic_columns.cl says.
GPU_TILE, CPU_TILE = (256, 32), (64, 128)
STRIP = 1024


@dataclass(frozen=True)
class Style:
    """Constants of the template. element: of x, or of what comes back. codes: int8, int16 or int4."""

    element: str
    codes: str
    stochastic: bool = False
    multiplied: bool = False
    save: bool = False

    @property
    def constants(self) -> dict[str, Any]:
        """By the template's names."""
        return {
            "X": self.element,
            "CODES": self.codes,
            "STOCHASTIC": int(self.stochastic),
            "MULTIPLIED": int(self.multiplied),
            "SAVE": int(self.save),
        }


def _spread(info: DeviceInfo, lines: int, length: int, least: int, groups: int = GROUPS_PER_UNIT) -> int:
    """Into how many parts of `least` elements or more each of `lines` lines is cut, to give every unit work: `groups`
    of a GPU.
    """
    wanted = info.compute_units * (groups if groups_share_rows(info) else BLOCKS_PER_UNIT)
    return max(1, min(ceil_div(wanted, lines), length // least))


def render_kernel(
    device: Device, name: str, style: Style, shape: dict[str, int], *, deep: int = 1, words: int = 0, far: bool = False
) -> Any:
    """The kernel `name` of kernels/stochastic.cl. shape: GPU and the constants of _rows.cl. deep, words, far: DEEP,
    WORDS and FAR.
    """
    own = {
        "DEEP": deep,
        "WORDS": words,
        "FAR": int(shape["GPU"] and far),
        "FUSED": int(shape["GPU"] and device.info.subnormals),
        "PTX": int(shape["GPU"] and device.info.inline_ptx),
    }
    return get_kernel(device, "stochastic", name, NAME=name, **own, **style.constants, **shape)


def far_indices(base: int, size: int) -> bool:
    """Whether indices from `base` on, `size` of them, have more than one upper half."""
    return base >> 32 != base + size - 1 >> 32


def _sizes(*values: int) -> tuple[np.uint32, ...]:
    return tuple(np.uint32(value) for value in values)


class Rows:
    """Launches over rows [rows, n] that are contiguous; a row is cut into parts where rows are few."""

    def __init__(self, device: Device, style: Style, rows: int, n: int, *, aligned: bool) -> None:
        self.device, self.style, self.rows = device, style, rows
        few = rows < device.info.compute_units
        self.splits = _spread(device.info, rows, n, LEAST_PART) if few else 1
        self.part = ceil_div(ceil_div(n, self.splits), LEAST_PART) * LEAST_PART if self.splits > 1 else n
        self.splits = ceil_div(n, self.part)
        self.length = n
        self.shape = row_shape(device, rows * self.splits, self.part, aligned=aligned)
        self._prepared: dict[tuple[str, bool], tuple[Any, tuple[int, ...], tuple[int, ...], tuple[np.uint32, ...]]] = {}

    def launch(self, name: str, *arguments: Any, extra: tuple[Any, ...] = (), far: bool = False) -> Any:
        """The kernel `name` over every part; the launch's event. far: of `far_indices`."""
        prepared = self._prepared.get((name, far))
        if prepared is None:
            prepared = self._prepared[name, far] = self._prepare(name, far)
        kernel, global_size, local_size, sizes = prepared
        return kernel(global_size, local_size, *arguments, *sizes, *extra)

    def _prepare(self, name: str, far: bool) -> tuple[Any, tuple[int, ...], tuple[int, ...], tuple[np.uint32, ...]]:
        """(kernel, global size, local size, the arguments that are sizes)."""
        spans = self.rows * self.splits
        constants, global_size, local_size = self.shape.constants, self.shape.global_size, self.shape.local_size
        lanes = self._lanes() if name == "quantize_rows" else None
        if lanes:
            slots = max(1, GROUP // lanes)
            constants = {**constants, "LANES": lanes, "SLOTS": slots, "HELD": HELD}
            local_size = (lanes * slots,)
            global_size = (ceil_div(spans, slots) * lanes * slots,)
        else:
            constants = {**constants, "HELD": 0}
        kernel = render_kernel(self.device, name, self.style, constants, far=far)
        sizes = _sizes(self.part, spans, self.shape.per, self.splits, self.length)
        return kernel, global_size, local_size, sizes

    def _lanes(self) -> int | None:
        """Work-items of a GPU that keep a row in registers; None where they cannot, or it is no GPU."""
        most = self.device.info.max_work_group_size if self.shape.constants["GPU"] else 0
        return next((lanes for lanes in LANES if lanes <= most and 4 * HELD * lanes >= self.part), None)


@functools.lru_cache(maxsize=1024)
def rows_of(device: Device, style: Style, rows: int, n: int, *, aligned: bool) -> Rows:
    """`Rows`, planned once: what a training launches comes again in every step."""
    return Rows(device, style, rows, n, aligned=aligned)


class Columns:
    """Launches over rows whose elements lie `inner` apart, [outer, length, inner]."""

    def __init__(self, device: Device, style: Style, outer: int, length: int, inner: int, *, aligned: bool) -> None:
        if max(outer, length, inner) >= SIZE_LIMIT:
            raise UnsupportedDevice(f"expected sizes below 2^31, got {outer}, {length} and {inner}")
        self.device, self.style = device, style
        self.outer, self.length, self.inner = outer, length, inner
        self.gpu = groups_share_rows(device.info)
        self.aligned = aligned and self.gpu
        self.deep = (DEEP[0] if device.info.max_work_group_size >= WIDE * DEEP[0] else DEEP[1]) if self.gpu else 1
        self.strips = ceil_div(inner, STRIP)
        lines = ceil_div(outer * inner, WIDE * self.step) if self.gpu else outer * self.strips
        #: Parts that a column's maximum is found in. GPU: a group of each takes what lies between the others'.
        self.splits = _spread(device.info, lines, length, LEAST_CHUNK * self.deep)
        self.coding = _spread(device.info, lines, length, LEAST_CHUNK * self.deep, CODING_GROUPS)
        self.chunk = ceil_div(length, self.splits)
        if not self.gpu:
            self.splits = ceil_div(length, self.chunk)

    @property
    def step(self) -> int:
        """Columns that an item of a GPU takes side by side."""
        return 4 if self.aligned else 1

    def launch(self, name: str, *arguments: Any, extra: tuple[Any, ...] = (), words: int = 0, far: bool = False) -> Any:
        """The kernel `name`; the launch's event. words: that rows of transposed codes are whole numbers of, 0, 1 or 4;
        far: of `far_indices`.
        """
        columns = self.outer * self.inner
        chunk = self.chunk
        if self.gpu:
            local_size: tuple[int, ...] = (WIDE, self.deep)
            if name == "scaled_transposed":
                strips, tiles = ceil_div(columns, GPU_TILE[1]), ceil_div(self.length, GPU_TILE[0])
                turns = max(1, strips * tiles // (self.device.info.compute_units * GROUPS_PER_UNIT))
                chunk = turns * GPU_TILE[0]
                global_size: tuple[int, ...] = (strips * ceil_div(tiles, turns) * WIDE, self.deep)
            else:
                groups = self.splits if name == "absmax_columns" else self.coding
                chunk = groups * self.deep
                global_size = (ceil_div(columns, WIDE * self.step) * WIDE, groups * self.deep)
        else:
            local_size = (1, 1)
            if name == "absmax_columns":
                global_size = (self.outer * self.strips, self.splits)
                extra = (np.uint32(self.strips), *extra)
            elif name == "scaled_transposed":
                global_size = (ceil_div(columns, CPU_TILE[1]), ceil_div(self.length, CPU_TILE[0]))
            else:
                stretches = self.outer * self.length
                chunk = ceil_div(stretches, self.device.info.compute_units * BLOCKS_PER_UNIT)
                global_size = (ceil_div(stretches, chunk), 1)
        shape = {"GPU": int(self.gpu), "LANES": 1, "SLOTS": 1, "HELD": 0, "ALIGNED": int(self.aligned)}
        kernel = render_kernel(
            self.device, name, self.style, shape, deep=self.deep, words=words if self.gpu else 0, far=far
        )
        sizes = (np.uint64(self.inner), np.uint64(columns), *_sizes(self.length, chunk))
        return kernel(global_size, local_size, *arguments, *sizes, *extra)


def launch_scale(
    device: Device,
    style: Style,
    parts: DeviceArray,
    scale: DeviceArray,
    columns: int,
    *,
    along: bool,
    levels: int,
    extra: tuple[Any, ...] = (),
) -> Any:
    """scale [columns] from parts [columns, count] (`along`) or [count, columns]; the launch's event."""
    count = parts.size // columns
    gpu = groups_share_rows(device.info)
    per = 1 if gpu else ceil_div(columns, device.info.compute_units * BLOCKS_PER_UNIT)
    shape = {"GPU": int(gpu), "LANES": 1, "SLOTS": 1, "HELD": 0, "ALIGNED": 0}
    plain = Style("float32", "int8", save=style.save)
    kernel = render_kernel(device, "absmax_scale", plain, shape)
    apart, step = (count, 1) if along else (1, columns)
    sizes = (np.uint64(columns), np.uint32(count), np.uint64(apart), np.uint64(step), np.uint64(per))
    return kernel((ceil_div(columns, per),), None, parts, scale, *sizes, np.float32(levels), *extra)
