"""Several backwards and one update: accumulate=k, layers used more than once in a forward, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memtrain_cl import memory_report
from memtrain_cl.device import Device
from tests.layer_cases import IN, OUT, assert_same
from tests.nn_cases import ROOMS, Room, bytes_of, room_of, twin

pytestmark = pytest.mark.device


@pytest.fixture(params=ROOMS)
def room(request: pytest.FixtureRequest, device: Device) -> Room:
    return room_of(request.param, device)


@pytest.fixture
def oracle(device: Device) -> Room:
    return room_of("reference", device)


def backward(layer: Any, room: Room, step: int, rows: int = 5) -> torch.Tensor:
    """One forward and backward on data that depends on the step; the weight's gradient, by the layer's own product."""
    x, grad_out = room.tensor(rows, IN, seed=step), room.tensor(rows, OUT, seed=1000 + step)
    layer(x).backward(grad_out)
    gradient: torch.Tensor = layer.ops.grad_weight(grad_out, x)
    return gradient


def sum_of(gradients: list[torch.Tensor]) -> torch.Tensor:
    """In the order of the list."""
    total = gradients[0]
    for gradient in gradients[1:]:
        total = total + gradient
    return total


# ---- accumulate ----


@pytest.mark.parametrize("kind", ["compact", "packed", "packed-lagged", "packed-clip"])
def test_the_update_follows_the_last_backward_with_the_sum(room: Room, kind: str) -> None:
    layer, plain = room.make(kind, accumulate=4), room.make(kind)
    plain.load_state_dict(layer.state_dict())
    for update in range(2):
        gradients = []
        for part in range(4):
            before = bytes_of(plain)
            assert (layer.step, int(layer.update_events)) == (update, int(plain.update_events))
            assert torch.equal(layer.state.cpu(), before["state"])
            gradients.append(backward(layer, room, 4 * update + part))
        plain.apply_update_from_grad_w(sum_of(gradients))
        assert_same(bytes_of(layer), bytes_of(plain))
    assert int(layer.update_events) == int(plain.update_events) > 0


def test_parts_make_the_update_of_one_large_batch(room: Room) -> None:
    layer, plain = room.make(accumulate=4), room.make()
    plain.load_state_dict(layer.state_dict())
    x, grad_out = room.tensor(20, IN), room.tensor(20, OUT, seed=1)
    for part in range(4):
        rows = slice(5 * part, 5 * part + 5)
        layer(x[rows]).backward(grad_out[rows])
    plain(x).backward(grad_out)
    torch.testing.assert_close(layer.scale, plain.scale, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(layer.v, plain.v, rtol=1e-5, atol=0.0)
    different = (layer.codes().cpu() != plain.codes().cpu()).float().mean()
    assert float(different) <= 0.01, "a sum in another order may round a counter otherwise"


@pytest.mark.parametrize("tile_rows", [1, 5, OUT, 99])
def test_tiles_of_a_sum_make_the_same_bytes(device: Device, tile_rows: int) -> None:
    room = room_of("host", device)
    layer, tiled = room.make(accumulate=2), room.make(accumulate=2, tile_rows=tile_rows)
    tiled.load_state_dict(layer.state_dict())
    for step in range(4):
        for one in (layer, tiled):
            backward(one, room, step)
    assert_same(bytes_of(tiled), bytes_of(layer))


def test_the_sum_is_the_memory_that_the_report_states(room: Room) -> None:
    layer = room.make(in_features=64, out_features=48, accumulate=3)
    claimed = memory_report(layer).totals["accumulation"]
    assert claimed == 4 * 64 * 48
    assert layer._sum.nbytes == 0
    for step in range(5):
        layer(room.tensor(3, 64, seed=step)).sum().backward()
        assert layer._sum.nbytes == claimed
        assert layer._sum.values.device == room.place
    assert memory_report(layer).totals["accumulation"] == claimed


def test_forwards_first_then_backwards(oracle: Room) -> None:
    layer, plain = oracle.make(accumulate=3), oracle.make(accumulate=3)
    plain.load_state_dict(layer.state_dict())
    batches = [oracle.tensor(4, IN, seed=part) for part in range(3)]
    losses = [layer(x).square().sum() for x in batches]
    with pytest.raises(RuntimeError, match="accumulate=k"):
        layer(batches[0])
    for loss in reversed(losses):
        loss.backward()
    for x in reversed(batches):
        plain(x).square().sum().backward()
    assert layer.step == plain.step == 1
    assert_same(bytes_of(layer), bytes_of(plain))
    sum(layer(x).square().sum() for x in batches).backward()
    assert layer.step == 2


def test_uses_in_one_forward_count_each(oracle: Room) -> None:
    layer = oracle.make(in_features=IN, out_features=IN, accumulate=4)
    for step in range(4):
        layer(torch.tanh(layer(oracle.tensor(3, IN, seed=step)))).sum().backward()
        assert layer.step == (step + 1) // 2


def test_a_row_that_is_not_finite_in_one_part_is_skipped_once(room: Room) -> None:
    layer = room.make(accumulate=2)
    before = bytes_of(layer)
    for part, value in enumerate((float("inf"), 1.0)):
        grad_out = room.tensor(4, OUT, seed=part).cpu()
        grad_out[1, 7] = value
        layer(room.tensor(4, IN, seed=part)).backward(grad_out.to(room.place))
    after = bytes_of(layer)
    assert int(layer.skipped_updates) == 1
    assert torch.equal(after["state"][7], before["state"][7])
    assert not torch.equal(after["state"][6], before["state"][6])
    backward(layer, room, 0)
    backward(layer, room, 1)
    assert int(layer.skipped_updates) == 1, "the next sum begins anew"


def test_parts_without_tokens(oracle: Room) -> None:
    layer, plain = oracle.make(accumulate=3), oracle.make()
    plain.load_state_dict(layer.state_dict())
    gradients = []
    for part, rows in enumerate((0, 4, 0)):
        gradients.append(backward(layer, oracle, part, rows))
    plain.apply_update_from_grad_w(gradients[1])
    assert_same(bytes_of(layer), bytes_of(plain))
    before = bytes_of(layer)
    for part in range(3):
        backward(layer, oracle, part, 0)
    assert layer.step == 2
    assert torch.equal(layer.state, before["state"])
    assert torch.equal(layer.v, before["v"])


def test_frozen_forwards_take_no_part(oracle: Room) -> None:
    layer = oracle.make(accumulate=2)
    backward(layer, oracle, 0)
    layer.update_enabled = False
    x = oracle.tensor(4, IN).requires_grad_()
    layer(x).sum().backward()
    layer(x).sum().backward()
    layer.update_enabled = True
    layer.eval()
    layer(x).sum().backward()
    layer.train()
    assert layer.step == 0
    backward(layer, oracle, 1)
    assert layer.step == 1


def test_a_lower_number_takes_effect_at_the_next_backward(oracle: Room) -> None:
    layer = oracle.make(accumulate=8)
    for step in range(3):
        backward(layer, oracle, step)
    layer.accumulate = 2
    backward(layer, oracle, 3)
    assert layer.step == 1
    backward(layer, oracle, 4)
    assert layer.step == 1


def test_a_given_gradient_does_not_break_into_a_sum(oracle: Room) -> None:
    layer = oracle.make(accumulate=2)
    backward(layer, oracle, 0)
    before = bytes_of(layer)
    with pytest.raises(RuntimeError, match="no sum of gradients under way"):
        layer.apply_update_from_grad_w(torch.randn(OUT, IN))
    assert_same(bytes_of(layer), before)
    backward(layer, oracle, 1)
    layer.apply_update_from_grad_w(torch.randn(OUT, IN))
    assert layer.step == 2


# ---- reuse ----


class Tied(nn.Module):
    """A layer that is used at two depths and twice side by side."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(torch.tanh(self.layer(x))) * torch.sigmoid(self.layer(x.flip(0)))
        return y


