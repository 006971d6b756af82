"""Rows in few bits, in torch: quantisation, stochastic or half to even, and the way back.

A row is what lies along one dimension; levels = 2^(bits-1) - 1. With everything in float32 and each operation rounded:

    v = x, or x * multiplier[place in the row];   |v| < 2^-126 counts as 0
    scale = max(max |v|, 1e-12) / levels          NaN where an element is not finite, and the row's codes are then 0
    y = v / scale
    code = floor(y) + (u < y - floor(y)), or y rounded half to even; clamped to +-levels
    u = uniform01(seed ^ hash_u32(i)), i = base + the element's flat index in x (lo ^ hash_u32(hi) of its halves)

so that the mean of code * scale over u is v: the estimate is unbiased.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from memtrain_cl.errors import NotFinite
from memtrain_cl.formats import check_bits, code_levels
from memtrain_cl.reference.codes import hash_u32, uniform01

_LEAST_NORMAL = 2.0**-126
FLOATING = (torch.float32, torch.float16, torch.bfloat16)


def _levels(bits: int) -> torch.Tensor:
    return torch.tensor([float(code_levels(bits))])


def _scale(v: torch.Tensor, bits: int) -> torch.Tensor:
    """[outer, inner] of v [outer, length, inner]."""
    scale = v.abs().amax(1).clamp_min(1e-12) / _levels(bits)
    return torch.where(torch.isfinite(v).all(1), scale, torch.nan)


def _codes(v: torch.Tensor, scale: torch.Tensor, bits: int, seed: int | None, base: int = 0) -> torch.Tensor:
    """Codes of v [outer, length, inner], as numbers."""
    levels = code_levels(bits)
    finite = torch.isfinite(scale)[:, None]
    y = torch.where(finite & (v.abs() >= _LEAST_NORMAL), v, 0.0) / torch.where(finite, scale[:, None], 1.0)
    if seed is None:
        return torch.round(y).clamp(-levels, levels)
    index = base + torch.arange(v.numel()).reshape(v.shape)
    u = uniform01(seed ^ hash_u32((index & 0xFFFFFFFF) ^ hash_u32(index >> 32)))
    below = torch.floor(y)
    return (below + (u < y - below).to(torch.float32)).clamp(-levels, levels)


def _stored(bits: int) -> torch.dtype:
    return torch.int8 if bits <= 8 else torch.int16


def _require(x: Any, bits: Any, seed: Any) -> int:
    if not isinstance(x, torch.Tensor) or x.dtype not in FLOATING:
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"expected x as a tensor of {', '.join(map(str, FLOATING))}, got {got}")
    if seed is not None and (not isinstance(seed, int) or not 0 <= seed < 1 << 32):
        raise ValueError(f"expected a seed in 0..2^32-1, got {seed!r}")
    return check_bits(bits)


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

    seed None rounds half to even. transposed (dim 0): codes are [N, M]. multiplier: float32, one number a place of the
    row, [N] for dim 1 and [M] for dim 0; x times it is what is quantised. index_base: the index of x's first element.
    """
    _require(x, 8, seed)
    if x.ndim != 2 or dim not in (0, 1) or (transposed and dim == 1):
        raise ValueError(f"expected x [M, N] and dim 1, or dim 0 also transposed; got {list(x.shape)}, dim {dim!r}")
    v = x.to(torch.float32)
    if multiplier is not None:
        if multiplier.dtype != torch.float32 or multiplier.shape != (x.shape[dim],):
            raise ValueError(f"expected multiplier float32 [{x.shape[dim]}], got {multiplier.dtype}")
        v = v * (multiplier[:, None] if dim == 0 else multiplier)
    if x.numel() == 0:
        codes = torch.zeros(x.shape, dtype=torch.int8)
        return codes.t() if transposed else codes, torch.full((x.shape[1 - dim],), 1e-12) / _levels(8)
    v = v.reshape(1, *x.shape) if dim == 0 else v.unsqueeze(2)
    scale = _scale(v, 8)
    codes = _codes(v, scale, 8, seed, index_base).to(torch.int8).reshape(x.shape)
    return codes.t().contiguous() if transposed else codes, scale.reshape(-1)


