"""Options of counter layers: each does what it says, in the reference, on host tensors and on the torch device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from memtrain_cl import memory_report
from memtrain_cl.bridge import refresh_host
from memtrain_cl.device import Device, use_device
from memtrain_cl.errors import NotFinite
from memtrain_cl.program import Kernel
from memtrain_cl.torch_device.fallback import strict
from tests.layer_cases import IN, OUT, assert_same
from tests.nn_cases import ROOMS, Room, bytes_of, room_of, twin

pytestmark = pytest.mark.device


@pytest.fixture(params=ROOMS)
def room(request: pytest.FixtureRequest, device: Device) -> Room:
    return room_of(request.param, device)


@pytest.fixture
def oracle(device: Device) -> Room:
    return room_of("reference", device)


@pytest.fixture(params=["host", "opencl", "discrete"])
def cached(request: pytest.FixtureRequest, device: Device) -> Iterator[Room]:
    """The rooms of OpenCL; "discrete": host tensors whose layers live on the device between steps."""
    apart = device.with_capabilities(unified_memory=False)
    with use_device(apart if request.param == "discrete" else device):
        yield room_of("host" if request.param == "discrete" else request.param, device)


def step(layer: Any, room: Room, number: int, rows: int = 6) -> torch.Tensor:
    """One step on data that depends on its number; the input's gradient, on the host."""
    x = room.tensor(rows, layer.in_features, seed=number).requires_grad_()
    layer(x).backward(room.tensor(rows, layer.out_features, seed=500 + number))
    assert x.grad is not None
    return x.grad.cpu()


def saved_by(run: Callable[[], Any]) -> list[torch.Tensor]:
    """The tensors that a forward keeps for its backward."""
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return saved


# ---- saved inputs ----


