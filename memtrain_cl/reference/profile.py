"""Profiles of blocks, in torch: each element's rank in its block, and a mean and a scale a block.

A tensor is taken flat, in blocks of `block_size` elements, of which the last may be short. With everything in float32
and each operation rounded; magnitudes below 2^-126 count as zero:

    k       the block's elements that are not zero, ranked r = 0..k-1 by (value, index)
    code    0 for a zero, else 1 + ((2*r + 1)*255) // (2*k), which is nearest to the quantile at (r + 0.5)/k
    mean    = sum / k, within the block's least and largest, which a rounded sum might leave
    scale   = sqrt(sum of (x - mean)^2 / k)
    back    0 for code 0, else mean + scale*table[code]; `positive`: at least mean/16

Sums have the one order, element j of a block in lane j; zeros add 0 to them. Both are taken of x / 2^e, e the exponent
of the block's largest magnitude, and multiplied back: within float32's range that changes no bit, and beyond it squares
neither vanish nor overflow. So a zero comes back as zero, and a block whose other elements are alike as it was.
table[c], c = 1..255, is the standardised quantile of a family of distributions at (c - 0.5)/255.

A block with an element that is not finite has mean and scale NaN and codes 1, and comes back NaN. Elements beyond 2^125
may come back infinite.
"""

from __future__ import annotations

import numbers
from typing import Any

import torch

_LEAST_NORMAL = 2.0**-126
_FLOATING = (torch.float32, torch.float16, torch.bfloat16)
_BELOW_TWO = 2.0 - 2.0**-23


def _require_block_size(block_size: Any) -> int:
    wrong = isinstance(block_size, bool) or not isinstance(block_size, numbers.Integral)
    if wrong or not 1 <= int(block_size) <= 256:
        raise ValueError(f"expected block_size as an integer in 1..256, got {block_size!r}")
    return int(block_size)


def _blocks(flat: torch.Tensor, block_size: int) -> torch.Tensor:
    """[blocks, block_size] of a flat tensor, filled up with zeros."""
    return torch.nn.functional.pad(flat, (0, -flat.numel() % block_size)).reshape(-1, block_size)


