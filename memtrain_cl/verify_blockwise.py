"""Numbers in 8 bits by blocks against the torch reference, byte for byte; cases: `memtrain_cl.cases_blockwise`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from memtrain_cl import ops, reference
from memtrain_cl.case import Case
from memtrain_cl.comparison import Comparison, compare_exact, generator


def numbers(case: Case, chance: torch.Generator, *, finite: bool = False) -> torch.Tensor:
    """[n] of magnitudes over many decades within each block; from four blocks on, some of them are hard ones."""
    n, size = case.shape["n"], case.shape["block_size"]
    x = torch.randn(n, generator=chance) * 10.0 ** (-7.0 * torch.rand(n, generator=chance))
    if n >= 4 * size:
        x[:size] = 0.0
        x[size : 2 * size] *= 1e-37  # zero blocks, all of them or nearly
        x[2 * size : 3 * size : 2] *= 1e-36
        x[3 * size] = 3e38
        if n > 5 * size and not finite:
            x[4 * size] = math.nan
            x[6 * size - 1 : 6 * size] = math.inf
    if case.options.get("unsigned"):
        x = x.abs()
    return x.to(getattr(torch, case.options.get("element", "float32")))


def _code(case: Case) -> dict[str, object]:
    dynamic = bool(case.options.get("dynamic"))
    return {"code": "dynamic" if dynamic else "linear", "signed": not case.options.get("unsigned")}


def check_quantize(case: Case) -> Comparison:
    """quantize_blockwise: every byte of codes and scales."""
    chance = generator(case)
    x = numbers(case, chance)
    seed = int(torch.randint(0, 1 << 32, (), generator=chance)) if case.options.get("stochastic") else None
    positive = bool(case.options.get("positive"))
    got, want = (
        room.quantize_blockwise(x, case.shape["block_size"], positive=positive, seed=seed, **_code(case))
        for room in (ops, reference)
    )
    return sum((compare_exact(a, b) for a, b in zip(got, want, strict=True)), Comparison())


def check_dequantize(case: Case) -> Comparison:
    """dequantize_blockwise: every byte of the numbers, of every code."""
    chance = generator(case)
    n, size = case.shape["n"], case.shape["block_size"]
    codes = torch.arange(n).to(torch.uint8 if case.options.get("dynamic") else torch.int8)
    scales = 10.0 ** (-4.0 * torch.rand(-(-n // size), generator=chance))
    got, want = (room.dequantize_blockwise(codes, scales, size, **_code(case)) for room in (ops, reference))
    return compare_exact(got, want)


CHECKS: dict[str, Callable[[Case], Comparison]] = {
    "quantize_blockwise": check_quantize,
    "dequantize_blockwise": check_dequantize,
}