@pytest.mark.parametrize("bits", [2, 4, 5, 8, 9, 15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bytes_of_a_saved_input(oracle: Room, bits: int, dtype: torch.dtype) -> None:
    rows, length = 12, 64
    layer = oracle.make(in_features=length, act_save_bits=bits)
    x = oracle.tensor(rows, length).to(dtype).requires_grad_()
    saved = saved_by(lambda: layer(x))
    stored = 4 if bits <= 4 else 8 if bits <= 8 else 16
    assert 8 * sum(tensor.nbytes for tensor in saved) == rows * (stored * length + 16)
    layer.act_save_bits = 0
    (whole,) = saved_by(lambda: layer(x))
    assert whole.dtype == dtype
    assert whole.data_ptr() == x.data_ptr(), "the input itself"


def test_what_is_saved_follows_from_seed_and_step(room: Room, oracle: Room) -> None:
    layer, twin_there = room.make(act_save_bits=4), oracle.make(act_save_bits=4)
    twin_there.load_state_dict(bytes_of(layer))
    for number in range(2):
        layer.step = twin_there.step = number
        saved = [
            saved_by(functools.partial(each, x))
            for each, x in ((layer, room.tensor(5, IN)), (twin_there, oracle.tensor(5, IN)))
        ]
        for ours, theirs in zip(*saved, strict=True):
            assert torch.equal(ours.cpu(), theirs)


def test_the_update_works_with_the_saved_copy(room: Room) -> None:
    layer = room.make(act_save_bits=4)
    plain = twin(layer)
    plain.act_save_bits = 0
    x, grad_out = room.tensor(2, 5, IN), room.tensor(2, 5, OUT, seed=1)
    codes, scale = saved_by(lambda: layer(x))
    restored = layer.ops.restore_rows(codes, scale, 4, (10, IN))
    assert 0 < float((restored - x.reshape(10, IN)).abs().max()) <= float(scale.float().max()) * 1.01
    for each, given in ((layer, x), (plain, restored.reshape(2, 5, IN))):
        leaf = given.clone().requires_grad_()
        each(leaf).backward(grad_out)
        assert leaf.grad is not None
        assert torch.equal(leaf.grad.cpu(), each_gradient(plain, grad_out)) or each is plain
    assert_same(bytes_of(layer), bytes_of(plain))


def each_gradient(layer: Any, grad_out: torch.Tensor) -> torch.Tensor:
    """The input's gradient as the layer's product makes it, on the host."""
    rows = grad_out.reshape(-1, OUT)
    gradient: torch.Tensor = layer.ops.counter_grad_input(rows, layer.state, layer.scale, IN, C=layer.C, packed=True)
    return gradient.reshape(*grad_out.shape[:-1], IN).cpu()


@pytest.mark.parametrize("shape", [(0, IN), (IN,), (2, 3, IN)])
def test_shapes_of_saved_inputs(room: Room, shape: tuple[int, ...]) -> None:
    layer = room.make(act_save_bits=4)
    x = room.tensor(*shape).requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape
    assert layer.step == 1


@pytest.mark.parametrize("mode", ["eval", "update_enabled"])
def test_without_an_update_nothing_is_saved(oracle: Room, mode: str) -> None:
    layer = oracle.make()
    if mode == "eval":
        layer.eval()
    else:
        layer.update_enabled = False
    assert saved_by(lambda: layer(oracle.tensor(3, IN).requires_grad_())) == []


def test_an_input_that_is_not_finite_is_not_saved_in_few_bits(device: Device, oracle: Room) -> None:
    for each in (oracle, room_of("host", device)):
        layer = each.make(act_save_bits=4)
        before = bytes_of(layer)
        x = each.tensor(3, IN)
        x[1, 2] = float("inf")
        with pytest.raises(NotFinite, match="row 1"):
            layer(x)
        assert_same(bytes_of(layer), before)
        layer(each.tensor(3, IN)).sum().backward()


# ---- int8 ----

INT8: dict[str, dict[str, Any]] = {
    "both": {"forward_compute": "int8", "update_compute": "int8"},
    "forward": {"forward_compute": "int8"},
    "update": {"update_compute": "int8"},
    "both-saved": {"forward_compute": "int8", "update_compute": "int8", "act_save_bits": 6},
    "both-tiled": {"forward_compute": "int8", "update_compute": "int8", "tile_rows": 5},
    "both-summed": {"forward_compute": "int8", "update_compute": "int8", "accumulate": 2},
    "both-reused": {"forward_compute": "int8", "update_compute": "int8", "reuse": True},
}


@pytest.mark.parametrize("kind", ["compact", "packed"])
@pytest.mark.parametrize("name", [name for name in INT8 if name.startswith("both")])
def test_layers_in_int8_are_the_reference_byte_for_byte(room: Room, oracle: Room, name: str, kind: str) -> None:
    layer, expected = room.make(kind, **INT8[name]), oracle.make(kind, **INT8[name])
    expected.load_state_dict(bytes_of(layer))
    for number in range(4):
        y, wanted = (each.eval()(here.tensor(6, IN)) for each, here in ((layer, room), (expected, oracle)))
        assert torch.equal(y.cpu(), wanted)
        layer.train()
        expected.train()
        assert torch.equal(step(layer, room, number), step(expected, oracle, number))
    assert_same(bytes_of(layer), bytes_of(expected))
    assert int(layer.update_events) > 0


@pytest.mark.parametrize("options", [{}, {"tile_rows": 2}, {"tile_rows": 2, "accumulate": 2}])
def test_a_gradient_of_tiles_is_quantised_once(
    device: Device, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    enqueue = Kernel.enqueue

    def watched(self: Kernel, *arguments: Any) -> Any:
        launched.append(self.label.partition("(")[0])
        return enqueue(self, *arguments)

    here = room_of("opencl", device)
    layer = here.make(update_compute="int8", **options)
    x, grad_out = here.tensor(6, IN), here.tensor(6, OUT, seed=1)
    monkeypatch.setattr(Kernel, "enqueue", watched)
    for _ in range(2):
        launched.clear()
        layer(x).backward(grad_out)
        assert launched.count("stochastic.scaled_transposed") == 2
        assert launched.count("matmul_int8.matmul_int8") == -(-OUT // options.get("tile_rows", OUT))


@pytest.mark.parametrize("name", INT8)
def test_int8_is_near_the_products_of_floats(oracle: Room, name: str) -> None:
    layer, plain = oracle.make(in_features=64, **INT8[name]), oracle.make(in_features=64)
    plain.load_state_dict(layer.state_dict())
    x, grad_out = oracle.tensor(50, 64).requires_grad_(), oracle.tensor(50, OUT, seed=1)
    y, expected = layer(x), plain(x)
    assert float((y - expected).detach().norm() / expected.detach().norm()) < 0.02
    y.backward(grad_out)
    ours, x.grad = x.grad, None
    expected.backward(grad_out)
    assert ours is not None
    assert x.grad is not None
    assert float((ours - x.grad).norm() / x.grad.norm()) < 0.02
    if layer.step:
        assert float((layer.codes() != plain.codes()).float().mean()) < 0.2


def test_uses_and_parts_round_their_gradients_differently(oracle: Room) -> None:
    x, grad_out = oracle.tensor(5, IN), oracle.tensor(5, OUT, seed=1)
    layer = oracle.make(update_compute="int8", accumulate=3)
    sums = []
    for _ in range(2):
        layer(x).backward(grad_out)
        sums.append(layer._sum.values.clone())
    assert not torch.equal(sums[1], 2 * sums[0])


# ---- the rule ----

RULES: dict[str, dict[str, Any]] = {
    "lagged": {"rms_mode": "lagged"},
    "lazy": {"scale_rebase": "lazy"},
    "ternary": {"pulse_mode": "ternary"},
    "lazy-ternary-clip": {"scale_rebase": "lazy", "pulse_mode": "ternary", "local_grad_clip": 0.5},
    "no-rms": {"use_rms": False, "pulse_mode": "ternary"},
    "decimated": {"decimate_updates": True},
}


@pytest.mark.parametrize("name", RULES)
def test_rules_reach_the_update(room: Room, oracle: Room, name: str) -> None:
    layer, expected, plain = (
        each.make(**options) for each, options in ((room, RULES[name]), (oracle, RULES[name]), (oracle, {}))
    )
    for each in (expected, plain):
        each.load_state_dict({key: value for key, value in bytes_of(layer).items() if key != "clock"})
    for number in range(3):
        gradient = room.tensor(OUT, IN, seed=number)
        layer.apply_update_from_grad_w(gradient)
        for each in (expected, plain):
            each.apply_update_from_grad_w(gradient.cpu())
    assert_same(bytes_of(layer), bytes_of(expected))
    assert name == "decimated" or not torch.equal(layer.state.cpu(), plain.state)


@pytest.mark.parametrize("name", [*RULES, "proxy"])
def test_rules_in_training(cached: Room, oracle: Room, name: str) -> None:
    options = {"rms_mode": "proxy"} if name == "proxy" else RULES[name]
    layer, expected = cached.make(**options), oracle.make(**options)
    expected.load_state_dict(bytes_of(layer))
    for number in range(3):
        step(layer, cached, number)
        step(expected, oracle, number)
    # Products sum in another order, so a counter may now and then land a quantum aside.
    assert float((layer.codes().cpu() != expected.codes()).float().mean()) <= 0.02
    torch.testing.assert_close(layer.scale.cpu(), expected.scale, rtol=1e-3, atol=0.0)


def test_the_proxy_of_a_sum_is_the_sum_of_proxies(room: Room) -> None:
    layer, plain = room.make(rms_mode="proxy", accumulate=2), room.make(rms_mode="proxy")
    plain.load_state_dict(layer.state_dict())
    squares, gradients = [], []
    for part in range(2):
        x, grad_out = room.tensor(4, IN, seed=part), room.tensor(4, OUT, seed=9 + part)
        layer(x).backward(grad_out)
        squares.append(layer.ops.proxy_moments(grad_out, x))
        gradients.append(layer.ops.grad_weight(grad_out, x))
    plain.ops.counter_update_(
        plain.state,
        plain.scale,
        plain.v,
        gradients[0] + gradients[1],
        plain.counts,
        plain.rule(),
        seed=plain.step_seed(),
        g_sq=squares[0] + squares[1],
    )
    for name in ("state", "scale", "v"):
        assert torch.equal(getattr(layer, name), getattr(plain, name)), name
    with pytest.raises(RuntimeError, match="expected rms_mode exact or lagged for a given gradient, got proxy"):
        layer.apply_update_from_grad_w(room.tensor(OUT, IN))


# ---- decimation ----


def test_updates_become_rarer_as_weights_settle(room: Room) -> None:
    layer = room.make(decimate_updates=True, lr=1e-9, lr_scale=0.0)
    assert int(layer.decimation_period) == 1
    periods, moved = [], []
    for number in range(20):
        before = bytes_of(layer)["v"]
        step(layer, room, number)
        periods.append(int(layer.decimation_period))
        moved.append(not torch.equal(bytes_of(layer)["v"], before))
    assert periods == [8] * 20, "nothing flips at this rate"
    assert [number for number, was in enumerate(moved) if was] == [0, 8, 16]
    assert layer.step == 20
    assert int(room.make().decimation_period) == 1


def test_a_rare_update_makes_up_for_those_left_out(oracle: Room) -> None:
    layer, plain = oracle.make(decimate_updates=True), oracle.make(lr=8 * 0.5)
    layer.clock.copy_(torch.tensor([8, 7, 0, 0]))
    plain.load_state_dict({key: value for key, value in layer.state_dict().items() if key != "clock"})
    gradient = oracle.tensor(OUT, IN)
    layer.apply_update_from_grad_w(gradient)
    plain.apply_update_from_grad_w(gradient)
    assert torch.equal(layer.state, plain.state)
    assert int(layer.decimation_period) == 1, "many weights flip at this rate"


def test_decimation_is_switched_and_counts_a_sum_once(oracle: Room) -> None:
    layer = oracle.make(accumulate=2)
    assert "clock" not in layer.state_dict()
    layer.decimate_updates = True
    assert layer.state_dict()["clock"].tolist() == [1, 0, 0, 0]
    layer.clock[0] = 4
    for number in range(8):
        step(layer, oracle, number)
    assert layer.step == 4
    assert int(layer.clock[1]) == 0
    assert int(layer.update_events) > 0
    layer.decimate_updates = False
    assert "clock" not in layer.state_dict()


# ---- cache ----


def unpacked(layer: Any) -> torch.Tensor:
    """What a layer's cache holds, on the host."""
    values = layer.cache_buffer()
    refresh_host(values)
    return values.cpu().to(torch.int8)  # type: ignore[no-any-return]


@pytest.mark.parametrize("patch", ["full", "flip"])
@pytest.mark.parametrize("mode", ["int8", "fp16"])
@pytest.mark.parametrize("kind", ["compact", "packed"])
def test_a_cache_changes_no_byte(cached: Room, kind: str, mode: str, patch: str) -> None:
    layer = cached.make(kind, cache_mode=mode, cache_patch=patch)
    plain = twin(layer)
    plain.cache_mode = "none"
    for number in range(4):
        with strict():
            ours = step(layer, cached, number)
        assert torch.equal(ours, step(plain, cached, number))
        if number == 1:
            for each in (layer, plain):
                each.state[3].fill_(0)
        if number == 2:
            for each in (layer, plain):
                each.load_state_dict(each.state_dict())
        assert torch.equal(unpacked(layer), layer.visible_ternary().cpu())
    assert_same(bytes_of(layer), bytes_of(plain))
    assert memory_report(layer).totals["cache"] == layer._cache.nbytes == OUT * IN * (1 if mode == "int8" else 2)


@pytest.mark.parametrize("patch", ["full", "flip"])
@pytest.mark.parametrize("options", [*INT8.values(), {"accumulate": 2}, {"tile_rows": 3}, {"decimate_updates": True}])
def test_a_cache_beside_other_options(oracle: Room, patch: str, options: dict[str, Any]) -> None:
    layer = oracle.make(cache_mode="int8", cache_patch=patch, **options)
    plain = twin(layer)
    plain.cache_mode = "none"
    for number in range(4):
        assert torch.equal(step(layer, oracle, number), step(plain, oracle, number))
    assert torch.equal(unpacked(layer), layer.visible_ternary())
    assert_same(bytes_of(layer), bytes_of(plain))


def test_a_cache_is_made_anew_where_it_must_be(cached: Room) -> None:
    layer = cached.make(cache_mode="int8")
    step(layer, cached, 0)
    assert "cache" not in " ".join(layer.state_dict())
    assert twin(layer)._cache.nbytes == 0
    layer.to(cached.place)
    assert layer._cache.nbytes == 0
    with torch.inference_mode():
        y = layer(cached.tensor(3, IN))
    assert torch.equal(y.cpu(), layer.eval()(cached.tensor(3, IN)).cpu())
    layer.train()
    step(layer, cached, 1)
    layer.cache_mode = "fp16"
    step(layer, cached, 2)
    assert layer.cache_buffer().dtype == torch.float16
    layer.load_dense_weight(cached.tensor(OUT, IN))
    assert torch.equal(unpacked(layer), layer.visible_ternary().cpu())
    layer.cache_mode = "none"
    step(layer, cached, 3)
    assert layer._cache.nbytes == 0
