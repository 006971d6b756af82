"""The ternary weights of counter codes as int8, in torch."""

from __future__ import annotations

import torch

from memtrain_cl.reference.codes import decode_state
from memtrain_cl.reference.counter import unpack_codes


def decode_ternary(
    state: torch.Tensor, in_features: int, *, C: int, packed: bool, transposed: bool = False
) -> torch.Tensor:
    """t int8 [out, in], or [in, out] where `transposed`; state uint8 [out, in] or packed [out, in/4*3]."""
    t, _ = decode_state(unpack_codes(state, in_features) if packed else state, C)
    t = t.to(torch.int8)
    return t.t().contiguous() if transposed else t
