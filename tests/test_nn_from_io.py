"""The update that forms its gradient itself: the oracle's bytes, no gradient in memory, and when a layer takes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memtrain_cl
from memtrain_cl import PackedRMSCounterLinear, RMSCounterLinear, ops, reference
from memtrain_cl.device import Device
from memtrain_cl.formats import code_count
from memtrain_cl.launchers.matmul import workspace_bytes
from memtrain_cl.memory import pool_of
from memtrain_cl.reference.from_io import grad_weight_in_order
from tests.layer_cases import assert_same
from tests.nn_cases import Room, bytes_of, room_of

pytestmark = pytest.mark.device

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lazy-ternary-lagged": {"rms_mode": "lagged", "scale_rebase": "lazy", "pulse_mode": "ternary"},
    "proxy-clock-cache": {
        "rms_mode": "proxy",
        "decimate_updates": True,
        "cache_mode": "int8",
        "cache_patch": "flip",
        "forward_compute": "int8",
    },
}


def trained(room: Room, steps: int = 4, **options: Any) -> Any:
    torch.manual_seed(3)
    layer = PackedRMSCounterLinear(36, 10, C=11, lr=0.3, update_from_io=True, ops=room.ops, **options).to(room.place)
    for step in range(steps):
        x = room.tensor(2, 3, 36, seed=step)
        layer(x).backward(room.tensor(2, 3, 10, seed=100 + step))
    return layer


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("place", ["host", "opencl"])
def test_a_layer_ends_with_the_oracles_bytes(device: Device, place: str, options: dict[str, Any]) -> None:
    oracle = trained(room_of("reference", device), **options)
    assert int(oracle.update_events) > 0
    assert_same(bytes_of(trained(room_of(place, device), **options)), bytes_of(oracle))


def test_tokens_are_added_in_their_order(device: Device) -> None:
    x, grad_out = torch.tensor([[1.0], [1e8], [-1e8], [0.5]]), torch.ones(4, 1)
    assert grad_weight_in_order(grad_out, x).item() == 0.5  # the first 1 is lost beside 1e8


def test_published_signature(shaped: Device) -> None:
    codes = torch.randint(0, code_count(11), (9, 12), dtype=torch.uint8)
    x, grad_out = torch.randn(5, 12), torch.randn(5, 9)
    rule = {"C": 11, "lr": 0.1, "lr_scale": 0.01, "rms_beta": 0.9, "rms_eps": 1e-3, "seed": 5, "clip": 0.5}
    ends = []
    for room in (ops, reference):
        scale, v = torch.full((9, 1), 0.1), torch.full((9, 1), 0.01)
        made = room.counter_update_from_io_hashsr(codes, scale, v, x, grad_out, **rule)
        assert not torch.equal(made, codes)
        ends.append({"codes": made, "scale": scale, "v": v})
    assert_same(*ends)


def peak_of_a_step(**options: Any) -> int:
    """Bytes that a step of a layer 256 x 512 takes beside what was there."""
    layer = RMSCounterLinear(512, 256, **options).to("opencl")
    x, grad_out = torch.randn(4, 512).to("opencl"), torch.randn(4, 256).to("opencl")
    for _ in range(2):
        y = layer(x)
        memtrain_cl.reset_peak_memory_stats()
        before = memtrain_cl.memory_allocated()
        y.backward(grad_out)
    return memtrain_cl.max_memory_allocated() - before


def test_no_gradient_of_the_weight_is_in_memory(device: Device) -> None:
    whole = 4 * 512 * 256
    assert peak_of_a_step(update_from_io=True) < whole / 8
    assert peak_of_a_step(update_from_io=False) >= whole
    assert peak_of_a_step(update_from_io=False, tile_rows=64) < whole / 2


def test_the_choice_follows_tile_rows_and_memory(device: Device) -> None:
    x = torch.zeros(4, 512, device="opencl")
    assert not ops.wants_from_io(x, 256, 0)
    assert not ops.wants_from_io(x, 256, 64)
    assert ops.wants_from_io(x, 256, 1)
    pool = pool_of(device)
    allowed = pool.limit
    try:
        pool.set_limit(pool.statistics().allocated + 4 * 512 * 256 - 1)
        assert ops.wants_from_io(x, 256, 0)
        assert not ops.wants_from_io(x, 256, 64)
        # The sums of parts of many tokens need room as well.
        long = torch.zeros(8192, 4, device="opencl")
        needed = 4 * 4 * 4 + workspace_bytes(device.info, (1, 4, 4, 8192), 4, 4)
        assert needed > 4 * 4 * 4
        pool.set_limit(pool.statistics().allocated + needed)
        assert not ops.wants_from_io(long, 4, 0)
        pool.set_limit(pool.statistics().allocated + needed - 1)
        assert ops.wants_from_io(long, 4, 0)
    finally:
        pool.set_limit(allowed)


def test_a_layer_without_room_for_its_gradient_trains(device: Device) -> None:
    layer = RMSCounterLinear(512, 256, lr=0.3).to("opencl")
    x, grad_out = torch.randn(4, 512).to("opencl"), torch.randn(4, 256).to("opencl")
    y = layer(x)
    memtrain_cl.empty_cache()
    pool = pool_of(device)
    allowed = pool.limit
    try:
        pool.set_limit(pool.statistics().allocated + 4 * 512 * 256 - 1)
        y.backward(grad_out)
    finally:
        pool.set_limit(allowed)
    assert int(layer.update_events) > 0


@pytest.mark.parametrize(
    "options", [{"accumulate": 2}, {"reuse": True}, {"update_compute": "int8"}], ids=lambda options: next(iter(options))
)
def test_what_needs_the_gradient_is_refused_beside_it(options: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="expected update_from_io as None or False beside"):
        PackedRMSCounterLinear(8, 4, C=11, update_from_io=True, **options)


def test_rows_too_long_to_hold_are_refused_before_anything_changes(device: Device) -> None:
    small = device.with_capabilities(local_mem_bytes=1 << 14, max_work_group_size=1)
    columns = 1 << 14
    with memtrain_cl.use_device(small):
        assert not ops.wants_from_io(torch.zeros(2, columns), 4, 1)
        layer = RMSCounterLinear(columns, 4, update_from_io=True)
        before = bytes_of(layer)
        y = layer(torch.randn(2, columns))
        with pytest.raises(ValueError, match="expected in_features that"):
            y.sum().backward()
        assert_same(bytes_of(layer), before)
