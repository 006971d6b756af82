"""Tensors as nobody would write them, drawn by hypothesis: what sweeps of public functions start from."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st

FLOATING = (torch.float32, torch.float16, torch.bfloat16)
#: Types that most functions refuse.
WRONG = (torch.float64, torch.int32, torch.bool)
#: What codecs and quotients stumble over: zeros, subnormals, the least normal number, blocks about to count as zero.
EDGES = (0.0, -0.0, 1e-45, 1e-39, 2.0**-126, -(2.0**-126), 127 * 2.0**-126, 126 * 2.0**-126, 6e-35, 0.5, 1.0, -1.0)
LARGE = (65504.0, 1e19, 2.0**63, 1e30, 3.4e38, -3.4e38)
NOT_FINITE = (math.nan, math.inf, -math.inf)
NUMBERS = st.one_of(
    st.floats(-4.0, 4.0, width=32), st.floats(width=32), st.sampled_from(EDGES + LARGE), st.sampled_from(NOT_FINITE)
)


@st.composite
def tensors(draw: Any, numbers: st.SearchStrategy[float] = NUMBERS, dtypes: tuple[Any, ...] = FLOATING) -> torch.Tensor:
    """A tensor of up to four dimensions, any of them empty, stepped, expanded or in another order, with an offset."""
    sizes = draw(st.lists(st.integers(0, 9), max_size=4))
    steps = [draw(st.integers(1, 3)) for _ in sizes]
    whole = [size * step for size, step in zip(sizes, steps, strict=True)]
    some = draw(st.lists(numbers, min_size=1, max_size=12))
    count = math.prod(whole)
    offset = draw(st.integers(0, 3))
    flat = torch.tensor(some, dtype=torch.float32).repeat(-(-(count + offset) // len(some)) or 1)
    x = flat[offset : offset + count].to(draw(st.sampled_from(dtypes))).view(whole)
    x = x[tuple(slice(None, None, step) for step in steps)]
    x = x.permute(draw(st.permutations(range(x.ndim))))
    return x.unsqueeze(0).expand(draw(st.integers(1, 3)), *x.shape) if draw(st.booleans()) else x
