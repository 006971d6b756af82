"""The counter code and its random numbers, element by element, in torch.

code = (t + 1)*(2C - 1) + (c + C - 1)            t in {-1, 0, 1}, c in {-(C-1) .. C-1}
hash_u32(x): x ^= x>>16; x *= 0x7feb352d; x ^= x>>15; x *= 0x846ca68b; x ^= x>>16      (32-bit, wrapping)
uniform01(x) = (hash_u32(x) & 0xffffff) / 2^24
hash_index(i) = hash_u32(lo ^ hash_u32(hi)) of a 64-bit index i = hi*2^32 + lo, so hash_u32(i) below 2^32
"""

from __future__ import annotations

import torch

from memtrain_cl.formats import C_DEFAULT, check_c, code_count

_MASK = 0xFFFFFFFF


def encode_state(t: torch.Tensor, c: torch.Tensor, C: int = C_DEFAULT) -> torch.Tensor:
    """Codes, uint8, of ternary weights t and residual counters c (integer tensors of one shape).

    ValueError where t or c leaves its range, or C does not fit uint8 codes.
    """
    C = check_c(C, packed=False)
    if t.shape != c.shape:
        raise ValueError(f"expected t and c of one shape, got {tuple(t.shape)} and {tuple(c.shape)}")
    if t.numel() and (int(t.abs().max()) > 1 or int(c.abs().max()) > C - 1):
        highest = f"|t| to {int(t.abs().max())}, |c| to {int(c.abs().max())}"
        raise ValueError(f"expected t in -1..1 and c in {1 - C}..{C - 1}, got {highest}")
    return ((t.to(torch.int16) + 1) * (2 * C - 1) + c.to(torch.int16) + (C - 1)).to(torch.uint8)


def decode_state(state: torch.Tensor, C: int = C_DEFAULT) -> tuple[torch.Tensor, torch.Tensor]:
    """(t, c), int16, of uint8 codes; ValueError where a code is beyond 3(2C-1)-1."""
    C = check_c(C, packed=False)
    if state.numel() and int(state.max()) >= code_count(C):
        raise ValueError(f"expected codes below {code_count(C)} for C={C}, got {int(state.max())}")
    code = state.to(torch.int16)
    upper = code // (2 * C - 1)
    return upper - 1, code - upper * (2 * C - 1) - (C - 1)


def hash_u32(x: torch.Tensor) -> torch.Tensor:
    """The 32-bit hash of integers (int64 tensor, taken modulo 2^32); int64 in 0..2^32-1."""
    x = x.to(torch.int64) & _MASK
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def uniform01(x: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in [0, 1), float32, multiples of 2^-24, from integers by `hash_u32`."""
    return (hash_u32(x) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def hash_index(index: torch.Tensor) -> torch.Tensor:
    """The hash of elements' 64-bit indices (int64 tensor): of the lower half, salted by that of the upper."""
    return hash_u32((index & _MASK) ^ hash_u32(index >> 32))


def stochastic_round(x: torch.Tensor, seed: int | None = None) -> torch.Tensor:
    """floor(x) + (u < x - floor(x)), of mean x. u hashes (seed, flat index); seed None draws one from torch."""
    if seed is None:
        seed = int(torch.randint(0, 2**32, ()))
    index = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    floor = torch.floor(x)
    return floor + (uniform01(seed ^ hash_u32(index)) < x - floor).to(x.dtype)


def pulse_of(g: torch.Tensor, seed: int, index: torch.Tensor) -> torch.Tensor:
    """The ternary estimate of float32 rows g [..., n] whose elements have these indices:

    a = max |g| of the row;  sign(g)*a where uniform01(seed ^ hash_index(index)) < |g|/a, else 0 (also where a = 0)
    """
    peak = g.abs().amax(dim=-1, keepdim=True)
    hit = uniform01(seed ^ hash_index(index)) < g.abs() / peak
    return torch.where(hit, torch.sign(g) * peak, torch.zeros((), device=g.device))


def ternary_gradient_unbiased(g: torch.Tensor, seed: int | None = None) -> torch.Tensor:
    """An estimate of g with mean g that takes three values a row (of the last dimension), in g's shape and dtype.

    a = max |g| of the row; each element becomes sign(g)*a with probability |g|/a, else 0. A row of zeros stays so; one
    that is not finite becomes NaN. The chance hashes (seed, flat index); seed None draws one from torch. With seed =
    `formats.stream_seed(step's seed, STREAM_PULSE)` it is the pulse that `counter_update_` makes of a whole gradient.
    TypeError unless g is a tensor of floats.
    """
    if not isinstance(g, torch.Tensor) or not g.is_floating_point():
        raise TypeError(f"expected g as a tensor of floats, got {g.dtype if isinstance(g, torch.Tensor) else type(g)}")
    if seed is None:
        seed = int(torch.randint(0, 2**32, (), device="cpu"))
    if g.numel() == 0:
        return g.clone()
    rows = (g if g.ndim else g[None]).detach().to(torch.float32)
    index = torch.arange(g.numel(), device=g.device).reshape(rows.shape)
    finite = torch.isfinite(rows).all(dim=-1, keepdim=True)
    pulse = torch.where(finite, pulse_of(rows, seed, index), torch.full((), float("nan"), device=g.device))
    return pulse.reshape(g.shape).to(g.dtype)


def weight_to_counter_state(
    weight: torch.Tensor, C: int, threshold_ratio: float = 0.7
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(scale, t, c) of a dense weight [out, in]: float32 [out, 1], int16 [out, in], int16 [out, in]. Per row:

    kept = |w| > threshold_ratio * mean|w|;  t = sign(w) where kept, else 0
    scale = max(mean of |w| over kept, 1e-5);  c = clamp(round((w/scale - t)*C), -(C-1), C-1)
    """
    C = check_c(C, packed=False)
    if weight.ndim != 2:
        raise ValueError(f"expected a weight [out, in], got shape {tuple(weight.shape)}")
    w = weight.detach().to(torch.float32)
    magnitude = w.abs()
    kept = magnitude > threshold_ratio * magnitude.mean(dim=1, keepdim=True)
    t = torch.sign(w) * kept
    total = (magnitude * kept).sum(dim=1, keepdim=True)
    scale = (total / kept.sum(dim=1, keepdim=True).clamp_min(1)).clamp_min(1e-5)
    c = torch.round((w / scale - t) * C).clamp(-(C - 1), C - 1)
    return scale, t.to(torch.int16), c.to(torch.int16)
