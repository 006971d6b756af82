"""A layer's ternary weights beside its codes, ready for products, in torch."""

from __future__ import annotations

import torch

from memtrain_cl.reference.codes import decode_state
from memtrain_cl.reference.counter import unpack_codes


def refresh_cache_(cache: torch.Tensor, state: torch.Tensor, *, C: int, packed: bool) -> None:
    """Write t of every code into cache int8 or float16 [out, in]; state uint8 [out, in] or packed [out, in/4*3]."""
    codes = unpack_codes(state, cache.shape[1]) if packed else state
    cache.copy_(decode_state(codes, C)[0])
