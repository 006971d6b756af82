"""Profiles of blocks against the torch reference, byte for byte; the cases are `memtrain_cl.cases_profile`'s."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from memtrain_cl import ops, reference
from memtrain_cl.case import Case
from memtrain_cl.comparison import Comparison, compare_exact, generator


def numbers(case: Case, chance: torch.Generator, *, finite: bool) -> torch.Tensor:
    """[n] of many magnitudes, with zeros and equal numbers; blocks of hard ones come in turn, as far as there are."""
    n, size = case.shape["n"], case.shape["block_size"]
    x = torch.randn(n, generator=chance) * 10.0 ** (-4.0 * torch.rand(n, generator=chance))
    kind = torch.rand(n, generator=chance)
    x = torch.where(kind < 0.1, 0.0, torch.where(kind < 0.2, 0.25, x))
    if case.options.get("positive"):
        x = x.abs()
    hard: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda b: b,
        torch.zeros_like,
        lambda b: torch.full_like(b, 0.1),  # alike
        lambda b: b * 1e-37,  # subnormal, many of them
        lambda b: b * 1e37,  # squares that overflow
        lambda b: torch.where(b > 0, b * 1e30, b * 1e-30),  # far apart
        lambda b: torch.where(torch.arange(len(b)) == len(b) // 2, 1e6, b * 1e-6),  # all but one in one bucket
        *(() if finite else (lambda b: torch.where(torch.arange(len(b)) == len(b) // 2, math.nan, b),)),
        *(() if finite else (lambda b: torch.where(torch.arange(len(b)) == len(b) - 1, -math.inf, b),)),
    )
    blocks = [hard[i % len(hard)](block) for i, block in enumerate(x.split(size))]
    return torch.cat(blocks).to(getattr(torch, case.options.get("element", "float32")))


def _table(chance: torch.Generator) -> torch.Tensor:
    return torch.randn(256, generator=chance).sort().values


def _same(got: torch.Tensor, want: torch.Tensor) -> Comparison:
    """Bytes, NaN aside, whose bits differ between processors."""
    nan = torch.tensor(math.nan)
    return compare_exact(torch.where(got.isnan(), nan, got), torch.where(want.isnan(), nan, want))


def check_encode(case: Case) -> Comparison:
    """encode_profile: every byte of codes, means and scales."""
    x = numbers(case, generator(case), finite=False)
    got, want = (room.encode_profile(x, case.shape["block_size"]) for room in (ops, reference))
    return compare_exact(got[0], want[0]) + _same(got[1], want[1])


def check_decode(case: Case) -> Comparison:
    """decode_profile: every byte of the numbers."""
    chance = generator(case)
    size, positive = case.shape["block_size"], case.options.get("positive", False)
    coded = reference.encode_profile(numbers(case, chance, finite=False), size)
    table = _table(chance)
    return _same(*(room.decode_profile(*coded, table, size, positive=positive) for room in (ops, reference)))


def check_pool(case: Case) -> Comparison:
    """pool_profile: every byte of the sorted numbers."""
    x, size = numbers(case, generator(case), finite=False), case.shape["block_size"]
    _, mean_scale = reference.encode_profile(x, size)
    return _same(*(room.pool_profile(x, mean_scale, size) for room in (ops, reference)))


def _of_floats(got: float, want: float) -> Comparison:
    return compare_exact(*(torch.tensor([number], dtype=torch.float64) for number in (got, want)))


def check_error(case: Case) -> Comparison:
    """profile_error: the number."""
    chance = generator(case)
    size, positive = case.shape["block_size"], case.options.get("positive", False)
    x = numbers(case, chance, finite=True)
    coded = reference.encode_profile(x, size)
    table = _table(chance)
    return _of_floats(*(room.profile_error(x, *coded, table, size, positive=positive) for room in (ops, reference)))


def check_distance(case: Case) -> Comparison:
    """profile_distance: both numbers."""
    chance = generator(case)
    n = case.shape["n"]
    values = torch.randn(n, generator=chance).sort().values
    values[n - n // 5 :] = math.nan
    curve = torch.rand(65, generator=chance).sort().values
    got, want = (room.profile_distance(values, curve, -2.0, 2.5) for room in (ops, reference))
    return _of_floats(got[0], want[0]) + _of_floats(got[1], want[1])


CHECKS: dict[str, Callable[[Case], Comparison]] = {
    "encode_profile": check_encode,
    "decode_profile": check_decode,
    "pool_profile": check_pool,
    "profile_error": check_error,
    "profile_distance": check_distance,
}
