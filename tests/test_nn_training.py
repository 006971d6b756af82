"""Counter layers within training loops as torch's users write them: scaled losses, threads, hooks, long runs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memtrain_cl.device import Device, use_device
from memtrain_cl.nn import CompactCounterLinear
from memtrain_cl.runtimes import import_pyopencl
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


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_scaled_loss_that_overflows_skips_and_counts(oracle: Room, accumulate: int) -> None:
    layer, linear = oracle.make(accumulate=accumulate), nn.Linear(OUT, 1)
    model = nn.Sequential(layer, linear)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    before, weight = bytes_of(layer), linear.weight.detach().clone()
    for part in range(accumulate):
        scaler.scale(model(oracle.tensor(4, IN, seed=part)).square().sum() * 1e6).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() < 2.0**127
    assert torch.equal(linear.weight, weight)
    assert int(layer.skipped_updates) == OUT
    assert layer.step == 1, "the step was taken, by no row"
    after = bytes_of(layer)
    for name in ("state", "scale", "v"):
        assert torch.equal(after[name], before[name])


def test_outgoing_gradients_of_any_layout(room: Room) -> None:
    layer = room.make()
    plain = twin(layer)
    x = room.tensor(6, IN)
    layouts: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: torch.ones(1, 1, device=room.place).expand(6, OUT),
        lambda t: t.t().contiguous().t(),
        lambda t: torch.stack([t, t], 1)[:, 0],
        lambda t: torch.cat([t.flatten(), t.flatten()])[3 : 3 + 6 * OUT].view(6, OUT),
    ]
    for layout in layouts:
        outgoing = layout(room.tensor(6, OUT, seed=1))
        layer(x.t().contiguous().t()).backward(outgoing)
        plain(x).backward(outgoing.contiguous().clone())
    assert_same(bytes_of(layer), bytes_of(plain))


STAY: dict[str, dict[str, Any]] = {
    "accumulate": {"accumulate": 2, "rms_mode": "proxy", "tile_rows": 5},
    "reuse": {"reuse": True},
    "saved": {"act_save_bits": 3},
    "int8": {"forward_compute": "int8", "update_compute": "int8", "act_save_bits": 8},
    "decimated": {"decimate_updates": True, "scale_rebase": "lazy", "pulse_mode": "ternary"},
    "cache-flip": {"cache_mode": "int8", "cache_patch": "flip", "accumulate": 2},
    "cache-full": {"cache_mode": "fp16", "cache_patch": "full"},
}


@pytest.mark.parametrize("name", STAY)
def test_steps_on_the_device_ask_nothing_of_the_host(
    device: Device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = room_of("opencl", device)
    layer = room.make(in_features=IN, out_features=IN, **STAY[name])
    batches = [room.tensor(4, IN, seed=seed) for seed in range(3)]

    def step(x: torch.Tensor) -> None:
        y = layer(x)
        if layer.reuse:
            y = layer(torch.tanh(y))
        y.backward(x)
        layer.weight_flips, layer.decimation_period, layer.skipped_updates  # noqa: B018 (read-outs wait for nothing)

    step(batches[0])

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the host waited")

    cl = import_pyopencl()
    copy_buffer = cl.enqueue_copy

    def copy_within(queue: Any, target: Any, source: Any, **options: Any) -> Any:
        if isinstance(target, np.ndarray) or isinstance(source, np.ndarray):
            raise AssertionError("bytes came from the host or went there, and the host waited")
        return copy_buffer(queue, target, source, **options)

    with strict(), monkeypatch.context() as patch:
        patch.setattr(cl, "enqueue_map_buffer", refuse)
        patch.setattr(cl, "enqueue_copy", copy_within)
        patch.setattr(type(device), "synchronize", refuse)
        for x in batches[1:]:
            step(x)
        with pytest.raises(AssertionError, match="the host waited"):
            layer.state.cpu()
    assert layer.step in (1, 3)


@pytest.mark.parametrize("kind", ["compact", "packed"])
def test_the_default_type_is_no_layers_concern(device: Device, kind: str) -> None:
    room = room_of("host", device)
    torch.manual_seed(1)
    plain = room.make(kind, accumulate=2)
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(1)
        layer = room.make(kind, accumulate=2)
        for each in (layer, plain):
            for seed in range(4):
                each(
                    torch.randn(3, IN, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
                ).sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(bytes_of(layer), bytes_of(plain))


@pytest.mark.parametrize("bits", [0, 4])
def test_saved_tensors_may_go_elsewhere_meanwhile(oracle: Room, bits: int) -> None:
    layer, plain = oracle.make(act_save_bits=bits), oracle.make(act_save_bits=bits)
    plain.load_state_dict(layer.state_dict())
    with torch.autograd.graph.save_on_cpu():
        loss = layer(oracle.tensor(4, IN)).sum()
    loss.backward()
    plain(oracle.tensor(4, IN)).sum().backward()
    assert_same(bytes_of(layer), bytes_of(plain))


def test_threads_train_layers_of_their_own(device: Device) -> None:
    room = room_of("host", device)
    layers = [room.make(accumulate=2) for _ in range(4)]
    alone = [twin(layer) for layer in layers]
    faults: list[BaseException] = []

    def train(layer: CompactCounterLinear, seed: int) -> None:
        try:
            with use_device(device):
                for step in range(6):
                    checkpoint(layer, room.tensor(3, IN, seed=10 * seed + step), use_reentrant=False).sum().backward()
        except BaseException as fault:
            faults.append(fault)
            raise

    threads = [threading.Thread(target=train, args=(layer, seed)) for seed, layer in enumerate(layers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    for seed, layer in enumerate(alone):
        train(layer, seed)
        assert_same(bytes_of(layer), bytes_of(layers[seed]))


@pytest.mark.parametrize("use_reentrant", [True, False, None])
def test_nothing_piles_up_over_steps(oracle: Room, use_reentrant: bool | None) -> None:
    layer = oracle.make(in_features=IN, out_features=IN, reuse=True, accumulate=2, act_save_bits=4)

    def step(number: int) -> None:
        x = oracle.tensor(3, IN, seed=number).requires_grad_()
        for _ in range(2):
            x = layer(x) if use_reentrant is None else checkpoint(layer, x, use_reentrant=use_reentrant)
        x.sum().backward()
        layer(x.detach())  # dropped

    def things() -> int:
        gc.collect()
        return len(gc.get_objects())

    for number in range(4):
        step(number)
    before = things()
    for number in range(20):
        step(number)
    assert things() - before < 20, "less than one thing a step"
    assert layer.step == 12


def test_training_and_evaluation_take_turns(room: Room) -> None:
    layer = room.make(reuse=True)
    x = room.tensor(4, IN)
    for step in range(3):
        layer(x).sum().backward()
        layer.eval()
        with torch.no_grad():
            layer(x)
        layer(x)
        with torch.inference_mode():
            layer(x)
        layer.train()
        layer.update_enabled = False
        layer(x)
        layer.update_enabled = True
        with torch.no_grad():
            layer(x)
        assert layer.step == step + 1
