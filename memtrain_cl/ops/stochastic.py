"""Launchers of kernels/stochastic.cl: rows quantised to few bits, stochastically or half to even, and back.

Signatures, formulas and results are those of `memtrain_cl.reference.stochastic`, byte for byte on every device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from memtrain_cl.array import DeviceArray
from memtrain_cl.bridge import Crossing
from memtrain_cl.device import Device, DeviceInfo
from memtrain_cl.errors import UnsupportedDevice
from memtrain_cl.formats import check_bits, code_levels
from memtrain_cl.homes import pooled
from memtrain_cl.operand import Operand, contiguous_strides
from memtrain_cl.ops.launch import SIZE_LIMIT, ready_device, require_tensor, require_together
from memtrain_cl.ops.rows import FLOATING, aligned_rows, row_shape
from memtrain_cl.program import get_kernel
from memtrain_cl.tuning import BLOCKS_PER_UNIT, ceil_div, groups_share_rows

#: Elements of a part of a row at least, where few rows leave a device's units without work, and a multiple of it.
LEAST_PART = 1 << 14
#: Work-items of a GPU's group that share a column, most and fewest; columns side by side.
DEEP = (8, 2)
WIDE = 32
#: Groups that a compute unit of a GPU gets of columns, where the rows' length allows.
GROUPS_PER_UNIT = 16
#: Elements of a chunk of a column that an item takes at least.
LEAST_CHUNK = 16
#: Tiles of transposed codes, [length, columns], and a CPU item's columns; as kernels/_stochastic_columns.cl says.
GPU_TILE, CPU_TILE = (128, 32), (64, 128)
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


def _spread(info: DeviceInfo, lines: int, length: int, least: int) -> int:
    """Into how many parts of `least` elements or more each of `lines` lines is cut, to give every unit work."""
    wanted = info.compute_units * (GROUPS_PER_UNIT if groups_share_rows(info) else BLOCKS_PER_UNIT)
    return max(1, min(ceil_div(wanted, lines), length // least))


def _kernel(device: Device, name: str, style: Style, shape: dict[str, int], deep: int = 1) -> Any:
    return get_kernel(device, "stochastic", name, NAME=name, DEEP=deep, **style.constants, **shape)


def _sizes(*values: int) -> tuple[np.uint32, ...]:
    return tuple(np.uint32(value) for value in values)


@dataclass(frozen=True)
class Chance:
    """What codes are made with: the levels, and the seed (0 where chance has no part)."""

    levels: int
    seed: int

    @property
    def arguments(self) -> tuple[Any, ...]:
        """For the kernels that make codes."""
        return np.float32(self.levels), np.uint32(self.seed)


class _Rows:
    """Launches over rows [rows, n] that are contiguous; a row is cut into parts where rows are few."""

    def __init__(self, device: Device, style: Style, rows: int, n: int, *, aligned: bool) -> None:
        self.device, self.style, self.rows = device, style, rows
        few = rows < device.info.compute_units
        self.splits = _spread(device.info, rows, n, LEAST_PART) if few else 1
        self.part = ceil_div(ceil_div(n, self.splits), LEAST_PART) * LEAST_PART if self.splits > 1 else n
        self.splits = ceil_div(n, self.part)
        self.length = n
        self.shape = row_shape(device, rows * self.splits, self.part, aligned=aligned)

    def launch(self, name: str, *arguments: Any, extra: tuple[Any, ...] = ()) -> Any:
        """The kernel `name` over every part; the launch's event."""
        kernel = _kernel(self.device, name, self.style, self.shape.constants)
        sizes = _sizes(self.part, self.rows * self.splits, self.shape.per, self.splits, self.length)
        return kernel(self.shape.global_size, self.shape.local_size, *arguments, *sizes, *extra)


