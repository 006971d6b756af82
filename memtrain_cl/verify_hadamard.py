"""Rotations and rotated rows against the torch reference, byte for byte; cases: `memtrain_cl.cases_hadamard`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from memtrain_cl import ops, reference
from memtrain_cl.case import Case
from memtrain_cl.comparison import Comparison, compare_exact, generator


def numbers(case: Case, chance: torch.Generator) -> torch.Tensor:
    """[rows, columns] of magnitudes over some decades; from four rows on, some of them are hard ones."""
    x = torch.randn(case.shape["rows"], case.shape["columns"], generator=chance)
    x = x * 10.0 ** (-4.0 * torch.rand(x.shape, generator=chance))
    if len(x) >= 4:
        x[0] = 0.0
        x[1] *= 1e-38  # subnormal, many of them
        x[2] *= 1e-30
        if case.op == "encode_rotated":
            x[3, -1] = math.nan
    return x.to(getattr(torch, case.options.get("element", "float32")))


def _same(got: torch.Tensor, want: torch.Tensor) -> Comparison:
    """Bytes, NaN aside, whose bits differ between processors."""
    nan = torch.tensor(math.nan)
    return compare_exact(torch.where(got.isnan(), nan, got), torch.where(want.isnan(), nan, want))


def check_rotate(case: Case) -> Comparison:
    """rotate: every byte."""
    x = numbers(case, generator(case))
    return compare_exact(*(room.rotate(x, case.options["rot"]) for room in (ops, reference)))


def check_encode(case: Case) -> Comparison:
    """encode_rotated: every byte of codes and scales."""
    x = numbers(case, generator(case))
    got, want = (room.encode_rotated(x, case.options["rot"]) for room in (ops, reference))
    return compare_exact(got[0], want[0]) + _same(got[1], want[1])


def check_decode(case: Case) -> Comparison:
    """decode_rotated: every byte."""
    chance = generator(case)
    rows, columns = case.shape["rows"], case.shape["columns"]
    codes = torch.randint(-127, 128, (rows, columns), generator=chance, dtype=torch.int8)
    scale = 10.0 ** (-4.0 * torch.rand(rows, generator=chance))
    return compare_exact(*(room.decode_rotated(codes, scale, case.options["rot"]) for room in (ops, reference)))


CHECKS: dict[str, Callable[[Case], Comparison]] = {
    "rotate": check_rotate,
    "encode_rotated": check_encode,
    "decode_rotated": check_decode,
}
