"""A cast to 8 bits that looks before it leaps: `fp8_cast_with_guard`.

The types have no scale of their own. What lies beyond their largest number is lost, and so is what rounds to zero; the
guard measures both in the pass that casts, and gives the tensor in a wider type where too much would be lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from memtrain_cl.formats import check_fp8
from memtrain_cl.homes import operand_of
from memtrain_cl.ops.fp8 import fp8_cast_counted
from memtrain_cl.ops.stochastic import FLOATING_DTYPES


@dataclass(frozen=True, eq=False)
class Fp8CastResult:
    """A tensor after `fp8_cast_with_guard`, and the receipt.

    tensor: the values, where the input is and of its shape, of the 8-bit type or of the fallback's. The 8-bit numbers
    are uint8 codes, torch's own bits, on "opencl" and where this torch lacks the type; `memtrain_cl.fp8_restore` reads
    them.   used_fp8: whether they are 8-bit numbers.   reason: "accepted", "non-finite", "overflow" or "underflow".
    max_abs: the largest magnitude; inf where a number is not finite.   underflow_fraction: of the numbers that are not
    zero, the share that the 8-bit type takes for zero (of the cast, whether it was used or not).
    """

    tensor: torch.Tensor
    used_fp8: bool
    reason: str
    max_abs: float
    underflow_fraction: float


def _require_options(fallback_dtype: Any, threshold: Any) -> tuple[torch.dtype, float]:
    dtype = torch.bfloat16 if fallback_dtype is None else fallback_dtype
    if dtype not in FLOATING_DTYPES:
        raise TypeError(f"expected fallback_dtype as {' or '.join(map(str, FLOATING_DTYPES))}, got {dtype!r}")
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0.0 <= threshold <= 1.0:
        raise ValueError(f"expected underflow_fraction_threshold in 0..1, got {threshold!r}")
    return dtype, float(threshold)


def fp8_cast_with_guard(
    tensor: torch.Tensor,
    fp8_dtype: Any = "float8_e4m3fn",
    fallback_dtype: torch.dtype | None = None,
    underflow_fraction_threshold: float = 0.5,
) -> Fp8CastResult:
    """`tensor` cast to an 8-bit floating type, or to `fallback_dtype` (bfloat16) where the cast would lose too much.

    In this order: a number that is not finite is refused ("non-finite"); a magnitude above the type's largest number,
    448 for e4m3fn and 57344 for e5m2, is ("overflow"); so is a share of the numbers that are not zero above
    underflow_fraction_threshold that would become zero ("underflow"); all else is "accepted", an empty tensor too.

    tensor: float32, float16 or bfloat16 of any shape and strides, on the host, on "opencl" or on CUDA; TypeError for
    others. The fallback is torch's own cast, so numbers beyond its largest become infinite, and where it is the
    tensor's own dtype the result is the tensor itself. fp8_dtype: "float8_e4m3fn" or "float8_e5m2", or torch's type of
    that name. One pass casts and measures, by whole numbers, so that every device gives the same receipt. The receipt
    is the host's, which waits for it. No gradient passes through.
    """
    form = check_fp8(fp8_dtype)
    fallback, threshold = _require_options(fallback_dtype, underflow_fraction_threshold)
    codes, counts = fp8_cast_counted(tensor, form.name)
    highest, wrong, filled, lost = counts.tolist()
    max_abs = math.inf if wrong else float(np.uint32(highest).view(np.float32))
    fraction = lost / filled if filled else 0.0
    if wrong:
        reason = "non-finite"
    elif max_abs > form.largest:
        reason = "overflow"
    elif fraction > threshold:
        reason = "underflow"
    else:
        own = getattr(torch, form.name, None)
        held = codes if own is None or operand_of(codes) is not None else codes.view(own)
        return Fp8CastResult(held, True, "accepted", max_abs, fraction)
    return Fp8CastResult(tensor.detach().to(fallback), False, reason, max_abs, fraction)
