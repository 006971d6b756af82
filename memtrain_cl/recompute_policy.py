"""Whether a block of a model should be run again in backward instead of keeping what it computed: a price for each.

    benefit = bytes kept * memory_value_per_byte          cost = flops * flop_cost_per_unit

Recomputed is where the benefit exceeds the cost. With flop_cost_per_unit in seconds a flop, a measured time takes the
cost's place, and memory_value_per_byte says how many seconds a byte is worth. The decisions and their published
defaults are for a whole model at once; `memtrain_cl.recompute` decides within a budget of bytes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from memtrain_cl.meter import SavedBytes, saved_bytes, synchronize

VALUE_PER_BYTE = 1.0
COST_PER_FLOP = 2e-9


def _counts(**values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"expected {name} as an integer >= 1, got {value!r}")


def _amount(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"expected {name} as a finite number >= 0, got {value!r}")
    return float(value)


def estimate_block_activation_bytes(batch: int, seq_len: int, d_model: int, dtype_bytes: int = 4) -> int:
    """batch * seq_len * d_model * dtype_bytes: one tensor of the residual stream. ValueError for sizes below 1."""
    _counts(batch=batch, seq_len=seq_len, d_model=d_model, dtype_bytes=dtype_bytes)
    return batch * seq_len * d_model * dtype_bytes


def estimate_block_recompute_flops(batch: int, seq_len: int, d_model: int) -> int:
    """2*batch*seq_len*12*d_model^2 for a block's products with weights, 4*batch*seq_len^2*d_model for its attention.

    ValueError for sizes below 1.
    """
    _counts(batch=batch, seq_len=seq_len, d_model=d_model)
    return 2 * batch * seq_len * 12 * d_model**2 + 4 * batch * seq_len**2 * d_model


def estimate_recompute_benefit(activation_bytes: float, memory_value_per_byte: float = VALUE_PER_BYTE) -> float:
    """activation_bytes * memory_value_per_byte. ValueError for what is negative or not finite."""
    return _amount("activation_bytes", activation_bytes) * _amount("memory_value_per_byte", memory_value_per_byte)


def estimate_recompute_cost(flops: float, flop_cost_per_unit: float = COST_PER_FLOP) -> float:
    """flops * flop_cost_per_unit. ValueError for what is negative or not finite."""
    return _amount("flops", flops) * _amount("flop_cost_per_unit", flop_cost_per_unit)


@dataclass(frozen=True)
class RecomputeDecision:
    """What was decided of a block and by which numbers; rationale says it in a sentence."""

    block_index: int
    should_recompute: bool
    estimated_cost: float
    estimated_benefit: float
    activation_bytes: float
    recompute_flops: float
    rationale: str

    @property
    def net_benefit(self) -> float:
        """estimated_benefit - estimated_cost."""
        return self.estimated_benefit - self.estimated_cost


class SelectiveRecomputePolicy:
    """Recompute where a block's bytes are worth more than its flops.

    memory_value_per_byte, flop_cost_per_unit: the two prices, in any common unit (in seconds where times are measured).
    ValueError unless both are finite and not negative.
    """

    def __init__(
        self, memory_value_per_byte: float = VALUE_PER_BYTE, flop_cost_per_unit: float = COST_PER_FLOP
    ) -> None:
        self.memory_value_per_byte = _amount("memory_value_per_byte", memory_value_per_byte)
        self.flop_cost_per_unit = _amount("flop_cost_per_unit", flop_cost_per_unit)

    def decide_block(
        self, block_index: int, activation_bytes: float, recompute_flops: float, *, seconds: float | None = None
    ) -> RecomputeDecision:
        """The decision on one block. seconds: how long it takes to run it again, where that was measured."""
        benefit = estimate_recompute_benefit(activation_bytes, self.memory_value_per_byte)
        cost = estimate_recompute_cost(recompute_flops, self.flop_cost_per_unit)
        source = f"{recompute_flops:.4g} flops"
        if seconds is not None:
            cost, source = _amount("seconds", seconds), f"{seconds * 1e3:.3g} ms measured"
        again = benefit > cost
        rationale = (
            f"{'recompute' if again else 'keep'}: {activation_bytes:.4g} bytes are worth {benefit:.4g}, "
            f"running the block again costs {cost:.4g} ({source})"
        )
        return RecomputeDecision(
            block_index, again, cost, benefit, float(activation_bytes), float(recompute_flops), rationale
        )

    def decide_model(
        self, lm: Any, batch: int, seq_len: int, dtype_bytes: int = 4, *, measure: bool = False
    ) -> list[RecomputeDecision]:
        """A decision a block of a model with d_model and n_layer, by the estimates.

        measure: run the model's forward on random tokens of [batch, seq_len] where its parameters are, twice, and take
        the bytes that each of `lm.blocks` saves and the seconds that it takes in the second run.
        """
        flops = estimate_block_recompute_flops(batch, seq_len, lm.d_model)
        if measure:
            found = _measure(lm, batch, seq_len)
            return [self.decide_block(i, size, flops, seconds=time) for i, (size, time) in enumerate(found)]
        size = estimate_block_activation_bytes(batch, seq_len, lm.d_model, dtype_bytes)
        return [self.decide_block(index, size, flops) for index in range(lm.n_layer)]

    def apply_to_model(
        self, lm: Any, batch: int, seq_len: int, dtype_bytes: int = 4, *, measure: bool = False
    ) -> list[RecomputeDecision]:
        """`decide_model`, and its booleans become `lm.gradient_checkpointing`."""
        decisions = self.decide_model(lm, batch, seq_len, dtype_bytes, measure=measure)
        lm.gradient_checkpointing = [decision.should_recompute for decision in decisions]
        return decisions


def _measure(lm: Any, batch: int, seq_len: int) -> Sequence[tuple[int, float]]:
    """(bytes that it saves, seconds of its forward) of each block, from the second of two forwards, which keep all."""
    _counts(batch=batch, seq_len=seq_len)
    place = next(lm.parameters()).device
    tokens = torch.randint(lm.vocab, (batch, seq_len), generator=torch.Generator().manual_seed(0)).to(place)
    found: list[tuple[int, float]] = []
    started: list[tuple[SavedBytes, float]] = []
    hooks: list[Any] = []
    inside = ExitStack()

    def begin(block: Any, args: Any) -> None:
        kept = inside.enter_context(saved_bytes())
        synchronize(place)
        started.append((kept, time.perf_counter()))

    def end(block: Any, args: Any, result: Any) -> None:
        synchronize(place)
        kept, since = started.pop()
        found.append((kept.nbytes, time.perf_counter() - since))
        inside.close()

    before = lm.gradient_checkpointing
    lm.gradient_checkpointing = False
    try:
        for block in lm.blocks:
            hooks += [block.register_forward_pre_hook(begin), block.register_forward_hook(end)]
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            for _ in range(2):
                found.clear()
                lm(tokens)
    finally:
        lm.gradient_checkpointing = before
        inside.close()
        for hook in hooks:
            hook.remove()
    return found
