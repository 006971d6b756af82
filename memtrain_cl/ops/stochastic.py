"""Launchers of kernels/stochastic.cl: rows quantised to few bits, stochastically or half to even, and back.

Signatures, formulas and results are those of `memtrain_cl.reference.stochastic`, byte for byte on every device.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from memtrain_cl.array import DeviceArray
from memtrain_cl.bridge import Crossing
from memtrain_cl.device import Device
from memtrain_cl.faults import faults_of
from memtrain_cl.formats import check_bits, code_levels
from memtrain_cl.homes import pooled
from memtrain_cl.launchers.rows import FLOATING, aligned_rows
from memtrain_cl.operand import Operand, contiguous_strides
from memtrain_cl.ops.launch import ready_device, require_dtype, require_seed, require_tensor, require_together
from memtrain_cl.ops.stochastic_plan import Columns, Style, far_indices, launch_scale, render_kernel, rows_of
from memtrain_cl.tuning import ceil_div, flat_shape, groups_share_rows

#: torch's types of what can be quantised.
FLOATING_DTYPES = tuple(getattr(torch, name) for name in FLOATING)


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
    index_base: int = 0,
) -> Any:
    """Enqueue codes and scale [outer, inner] float32 of x [outer, length, inner], contiguous, of a floating element.

    codes: int8 to 8 bits, int16 beyond, as x lies, or [inner, length] where `transposed` (outer 1, at most 8 bits).
    seed None rounds half to even. multiplier float32 [length]: x[l] * multiplier[l] is what is quantised. index_base:
    the index of the first element, which the rounding hashes. Nothing waits; the last launch's event, None where x is
    empty.
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
    if inner == 1:
        # Transposed, it lies as it did.
        return launch_rows(device, style, x, codes, scale, outer, length, bits, seed or 0, multiplier, index_base)
    factors = () if multiplier is None else (multiplier,)
    aligned = aligned_rows(inner, x) and min(codes.alignment, scale.alignment) >= 16 and index_base % 4 == 0
    columns = Columns(device, style, outer, length, inner, aligned=aligned)
    parts = pooled(device, (columns.splits, outer * inner), np.uint32)
    columns.launch("absmax_columns", *x.place, *factors, parts)
    if columns.gpu:
        given: tuple[Any, ...] = (parts, np.uint32(columns.splits), scale)
    else:
        launch_scale(device, style, parts, scale, outer * inner, along=False, levels=levels)
        given = (scale,)
    name = "scaled_transposed" if transposed else "scaled_columns"
    # Words that a store of transposed codes may have.
    words = next((words for words in (4, 1) if length % (4 * words) == 0 and codes.alignment >= 4 * words), 0)
    chance = (np.float32(levels), np.uint32(seed or 0), np.uint64(index_base))
    far = far_indices(index_base, x.size)
    return columns.launch(
        name, *x.place, *factors, *given, codes, extra=chance, words=words if transposed else 0, far=far
    )


def launch_rows(
    device: Device,
    style: Style,
    x: Operand,
    codes: DeviceArray,
    scale: DeviceArray,
    outer: int,
    length: int,
    bits: int,
    seed: int,
    multiplier: DeviceArray | None = None,
    index_base: int = 0,
    *,
    reports: bool = False,
) -> Any:
    """`launch_quantize` where inner is 1, in any style; reports: rows that are not finite, where the style saves."""
    levels = code_levels(bits)
    factors = () if multiplier is None else (multiplier,)
    alignment = min(array.alignment for array in (codes, *factors))
    aligned = aligned_rows(length, x) and alignment >= 16 and index_base % 4 == 0
    rows = rows_of(device, style, outer, length, aligned=aligned)
    chance = (np.float32(levels), np.uint32(seed), np.uint64(index_base))
    far = far_indices(index_base, x.size)
    # A kernel that reports nothing takes a buffer that it does not touch.
    faults: tuple[Any, ...] = ()
    if style.save:
        faults = (np.uint32(reports), faults_of(device) if reports else scale)
    if rows.splits == 1:
        return rows.launch("quantize_rows", *x.place, *factors, codes, scale, extra=chance + faults, far=far)
    parts = pooled(device, (outer, rows.splits), np.uint32)
    rows.launch("absmax_rows", *x.place, *factors, parts)
    launch_scale(device, style, parts, scale, outer, along=True, levels=levels, extra=faults)
    return rows.launch("scaled_rows", *x.place, *factors, codes, scale, extra=chance, far=far)


