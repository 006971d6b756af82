"""How `memtrain-cl verify` compares a result with the reference's, and the random numbers of its cases."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch

from memtrain_cl.case import Case


@dataclass(frozen=True)
class Comparison:
    """How far a result is from the reference: the largest error (infinite where a number meets a NaN), and how many
    elements are further off than the case allows.
    """

    max_error: float = 0.0
    mismatches: int = 0

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison(max(self.max_error, other.max_error), self.mismatches + other.mismatches)


def compare_exact(got: torch.Tensor, want: torch.Tensor) -> Comparison:
    """Bytes against bytes; the error is the absolute difference of the values."""
    if got.dtype != want.dtype or got.shape != want.shape:
        raise ValueError(f"expected {want.dtype} {list(want.shape)}, got {got.dtype} {list(got.shape)}")
    bits = torch.int32 if want.dtype == torch.float32 else want.dtype
    wrong = got.view(bits) != want.view(bits)
    error = (got.to(torch.float64) - want.to(torch.float64)).abs()[wrong]
    largest = float(error.nan_to_num(math.inf, math.inf).max()) if error.numel() else 0.0
    return Comparison(largest, int(wrong.sum()))


def compare_product(got: torch.Tensor, left: torch.Tensor, right: torch.Tensor, tolerance: float) -> Comparison:
    """float32 left @ right against float64; the error of an element is relative to the sum of its terms' magnitudes."""
    left, right = left.to(torch.float64), right.to(torch.float64)
    if got.dtype != torch.float32 or got.shape != (left.shape[0], right.shape[1]):
        raise ValueError(f"expected float32 {[left.shape[0], right.shape[1]]}, got {got.dtype} {list(got.shape)}")
    magnitude = (left.abs() @ right.abs()).clamp_min(torch.finfo(torch.float64).tiny)
    error = ((got.to(torch.float64) - left @ right).abs() / magnitude).nan_to_num(math.inf, math.inf)
    return Comparison(float(error.max()) if error.numel() else 0.0, int((error > tolerance).sum()))


def generator(case: Case) -> torch.Generator:
    """Random numbers that depend on the case alone."""
    return torch.Generator().manual_seed(zlib.crc32(case.name.encode()))


def compare_close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> Comparison:
    """The error of an element is relative to itself and the root of the mean square of all."""
    if got.shape != want.shape:
        raise ValueError(f"expected {list(want.shape)}, got {list(got.shape)}")
    got, want = got.to(torch.float64), want.to(torch.float64)
    scale = want.abs() + (want * want).mean().sqrt() + torch.finfo(torch.float64).tiny
    error = ((got - want).abs() / scale).nan_to_num(math.inf, math.inf)
    return Comparison(float(error.max()) if error.numel() else 0.0, int((error > tolerance).sum()))
