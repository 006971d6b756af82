"""Numbers in 8 bits, a scale a block of consecutive elements, in torch: there, to nearest or stochastically, and back.

A tensor is taken flat, in blocks of `block_size` elements of which the last may be shorter. With everything in float32
and each operation rounded; |x| < 2^-126 counts as 0:

    most = max |x| of the block;   a block of most < 127 * 2^-126 is a zero block: scale 1, every code that of 0
    linear   scale = most / 127,  y = x / scale,  code = y rounded half to even, or floor(y) + (u < y - floor(y));
             clamped to +-127; back: code * scale
    dynamic  scale = most,  y = x / scale,  code = the place in `memtrain_cl.code_maps.dynamic_map` of the number
             nearest to y (turning at the midpoints (map[i] + map[i+1]) / 2, rounded to float32, and where y is one of
             them to the even place), or of its neighbours lo <= y < hi the upper one where u < (y - lo) / (hi - lo);
             back: map[code] * scale
    u = uniform01(seed ^ hash_u32(i)), i the element's flat index (lo ^ hash_u32(hi) of its halves)

positive: a number above 0 that counts, in a block that does, never gets the code of 0 but at least the next one.
A block with an element that is not finite has scale NaN and the codes of 0, and so comes back as NaN.
"""

from __future__ import annotations

from typing import Any

import torch

from memtrain_cl.code_maps import CODES, dynamic_map, dynamic_midpoints, zero_code
from memtrain_cl.reference.codes import hash_index, uniform01

FLOATING = (torch.float32, torch.float16, torch.bfloat16)
_LEAST_NORMAL = 2.0**-126
_LEAST_BLOCK = 127 * 2.0**-126


def _require(block_size: Any, code: Any, seed: Any = None) -> int:
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"expected block_size as an integer >= 1, got {block_size!r}")
    if code not in CODES:
        raise ValueError(f"expected code as one of {', '.join(CODES)}, got {code!r}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 32):
        raise ValueError(f"expected a seed in 0..2^32-1, got {seed!r}")
    return block_size


def _per_element(per_block: torch.Tensor, block_size: int, n: int) -> torch.Tensor:
    """One number a block, for each of the n elements."""
    return per_block[torch.arange(n) // block_size]


def _block_scales(x: torch.Tensor, block_size: int, code: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales, whether the block counts) of x, flat, in which what does not count is 0 already."""
    blocks = -(-x.numel() // block_size)
    padded = torch.zeros(blocks * block_size)
    padded[: x.numel()] = x
    rows = padded.reshape(blocks, block_size)
    most = rows.abs().amax(dim=1)
    finite = torch.isfinite(rows).all(dim=1)
    counts = finite & (most >= _LEAST_BLOCK)
    scales = most / torch.tensor(127.0) if code == "linear" else most
    scales = torch.where(counts, scales, 1.0)
    return torch.where(finite, scales, torch.nan), counts


def _linear_codes(y: torch.Tensor, u: torch.Tensor | None) -> torch.Tensor:
    below = torch.floor(y)
    codes = torch.round(y) if u is None else below + (u < y - below).to(torch.float32)
    return codes.clamp(-127, 127)


def _dynamic_codes(y: torch.Tensor, u: torch.Tensor | None, signed: bool) -> torch.Tensor:
    if u is None:
        middles = torch.from_numpy(dynamic_midpoints(signed).copy())
        places = torch.searchsorted(middles, y)  # how many midpoints lie below y
        tie = y == middles[places.clamp_max(254)]
        return places + (tie & (places % 2 == 1)).to(torch.int64)
    numbers = torch.from_numpy(dynamic_map(signed).copy())
    places = (torch.searchsorted(numbers, y, right=True) - 1).clamp(0, 255)
    lo, hi = numbers[places], numbers[(places + 1).clamp_max(255)]
    inside = (y >= lo) & (places < 255)
    chance = (y - lo) / torch.where(inside, hi - lo, 1.0)
    return places + (inside & (u < chance)).to(torch.int64)


def quantize_blockwise(
    x: torch.Tensor,
    block_size: int,
    *,
    code: str = "linear",
    signed: bool = True,
    positive: bool = False,
    seed: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes of x's shape, scales float32 [blocks]) of x, float32, float16 or bfloat16 of any shape.

    code "linear": int8; "dynamic": uint8, of the signed or the unsigned map (what is below 0 gets the code of 0 there).
    seed None rounds to nearest. ValueError for a block size below 1, an unknown code, a seed out of range; TypeError
    for other dtypes.
    """
    _require(block_size, code, seed)
    if not isinstance(x, torch.Tensor) or x.dtype not in FLOATING:
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"expected x as a tensor of {', '.join(map(str, FLOATING))}, got {got}")
    flat = x.detach().to(torch.float32).reshape(-1)
    flat = torch.where(flat.abs() < _LEAST_NORMAL, 0.0, flat)
    scales, counts = _block_scales(flat, block_size, code)
    n = flat.numel()
    live = _per_element(counts, block_size, n)
    y = torch.where(live, flat, 0.0) / torch.where(live, _per_element(scales, block_size, n), 1.0)
    u = None if seed is None else uniform01(seed ^ hash_index(torch.arange(n)))
    zero = 0
    if code == "linear":
        codes = _linear_codes(y, u)
    else:
        zero = zero_code(signed)
        codes = _dynamic_codes(y, u, signed)
    if positive:
        codes = torch.where(live & (flat > 0), codes.clamp_min(zero + 1), codes)
    return codes.to(torch.int8 if code == "linear" else torch.uint8).reshape(x.shape), scales


def dequantize_blockwise(
    codes: torch.Tensor, scales: torch.Tensor, block_size: int, *, code: str = "linear", signed: bool = True
) -> torch.Tensor:
    """float32 of codes' shape: code * scale, or map[code] * scale, from what `quantize_blockwise` gives."""
    _require(block_size, code)
    stored = torch.int8 if code == "linear" else torch.uint8
    if codes.dtype != stored or scales.dtype != torch.float32:
        raise TypeError(f"expected codes {stored} and scales torch.float32, got {codes.dtype} and {scales.dtype}")
    n = codes.numel()
    blocks = -(-n // block_size)
    if scales.shape != (blocks,):
        raise ValueError(f"expected scales of shape [{blocks}], got {list(scales.shape)}")
    flat = codes.reshape(-1)
    if code == "linear":
        numbers = flat.to(torch.float32)
    else:
        numbers = torch.from_numpy(dynamic_map(signed).copy())[flat.to(torch.int64)]
    return (numbers * _per_element(scales, block_size, n)).reshape(codes.shape)


def quantize_int8_blockwise(flat: torch.Tensor, block_size: int = 2048) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes int8 of its shape, scales float32 [blocks]) of the linear map, half to even."""
    return quantize_blockwise(flat, block_size)


def dequantize_int8_blockwise(codes: torch.Tensor, scales: torch.Tensor, block_size: int = 2048) -> torch.Tensor:
    """float32 of codes' shape, code * scale."""
    return dequantize_blockwise(codes, scales, block_size)