def launch_dequantize(
    device: Device, style: Style, codes: DeviceArray, scale: DeviceArray, y: DeviceArray, view: tuple[int, int, int]
) -> Any:
    """Enqueue y [outer, length, inner] = codes * scale [outer, inner]; the launch's event."""
    outer, length, inner = view
    aligned = inner * length % 4 == 0 and min(y.alignment, codes.alignment, scale.alignment) >= 16
    if inner == 1:
        return rows_of(device, style, outer, length, aligned=aligned).launch("dequantize_rows", codes, scale, y)
    columns = Columns(device, style, outer, length, inner, aligned=aligned and inner % 4 == 0)
    return columns.launch("dequantize_columns", codes, scale, y)


def launch_nibbles(device: Device, name: str, source: DeviceArray, target: DeviceArray, n: int) -> Any:
    """Enqueue pack_int4 or unpack_int4 of n codes; the launch's event."""
    global_size, per = flat_shape(device.info, ceil_div(n, 8))
    shape = {"GPU": int(groups_share_rows(device.info)), "LANES": 1, "SLOTS": 1, "HELD": 0, "ALIGNED": 0}
    kernel = render_kernel(device, name, Style("float32", "int4"), shape)
    return kernel(global_size, None, source, target, np.uint64(n), np.uint64(per))


def name_of(dtype: torch.dtype) -> str:
    """An element's name."""
    return str(dtype).removeprefix("torch.")


def operand_from(array: DeviceArray, tensor: torch.Tensor) -> Operand:
    """The operand of a visit's array of `tensor`'s values."""
    return Operand(array, array.shape, contiguous_strides(array.shape), 0, name_of(tensor.dtype), contiguous=True)


def require_numbers(x: Any, bits: Any, seed: Any) -> int:
    """The bits as an int, once x, bits and seed (None: not given) are such as can be quantised."""
    require_dtype("x", x, *FLOATING_DTYPES)
    if seed is not None:
        require_seed("a seed", seed)
    return check_bits(bits)


def least_scale(shape: tuple[int, ...], bits: int, like: torch.Tensor) -> torch.Tensor:
    """Scales of rows without elements."""
    least = np.float32(1e-12) / np.float32(code_levels(bits))
    return torch.full(shape, float(least), dtype=torch.float32, device=like.device)


def quantize_int8(
    x: torch.Tensor,
    *,
    dim: int,
    seed: int | None = None,
    transposed: bool = False,
    multiplier: torch.Tensor | None = None,
    index_base: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes int8, scale float32) of x [M, N], one scale a row along `dim`: [M] for dim 1, [N] for dim 0.

    x: float32, float16 or bfloat16. seed None rounds half to even. transposed (dim 0): codes are [N, M]. multiplier:
    float32, one number a place of the row, [N] for dim 1 and [M] for dim 0; x times it is what is quantised.
    index_base: the index of x's first element, which the rounding hashes.
    """
    require_numbers(x, 8, seed)
    if x.ndim != 2 or dim not in (0, 1) or (transposed and dim == 1):
        raise ValueError(f"expected x [M, N] and dim 1, or dim 0 also transposed; got {list(x.shape)}, dim {dim!r}")
    if multiplier is not None:
        require_tensor("multiplier", multiplier, torch.float32, (x.shape[dim],))
        require_together(x=x, multiplier=multiplier)
    M, N = x.shape
    shape = (N, M) if transposed else (M, N)
    if x.numel() == 0:
        codes = torch.empty(shape, dtype=torch.int8, device=x.device)
        return codes, least_scale((x.shape[1 - dim],), 8, x)
    device = ready_device(x)
    outer, length, inner = (M, N, 1) if dim == 1 else (1, M, N)
    with Crossing(device, x) as cross:
        codes, codes_array = cross.output(shape, torch.int8)
        scale, scale_array = cross.output((outer * inner,))
        launch_quantize(
            device,
            operand_from(cross.read(x), x),
            codes_array,
            scale_array,
            outer=outer,
            length=length,
            inner=inner,
            bits=8,
            seed=seed,
            transposed=transposed,
            multiplier=None if multiplier is None else cross.read(multiplier),
            index_base=index_base,
        )
    return codes, scale


def _view(shape: torch.Size, dim: Any) -> tuple[int, int, int]:
    """A shape as (outer, length, inner) around `dim`; one number is a row of one."""
    rank = max(len(shape), 1)
    if isinstance(dim, bool) or not isinstance(dim, int) or not -rank <= dim < rank:
        raise ValueError(f"expected dim in {-rank}..{rank - 1}, got {dim!r}")
    sizes = tuple(shape) or (1,)
    dim %= rank
    return math.prod(sizes[:dim]), sizes[dim], math.prod(sizes[dim + 1 :])


def _drawn(seed: int | None) -> int:
    return int(torch.randint(0, 1 << 32, ())) if seed is None else seed


def quantize_codes(
    x: torch.Tensor, bits: int, dim: int = -1, *, seed: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scale) of x, of any shape, in rows along `dim`, stochastically: the mean of codes*scale is x.

    x: float32, float16 or bfloat16. codes: of x's shape, int8 to 8 bits and int16 to 15, in +-(2^(bits-1) - 1). scale:
    float32, x's shape with 1 at `dim`. A row that is not finite has codes 0 and scale NaN. seed None draws one.
    """
    bits = require_numbers(x, bits, seed)
    outer, length, inner = _view(x.shape, dim)
    shape = tuple(x.shape)
    scales = tuple(1 if place == dim % x.ndim else size for place, size in enumerate(shape))
    stored = torch.int8 if bits <= 8 else torch.int16
    if x.numel() == 0:
        return torch.empty(shape, dtype=stored, device=x.device), least_scale(scales, bits, x)
    device = ready_device(x)
    with Crossing(device, x) as cross:
        codes, codes_array = cross.output(shape, stored)
        scale, scale_array = cross.output(scales)
        launch_quantize(
            device,
            operand_from(cross.read(x), x),
            codes_array,
            scale_array,
            outer=outer,
            length=length,
            inner=inner,
            bits=bits,
            seed=_drawn(seed),
        )
    return codes, scale