def _view(x: torch.Tensor, dim: Any) -> torch.Tensor:
    """x as [outer, length, inner] around `dim`; one number is a row of one."""
    rank = max(x.ndim, 1)
    if isinstance(dim, bool) or not isinstance(dim, int) or not -rank <= dim < rank:
        raise ValueError(f"expected dim in {-rank}..{rank - 1}, got {dim!r}")
    dim %= rank
    sizes = tuple(x.shape) or (1,)
    return x.reshape(math.prod(sizes[:dim]), sizes[dim], math.prod(sizes[dim + 1 :]))


def quantize_codes(
    x: torch.Tensor, bits: int, dim: int = -1, *, seed: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scale) of x, of any shape, in rows along `dim`, stochastically: the mean of codes*scale is x.

    codes: of x's shape, int8 to 8 bits and int16 to 15. scale: float32, x's shape with 1 at `dim`. A row that is not
    finite has codes 0 and scale NaN. seed None draws one from torch.
    """
    bits = _require(x, bits, seed)
    v = _view(x.to(torch.float32), dim)
    seed = int(torch.randint(0, 1 << 32, ())) if seed is None else seed
    shape = tuple(1 if place == dim % x.ndim else size for place, size in enumerate(x.shape))
    if x.numel() == 0:
        return torch.zeros(x.shape, dtype=_stored(bits)), torch.full(shape, 1e-12) / _levels(bits)
    scale = _scale(v, bits)
    return _codes(v, scale, bits, seed).to(_stored(bits)).reshape(x.shape), scale.reshape(shape)


def dequantize_codes(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """codes * scale, float32 of codes' shape."""
    return codes.to(torch.float32) * scale


def stochastic_quantize(x: torch.Tensor, bits: int, dim: int = -1, *, seed: int | None = None) -> torch.Tensor:
    """x after `quantize_codes` and back, in x's dtype: an unbiased estimate of x on the grid of its rows."""
    return dequantize_codes(*quantize_codes(x, bits, dim, seed=seed)).to(x.dtype)


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """int8 codes -8..7 of any shape, flat -> flat uint8, two in a byte: lo | hi<<4, each as code + 8.

    The last of an odd count has the code -8 (nibble 0) beside it.
    """
    flat = codes.reshape(-1).to(torch.int16) + 8 & 15
    pairs = torch.cat([flat, flat.new_zeros(flat.numel() % 2)]).reshape(-1, 2)
    return (pairs[:, 0] | pairs[:, 1] << 4).to(torch.uint8)


def unpack_int4(packed: torch.Tensor, n: int) -> torch.Tensor:
    """The first n codes, flat int8, of what `pack_int4` gives."""
    p = packed.to(torch.int16)
    return (torch.stack([p & 15, p >> 4], dim=1).reshape(-1)[:n] - 8).to(torch.int8)


def save_rows(x: torch.Tensor, bits: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scale) of x [M, n] for `restore_rows`, stochastically.

    codes: to 4 bits packed as `pack_int4` does, flat uint8; to 8 int8 [M, n]; to 15 int16 [M, n]. scale: bfloat16 [M],
    max(max |x|, 1e-12) / levels rounded up. NotFinite (a ValueError) for a row that is not finite, or whose largest
    code times its scale is not.
    """
    bits = _require(x, bits, seed)
    if x.ndim != 2:
        raise ValueError(f"expected x [M, n], got {list(x.shape)}")
    if x.numel() == 0:
        codes = torch.zeros(x.shape, dtype=_stored(bits))
        scale = (torch.full((x.shape[0],), 1e-12) / _levels(bits)).to(torch.bfloat16)
        return (pack_int4(codes) if bits <= 4 else codes), scale
    v = x.to(torch.float32).unsqueeze(2)
    scale = ((_scale(v, bits).view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    wrong = (~torch.isfinite(scale * _levels(bits)[:, None])).nonzero()
    if len(wrong):
        raise NotFinite(f"expected finite numbers to save in few bits, got others in row {int(wrong[0, 0])}")
    codes = _codes(v, scale, bits, seed).to(_stored(bits)).reshape(x.shape)
    return (pack_int4(codes) if bits <= 4 else codes), scale.reshape(-1).to(torch.bfloat16)


def restore_rows(
    codes: torch.Tensor,
    scale: torch.Tensor,
    bits: int,
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """[M, n] = codes * scale from what `save_rows` gave, each product rounded to float32, then to `dtype`."""
    M, n = shape
    flat = unpack_int4(codes, M * n) if check_bits(bits) <= 4 else codes
    return (flat.reshape(M, n).to(torch.float32) * scale.to(torch.float32)[:, None]).to(dtype)
