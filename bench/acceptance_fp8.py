"""Tensors of any shape, strides and contents through the casts to 8-bit floating types, for the acceptance run.

What a guard says and gives is compared with the oracle's codes and with the equations of its receipt.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memtrain_cl import fp8_cast_with_guard, ops, reference
from memtrain_cl.formats import FP8_FORMATS

#: Tensors that are tried in the acceptance run.
EXAMPLES = 2000
_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_NUMBERS = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, 1e-39, 2.0**-126, 2.0**-10, 3 * 2.0**-10, 448.0, 464.0, 465.0, 57344.0, 61440.0]),
    st.floats(-600.0, 600.0, width=32),
)


@st.composite
def hostile_tensors(draw: Any) -> torch.Tensor:
    """A tensor of up to four dimensions, any of them empty, stepped, expanded or in another order."""
    sizes = draw(st.lists(st.integers(0, 9), max_size=4))
    steps = [draw(st.integers(1, 3)) for _ in sizes]
    whole = [size * step for size, step in zip(sizes, steps, strict=True)]
    numbers = draw(st.lists(_NUMBERS, min_size=1, max_size=12))
    count = math.prod(whole)
    offset = draw(st.integers(0, 3))
    flat = torch.tensor(numbers, dtype=torch.float32).repeat(-(-(count + offset) // len(numbers)) or 1)
    x = flat[offset : offset + count].to(draw(st.sampled_from(_TYPES))).view(whole)
    x = x[tuple(slice(None, None, step) for step in steps)]
    x = x.permute(draw(st.permutations(range(x.ndim))))
    return x.unsqueeze(0).expand(draw(st.integers(1, 3)), *x.shape) if draw(st.booleans()) else x


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


def run() -> dict[str, Any]:
    """EXAMPLES tensors; the first that is wrong ends it."""
    wrong: list[str] = []

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(x=hostile_tensors(), name=st.sampled_from(list(FP8_FORMATS)), threshold=st.floats(0.0, 1.0))
    def anything(x: torch.Tensor, name: str, threshold: float) -> None:
        if found := judge(x, name, threshold):
            raise ValueError(f"{found}: {x.dtype} {list(x.shape)} {x.stride()} {x.flatten()[:12].tolist()} to {name}")

    try:
        anything()
    except ValueError as error:
        wrong.append(str(error))
    return {"examples": EXAMPLES, "wrong": wrong, "ok": not wrong}