def test_all_uses_make_one_update(room: Room) -> None:
    layer = room.make(in_features=IN, out_features=IN, reuse=True)
    weight = layer.dense_weight().detach().cpu().requires_grad_()
    x = room.tensor(4, IN)
    for _ in range(2):
        leaf = x.clone().detach().requires_grad_()
        dense = leaf.detach().cpu().requires_grad_()
        y = Tied(layer)(leaf)
        y.square().sum().backward()
        expected = torch.tanh(dense @ weight.t()) @ weight.t() * torch.sigmoid(dense.flip(0) @ weight.t())
        expected.square().sum().backward()
        assert leaf.grad is not None
        assert dense.grad is not None
        torch.testing.assert_close(leaf.grad.cpu(), dense.grad, rtol=1e-4, atol=1e-4)
        weight = layer.dense_weight().detach().cpu().requires_grad_()
    assert layer.step == 2


def test_the_sum_of_uses_is_that_of_the_weights_gradient(oracle: Room) -> None:
    layer, plain = (oracle.make(in_features=IN, out_features=IN, reuse=reuse) for reuse in (True, False))
    plain.load_state_dict(layer.state_dict())
    weight = layer.dense_weight().requires_grad_()
    x = oracle.tensor(4, IN)
    Tied(layer)(x).square().sum().backward()
    (torch.tanh(x @ weight.t()) @ weight.t() * torch.sigmoid(x.flip(0) @ weight.t())).square().sum().backward()
    assert weight.grad is not None
    plain.apply_update_from_grad_w(weight.grad)
    torch.testing.assert_close(layer.scale, plain.scale, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(layer.v, plain.v, rtol=1e-5, atol=0.0)
    assert float((layer.codes() != plain.codes()).float().mean()) <= 0.01


def test_the_order_of_uses_is_that_of_their_backwards(room: Room) -> None:
    layer, plain = room.make(reuse=True), room.make()
    plain.load_state_dict(layer.state_dict())
    inputs = [room.tensor(4, IN, seed=part) for part in range(3)]
    outgoing = [room.tensor(4, OUT, seed=10 + part) for part in range(3)]
    outputs = [layer(x) for x in inputs]
    torch.autograd.backward(outputs, outgoing)
    gradients = [layer.ops.grad_weight(g, x) for g, x in zip(outgoing, inputs, strict=True)]
    plain.apply_update_from_grad_w(sum_of(gradients[::-1]))
    assert_same(bytes_of(layer), bytes_of(plain))


def test_a_single_use_of_a_reusable_layer_is_a_plain_step(room: Room) -> None:
    layer, plain = room.make(reuse=True), room.make()
    plain.load_state_dict(layer.state_dict())
    for step in range(2):
        for each in (layer, plain):
            backward(each, room, step)
    assert_same(bytes_of(layer), bytes_of(plain))
    assert layer._sum.nbytes == 0, "no sum was needed"


def test_losses_of_their_own_share_the_update(oracle: Room) -> None:
    layer = oracle.make(reuse=True)
    first, second = (layer(oracle.tensor(4, IN, seed=seed)).sum() for seed in (1, 2))
    first.backward()
    assert layer.step == 0
    second.backward()
    assert layer.step == 1


def test_a_dropped_use_ends_the_forward(oracle: Room) -> None:
    layer, plain = oracle.make(reuse=True), oracle.make()
    plain.load_state_dict(layer.state_dict())
    unused = layer(oracle.tensor(4, IN, seed=9))
    layer(oracle.tensor(4, IN)).sum().backward()
    assert layer.step == 0, "the other use may still come"
    del unused
    plain(oracle.tensor(4, IN)).sum().backward()
    y = layer(oracle.tensor(4, IN, seed=1))
    assert layer.step == 1, "it cannot any more"
    assert_same(bytes_of(layer), bytes_of(plain))
    y.sum().backward()
    plain(oracle.tensor(4, IN, seed=1)).sum().backward()
    assert_same(bytes_of(layer), bytes_of(plain))


def test_reuse_and_accumulate_count_forwards(oracle: Room) -> None:
    layer = oracle.make(in_features=IN, out_features=IN, reuse=True, accumulate=2)
    plain = twin(layer)
    for step in range(4):
        Tied(layer)(oracle.tensor(3, IN, seed=step)).sum().backward()
        assert layer.step == (step + 1) // 2
    unused = layer(oracle.tensor(3, IN))
    layer(oracle.tensor(3, IN)).sum().backward()
    del unused
    assert layer.step == 2
    layer(oracle.tensor(3, IN)).sum().backward()
    assert layer.step == 3
    sum(Tied(plain)(oracle.tensor(3, IN, seed=step)).sum() for step in range(2)).backward()
    assert plain.step == 0, "one forward with all uses in it counts once"


# ---- rounding of the uses ----


def test_uses_round_their_saved_inputs_differently(oracle: Room) -> None:
    layer = oracle.make(reuse=True, act_save_bits=2)
    x = oracle.tensor(4, IN)
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = [layer(x), layer(x)]
    codes = [tensor for tensor in saved if tensor.dtype == torch.uint8]
    assert len(codes) == 2
    assert not torch.equal(*codes)
    del outputs
    saved.clear()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)
    assert torch.equal(saved[0], codes[0]), "what was dropped leaves no trace"