class _Columns:
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
        self.splits = _spread(device.info, lines, length, LEAST_CHUNK * self.deep)
        self.chunk = ceil_div(length, self.splits)
        self.splits = ceil_div(length, self.chunk)

    @property
    def step(self) -> int:
        """Columns that an item of a GPU takes side by side."""
        return 4 if self.aligned else 1

    def launch(self, name: str, *arguments: Any, extra: tuple[Any, ...] = (), whole_words: bool = False) -> Any:
        """The kernel `name`; the launch's event. whole_words: of transposed codes, along their rows."""
        columns = self.outer * self.inner
        chunk = self.chunk
        if self.gpu:
            step = 1 if name == "scaled_transposed" else self.step
            groups = ceil_div(self.length, GPU_TILE[0]) if name == "scaled_transposed" else self.splits
            global_size: tuple[int, ...] = (ceil_div(columns, WIDE * step) * WIDE, groups * self.deep)
            local_size: tuple[int, ...] = (WIDE, self.deep)
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
        aligned = whole_words if name == "scaled_transposed" else self.aligned
        shape = {"GPU": int(self.gpu), "LANES": 1, "SLOTS": 1, "HELD": 0, "ALIGNED": int(aligned and self.gpu)}
        kernel = _kernel(self.device, name, self.style, shape, self.deep)
        sizes = (np.uint64(self.inner), np.uint64(columns), *_sizes(self.length, chunk))
        return kernel(global_size, local_size, *arguments, *sizes, *extra)


def _launch_scale(
    device: Device, style: Style, parts: DeviceArray, scale: DeviceArray, columns: int, *, along: bool, levels: int
) -> Any:
    """scale [columns] from parts [columns, count] (`along`) or [count, columns]; the launch's event."""
    count = parts.size // columns
    gpu = groups_share_rows(device.info)
    per = 1 if gpu else ceil_div(columns, device.info.compute_units * BLOCKS_PER_UNIT)
    shape = {"GPU": int(gpu), "LANES": 1, "SLOTS": 1, "HELD": 0, "ALIGNED": 0}
    plain = Style("float32", "int8", save=style.save)
    kernel = _kernel(device, "absmax_scale", plain, shape)
    apart, step = (count, 1) if along else (1, columns)
    sizes = (np.uint64(columns), np.uint32(count), np.uint64(apart), np.uint64(step), np.uint64(per))
    return kernel((ceil_div(columns, per),), None, parts, scale, *sizes, np.float32(levels))


def launch_quantize(
    device: Device,
    x: Operand,
    codes: DeviceArray,
    scale: DeviceArray,
    *,
    outer: int,
    length: int,
    inner: int,
    bits: int,
    seed: int | None,
    transposed: bool = False,
    multiplier: DeviceArray | None = None,
) -> Any:
    """Enqueue codes and scale [outer, inner] float32 of x [outer, length, inner], contiguous, of a floating element.

    codes: int8 to 8 bits, int16 beyond, as x lies, or [inner, length] where `transposed` (outer 1, at most 8 bits).
    seed None rounds half to even. multiplier float32 [length]: x[l] * multiplier[l] is what is quantised. Nothing
    waits; the last launch's event, None where x is empty.
    """
    levels = code_levels(check_bits(bits))
    stored = "int8" if bits <= 8 else "int16"
    if x.element not in FLOATING:
        raise TypeError(f"expected x of {' or '.join(FLOATING)}, got {x.element}")
    if not x.contiguous or x.size != outer * length * inner:
        raise ValueError(f"expected x contiguous, {outer} x {length} x {inner} elements, got {x}")
    if codes.dtype.name != stored or codes.size != x.size or scale.size != outer * inner:
        raise ValueError(f"expected {x.size} codes of {stored} and {outer * inner} scales, got {codes} and {scale}")
    if transposed and (outer != 1 or stored != "int8"):
        raise ValueError(f"expected outer 1 and at most 8 bits for transposed codes, got {outer} and {bits}")
    if x.size == 0:
        return None
    style = Style(x.element, stored, seed is not None, multiplier is not None)
    chance = Chance(levels, seed or 0)
    factors = () if multiplier is None else (multiplier,)
    if inner == 1:
        # Its transpose lies as it does.
        factors_aligned = multiplier is None or multiplier.alignment >= 16
        aligned = aligned_rows(length, x) and codes.alignment >= 8 and factors_aligned
        rows = _Rows(device, style, outer, length, aligned=aligned)
        if rows.splits == 1:
            return rows.launch("quantize_rows", *x.place, *factors, codes, scale, extra=chance.arguments)
        parts = pooled(device, (outer, rows.splits), np.uint32)
        rows.launch("absmax_rows", *x.place, *factors, parts)
        _launch_scale(device, style, parts, scale, outer, along=True, levels=levels)
        return rows.launch("scaled_rows", *x.place, *factors, codes, scale, extra=chance.arguments)
    aligned = aligned_rows(inner, x) and codes.alignment >= 8 and scale.alignment >= 16
    columns = _Columns(device, style, outer, length, inner, aligned=aligned)
    parts = pooled(device, (columns.splits, outer * inner), np.uint32)
    columns.launch("absmax_columns", *x.place, *factors, parts)
    _launch_scale(device, style, parts, scale, outer * inner, along=False, levels=levels)
    name = "scaled_transposed" if transposed else "scaled_columns"
    words = length % 4 == 0 and codes.alignment >= 4
    return columns.launch(
        name, *x.place, *factors, scale, codes, extra=chance.arguments, whole_words=words and transposed
    )


