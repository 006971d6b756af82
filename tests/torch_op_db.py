"""torch's list of operations with samples, imported without the warnings that some NumPys give for how it is made."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_utils import SEED, set_rng_seed
    from torch.testing._internal.opinfo.core import OpInfo

__all__ = ["OpInfo", "op_db", "sample_inputs"]


def sample_inputs(op: Any, dtype: torch.dtype, *, requires_grad: bool) -> Iterator[Any]:
    """The samples that `op.sample_inputs` makes on the CPU, without its search for one of torch's own tests among all
    callers: that takes a quarter of a second a call where pytest is one of them, ten times what an op's samples do.
    """
    samples = iter(op.sample_inputs_func(op, "cpu", dtype, requires_grad))
    while True:
        set_rng_seed(SEED)
        try:
            yield next(samples)
        except StopIteration:
            return
