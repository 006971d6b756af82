"""Products of int8 codes in torch, exact by way of float64, and a counter layer's three products by them.

forward      y      = float32(codes(x) @ t^T) * (scale_x[m] * scale[o])          codes by token, half to even
grad_input   grad_x = float32(codes(grad_out*scale[o]) @ t) * scale_z[m]         codes by token, stochastic
grad_weight  grad_w = float32(codes(grad_out)^T @ codes(x)) * (scale_g[o] * scale_x[j])    by column, stochastic

The last one's sums over more than `chunk` tokens are of chunks, added in float32 in their order before the scales.
"""

from __future__ import annotations

import torch

from memtrain_cl.formats import INT8_CHUNK
from memtrain_cl.reference.stochastic import quantize_int8
from memtrain_cl.reference.ternary import decode_ternary


def _sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """int32 a @ b^T of int8 codes: no sum comes near 2^53."""
    return (a.to(torch.float64) @ b.to(torch.float64).t()).to(torch.int32)


def int8_product(
    a: torch.Tensor, b: torch.Tensor, row: torch.Tensor | None = None, col: torch.Tensor | None = None
) -> torch.Tensor:
    """a @ b^T of int8 [M, K] and [N, K]: int32, or float32 by row [M], or by row [M] and col [N]."""
    if a.shape[1] > INT8_CHUNK:
        raise ValueError(f"expected at most {INT8_CHUNK} columns, got {a.shape[1]}")
    sums = _sums(a, b)
    if row is None:
        return sums
    factors = row[:, None] if col is None else row[:, None] * col
    return sums.to(torch.float32) * factors


def counter_forward_int8(
    x: torch.Tensor,
    state: torch.Tensor,
    scale: torch.Tensor,
    *,
    C: int,
    packed: bool,
    cache: torch.Tensor | None = None,
) -> torch.Tensor:
    """y float32 [M, out] of x float32 [M, in]. cache: t, already decoded, [out, in]."""
    codes, own = quantize_int8(x, dim=1)
    t = decode_ternary(state, x.shape[1], C=C, packed=packed) if cache is None else cache
    return _sums(codes, t).to(torch.float32) * (own[:, None] * scale[:, 0])


def counter_grad_input_int8(
    grad_out: torch.Tensor,
    state: torch.Tensor,
    scale: torch.Tensor,
    in_features: int,
    *,
    C: int,
    packed: bool,
    seed: int,
    cache: torch.Tensor | None = None,
) -> torch.Tensor:
    """grad_x float32 [M, in] of grad_out float32 [M, out]. seed: that of the stream."""
    codes, own = quantize_int8(grad_out, dim=1, seed=seed, multiplier=scale[:, 0])
    t = decode_ternary(state, in_features, C=C, packed=packed) if cache is None else cache
    return _sums(codes, t.t()).to(torch.float32) * own[:, None]


def grad_weight_int8(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    row_offset: int = 0,
    rows: int | None = None,
    *,
    seed_grad: int,
    seed_input: int,
    chunk: int = INT8_CHUNK,
) -> torch.Tensor:
    """grad_w float32 [R, in] of grad_out [M, out] and x [M, in]. seeds: those of the streams. chunk: of tokens."""
    grad_codes = quantize_int8(grad_out, dim=0, seed=seed_grad, transposed=True)
    x_codes = quantize_int8(x, dim=0, seed=seed_input, transposed=True)
    return grad_weight_of_codes(*grad_codes, *x_codes, row_offset, rows, chunk=chunk)


def grad_weight_of_codes(
    grad_codes: torch.Tensor,
    grad_scale: torch.Tensor,
    x_codes: torch.Tensor,
    x_scale: torch.Tensor,
    row_offset: int = 0,
    rows: int | None = None,
    *,
    chunk: int = INT8_CHUNK,
) -> torch.Tensor:
    """The same from the codes int8 [out, M] and [in, M] of both, and their scales [out] and [in]."""
    tile = slice(row_offset, None if rows is None else row_offset + rows)
    total = torch.zeros(len(grad_codes[tile]), len(x_codes))
    for first in range(0, x_codes.shape[1], chunk):
        part = slice(first, first + chunk)
        total = total + _sums(grad_codes[tile, part], x_codes[:, part]).to(torch.float32)
    return total * (grad_scale[tile, None] * x_scale)
