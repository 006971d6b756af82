"""Prices of recompute, the decisions by them, and the reference model that acts on them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from memtrain_cl import (
    RecomputeDecision,
    SelectiveRecomputePolicy,
    build_causal_lm,
    estimate_block_activation_bytes,
    estimate_block_recompute_flops,
    estimate_recompute_benefit,
    estimate_recompute_cost,
)
from memtrain_cl.meter import saved_bytes

GOLDEN = json.loads((Path(__file__).parent / "golden" / "moments.json").read_text())["recompute"]
ESTIMATES = {"activation_bytes": estimate_block_activation_bytes, "recompute_flops": estimate_block_recompute_flops}
TOKENS = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(0))


def lm_of(**options: Any) -> Any:
    torch.manual_seed(0)
    return build_causal_lm(50, 16, 4, 2, 8, **options)


def gradients(lm: Any, **options: Any) -> list[torch.Tensor]:
    lm.zero_grad()
    lm(TOKENS, **options).square().mean().backward()
    return [parameter.grad.clone() for parameter in lm.parameters()]


def test_published_values() -> None:
    for name, value in GOLDEN.items():
        if "(" in name:
            function, numbers = re.fullmatch(r"(\w+)\((.*)\)", name).groups()  # type: ignore[union-attr]
            assert ESTIMATES[function](*map(int, numbers.split(","))) == value
    policy = SelectiveRecomputePolicy()
    assert policy.memory_value_per_byte == GOLDEN["default_memory_value_per_byte"]
    assert policy.flop_cost_per_unit == GOLDEN["default_flop_cost_per_unit"]
    assert estimate_recompute_benefit(100) == 100.0
    assert estimate_recompute_benefit(100, 0.5) == 50.0
    assert estimate_recompute_cost(5e8) == 1.0
    assert estimate_recompute_cost(100, 3.0) == 300.0


def test_recompute_where_the_benefit_exceeds_the_cost() -> None:
    decision = SelectiveRecomputePolicy(1.0, 1.0).decide_block(3, 100.0, 99.0)
    assert decision == RecomputeDecision(3, True, 99.0, 100.0, 100.0, 99.0, decision.rationale)
    assert decision.net_benefit == 1.0
    assert decision.rationale.startswith("recompute: 100 bytes")
    with pytest.raises(AttributeError):
        decision.block_index = 4  # type: ignore[misc]
    equal = SelectiveRecomputePolicy(1.0, 1.0).decide_block(0, 100, 100)
    assert not equal.should_recompute, "a draw is no gain"


def test_decisions_of_a_model_are_those_of_its_blocks() -> None:
    lm = lm_of()
    policy = SelectiveRecomputePolicy(1.0, 1e-3)
    decisions = policy.apply_to_model(lm, 2, 8, dtype_bytes=2)
    bytes_, flops = estimate_block_activation_bytes(2, 8, 16, 2), estimate_block_recompute_flops(2, 8, 16)
    assert decisions == [policy.decide_block(index, bytes_, flops) for index in range(4)]
    assert lm.gradient_checkpointing == [True] * 4
    SelectiveRecomputePolicy(0.0).apply_to_model(lm, 2, 8)
    assert lm.gradient_checkpointing == [False] * 4


@pytest.mark.parametrize("again", [True, [True, False, False, True], (False, False, True, False)])
def test_recomputed_blocks_save_less_and_give_the_same_gradients(again: Any) -> None:
    lm = lm_of()
    expected = gradients(lm)
    with saved_bytes() as plain:
        lm(TOKENS)
    lm.gradient_checkpointing = again
    with saved_bytes() as less:
        lm(TOKENS)
    assert less.nbytes < plain.nbytes
    assert all(map(torch.equal, gradients(lm), expected))
    # For one forward alone; the model's own answer stays.
    with saved_bytes() as once:
        lm(TOKENS, gradient_checkpointing=False)
    assert once.nbytes == plain.nbytes
    assert lm.gradient_checkpointing == (again if again is True else list(again))


def test_measured_bytes_and_times_decide() -> None:
    lm = lm_of(gradient_checkpointing=[True, False, True, False])
    with saved_bytes() as all_blocks:
        lm(TOKENS, gradient_checkpointing=False)
    policy = SelectiveRecomputePolicy(1.0)
    decisions = policy.decide_model(lm, 2, 8, measure=True)
    assert lm.gradient_checkpointing == [True, False, True, False]
    sizes = [decision.activation_bytes for decision in decisions]
    assert max(sizes) == min(sizes[1:]), "blocks are alike"
    assert sum(sizes) <= all_blocks.nbytes + 4 * 2 * 8 * 16 * 4 + 2 * 4 * 8 * 8 * 4, "each counts its input and tables"
    assert all(0 < decision.estimated_cost < 5 for decision in decisions), "in seconds"
    assert all("measured" in decision.rationale for decision in decisions)
    assert policy.apply_to_model(lm, 2, 8, measure=True)
    assert lm.gradient_checkpointing == [True] * 4
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in lm.blocks)


def test_what_is_refused() -> None:
    lm = lm_of()
    with pytest.raises(ValueError, match=r"one answer a block \(4\), got 3"):
        lm.gradient_checkpointing = [True] * 3
    with pytest.raises(TypeError, match="expected gradient_checkpointing as a bool or a list"):
        lm(TOKENS, gradient_checkpointing=1)
    assert lm.gradient_checkpointing is False
    for bad in (-1.0, float("nan"), float("inf"), True):
        with pytest.raises(ValueError, match="memory_value_per_byte"):
            SelectiveRecomputePolicy(bad)
    with pytest.raises(ValueError, match="expected batch as an integer >= 1, got 0"):
        estimate_block_activation_bytes(0, 1, 1)
    with pytest.raises(ValueError, match="expected vocab >= 1, got 0"):
        build_causal_lm(0, 16, 1, 1, 8)
