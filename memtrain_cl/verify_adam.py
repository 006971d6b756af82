"""Adam on compressed moments against the torch reference, byte for byte; cases: `memtrain_cl.cases_adam`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch

from memtrain_cl import ops, reference
from memtrain_cl.adam_rule import AdamStep, AdamTensor
from memtrain_cl.case import Case
from memtrain_cl.comparison import Comparison, compare_exact, generator

#: What a step may change of a tensor.
CHANGED = ("param", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale", "skipped")


def rule_of(case: Case) -> AdamStep:
    """The constants of a case's step."""
    own = {name: value for name, value in case.options.items() if name in AdamStep.__dataclass_fields__}
    return AdamStep(lr=0.01, step=3, block_size=case.shape["block_size"], **own)


def quantiles() -> torch.Tensor:
    """Those of the standard normal distribution, by the codes of a profile."""
    levels = (torch.arange(256, dtype=torch.float64) - 0.5) / 255
    table: torch.Tensor = torch.special.ndtri(levels.clamp_min(0.5 / 255))
    return table.to(torch.float32)


def adam_tensor(n: int, rule: AdamStep, case: Case, chance: torch.Generator) -> AdamTensor:
    """A tensor in the middle of training: moments of any code, gradients from 1e-9 to 1, zeros among both."""
    param, grad = (getattr(torch, case.options.get(name, "float32")) for name in ("param", "grad"))
    g = torch.randn(n, generator=chance) * 10.0 ** (-9.0 * torch.rand(n, generator=chance))
    g[::3] = 0.0
    if n > 20:
        g[7], g[11], g[13] = 1e-39, 1e18 if grad != torch.float16 else 6e4, -1e-30
    m = torch.randn(n, generator=chance) * 10.0 ** (-6.0 * torch.rand(n, generator=chance))
    s = m.abs() * (1.0 + torch.rand(n, generator=chance))
    m[::6] = 0.0
    s[::6] = 0.0
    size = case.shape["block_size"]
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if rule.code == "dense":
        moments = (m, s * s)
    elif rule.code == "profile":
        made = reference.encode_profile(m, size), reference.encode_profile(s, size)
        moments, scales = (made[0][0], made[1][0]), (made[0][1], made[1][1])
    else:
        first = reference.quantize_blockwise(m, size, code=rule.code)
        second = reference.quantize_blockwise(s, size, code=rule.code, signed=False, positive=True)
        moments, scales = (first[0], second[0]), (first[1], second[1])
    weights = torch.randn(n, generator=chance) * 10.0 ** (-8.0 * torch.rand(n, generator=chance))
    seed = int(torch.randint(0, 1 << 32, (), generator=chance))
    skipped = torch.tensor([4, 1], dtype=torch.int32)
    return AdamTensor(weights.to(param), g.to(grad), *moments, *scales, skipped, seed)


def check_step(case: Case) -> Comparison:
    """adam_step_: every byte of weights, moments, scales and counts, after two steps."""
    chance, rule = generator(case), rule_of(case)
    sizes = [max(1, case.shape["n"] - 7 * place) for place in range(case.options.get("tensors", 1))]
    start = [adam_tensor(n, rule, case, chance) for n in sizes]
    tables = (quantiles(), quantiles().abs()) if rule.code == "profile" else None
    ends = []
    for room in (ops, reference):
        tensors = copy.deepcopy(start)
        room.adam_step_(tensors, rule, tables=tables)
        if case.options.get("wrong"):
            tensors[0].grad[sizes[0] // 2] = math.inf
        room.adam_step_(tensors, rule, tables=tables)
        ends.append([getattr(tensor, name) for tensor in tensors for name in CHANGED])
    pairs = ((got, want) for got, want in zip(*ends, strict=True) if want is not None)
    return sum((compare_exact(got, want) for got, want in pairs), Comparison())


CHECKS: dict[str, Callable[[Case], Comparison]] = {"adam_step_": check_step}
