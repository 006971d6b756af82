"""The context_fn `recompute`: gradients, budgets that are met, choices and their reasons, hooks that get in the way."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memtrain_cl import SelectiveRecomputePolicy, build_causal_lm, recompute, saved_activations
from memtrain_cl.device import Device
from memtrain_cl.meter import AllocatorMeter, saved_bytes
from memtrain_cl.recompute_choice import BlockCost, cheapest, peak_of, smallest
from memtrain_cl.torch_device.aten import linear
from memtrain_cl.torch_device.aten import matmul as products

MM = torch.ops.aten.mm.default


class Model(nn.Module):
    """Blocks with dropout, each a region of its own."""

    def __init__(self, plan: Any, depth: int = 4) -> None:
        super().__init__()
        self.plan = plan
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, 64))
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.plan is None:
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=False, context_fn=self.plan)
        return x


def steps(model: nn.Module, count: int = 3, place: torch.device | str = "cpu") -> list[torch.Tensor]:
    """The gradients of the last of some equal steps."""
    x = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(0)).to(place)
    for _ in range(count):
        torch.manual_seed(5)
        model.zero_grad()
        model(x).square().mean().backward()
    return [parameter.grad.cpu().clone() for parameter in model.parameters() if parameter.grad is not None]


def model_of(plan: Any, place: torch.device | str = "cpu") -> Model:
    torch.manual_seed(0)
    return Model(plan).to(place)


PLANS: dict[str, dict[str, Any]] = {
    "all again": {"policy": "recompute"},
    "all kept": {"policy": "store"},
    "mixed": {"policy": [True, "store", False, "recompute"]},
    "some, by budget": {"budget_bytes": 400_000},
    "products kept": {"policy": "recompute", "save": [torch.ops.aten.addmm.default, MM]},
    "by price": {"policy": SelectiveRecomputePolicy(1.0)},
}


@pytest.mark.parametrize("name", PLANS)
def test_gradients_are_those_without(name: str) -> None:
    """With dropout, which draws the same numbers in the second run."""
    expected = steps(model_of(None))
    plan = recompute(**PLANS[name])
    assert all(map(torch.equal, steps(model_of(plan)), expected))
    assert plan.decided
    if name == "some, by budget":
        assert set(plan.actions) == {"store", "recompute"}
    if name == "by price":
        assert set(plan.actions) == {"recompute"}
        assert "net seconds: store +0, recompute +" in str(plan)


@pytest.mark.parametrize("kept", [True, False])
def test_on_the_device_kept_products_are_not_made_again(
    device: Device, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = torch.device("opencl:0")
    expected = steps(model_of(None, place), 1, place)
    save = [torch.ops.aten.addmm.default, MM] if kept else []
    model, made = model_of(recompute(policy="recompute", save=save), place), []
    for room in (products, linear):
        launch = room.matmul
        monkeypatch.setattr(room, "matmul", lambda *args, launch=launch, **more: made.append(launch(*args, **more)))
    got = steps(model, 1, place)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    # Of each block two forwards and two gradients of each. What is not kept is made again, but for the last, whose
    # result nobody saves.
    assert len(made) == 4 * (2 + 4) + (0 if kept else 4)


def test_on_the_device_a_limit_is_met_to_the_byte(device: Device) -> None:
    place = torch.device("opencl:0")
    expected = steps(model_of(None, place), place=place)
    loose = recompute(limit_bytes=1 << 30)
    model = model_of(loose, place)
    steps(model, place=place)
    assert loose.actions == ("store",) * 4
    limit = loose.peak_bytes - 100_000
    model.plan = plan = recompute(limit_bytes=limit)
    meter = AllocatorMeter(place)
    steps(model, place=place)
    meter.reset()
    got = steps(model, 1, place)
    assert all(map(torch.equal, got, expected))
    assert set(plan.actions) == {"store", "recompute"}
    assert meter.peak() <= plan.peak_bytes <= limit
    model.plan = recompute(limit_bytes=10_000)
    with pytest.raises(ValueError, match=r"expected limit_bytes of at least \d+, the smallest .* got 10000"):
        steps(model, place=place)


def test_few_bits_on_the_device(device: Device) -> None:
    place = torch.device("opencl:0")
    expected = steps(model_of(None, place), place=place)
    model = model_of(recompute(policy="bits", bits=8), place)
    got = steps(model, place=place)
    assert 0 < max(float((a - b).norm() / b.norm()) for a, b in zip(got, expected, strict=True)) < 0.05
    model.plan = plan = recompute(budget_bytes=1 << 30, bits=4, seed=3)
    steps(model, place=place)
    costs = [block.cost for block in plan.blocks]
    assert all(cost is not None and 6 * cost.kept("bits") < 2 * cost.kept("store") for cost in costs)
    assert all(cost is not None and 0 < cost.bits_seconds < 5 for cost in costs)
    model.plan = recompute(policy=["bits", "recompute", "bits", "store"], bits=4, seed=3)
    model.plan.reseed(1)
    first = steps(model, 1, place)
    model.plan.reseed(1)
    assert all(map(torch.equal, steps(model, 1, place), first))


def test_bytes_of_a_budget_are_those_that_autograd_keeps() -> None:
    plan = recompute(budget_bytes=1 << 30)
    model = model_of(plan)
    steps(model)
    model.plan = None
    with saved_bytes() as kept:
        model(torch.randn(4, 32, 64))
    assert plan.peak_bytes == kept.nbytes


def test_the_cheapest_set_is_found() -> None:
    random.seed(0)
    for _ in range(60):
        blocks = [
            BlockCost(
                random.randint(0, 9),
                random.randint(0, 40),
                few=random.choice([None, random.randint(0, 12)]),
                seconds=random.random(),
                bits_seconds=random.random(),
                base=random.randint(0, 9),
            )
            for _ in range(random.randint(1, 5))
        ]
        tail, budget = random.randint(0, 30), random.randint(10, 150)
        every = [
            (sum(cost.cost(action) for cost, action in zip(blocks, one, strict=True)), peak_of(blocks, one, tail))
            for one in itertools.product(*(cost.actions for cost in blocks))
        ]
        choice = cheapest(blocks, budget, tail)
        least = min((seconds for seconds, peak in every if peak <= budget), default=None)
        assert (choice is None) == (least is None)
        if choice is not None:
            assert choice.seconds == pytest.approx(least)
            assert choice.peak == peak_of(blocks, choice.actions, tail) <= budget
        assert smallest(blocks, tail).peak == min(peak for _, peak in every)


def test_steps_are_told_apart() -> None:
    plan = recompute(budget_bytes=1 << 30)
    model, x = model_of(plan), torch.randn(4, 32, 64)
    for _ in range(2):
        with torch.no_grad():
            model(x)
        (model(x) + model(x * 2)).sum().backward()
        assert not plan.decided
    assert str(plan) == "not measured yet"
    model(x).sum().backward()
    assert len(plan.blocks) == 8, "two forwards before one backward are one step"
    assert str(plan).count("\n") == 8


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
def test_a_model_that_checkpoints_itself() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **sizes)).train()
    tokens = torch.randint(50, (2, 16))
    model(tokens, labels=tokens).loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    plan = recompute(budget_bytes=120_000)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": plan})
    for _ in range(3):
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
    assert all(
        torch.equal(parameter.grad, wanted) for parameter, wanted in zip(model.parameters(), expected, strict=True)
    )
    assert set(plan.actions) == {"store", "recompute"}


def test_hooks_that_keep_what_was_to_be_recomputed_are_told() -> None:
    def kept_inside(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
            return x.sin().exp()

    plan, x = recompute(budget_bytes=1 << 20), torch.randn(8, requires_grad=True)
    checkpoint(kept_inside, x, use_reentrant=False, context_fn=plan).sum().backward()
    plan._began()  # backward ran no region again, so none told
    with pytest.warns(RuntimeWarning, match="nothing of block 0 is recomputed"):
        checkpoint(kept_inside, x, use_reentrant=False, context_fn=plan)

    def saver_inside(x: torch.Tensor) -> torch.Tensor:
        with saved_activations():
            return x.sin()

    with pytest.raises(RuntimeError, match="nothing would be recomputed"):
        checkpoint(saver_inside, x, use_reentrant=False, context_fn=recompute(budget_bytes=1 << 20))


def test_the_reference_model_under_a_plan() -> None:
    torch.manual_seed(0)
    lm = build_causal_lm(50, 16, 4, 2, 8, gradient_checkpointing=True)
    lm.model.context_fn = plan = recompute(budget_bytes=60_000)
    tokens = torch.randint(0, 50, (2, 8))
    for _ in range(3):
        lm(tokens).sum().backward()
    assert len(plan.actions) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected one of budget_bytes, limit_bytes and policy, got none"),
        ({"budget_bytes": 1, "policy": "store"}, "got budget_bytes and policy"),
        ({"budget_bytes": 0}, "expected budget_bytes as an integer >= 1, got 0"),
        ({"limit_bytes": 1.5}, "expected limit_bytes as an integer"),
        ({"policy": "forget"}, "one of store, bits, recompute, got 'forget'"),
        ({"policy": "bits"}, "expected bits beside the action 'bits', got None"),
        ({"policy": "bits", "bits": 1}, "bits"),
        ({"policy": "store", "seed": -1}, "seed"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recompute(**options)


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match="expected policy as an action"):
        recompute(policy=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected save as operations"):
        recompute(policy="store", save=[torch.mm])
    with pytest.raises(RuntimeError, match=r"expected to be called by torch\.utils\.checkpoint"):
        recompute(policy="store")()
    with pytest.raises(ValueError, match="expected a policy for every block of a step, got 2"):
        steps(model_of(recompute(policy=[True, False])))
    with pytest.raises(ValueError, match="expected limit_bytes on a device with an allocator"):
        steps(model_of(recompute(limit_bytes=1 << 30)))
    with pytest.raises(ValueError, match=r"expected budget_bytes of at least \d+, the smallest"):
        steps(model_of(recompute(budget_bytes=1000)))
