"""Activation checkpointing around counter layers: forwards run twice, updates once, and everything is as without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    get_device_states,
    set_checkpoint_early_stop,
    set_device_states,
)

from memtrain_cl.device import Device
from memtrain_cl.nn import CompactCounterLinear
from tests.layer_cases import IN, OUT, assert_same
from tests.nn_cases import ROOMS, Room, bytes_of, layers_of, room_of, twin

pytestmark = pytest.mark.device

Around = Callable[..., Any]


@pytest.fixture(params=ROOMS)
def room(request: pytest.FixtureRequest, device: Device) -> Room:
    return room_of(request.param, device)


@pytest.fixture
def oracle(device: Device) -> Room:
    return room_of("reference", device)


def plainly(function: Around, *inputs: Any) -> Any:
    return function(*inputs)


def reentrant(function: Around, *inputs: Any) -> Any:
    return checkpoint(function, *inputs, use_reentrant=True)


def repeated(function: Around, *inputs: Any) -> Any:
    return checkpoint(function, *inputs, use_reentrant=False)


def repeated_to_the_end(function: Around, *inputs: Any) -> Any:
    with set_checkpoint_early_stop(False):
        return checkpoint(function, *inputs, use_reentrant=False)


def nested(outer: Around, inner: Around) -> Around:
    def both(function: Around, *inputs: Any) -> Any:
        return outer(lambda *given: inner(function, *given), *inputs)

    return both


class Again(torch.autograd.Function):
    """A block that forgets, as users write it: the body runs without a graph, and with one in backward."""

    @staticmethod
    def forward(ctx: Any, function: Around, x: torch.Tensor) -> torch.Tensor:
        ctx.function, ctx.chance = function, (torch.get_rng_state(), get_device_states(x))
        ctx.save_for_backward(x)
        y: torch.Tensor = function(x)
        return y

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        leaf = ctx.saved_tensors[0].detach().requires_grad_()
        host, (devices, states) = ctx.chance
        kind = leaf.device.type if devices else "cuda"
        with torch.random.fork_rng(devices=devices, device_type=kind), torch.enable_grad():
            torch.set_rng_state(host)
            set_device_states(devices, states, device_type=kind)
            y = ctx.function(leaf)
        torch.autograd.backward(y, grad_out)
        return None, leaf.grad


def forgetting(function: Around, x: torch.Tensor) -> Any:
    return Again.apply(function, x)  # type: ignore[no-untyped-call]


WAYS: dict[str, Around] = {
    "forgetting": forgetting,
    "forgetting-within-reentrant": nested(reentrant, forgetting),
    "reentrant": reentrant,
    "repeated": repeated,
    "to-the-end": repeated_to_the_end,
    "reentrant-within-reentrant": nested(reentrant, reentrant),
    "repeated-within-repeated": nested(repeated, repeated),
    "repeated-within-reentrant": nested(reentrant, repeated),
    "reentrant-within-repeated": nested(repeated, reentrant),
}


class Blocks(nn.Module):
    """Two blocks of counter layers with dropout between them; `around` runs each block."""

    def __init__(self, room: Room, **options: Any) -> None:
        super().__init__()
        self.first = nn.Sequential(room.make(**options), nn.Dropout(0.1), room.make(in_features=OUT, **options))
        self.second = nn.Sequential(room.make(in_features=OUT, **options), nn.Tanh())

    def forward(self, x: torch.Tensor, around: Around) -> torch.Tensor:
        y: torch.Tensor = around(self.second, around(self.first, x))
        return y


def run(model: Any, room: Room, around: Around, steps: int = 3) -> list[torch.Tensor]:
    """The gradients of the input in some steps."""
    gradients = []
    for step in range(steps):
        torch.manual_seed(step)
        x = room.tensor(5, IN, seed=step).requires_grad_()
        model(x, around).square().sum().backward()
        assert x.grad is not None
        gradients.append(x.grad.cpu())
    return gradients


@pytest.mark.parametrize("way", WAYS)
def test_steps_are_those_without_a_checkpoint(room: Room, way: str) -> None:
    plain = Blocks(room)
    checkpointed = twin(plain)
    expected, got = run(plain, room, plainly), run(checkpointed, room, WAYS[way])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))
    assert_same(bytes_of(checkpointed), bytes_of(plain))
    assert [layer.step for layer in layers_of(checkpointed)] == [3, 3, 3]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{"act_save_bits": 4}, {"accumulate": 2}], ids=["saved-in-4-bits", "accumulate"])
def test_options_under_a_checkpoint(oracle: Room, way: str, options: dict[str, Any]) -> None:
    plain = Blocks(oracle, **options)
    checkpointed = twin(plain)
    expected, got = run(plain, oracle, plainly), run(checkpointed, oracle, WAYS[way])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))
    assert_same(bytes_of(checkpointed), bytes_of(plain))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("preserve", [True, False])
def test_the_generator_is_left_alone(oracle: Room, use_reentrant: bool, preserve: bool) -> None:
    plain = nn.Sequential(oracle.make(), nn.Tanh(), oracle.make(in_features=OUT))
    checkpointed = twin(plain)

    def around(function: Around, x: torch.Tensor) -> Any:
        return checkpoint(function, x, use_reentrant=use_reentrant, preserve_rng_state=preserve)

    for step in range(2):
        torch.manual_seed(step)
        places = []
        for model, way in ((plain, plainly), (checkpointed, around)):
            torch.manual_seed(step)
            way(model, torch.ones(3, IN, requires_grad=True)).square().sum().backward()
            places.append(torch.get_rng_state())
        assert torch.equal(*places), "layers draw nothing from torch's generator"
    assert_same(bytes_of(checkpointed), bytes_of(plain))


@pytest.mark.parametrize("way", ["repeated", "to-the-end", "repeated-within-repeated"])
def test_the_first_layer_learns_from_raw_data(room: Room, way: str) -> None:
    layer = room.make()
    plain = twin(layer)
    for each, around in ((layer, WAYS[way]), (plain, plainly)):
        around(each, room.tensor(4, IN)).sum().backward()
    assert layer.step == 1
    assert_same(bytes_of(layer), bytes_of(plain))


def test_the_last_product_of_a_region_is_not_computed_again(oracle: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Sequential(oracle.make(), oracle.make(in_features=OUT))
    products: list[nn.Module] = []
    compute = CompactCounterLinear._product

    def noted(layer: CompactCounterLinear, x: torch.Tensor) -> torch.Tensor:
        products.append(layer)
        return compute(layer, x)

    monkeypatch.setattr(CompactCounterLinear, "_product", noted)
    repeated(layers, oracle.tensor(4, IN)).sum().backward()
    assert products == [layers[0], layers[1], layers[0]]
    assert [layer.step for layer in layers_of(layers)] == [1, 1]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_segments_of_a_sequence(oracle: Room, use_reentrant: bool) -> None:
    plain = nn.Sequential(*(oracle.make(in_features=IN, out_features=IN) for _ in range(4)))
    checkpointed = twin(plain)
    x = oracle.tensor(3, IN).requires_grad_()
    plain(x).sum().backward()
    checkpoint_sequential(checkpointed, 2, x, use_reentrant=use_reentrant).sum().backward()
    assert_same(bytes_of(checkpointed), bytes_of(plain))


@pytest.mark.parametrize("way", WAYS)
def test_graphs_that_are_dropped_do_not_count(oracle: Room, way: str) -> None:
    layer = oracle.make()
    x = oracle.tensor(4, IN).requires_grad_()
    for _ in range(3):
        WAYS[way](layer, x)
        with torch.no_grad():
            WAYS[way](layer, x)
            layer(x)
    y = WAYS[way](layer, x)
    with torch.no_grad():
        layer(x)
    y.sum().backward()
    assert layer.step == 1


@pytest.mark.parametrize("way", WAYS)
def test_two_uses_want_reuse(oracle: Room, way: str) -> None:
    layer = oracle.make(in_features=IN, out_features=IN)
    before = bytes_of(layer)
    x = oracle.tensor(4, IN).requires_grad_()
    y = WAYS[way](layer, x)
    with pytest.raises(RuntimeError, match="used again in training before the backward of its first use"):
        WAYS[way](layer, y)
    assert_same(bytes_of(layer), before)
    y.sum().backward()
    assert layer.step == 1


def twice(layer: Any, around: Around, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = around(layer, torch.tanh(around(layer, x)))
    return y


def within(layer: Any, around: Around, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = around(lambda given: layer(torch.tanh(layer(given))), x)
    return y


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("uses", [twice, within])
@pytest.mark.parametrize("bits", [0, 6])
def test_a_reused_layer_under_checkpoints(oracle: Room, way: str, uses: Around, bits: int) -> None:
    plain = oracle.make(in_features=IN, out_features=IN, reuse=True, act_save_bits=bits)
    checkpointed = twin(plain)
    for step in range(3):
        gradients = []
        for layer, around in ((plain, plainly), (checkpointed, WAYS[way])):
            x = oracle.tensor(4, IN, seed=step).requires_grad_()
            uses(layer, around, x).square().sum().backward()
            assert x.grad is not None
            gradients.append(x.grad)
        assert checkpointed.step == plain.step == step + 1, "one update after the last backward"
        if bits and uses is within:
            # Uses that one checkpoint holds are numbered backwards in it, and rounded by each other's numbers.
            return
        assert torch.equal(*gradients)
    assert_same(bytes_of(checkpointed), bytes_of(plain))


# torch 2.11 complains when it lets go of the checkpoint whose backward was refused.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_second_backward_through_a_checkpoint_is_refused(oracle: Room) -> None:
    for way in WAYS:
        layer = oracle.make()
        loss = WAYS[way](layer, oracle.tensor(4, IN).requires_grad_()).sum()
        loss.backward(retain_graph=True)
        after = bytes_of(layer)
        with pytest.raises(RuntimeError, match=r"already been updated|have changed since"):
            loss.backward()
        assert_same(bytes_of(layer), after)
