"""float32 numbers rounded stochastically to bfloat16 and float16, in torch.

    x = (k + f)*q, q the spacing of the type's numbers at x, k whole, 0 <= f < 1 (of the magnitude; the sign is kept)
    rounded: (k + (u < f))*q, u = uniform01(seed ^ hash_index(flat index))

so that numbers of the type stay and the mean is x. A finite x beyond the type's largest number becomes that.
"""

from __future__ import annotations

import torch

from memtrain_cl.reference.codes import hash_index, uniform01

#: The bits after a number's first, and the exponent of the smallest normal number.
_GRIDS = {torch.bfloat16: (7, -126), torch.float16: (10, -14)}


def round_to(x: torch.Tensor, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """float32 x, stochastically rounded to bfloat16 or float16 (see above); seed: uint32, the stream's own."""
    bits, least = _GRIDS[dtype]
    magnitude = x.double().abs()
    exponent = (torch.frexp(magnitude).exponent - 1).clamp_min(least)
    spacing = torch.ldexp(torch.ones_like(magnitude), exponent - bits)
    y = magnitude / spacing
    whole = torch.floor(y)
    u = uniform01(seed ^ hash_index(torch.arange(x.numel()).reshape(x.shape)))
    rounded = ((whole + (u < y - whole)) * spacing).clamp_max(torch.finfo(dtype).max)
    return torch.copysign(torch.where(torch.isfinite(x), rounded, magnitude), x).to(dtype)
