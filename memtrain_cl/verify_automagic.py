"""Automagic's kernels against the torch reference, byte for byte; cases: `memtrain_cl.cases_automagic`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from memtrain_cl import ops, reference
from memtrain_cl.automagic_rule import AutomagicStep, AutomagicTensor
from memtrain_cl.case import Case
from memtrain_cl.comparison import Comparison, compare_exact, generator


def _dtypes(case: Case) -> tuple[torch.dtype, torch.dtype]:
    """Of the weights and of the gradients."""
    element = case.options.get("element", "float32")
    return getattr(torch, element), getattr(torch, case.options.get("grad", element))


def _gradient(shape: tuple[int, ...], dtype: torch.dtype, chance: torch.Generator) -> torch.Tensor:
    """Of many magnitudes, some of them hard ones from sixteen elements on."""
    grad = torch.randn(shape, generator=chance) * 10.0 ** (-6.0 * torch.rand(shape, generator=chance))
    flat = grad.view(-1)
    if len(flat) >= 16:
        hard = (math.nan, -math.inf, 3e38, 1e-30, -1e-42, 0.0, -0.0)
        places = torch.randperm(len(flat), generator=chance)[: len(hard)]
        flat[places] = torch.tensor(hard)
    return grad.to(dtype)


def check_step(case: Case) -> Comparison:
    """automagic_step_: every byte of what three steps change, with rings about to be full."""
    chance = generator(case)
    rows, columns, history = case.shape["rows"], case.shape["columns"], case.options["history"]
    shape = (rows, columns) if rows else (columns,)
    n = max(rows, 1) * columns
    weights, gradients = _dtypes(case)
    param = torch.randn(shape, generator=chance).to(weights)
    # Alike, in turn, or any: of each some.
    kinds = torch.randint(0, 3, (n,), generator=chance)
    start = torch.rand(n, generator=chance) < 0.5
    turns = (torch.arange(history) % 2 == 0)[:, None].expand(history, n)
    ring = torch.where(kinds == 0, start, torch.where(kinds == 1, start ^ turns, torch.rand(history, n) < 0.5))
    signs = reference.automagic.pack_signs(ring)
    if rows:
        held, scale = reference.encode_rotated(torch.randn(shape, generator=chance).abs() * 1e-2, 1)
    else:
        held, scale = torch.rand(shape, generator=chance) * 1e-4, None
    steps = [_gradient(shape, gradients, chance) for _ in range(3)]
    seed = int(torch.randint(0, 1 << 32, (), generator=chance))
    ends = []
    for room in (ops, reference):
        lr, tally, skipped = torch.tensor([0.01]), torch.full((3, 2), 5.0), torch.tensor([2], dtype=torch.int32)
        parts = [None if part is None else part.clone() for part in (param, held, scale, signs)]
        end: list[torch.Tensor] = [lr, skipped]
        for number, grad in enumerate(steps):
            rule = AutomagicStep(
                weight_decay=0.1, step=number + 5, history=history, entered=history - 2 + number, clip=0.7
            )
            own = AutomagicTensor(parts[0], grad, parts[1], parts[2], parts[3], skipped, rule, place=1, seed=seed)  # type: ignore[arg-type]
            room.automagic_step_([own], lr, tally)
            end.append(tally.clone())
        ends.append([*end, *(part for part in parts if part is not None)])
    return sum((compare_exact(got, want) for got, want in zip(*ends, strict=True)), Comparison())


def check_rate(case: Case) -> Comparison:
    """automagic_rate_: the learning rate, of votes of every kind."""
    chance = generator(case)
    total = Comparison()
    for scale in (-2.0, -1.0, -0.6, -1e-3, 0.0, 1e-30, 0.3, 0.5, 1.0, 2.0):
        weights = torch.rand(case.shape["tensors"], generator=chance)
        votes = torch.stack([weights * scale, weights], dim=1)
        ends = []
        for room in (ops, reference):
            lr, tally = torch.tensor([0.37]), votes.clone()
            room.automagic_rate_(lr, tally, 1e-30, 0.8)
            ends.append((lr, tally))
        total = sum((compare_exact(got, want) for got, want in zip(*ends, strict=True)), total)
    return total


def check_sum(case: Case) -> Comparison:
    """add_rounded_: every byte."""
    chance = generator(case)
    weights, gradients = _dtypes(case)
    total = torch.randn(case.shape["n"], generator=chance).to(weights)
    grad = torch.randn(case.shape["n"], generator=chance).to(gradients)
    got, want = total.clone(), total.clone()
    ops.add_rounded_(got, grad, 77)
    reference.add_rounded_(want, grad, 77)
    return compare_exact(got, want)


CHECKS: dict[str, Callable[[Case], Comparison]] = {
    "automagic_step_": check_step,
    "automagic_rate_": check_rate,
    "add_rounded_": check_sum,
}