def _require_codes(codes: Any, scale: Any) -> tuple[int, int, int]:
    require_dtype("codes", codes, torch.int8, torch.int16)
    require_dtype("scale", scale, torch.float32)
    require_together(codes=codes, scale=scale)
    along = [dim for dim, (size, own) in enumerate(zip(codes.shape, scale.shape, strict=False)) if size != own]
    if codes.ndim != scale.ndim or len(along) > 1 or any(scale.shape[dim] != 1 for dim in along):
        raise ValueError(
            f"expected scale of codes' shape with 1 in one dimension, got {list(scale.shape)} for {list(codes.shape)}"
        )
    return _view(codes.shape, along[0]) if along else (codes.numel(), 1, 1)


def _dequantized(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    view = _require_codes(codes, scale)
    if codes.numel() == 0:
        return torch.empty(codes.shape, dtype=dtype, device=codes.device)
    device = ready_device(codes)
    with Crossing(device, codes) as cross:
        result, target = cross.output(tuple(codes.shape), dtype)
        style = Style(name_of(dtype), name_of(codes.dtype))
        launch_dequantize(device, style, cross.read(codes), cross.read(scale), target, view)
    return result


def dequantize_codes(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """codes * scale, float32 of codes' shape, from what `quantize_codes` gives."""
    return _dequantized(codes, scale, torch.float32)


def stochastic_quantize(x: torch.Tensor, bits: int, dim: int = -1, *, seed: int | None = None) -> torch.Tensor:
    """x after `quantize_codes` and back, in x's dtype: an unbiased estimate of x on the grid of its rows.

    It is a value: no gradient passes through it. Rows that are not finite come back NaN.
    """
    codes, scale = quantize_codes(x, bits, dim, seed=seed)
    return _dequantized(codes, scale, x.dtype)


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """int8 codes -8..7 of any shape, flat -> flat uint8, two in a byte: lo | hi<<4, each as code + 8.

    The last of an odd count has the code -8 (nibble 0) beside it. Of codes beyond 4 bits the low ones count.
    """
    require_dtype("codes", codes, torch.int8)
    return _nibbles("pack_int4", codes, codes.numel(), ceil_div(codes.numel(), 2), torch.uint8)


def unpack_int4(packed: torch.Tensor, n: int) -> torch.Tensor:
    """The first n codes, flat int8, of what `pack_int4` gives."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise ValueError(f"expected the number of codes as an integer >= 0, got {n!r}")
    require_tensor("packed", packed, torch.uint8, (ceil_div(n, 2),))
    return _nibbles("unpack_int4", packed, n, n, torch.int8)


def _nibbles(name: str, source: torch.Tensor, n: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    if n == 0:
        return torch.empty(0, dtype=dtype, device=source.device)
    device = ready_device(source)
    with Crossing(device, source) as cross:
        result, target = cross.output((size,), dtype)
        launch_nibbles(device, name, cross.read(source), target, n)
    return result
