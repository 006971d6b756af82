"""What the guard of a cast to 8-bit floating numbers must answer, for sweeps of hostile tensors (hostile.py).

What a guard says and gives is compared with the oracle's codes and with the equations of its receipt.
"""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

from memtrain_cl import fp8_cast_with_guard, ops, reference
from memtrain_cl.formats import FP8_FORMATS

#: Numbers about which casts differ.
NUMBERS = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, 1e-39, 2.0**-126, 2.0**-10, 3 * 2.0**-10, 448.0, 464.0, 465.0, 57344.0, 61440.0]),
    st.floats(-600.0, 600.0, width=32),
)


def judge(x: torch.Tensor, name: str, threshold: float) -> str:
    """What is wrong with the guard's answer to x; "" where nothing is."""
    form = FP8_FORMATS[name]
    result = fp8_cast_with_guard(x, name, underflow_fraction_threshold=threshold)
    codes = reference.fp8_cast(x, name)
    finite = bool(torch.isfinite(x).all())
    wide = x.to(torch.float64).abs()
    filled = int((wide != 0).sum())
    fraction = int(((wide != 0) & (codes & 0x7F == 0)).sum()) / filled if filled else 0.0
    most = (float(wide.max()) if x.numel() else 0.0) if finite else math.inf
    refusals = (("non-finite", not finite), ("overflow", most > form.largest), ("underflow", fraction > threshold))
    reason = next((word for word, holds in refusals if holds), "accepted")
    if (result.reason, result.max_abs, result.underflow_fraction) != (reason, most, fraction):
        return f"expected {reason}, {most}, {fraction}, got {result}"
    if result.used_fp8 != (reason == "accepted") or result.tensor.shape != x.shape:
        return f"expected {x.shape}, got {result}"
    if not result.used_fp8:
        same = torch.equal(result.tensor.view(torch.int16), x.to(torch.bfloat16).view(torch.int16))
        return "" if same else "the fallback is not torch's cast"
    if not torch.equal(result.tensor.view(torch.uint8), codes):
        return "codes are not the oracle's"
    back, want = (room.fp8_restore(codes, name, dtype=x.dtype) for room in (ops, reference))
    return "" if torch.equal(back, want) else "numbers are not the oracle's"
