"""The state of counter layers: live buffers, saving and loading, copies, resuming bit for bit."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from memtrain_cl import reference
from memtrain_cl.device import Device, use_device
from memtrain_cl.nn import CompactCounterLinear, layer_from_state, layer_state, load_layer_state
from tests.layer_cases import IN, MAIN, OUT, assert_same, buffers, make, train, twins


@pytest.fixture(params=["shared", "discrete"])
def way(request: pytest.FixtureRequest, device: Device) -> Iterator[Device]:
    """The device as it is, and as one that keeps the layer's state in memory of its own."""
    twin = device if request.param == "shared" else device.with_capabilities(unified_memory=False)
    with use_device(twin):
        yield twin


def saved_and_loaded(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_equal_layers(left: CompactCounterLinear, right: CompactCounterLinear) -> None:
    assert (left.seed, left.step) == (right.seed, right.step)
    left_state, right_state = left.state_dict(), right.state_dict()
    assert_same(left_state, right_state)


# ---- live buffers ----


@pytest.mark.parametrize("kind", MAIN)
def test_reading_after_a_step_shows_the_step(way: Device, kind: str) -> None:
    # The reference works on host memory, so what it shows is current by construction.
    layer, oracle = twins(kind)
    gradient = torch.randn(OUT, IN)
    for each in (layer, oracle):
        each.apply_update_from_grad_w(gradient)
    assert torch.equal(layer.scale, oracle.scale)
    assert torch.equal(layer.codes(), oracle.codes())
    assert torch.equal(layer.dense_weight(), oracle.dense_weight())
    assert layer.state_statistics() == pytest.approx(oracle.state_statistics())
    assert int(layer.update_events) == int(oracle.update_events) > 0
    for each in (layer, oracle):
        each.apply_update_from_grad_w(gradient)
    assert_same(layer.state_dict(), oracle.state_dict())
    for each in (layer, oracle):
        each.apply_update_from_grad_w(gradient)
    assert_same(dict(layer.named_buffers()), dict(oracle.named_buffers()))


@pytest.mark.parametrize("name", ["state", "scale", "v"])
def test_what_is_written_counts_at_the_next_use(way: Device, name: str) -> None:
    layer, oracle = twins("packed")
    gradient = torch.randn(OUT, IN)
    for step in range(3):
        for each in (layer, oracle):
            each.apply_update_from_grad_w(gradient)
            chance = torch.Generator().manual_seed(step)
            if name == "state":
                codes = torch.randint(0, 63, (1, IN), generator=chance, dtype=torch.uint8)
                each.state[2:3] = reference.pack_codes(codes)
            else:
                getattr(each, name)[2].copy_(torch.rand(1, generator=chance))
        assert torch.equal(layer.dense_weight(), oracle.dense_weight())
    assert_same(buffers(layer), buffers(oracle))
    assert torch.equal(layer.eval()(torch.eye(IN)), oracle.dense_weight().t())


def test_a_layer_moves_between_devices(device: Device) -> None:
    layer, oracle = twins("packed")
    own = device.with_capabilities(unified_memory=False)
    for where in (own, device, own, device):
        gradient = torch.randn(OUT, IN)
        with use_device(where):
            layer.apply_update_from_grad_w(gradient)
        oracle.apply_update_from_grad_w(gradient)
    assert_same(buffers(layer), buffers(oracle))


# ---- state_dict ----


def test_keys_and_types() -> None:
    for kind, names in (("compact", ["state", "scale"]), ("packed", ["state", "scale", "v", "s_base"])):
        layer = make(kind, ops=reference)
        assert list(layer.published_state_dict()) == names
        assert set(layer.state_dict()) == {*names, "seed", "step"}
        assert all(isinstance(value, torch.Tensor) for value in layer.state_dict().values())
        assert layer.state.dtype == torch.uint8
        assert layer.scale.dtype == torch.float32


@pytest.mark.parametrize("kind", MAIN)
def test_resuming_continues_bit_for_bit(way: Device, kind: str) -> None:
    live = make(kind)
    train(live, 5)
    checkpoint = saved_and_loaded(live.state_dict())
    weights_only = saved_and_loaded(live.published_state_dict())
    train(live, 5, start=5)
    resumed, published = make(kind), make(kind)
    resumed.load_state_dict(checkpoint)
    published.load_state_dict(weights_only)
    for layer in (resumed, published):
        train(layer, 5, start=5)
    assert_equal_layers(live, resumed)
    assert not torch.equal(published.state, live.state), "without seed and step the roundings are others"
    assert published.step == 5


def test_a_published_checkpoint_loads_strictly(way: Device) -> None:
    source, layer = make(), make()
    train(source, 2)
    train(layer)
    seed = layer.seed
    result = layer.load_state_dict(source.published_state_dict(), strict=True)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert (layer.seed, layer.step) == (seed, 1)
    assert_same(layer.published_state_dict(), source.published_state_dict())
    assert torch.equal(layer.dense_weight(), source.dense_weight())


def test_a_model_saves_and_loads_with_prefixes(way: Device) -> None:
    model = torch.nn.Sequential(make(), torch.nn.Linear(OUT, 3))
    train(model, 2)
    checkpoint = saved_and_loaded(model.state_dict())
    assert {"0.state", "0.seed", "1.weight"} <= checkpoint.keys()
    other = torch.nn.Sequential(make(), torch.nn.Linear(OUT, 3))
    other.load_state_dict(checkpoint)
    for each in (model, other):
        train(each, 1, start=2)
    assert_same(model.state_dict(), other.state_dict())


@pytest.mark.parametrize("assign", [False, True])
def test_types_survive_loading(way: Device, assign: bool) -> None:
    layer, oracle = twins("packed")
    layer.load_state_dict(saved_and_loaded(layer.state_dict()), assign=assign)
    gradient = torch.randn(OUT, IN)
    for each in (layer, oracle):
        each.apply_update_from_grad_w(gradient)
    assert_equal_layers(layer, oracle)
    if not assign:
        halved = {
            key: value.half() if value.is_floating_point() else value for key, value in oracle.state_dict().items()
        }
        layer.load_state_dict(halved)
        assert layer.scale.dtype == torch.float32
        assert torch.equal(layer.scale, oracle.scale.half().float())


FAULTS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor], str]] = {
    "rows": ("state", lambda t: t[:-1], r"state: expected uint8 \[12, 15\], got torch.uint8 \[11, 15\]"),
    "type": ("state", lambda t: t.float(), r"state: expected uint8 \[12, 15\], got torch.float32"),
    "scale": ("scale", lambda t: t[:, 0], r"scale: expected \[12, 1\], got \[12\]"),
    "v": ("v", lambda t: t[:5], r"v: expected \[12, 1\], got \[5, 1\]"),
    "s_base": ("s_base", lambda t: t[:5], r"s_base: expected \[12, 1\], got \[5, 1\]"),
    "code": ("state", lambda t: torch.full_like(t, 255), "state: expected codes below 63 for C=11, got 63"),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_checkpoint_that_does_not_fit_changes_nothing(way: Device, fault: str) -> None:
    name, change, message = FAULTS[fault]
    layer, other = make(), make()
    for each in (layer, other):
        train(each, 2)
    wrong = other.state_dict()
    wrong[name] = change(wrong[name])
    before, place = buffers(layer), (layer.seed, layer.step)
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(wrong)
    assert_same(buffers(layer), before)
    assert (layer.seed, layer.step) == place


@pytest.mark.parametrize(("saved", "own"), [(8, 11), (11, 8), (2, 1)])
def test_a_checkpoint_of_another_radix_is_refused(saved: int, own: int) -> None:
    # Codes of C=8 are all codes of C=11 too, with other meanings.
    layer = make(C=own, ops=reference)
    before = buffers(layer)
    for checkpoint in (make(C=saved, ops=reference).state_dict(), saved_and_loaded(make(C=saved).state_dict())):
        with pytest.raises(RuntimeError, match=f"expected a state with C={own}, got one with C={saved}"):
            layer.load_state_dict(checkpoint)
    assert_same(buffers(layer), before)


# ---- copies ----


@pytest.mark.parametrize("kind", MAIN)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_continue_bit_for_bit(way: Device, kind: str, how: str) -> None:
    layer = make(kind, tile_rows=5)
    train(layer, 2)
    pending = layer(torch.randn(2, IN))  # a copy has no forward of its own to wait for
    if how == "deepcopy":
        twin = copy.deepcopy(layer)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(layer))
    else:
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    del pending
    assert twin.hyper() == layer.hyper()
    assert twin.ops is layer.ops
    assert_equal_layers(twin, layer)
    train(twin)
    assert layer.step == 2, "the copy is on its own"
    train(layer)
    assert_equal_layers(twin, layer)


