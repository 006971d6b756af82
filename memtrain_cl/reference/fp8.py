"""Casts to torch's 8-bit floating types and back, in torch, without its types.

A code is a sign, an exponent e and a mantissa m of M bits, with a bias of b (see `memtrain_cl.formats.Fp8Format`):

    value = (-1)^sign * 2^(e-b) * (1 + m/2^M), or (-1)^sign * 2^(1-b) * m/2^M where e is 0

All of them, and all midpoints between neighbours, are exact in float64, where numbers are rounded here.
"""

from __future__ import annotations

from typing import Any

import torch

from memtrain_cl.formats import FP8_NAN, Fp8Format, check_fp8

FLOATING = (torch.float32, torch.float16, torch.bfloat16)


def _values(form: Fp8Format) -> torch.Tensor:
    """float64 values of the codes from 0 to the first one beyond the largest number, read as if it was a number."""
    codes = torch.arange(form.largest_code + 2)
    exponent = codes >> form.mantissa
    mantissa = (codes & (1 << form.mantissa) - 1) * 2.0**-form.mantissa
    normal = 2.0 ** (exponent - form.bias).to(torch.float64) * (1.0 + mantissa)
    return torch.where(exponent == 0, 2.0 ** (1 - form.bias) * mantissa.to(torch.float64), normal)


def _saturates(form: Fp8Format) -> bool:
    own = getattr(torch, form.name, None)
    if own is None:
        return form.name == "float8_e4m3fn"
    return float(torch.tensor([1e30]).to(own).to(torch.float32)) == form.largest


def fp8_cast(x: torch.Tensor, fp8_dtype: Any = "float8_e4m3fn", *, saturate: bool | None = None) -> torch.Tensor:
    """The codes of x, uint8 of its shape: to nearest, ties to the even code.

    saturate: whether magnitudes beyond the largest number, infinities too, become that, or the NaN of e4m3fn and the
    infinity of e5m2; None does as torch's own cast.
    """
    form = check_fp8(fp8_dtype)
    if not isinstance(x, torch.Tensor) or x.dtype not in FLOATING:
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"expected x as a tensor of {', '.join(map(str, FLOATING))}, got {got}")
    values = _values(form)
    midpoints = (values[:-1] + values[1:]) / 2
    magnitude = x.to(torch.float64).abs().contiguous()
    code = torch.searchsorted(midpoints, magnitude)
    # A midpoint itself goes to the code below it so far.
    tie = magnitude == midpoints[code.clamp_max(len(midpoints) - 1)]
    code += tie & (code % 2 == 1)
    if _saturates(form) if saturate is None else saturate:
        code.clamp_max_(form.largest_code)
    code = torch.where(x.isnan(), FP8_NAN, code)
    return (code + 128 * torch.signbit(x)).to(torch.uint8)


def fp8_cast_counted(
    x: torch.Tensor, fp8_dtype: Any = "float8_e4m3fn", *, saturate: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, counts int64 [4]): the largest bits of |x| as float32, how many numbers are not finite, how many are not
    zero, and how many of those have a code of zero.
    """
    codes = fp8_cast(x, fp8_dtype, saturate=saturate)
    bits = x.to(torch.float32).contiguous().view(torch.int32) & 0x7FFFFFFF
    filled = bits != 0
    highest = int(bits.max()) if bits.numel() else 0
    lost = filled & (codes & 0x7F == 0)
    return codes, torch.tensor([highest, int((bits >= 0x7F800000).sum()), int(filled.sum()), int(lost.sum())])


def fp8_restore(
    codes: torch.Tensor, fp8_dtype: Any = "float8_e4m3fn", *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The numbers of uint8 codes in float32, float16 or bfloat16."""
    form = check_fp8(fp8_dtype)
    table = torch.full((128,), torch.nan, dtype=torch.float64)
    table[: form.largest_code + 1] = _values(form)[:-1]
    if form.beyond_code != FP8_NAN:
        table[form.beyond_code] = torch.inf
    magnitude = table[(codes & 0x7F).to(torch.int64)]
    return torch.where(codes > 0x7F, -magnitude, magnitude).to(dtype)
