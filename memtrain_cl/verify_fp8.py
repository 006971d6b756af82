"""Casts to 8-bit floating types against the torch reference, byte for byte; the cases are `memtrain_cl.cases_fp8`'s."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from memtrain_cl import ops, reference
from memtrain_cl.case import Case
from memtrain_cl.comparison import Comparison, compare_exact, generator

#: What stands among other numbers where there is room: none, zeros, ties, subnormals of both kinds, and neighbours of
#: what is too large.
_SMALL = (0.0, -0.0, 1e-39, 2.0**-10, 3 * 2.0**-10, 2.0**-17)
_HARD = (math.nan, -math.inf, *_SMALL, 464.0, -464.01, 449.0, 61439.0, 61440.0)


def numbers(case: Case) -> torch.Tensor:
    """[n] of magnitudes from 2^-20 to 2^18, hard ones among them."""
    chance, n = generator(case), case.shape["n"]
    x = torch.randn(n, generator=chance) * 2.0 ** (38.0 * torch.rand(n, generator=chance) - 20.0)
    if n >= 2 * len(_HARD):
        x[torch.randperm(n, generator=chance)[: len(_HARD)]] = torch.tensor(_HARD)
    return x.to(getattr(torch, case.options["element"]))


def check_cast(case: Case) -> Comparison:
    """fp8_cast: every code."""
    saturate = not case.options.get("unbounded", False)
    x = numbers(case)
    return compare_exact(*(room.fp8_cast(x, case.options["form"], saturate=saturate) for room in (ops, reference)))


def check_counted(case: Case) -> Comparison:
    """fp8_cast_counted: every code and every count."""
    x = numbers(case)
    got, want = (room.fp8_cast_counted(x, case.options["form"], saturate=True) for room in (ops, reference))
    return sum((compare_exact(one, other) for one, other in zip(got, want, strict=True)), Comparison())


def check_restore(case: Case) -> Comparison:
    """fp8_restore: every byte of the numbers; a NaN is any NaN."""
    n = case.shape["n"]
    codes = ((torch.arange(n) * 37 + int(torch.randint(0, 256, (), generator=generator(case)))) % 256).to(torch.uint8)
    dtype = getattr(torch, case.options["element"])
    got, want = (room.fp8_restore(codes, case.options["form"], dtype=dtype) for room in (ops, reference))
    seven = torch.tensor(7.0, dtype=dtype)
    return compare_exact(torch.where(got.isnan(), seven, got), torch.where(want.isnan(), seven, want))


CHECKS: dict[str, Callable[[Case], Comparison]] = {
    "fp8_cast": check_cast,
    "fp8_cast_counted": check_counted,
    "fp8_restore": check_restore,
}