def test_moving_and_halving_keep_the_state(way: Device) -> None:
    layer = make()
    train(layer)
    before = buffers(layer)
    moves: list[Callable[[torch.nn.Sequential], torch.nn.Sequential]] = [
        lambda m: m.to("cpu"),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.float(),
    ]
    for move in moves:
        assert move(torch.nn.Sequential(layer))[0] is layer
        assert_same(buffers(layer), before)
        assert {name: buffer.dtype for name, buffer in layer.named_buffers()} == {
            name: buffer.dtype for name, buffer in before.items()
        }
    twin = make()
    twin.load_state_dict(layer.state_dict())
    for each in (layer, twin):
        train(each, 1, start=1)
    assert_equal_layers(layer, twin)


@pytest.mark.parametrize("kind", MAIN)
def test_layer_state_there_and_back(way: Device, kind: str) -> None:
    layer = make(kind, lr=0.25, tile_rows=3)
    train(layer, 2)
    state = layer_state(layer)
    assert (state.kind, state.seed, state.step) == (type(layer).__name__, layer.seed, 2)
    for twin in (layer_from_state(state), make(kind)):
        load_layer_state(twin, state)
        assert twin.hyper() == layer.hyper()
        assert_equal_layers(twin, layer)
    other = make(kind, in_features=IN + 4)
    before = buffers(other)
    with pytest.raises(ValueError, match=f"expected a layer with in_features={IN}"):
        load_layer_state(other, state)
    assert_same(buffers(other), before)
