"""Every option goes through files, copies and moves, and training goes on bit for bit."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memtrain_cl.device import Device
from memtrain_cl.export.packed import export_model, load_into, read_engine, verify_export
from memtrain_cl.nn import layer_from_state, layer_state, load_layer_state
from tests.layer_cases import IN, OUT, assert_same, make
from tests.nn_cases import ROOMS, Room, bytes_of, room_of

pytestmark = pytest.mark.device

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "proxy": {"rms_mode": "proxy"},
    "lagged": {"rms_mode": "lagged", "rms_beta": 0.5, "rms_eps": 0.1},
    "no-rms": {"use_rms": False},
    "lazy": {"scale_rebase": "lazy"},
    "ternary": {"pulse_mode": "ternary"},
    "clip": {"local_grad_clip": 0.5, "tile_rows": 5},
    "saved-4": {"act_save_bits": 4},
    "saved-9": {"act_save_bits": 9},
    "decimated": {"decimate_updates": True, "lr": 1e-3, "lr_scale": 0.0},
    "cache-full": {"cache_mode": "fp16", "cache_patch": "full"},
    "cache-flip": {"cache_mode": "int8", "cache_patch": "flip"},
    "int8": {"update_compute": "int8", "forward_compute": "int8"},
    "accumulate": {"accumulate": 3},
    "accumulate-proxy-int8": {"accumulate": 3, "rms_mode": "proxy", "update_compute": "int8", "act_save_bits": 8},
    "reuse": {"reuse": True, "accumulate": 2},
    "materialised": {"update_from_io": False},
}


@pytest.fixture(params=ROOMS)
def room(request: pytest.FixtureRequest, device: Device) -> Room:
    return room_of(request.param, device)


@pytest.fixture
def oracle(device: Device) -> Room:
    return room_of("reference", device)


def train(layer: Any, room: Room, start: int, steps: int = 5) -> None:
    for number in range(start, start + steps):
        layer(room.tensor(4, IN, seed=number)).square().sum().backward()


def through_a_file(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_equal_layers(left: Any, right: Any) -> None:
    assert (left.seed, left.step, left.hyper()) == (right.seed, right.step, right.hyper())
    assert_same(bytes_of(left), bytes_of(right))


# ---- going on ----


@pytest.mark.parametrize("name", OPTIONS)
def test_ten_steps_are_five_and_five(room: Room, name: str) -> None:
    live, resumed = (room.make(**OPTIONS[name]) for _ in range(2))
    train(live, room, 0)
    checkpoint = through_a_file(live.state_dict())
    train(live, room, 5)
    train(resumed, room, 90, 2)
    resumed.load_state_dict(checkpoint)
    train(resumed, room, 5)
    assert_equal_layers(live, resumed)
    assert torch.equal(live.decimation_period.cpu(), resumed.decimation_period.cpu())
    restarted = room.make(**OPTIONS[name])
    restarted.load_state_dict({key: value for key, value in checkpoint.items() if key in live.published})
    train(restarted, room, 5)
    assert not torch.equal(restarted.state.cpu(), live.state.cpu()), "weights alone are another run"


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "to"])
def test_copies_go_on(oracle: Room, device: Device, name: str, how: str) -> None:
    here = room_of("opencl", device) if how == "to" else oracle
    layer = here.make(**OPTIONS[name])
    train(layer, here, 0, 4)
    copies: dict[str, Callable[[Any], Any]] = {
        "deepcopy": copy.deepcopy,
        "pickle": lambda it: pickle.loads(pickle.dumps(it)),
        "to": lambda it: copy.deepcopy(it).to("cpu").to(here.place),
    }
    twin = copies[how](layer)
    assert_equal_layers(twin, layer)
    before = bytes_of(layer)
    train(twin, here, 4, 2)
    assert_same(bytes_of(layer), before)
    train(layer, here, 4, 2)
    assert_equal_layers(twin, layer)


@pytest.mark.parametrize("name", OPTIONS)
def test_engine_files_hold_the_options(oracle: Room, tmp_path: Path, name: str) -> None:
    layer, other = oracle.make(**OPTIONS[name]), oracle.make()
    train(layer, oracle, 0, 6)
    export_model(layer, tmp_path / "m", {})
    assert verify_export(layer, tmp_path / "m") == []
    stored = read_engine(tmp_path / "m")
    load_into(other, stored)
    made = layer_from_state(stored.layers[""], ops=oracle.ops)
    for twin in (other, made):
        assert_equal_layers(twin, layer)
    for each in (layer, other, made):
        train(each, oracle, 6, 6)
    for twin in (other, made):
        assert_equal_layers(twin, layer)


def test_a_layer_moves_to_the_device_and_back(device: Device) -> None:
    there = room_of("opencl", device)
    layer = make(accumulate=3, decimate_updates=True, cache_mode="int8", cache_patch="flip", act_save_bits=6)
    stays = copy.deepcopy(layer)
    host = room_of("host", device)
    for number, room in enumerate((host, there, host, there, there)):
        layer.to(room.place)
        train(layer, room, number, 1)
        train(stays, host, number, 1)
        assert layer._sum.values is not None
        assert layer._sum.values.device == room.place
    assert_same(bytes_of(layer), bytes_of(stays))


# ---- what a state_dict holds ----


def test_keys_follow_the_options(oracle: Room) -> None:
    plain = {"state", "scale", "v", "s_base", "seed", "step"}
    for name, extra in (("default", set()), ("decimated", {"clock"}), ("cache-flip", set()), ("accumulate", set())):
        layer = oracle.make(**OPTIONS[name])
        assert set(layer.state_dict()) == plain | extra, name
        assert list(layer.published_state_dict()) == ["state", "scale", "v", "s_base"]
    train(layer, oracle, 0, 2)
    assert set(layer.state_dict()) == plain | {"accumulation", "accumulated"}
    assert list(layer.published_state_dict()) == ["state", "scale", "v", "s_base"]
    train(layer, oracle, 2, 1)
    assert set(layer.state_dict()) == plain, "the sum has become an update"
    layer = oracle.make(**OPTIONS["accumulate-proxy-int8"])
    train(layer, oracle, 0, 1)
    assert set(layer.state_dict()) == plain | {"accumulation", "accumulated", "accumulated_squares"}


def test_a_published_checkpoint_loads_into_every_option(oracle: Room) -> None:
    source = oracle.make()
    train(source, oracle, 0, 3)
    published = through_a_file(source.published_state_dict())
    for options in OPTIONS.values():
        layer = oracle.make(**options)
        train(layer, oracle, 7, 2)
        place = (layer.seed, layer.step)
        assert layer.load_state_dict(published, strict=True).missing_keys == []
        assert (layer.seed, layer.step) == place
        assert_same(layer.published_state_dict(), published)
        assert "accumulation" not in layer.state_dict(), "a sum of other weights' gradients is dropped"


def test_the_uses_of_a_forward_that_is_saved_in_its_middle(oracle: Room) -> None:
    layer, resumed = oracle.make(reuse=True), oracle.make(reuse=True)
    first, second = (layer(oracle.tensor(4, IN, seed=seed)).sum() for seed in (1, 2))
    first.backward()
    resumed.load_state_dict(through_a_file(layer.state_dict()))
    del second  # as it is gone for the process that loads
    for each in (layer, resumed):
        train(each, oracle, 0, 1)
        assert each.step == 2
    assert_equal_layers(layer, resumed)


FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "clock": ({}, {"clock": torch.tensor([1, 0, 0, 0])}, "expected decimate_updates=True for a state with a clock"),
    "period": ({"decimate_updates": True}, {"clock": torch.tensor([3, 0, 0, 0])}, "clock: expected"),
    "numbers": ({"decimate_updates": True}, {"clock": torch.tensor([1, 0])}, "clock: expected"),
    "sum": ({}, {"accumulation": torch.tensor([1, 1, 0])}, "expected accumulate > 1 or reuse=True"),
    "rows": (
        {"accumulate": 2},
        {"accumulation": torch.tensor([1, 1, 0]), "accumulated": torch.zeros(3, IN)},
        r"accumulated: expected \[12, 20\], got \[3, 20\]",
    ),
    "progress": ({"reuse": True}, {"accumulated": torch.zeros(OUT, IN)}, "expected accumulation beside"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_changes_nothing(oracle: Room, fault: str) -> None:
    options, wrong, message = FAULTS[fault]
    layer, other = oracle.make(**options), oracle.make()
    train(layer, oracle, 0, 3)
    before, place = bytes_of(layer), (layer.seed, layer.step)
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict({**other.state_dict(), **wrong})
    assert_same(bytes_of(layer), before)
    assert (layer.seed, layer.step) == place


def test_an_eager_state_becomes_lazy_by_its_scale(oracle: Room) -> None:
    eager, lazy = oracle.make(), oracle.make(scale_rebase="lazy")
    train(eager, oracle, 0)
    assert not torch.equal(eager.s_base, eager.scale)
    lazy.load_state_dict(eager.state_dict())
    assert torch.equal(lazy.s_base, eager.scale), "its counters are calibrated to the scale"
    again = oracle.make(scale_rebase="lazy")
    train(lazy, oracle, 5)
    again.load_state_dict(lazy.state_dict())
    assert torch.equal(again.s_base, lazy.s_base)


def test_layer_states_and_what_they_refuse(oracle: Room) -> None:
    layer = oracle.make(decimate_updates=True, accumulate=2)
    layer.clock.copy_(torch.tensor([4, 3, 1, 17]))
    state = layer_state(layer)
    assert state.clock == (4, 3)
    assert state.hyper == layer.hyper()
    other = oracle.make()
    load_layer_state(other, state)
    assert other.clock.tolist() == [4, 3, 0, 0]
    train(layer, oracle, 0, 1)
    with pytest.raises(ValueError, match="between updates, got one with 1 of 2 backwards done"):
        layer_state(layer)
    before, options = bytes_of(other), other.hyper()
    for name, value in (("accumulate", 0), ("lr", -1.0), ("cache_mode", "fp8")):
        state.hyper[name] = value  # type: ignore[index]
        with pytest.raises(ValueError, match=f"expected {name}"):
            load_layer_state(other, state)
        state.hyper[name] = options[name]  # type: ignore[index]
        assert other.hyper() == options
        assert_same(bytes_of(other), before)
