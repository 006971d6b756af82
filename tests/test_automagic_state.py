"""Automagic's state: saved, loaded by the places of parameters, refused, copied."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memtrain_cl import reference
from memtrain_cl.device import Device
from memtrain_cl.optim import Automagic
from tests.adam_cases import advance, give, rooms, same_bits, through_safetensors, through_torch, values
from tests.automagic_cases import loss_of, model_of, oracle, parameters

LR = 1e-3


@pytest.mark.parametrize("save", [through_torch, through_safetensors])
def test_resumed_runs_go_on_bit_for_bit(device: Device, tmp_path: Path, save: Callable[..., Any]) -> None:
    """Also where a parameter never had a gradient, and with options that the file does not rule."""
    for room in rooms(device).values():
        live, resumed, bare = (
            Automagic(parameters(torch.bfloat16, room.place)[1:4], lr=lr, polarity_history=3, fused=False, ops=room.ops)
            for lr in (1e-2, 1e-5, 1e-2)
        )

        def steps(optimizer: Automagic, first: int, count: int) -> None:
            mine = optimizer.param_groups[0]["params"]
            for step in range(first, first + count):
                give(mine, step)
                mine[1].grad = None
                optimizer.step()

        steps(live, 0, 5)
        state = save(live, tmp_path / "state")
        assert state["state"].keys() == {0, 2}
        for optimizer in (resumed, bare):
            for p, own in zip(optimizer.param_groups[0]["params"], live.param_groups[0]["params"], strict=True):
                p.data.copy_(own.data)
        resumed.load_state_dict(state)
        assert resumed.get_learning_rates() == live.get_learning_rates()
        for optimizer in (live, resumed, bare):
            steps(optimizer, 5, 4)
        assert same_bits(live, resumed)
        assert resumed.get_learning_rates() == live.get_learning_rates()
        assert not torch.equal(live.param_groups[0]["params"][0], bare.param_groups[0]["params"][0])


def test_options_stay_and_signs_of_another_history_start_afresh() -> None:
    live, mine = oracle(parameters(), lr=1e-2, polarity_history=4), oracle(parameters(), weight_decay=0.5)
    advance(live, 0, 6)
    mine.load_state_dict(live.state_dict())
    group = mine.param_groups[0]
    assert (group["weight_decay"], group["polarity_history"]) == (0.5, 8)
    assert group["lr"] == live.param_groups[0]["lr"]
    state = mine.state[group["params"][0]]
    assert (state["step"], state["entered"], state["history"]) == (6, 0, 8)
    assert not state["signs"].any()
    assert torch.equal(state["exp_avg_sq"], live.state[live.param_groups[0]["params"][0]]["exp_avg_sq"])


def test_rates_of_a_group_become_their_geometric_median() -> None:
    live, mine = oracle(parameters()[:3]), oracle(parameters()[:3], lr=1.0)
    advance(live, 0, 1)
    state = copy.deepcopy(live.state_dict())
    for index, rate in enumerate((1e-8, 1e-2, 1e-4)):
        state["state"][index]["lr"] = torch.tensor([rate])
    mine.load_state_dict(state)
    assert mine.get_learning_rates() == [pytest.approx(1e-4)]
    assert {float(own["lr"]) for own in mine.state.values()} == {float(torch.tensor(1e-4))}
    empty = oracle(parameters()[:3], lr=0.25)
    mine.load_state_dict(empty.state_dict())  # no parameter has a rate of its own
    assert (mine.get_learning_rates(), len(mine.state)) == ([0.25], 0)


def test_a_state_that_does_not_fit_is_refused_by_name() -> None:
    mine = oracle([("weight", torch.nn.Parameter(values(4, 32)))])
    advance(mine, 0, 1)
    state, before = mine.state_dict(), copy.deepcopy(mine)
    adamw = torch.optim.AdamW([torch.nn.Parameter(values(4, 32))])
    advance(adamw, 0, 1)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"exp_avg_sq": torch.zeros(4, 32)}, r"expected 'exp_avg_sq' of parameter weight as torch.int8 \[4, 32\]"),
        ({"scale": None}, "expected 'scale' of parameter weight as torch.float32 .* got None"),
        ({"signs": torch.zeros(128, dtype=torch.uint8)}, r"expected 'signs' .* \[1, 128\]"),
        ({"rot": 16.0}, "expected 'rot' in the state of parameter weight as an integer"),
        ({"rot": 4}, "expected rows of parameter weight rotated by 16, got 4"),
        ({"lr": 0.1}, "expected 'lr' of parameter weight as a tensor"),
        ({"lr": torch.tensor([math.nan])}, "expected 'lr' of parameter weight as a tensor of one finite number"),
        ({"step": -1}, "expected 'step' in the state"),
    ]
    refused = [({**state, "state": {0: {**state["state"][0], **change}}}, message) for change, message in changes]
    refused += [
        (adamw.state_dict(), "expected 'step' in the state of parameter weight as an integer"),
        ({**state, "state": {3: {}}}, r"expected state of parameters \[0\], got one of 3"),
        ({**state, "state": {0: 1}}, "expected the state of parameter weight as a mapping, got int"),
        ({**state, "param_groups": state["param_groups"] * 2}, r"expected groups of \[1\] parameters, got \[1, 1\]"),
        ({**state, "param_groups": [{"params": [0]}]}, "got a group without lr"),
    ]
    for wrong, message in refused:
        with pytest.raises(ValueError, match=message):
            mine.load_state_dict(wrong)
        assert same_bits(mine, before)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("fused", [False, True])
def test_copies_go_on_by_themselves(copied: Callable[[Any], Any], fused: bool) -> None:
    model = model_of()
    optimizer = oracle(model.parameters(), lr=LR, polarity_history=2, fused=fused)

    def train(own: torch.nn.Module, steps: Automagic, count: int) -> None:
        for step in range(count):
            steps.zero_grad()
            loss_of(own, step).backward()
            steps.step()

    train(model, optimizer, 3)
    twin_model, twin = copied((model, optimizer))
    assert next(iter(twin_model.parameters())) is twin.param_groups[0]["params"][0]
    assert twin.ops is reference
    train(model, optimizer, 2)
    train(twin_model, twin, 2)
    assert same_bits(optimizer, twin)
    assert optimizer.get_learning_rates() == twin.get_learning_rates()
    train(twin_model, twin, 1)
    assert not same_bits(optimizer, twin)
