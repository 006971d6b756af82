"""Whether what is drawn at random is unbiased: its mean over many seeds against the truth, in its standard errors.

Of an unbiased estimator these errors are nearly normal: their mean square over the elements is near 1, and none is far
out. The seeds are fixed, and the devices agree byte for byte, so that a verdict is the same everywhere.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from memtrain_cl import ops
from memtrain_cl.formats import STREAM_GRAD_INPUT, STREAM_GRAD_OUTPUT, STREAM_INPUT, CounterRule, stream_seed

SEEDS, ELEMENTS = 20_000, 10_000
#: Where the mean square may lie, and no error beyond.
MEAN_SQUARE, FARTHEST = (0.9, 1.1), 6.0


@dataclass(frozen=True)
class Verdict:
    """What the standardised errors of one estimator's mean are like."""

    name: str
    seeds: int
    elements: int
    mean_square: float
    farthest: float

    @property
    def ok(self) -> bool:
        """Whether the estimator passes for unbiased."""
        return MEAN_SQUARE[0] <= self.mean_square <= MEAN_SQUARE[1] and self.farthest <= FARTHEST


def judge(
    name: str,
    draw: Callable[[int], torch.Tensor],
    truth: torch.Tensor,
    seeds: int,
    variance: torch.Tensor | None = None,
) -> Verdict:
    """The verdict on `draw`, an estimate of `truth` (float64) for each of so many seeds; every element must vary.

    variance: of one estimate, where it is known; else it is that of the estimates.
    """
    total, squares = torch.zeros_like(truth), torch.zeros_like(truth)
    for seed in range(seeds):
        error = draw(seed).to(torch.float64) - truth
        total += error
        squares += error * error
    mean = total / seeds
    if variance is None:
        variance = (squares - seeds * mean * mean) / (seeds - 1)
    if not bool((variance > 0).all()):
        raise ValueError(f"expected every element of {name} to vary, got {int((variance <= 0).sum())} that do not")
    standardised = mean / (variance / seeds).sqrt()
    return Verdict(name, seeds, truth.numel(), float(standardised.square().mean()), float(standardised.abs().max()))


def stochastic_quantize(bits: int, seeds: int = SEEDS, elements: int = ELEMENTS) -> Verdict:
    """Normal numbers in rows of a square, and one more a row: the largest, which is a level and does not vary."""
    chance = torch.Generator().manual_seed(bits)
    side = math.isqrt(elements)
    x = torch.randn(side, side, generator=chance)
    x = torch.cat([x, x.abs().amax(dim=1, keepdim=True) * 1.1], dim=1)
    _, scale = ops.quantize_codes(x, bits, seed=0)
    truth, spacing = x[:, :-1].to(torch.float64), scale.to(torch.float64)
    above = truth / spacing - (truth / spacing).floor()

    def draw(seed: int) -> torch.Tensor:
        return ops.stochastic_quantize(x, bits, seed=seed)[:, :-1]

    # Two values, a level apart: their variance is known, also where one of them is too rare to be met.
    variance = spacing * spacing * above * (1.0 - above)
    return judge(f"stochastic_quantize at {bits} bits", draw, truth, seeds, variance)


def int8_gradient(seeds: int = SEEDS, elements: int = ELEMENTS) -> Verdict:
    """The gradient of a weight from codes of grad_out and x, of a square weight and 64 tokens."""
    chance = torch.Generator().manual_seed(1)
    side = math.isqrt(elements)
    grad_out, x = (torch.randn(64, side, generator=chance) for _ in range(2))

    def draw(seed: int) -> torch.Tensor:
        seeds_of = {"seed_grad": stream_seed(seed, STREAM_GRAD_OUTPUT), "seed_input": stream_seed(seed, STREAM_INPUT)}
        return ops.grad_weight_int8(grad_out, x, **seeds_of)

    return judge("int8 gradient of a weight", draw, grad_out.to(torch.float64).t() @ x.to(torch.float64), seeds)


def int8_grad_input(seeds: int = SEEDS, elements: int = ELEMENTS) -> Verdict:
    """The gradient of an input from codes of grad_out, of a square weight and as many tokens."""
    chance = torch.Generator().manual_seed(2)
    side = math.isqrt(elements)
    grad_out = torch.randn(side, side, generator=chance)
    state = torch.randint(0, 45, (side, side), generator=chance, dtype=torch.uint8)
    scale = torch.rand(side, 1, generator=chance) + 0.1
    t = ops.decode_ternary(state, side, C=8, packed=False)

    def draw(seed: int) -> torch.Tensor:
        own = stream_seed(seed, STREAM_GRAD_INPUT)
        return ops.counter_grad_input_int8(grad_out, state, scale, side, C=8, packed=False, seed=own)

    truth = (grad_out * scale[:, 0]).to(torch.float64) @ t.to(torch.float64)
    return judge("int8 gradient of an input", draw, truth, seeds)


def ternary_pulse(seeds: int = SEEDS, elements: int = ELEMENTS) -> Verdict:
    """The ternary pulse of a counter update, as its counters show it.

    A row's largest magnitude is 3 and a pulse of it moves the counter by 3: the step is 1 and nothing is left to round.
    The others lie between a tenth and nine tenths of it: means of rarer events take more seeds to become normal.
    """
    chance = torch.Generator().manual_seed(3)
    side, C, zero = math.isqrt(elements), 11, 31
    grad = 3.0 * (0.1 + 0.8 * torch.rand(side, side + 1, generator=chance))
    grad[:, -1] = 3.0
    grad *= 2.0 * torch.randint(0, 2, grad.shape, generator=chance) - 1.0
    # k = (lr/rms_eps)*(C/scale) = 0.125*8.
    floor = 2.0**20
    rule = CounterRule(C, False, lr=0.125 * floor, lr_scale=0.0, rms_eps=floor, pulse_mode="ternary")
    scale, v = torch.full((side, 1), C / 8), torch.zeros(side, 1)
    totals, codes = torch.zeros(3, dtype=torch.int64), torch.empty(grad.shape, dtype=torch.uint8)

    def draw(seed: int) -> torch.Tensor:
        ops.counter_update_(codes.fill_(zero), scale, v, grad, totals, rule, seed=seed)
        return zero - codes[:, :-1].to(torch.float64)

    return judge("ternary pulse", draw, grad[:, :-1].to(torch.float64), seeds)


#: Every estimator, each given its seeds and elements.
ESTIMATORS: tuple[Callable[[int, int], Verdict], ...] = (
    *(functools.partial(stochastic_quantize, bits) for bits in (2, 4, 8)),
    int8_gradient,
    int8_grad_input,
    ternary_pulse,
)


def judge_all(seeds: int = SEEDS, elements: int = ELEMENTS) -> list[Verdict]:
    """A verdict on every estimator, printed as it comes."""
    verdicts = []
    for estimator in ESTIMATORS:
        verdict = estimator(seeds, elements)
        print(
            f"{verdict.name}: mean square {verdict.mean_square:.3f}, farthest {verdict.farthest:.2f} standard errors, "
            f"{verdict.elements} elements, {verdict.seeds} seeds",
            flush=True,
        )
        verdicts.append(verdict)
    return verdicts