# ---- what is refused ----


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"reuse": True}])
def test_a_second_backward_through_a_graph_is_refused(room: Room, options: dict[str, Any]) -> None:
    layer = room.make(**options)
    loss = layer(room.tensor(4, IN)).sum()
    loss.backward(retain_graph=True)
    before = bytes_of(layer)
    with pytest.raises(RuntimeError, match="already been updated by a backward through this graph"):
        loss.backward()
    assert_same(bytes_of(layer), before)


@pytest.mark.parametrize("stale", ["training", "eval", "loaded"])
def test_a_backward_that_meets_other_weights_is_refused(room: Room, stale: str) -> None:
    layer = room.make()
    x = room.tensor(4, IN).requires_grad_()
    if stale == "eval":
        layer.eval()
    loss = layer(x).sum()
    layer.train()
    if stale == "eval":
        layer(x).sum().backward()
    elif stale == "training":
        layer.apply_update_from_grad_w(room.tensor(OUT, IN))
    else:
        layer.load_state_dict(room.make().state_dict())
    before = bytes_of(layer)
    with pytest.raises(RuntimeError, match="weights of this counter layer have changed since this forward"):
        loss.backward()
    assert_same(bytes_of(layer), before)


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"reuse": True}])
def test_gradients_of_gradients_are_refused(oracle: Room, options: dict[str, Any]) -> None:
    layer = oracle.make(**options)
    x = oracle.tensor(4, IN).requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    before = bytes_of(layer)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
    assert_same(bytes_of(layer), before)


def test_replicas_of_data_parallel_are_refused(oracle: Room) -> None:
    model = nn.Sequential(oracle.make())
    with pytest.raises(RuntimeError, match=r"use torch\.nn\.parallel\.DistributedDataParallel"):
        model[0]._replicate_for_data_parallel()


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"reuse": True}])
def test_an_update_without_a_gradient_adds_none_up(oracle: Room, options: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="expected update_from_io as None or False beside accumulate"):
        oracle.make(update_from_io=True, **options)
    layer = oracle.make(update_from_io=True)
    for name, value in options.items():
        setattr(layer, name, value)
    before = layer.state.clone()
    with pytest.raises(RuntimeError, match="expected update_from_io as None or False"):
        layer(oracle.tensor(2, IN))
    assert torch.equal(layer.state, before)