def _operand(array: DeviceArray, tensor: torch.Tensor) -> Operand:
    """The operand of a visit's array of `tensor`'s values."""
    element = str(tensor.dtype).removeprefix("torch.")
    return Operand(array, array.shape, contiguous_strides(array.shape), 0, element, contiguous=True)


def _require(x: Any, bits: Any, seed: Any) -> int:
    if not isinstance(x, torch.Tensor) or str(x.dtype).removeprefix("torch.") not in FLOATING:
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"expected x as a tensor of torch.{', torch.'.join(FLOATING)}, got {got}")
    if seed is not None and (not isinstance(seed, int) or not 0 <= seed < 1 << 32):
        raise ValueError(f"expected a seed in 0..2^32-1, got {seed!r}")
    return check_bits(bits)


def _least_scale(shape: tuple[int, ...], bits: int, like: torch.Tensor) -> torch.Tensor:
    """The scale of rows without elements."""
    least = np.float32(1e-12) / np.float32(code_levels(bits))
    return torch.full(shape, float(least), dtype=torch.float32, device=like.device)


def quantize_int8(
    x: torch.Tensor,
    *,
    dim: int,
    seed: int | None = None,
    transposed: bool = False,
    multiplier: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes int8, scale float32) of x [M, N], one scale a row along `dim`: [M] for dim 1, [N] for dim 0.

    x: float32, float16 or bfloat16. seed None rounds half to even. transposed (dim 0): codes are [N, M]. multiplier:
    float32, one number a place of the row, [N] for dim 1 and [M] for dim 0; x times it is what is quantised.
    """
    _require(x, 8, seed)
    if x.ndim != 2 or dim not in (0, 1) or (transposed and dim == 1):
        raise ValueError(f"expected x [M, N] and dim 1, or dim 0 also transposed; got {list(x.shape)}, dim {dim!r}")
    if multiplier is not None:
        require_tensor("multiplier", multiplier, torch.float32, (x.shape[dim],))
        require_together(x=x, multiplier=multiplier)
    M, N = x.shape
    shape = (N, M) if transposed else (M, N)
    if x.numel() == 0:
        codes = torch.empty(shape, dtype=torch.int8, device=x.device)
        return codes, _least_scale((x.shape[1 - dim],), 8, x)
    device = ready_device(x)
    outer, length, inner = (M, N, 1) if dim == 1 else (1, M, N)
    with Crossing(device, x) as cross:
        codes, codes_array = cross.output(shape, torch.int8)
        scale, scale_array = cross.output((outer * inner,))
        launch_quantize(
            device,
            _operand(cross.read(x), x),
            codes_array,
            scale_array,
            outer=outer,
            length=length,
            inner=inner,
            bits=8,
            seed=seed,
            transposed=transposed,
            multiplier=None if multiplier is None else cross.read(multiplier),
        )
    return codes, scale
