"""Rows in few bits, in torch: quantisation, stochastic or half to even, and the way back.

A row is what lies along one dimension; levels = 2^(bits-1) - 1. With everything in float32 and each operation rounded:

    v = x, or x * multiplier[place in the row];   |v| < 2^-126 counts as 0
    scale = max(max |v|, 1e-12) / levels          NaN where an element is not finite, and the row's codes are then 0
    y = v / scale
    code = floor(y) + (u < y - floor(y)), or y rounded half to even; clamped to +-levels
    u = uniform01(seed ^ hash_u32(i)), i the element's flat index in x (lo ^ hash_u32(hi) of its halves)

so that the mean of code * scale over u is v: the estimate is unbiased.
"""

from __future__ import annotations

from typing import Any

import torch

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


def _codes(v: torch.Tensor, scale: torch.Tensor, bits: int, seed: int | None) -> torch.Tensor:
    """Codes of v [outer, length, inner], as numbers."""
    levels = code_levels(bits)
    finite = torch.isfinite(scale)[:, None]
    y = torch.where(finite & (v.abs() >= _LEAST_NORMAL), v, 0.0) / torch.where(finite, scale[:, None], 1.0)
    if seed is None:
        return torch.round(y).clamp(-levels, levels)
    index = torch.arange(v.numel()).reshape(v.shape)
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes int8, scale float32) of x [M, N], one scale a row along `dim`: [M] for dim 1, [N] for dim 0.

    seed None rounds half to even. transposed (dim 0): codes are [N, M]. multiplier: float32, one number a place of the
    row, [N] for dim 1 and [M] for dim 0; x times it is what is quantised.
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
    codes = _codes(v, scale, 8, seed).to(torch.int8).reshape(x.shape)
    return codes.t().contiguous() if transposed else codes, scale.reshape(-1)