def _sums(rows: torch.Tensor) -> torch.Tensor:
    """[blocks, 1]: the sum of each row [blocks, n <= 1024] in the one order."""
    lanes = torch.nn.functional.pad(rows, (0, 1024 - rows.shape[1]))
    while lanes.shape[1] > 1:
        lanes = lanes[:, : lanes.shape[1] // 2] + lanes[:, lanes.shape[1] // 2 :]
    return lanes


def encode_profile(x: torch.Tensor, block_size: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8 of x's shape, mean_scale float32 [blocks, 2]) of x of float32, float16 or bfloat16, of any shape.

    TypeError for other types; ValueError unless block_size is an integer in 1..256.
    """
    block_size = _require_block_size(block_size)
    if not isinstance(x, torch.Tensor) or x.dtype not in _FLOATING:
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"expected x as a tensor of {', '.join(map(str, _FLOATING))}, got {got}")
    rows = _blocks(x.reshape(-1).to(torch.float32), block_size)
    finite = torch.isfinite(rows).all(1, keepdim=True)
    rows = torch.where(finite & (rows.abs() >= _LEAST_NORMAL), rows, 0.0)
    there = rows != 0
    count = there.sum(1, keepdim=True)

    # Zeros behind all others; a stable sort keeps equals in the order of their indices.
    order = torch.where(there, rows, torch.inf).sort(dim=1, stable=True).indices
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(block_size).expand_as(order))
    codes = torch.where(there, 1 + (2 * rank + 1) * 255 // (2 * count.clamp_min(1)), 0)
    codes = torch.where(finite, codes, 1).to(torch.uint8)

    power = (rows.abs().amax(1, keepdim=True).view(torch.int32) & 0x7F800000).view(torch.float32)
    power = torch.where(count > 0, power, 1.0)
    near = rows * (1.0 / power)
    k = count.clamp_min(1).to(torch.float32)
    least = torch.where(there, near, torch.inf).amin(1, keepdim=True)
    largest = torch.where(there, near, -torch.inf).amax(1, keepdim=True)
    mean = torch.where(count > 0, torch.minimum(torch.maximum(_sums(near) / k, least), largest), 0.0)
    apart = torch.where(there, near - mean, 0.0)
    # torch's root of float32 is off now and then.
    scale = (_sums(apart * apart) / k).double().sqrt().float().clamp_max(_BELOW_TWO)
    pair = torch.cat([mean * power, scale * power], dim=1)
    return codes.reshape(-1)[: x.numel()].reshape(x.shape), torch.where(finite, pair, torch.nan)


def decode_profile(
    codes: torch.Tensor,
    mean_scale: torch.Tensor,
    table: torch.Tensor,
    block_size: int = 256,
    *,
    positive: bool = False,
) -> torch.Tensor:
    """float32 of codes' shape from what `encode_profile` gives. table: float32 [256].

    positive: of numbers that are none of them negative; one that is not zero comes back as at least mean/16.
    TypeError and ValueError for tensors of other types and shapes, and for block sizes out of 1..256.
    """
    block_size = _require_block_size(block_size)
    blocks = -(-codes.numel() // block_size)
    wanted = (("codes", codes, torch.uint8, codes.shape), ("mean_scale", mean_scale, torch.float32, (blocks, 2)))
    for name, tensor, dtype, shape in (*wanted, ("table", table, torch.float32, (256,))):
        if tensor.dtype != dtype:
            raise TypeError(f"expected {name} of dtype {dtype}, got {tensor.dtype}")
        if tensor.shape != shape:
            raise ValueError(f"expected {name} of shape {list(shape)}, got {list(tensor.shape)}")
    rows = _blocks(codes.reshape(-1), block_size).to(torch.int64)
    mean, scale = mean_scale[:, :1], mean_scale[:, 1:]
    value = mean + scale * table[rows]
    if positive:
        value = torch.maximum(value, mean * 0.0625)
    value = torch.where(rows > 0, value, 0.0)
    return value.reshape(-1)[: codes.numel()].reshape(codes.shape)


def pool_profile(x: torch.Tensor, mean_scale: torch.Tensor, block_size: int = 256) -> torch.Tensor:
    """(x - mean)/scale of all elements that are not zero, in blocks whose scale is not, in ascending order.

    float32 [x.numel()]; what the other elements leave free at the end is NaN.
    """
    rows = _blocks(x.reshape(-1).to(torch.float32), _require_block_size(block_size))
    mean, scale = mean_scale[:, :1], mean_scale[:, 1:]
    there = (rows.abs() >= _LEAST_NORMAL) & (scale > 0)
    z = torch.where(there, (rows - mean) / scale, torch.nan)
    return z.reshape(-1)[: x.numel()].sort().values


def profile_distance(pooled_values: torch.Tensor, curve: torch.Tensor, start: float, stop: float) -> tuple[float, int]:
    """(the Kolmogorov-Smirnov distance of sorted values, NaN behind all others, from a curve; how many are numbers).

    curve: float32 [cells + 1], a distribution function at equally spaced places from start to stop, straight between
    them and level beyond. With z_i the i-th of n numbers, i from 0: the largest of (i+1)/n - curve(z_i) and
    curve(z_i) - i/n; 0 where there is none.
    """
    cells = curve.numel() - 1
    if cells < 1 or not start < stop:
        raise ValueError(f"expected a curve of two places or more, start below stop, got {cells + 1}, {start}, {stop}")
    z = pooled_values[~pooled_values.isnan()]
    n = z.numel()
    if n == 0:
        return 0.0, 0
    place = ((z - torch.tensor(start)) * torch.tensor(cells / (stop - start))).clamp(0, cells)
    cell = place.to(torch.int64).clamp_max(cells - 1)
    height = curve[cell] + (curve[cell + 1] - curve[cell]) * (place - cell.to(torch.float32))
    step = torch.arange(n + 1).to(torch.float32) / float(n)
    return float(torch.maximum(step[1:] - height, height - step[:-1]).max().clamp_min(0.0)), n


def profile_error(
    x: torch.Tensor,
    codes: torch.Tensor,
    mean_scale: torch.Tensor,
    table: torch.Tensor,
    block_size: int = 256,
    *,
    positive: bool = False,
) -> float:
    """||decoded - x|| / ||x|| of what `encode_profile` made of x; 0 where x is zero, NaN where it is not finite.

    In a block both are divided by its power of two before they are squared and added up; the blocks' sums are added in
    float64.
    """
    block_size = _require_block_size(block_size)
    rows = _blocks(x.reshape(-1).to(torch.float32), block_size)
    back = _blocks(decode_profile(codes, mean_scale, table, block_size, positive=positive).reshape(-1), block_size)
    largest = rows.abs().amax(1, keepdim=True) if x.numel() else rows.new_empty((0, 1))
    power = (largest.view(torch.int32) & 0x7F800000).view(torch.float32)
    power = torch.where(power > 0, power, 1.0)
    near = rows * (1.0 / power)
    apart = back * (1.0 / power) - near
    whole, error = (float((_sums(part * part) * power.double().square()).sum().sqrt()) for part in (near, apart))
    return error / whole if whole else 0.0
