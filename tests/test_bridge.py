"""Tensors to the device and back: shared memory, staged copies, views of every kind, and tensors that stay there."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memtrain_cl import bridge, ops, program, reference, staging
from memtrain_cl.bridge import Crossing, host_view, keep_resident, refresh_host
from memtrain_cl.device import Device, use_device
from memtrain_cl.formats import CounterRule
from memtrain_cl.nn import PackedRMSCounterLinear
from memtrain_cl.program import get_kernel

pytestmark = pytest.mark.device

KERNELS = """
__kernel void double_into(__global const int *x, __global int *y) { y[get_global_id(0)] = 2 * x[get_global_id(0)]; }
__kernel void add_one(__global int *x) { x[get_global_id(0)] += 1; }
__kernel void add_one_short(__global short *x) { x[get_global_id(0)] += 1; }
"""


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """launch(device, kernel, n, *arrays) over kernels of this file."""
    (tmp_path / "bridge_tests.cl").write_text(KERNELS)

    def run(device: Device, name: str, n: int, *arrays: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(program, "kernels_dir", lambda: tmp_path)
            kernel = get_kernel(device, "bridge_tests", name)
        if n:
            kernel((n,), None, *arrays)

    return run


@pytest.fixture
def staged(device: Device, monkeypatch: pytest.MonkeyPatch) -> Device:
    """The device as if its memory were its own, with pinned buffers so small that every border is met."""
    monkeypatch.setattr(staging, "CHUNK_BYTES", 64)
    twin = device.with_capabilities(unified_memory=False)
    twin.kept = {}  # its pinned buffers are not the session's
    return twin


@pytest.fixture(params=["as it is", "staged"])
def way(request: pytest.FixtureRequest, device: Device) -> Device:
    """The device, and the device with staged copies."""
    if request.param == "staged":
        staged_device: Device = request.getfixturevalue("staged")
        return staged_device
    return device


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fills with "up" and "down" as bytes travel."""
    seen: list[str] = []

    def watch(name: str, original: Callable[..., None]) -> Callable[..., None]:
        def watched(*arguments: Any) -> None:
            seen.append(name)
            original(*arguments)

        return watched

    monkeypatch.setattr(staging, "upload", watch("up", staging.upload))
    monkeypatch.setattr(staging, "download", watch("down", staging.download))
    return seen


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda x: x,
    "rows": lambda x: x[::2],
    "columns": lambda x: x[:, 1:5],
    "inner": lambda x: x.reshape(4, 2, 3)[:, ::2],
    "transposed": lambda x: x.t(),
    "offset": lambda x: x.flatten()[8:],
    "one": lambda x: x[1, 1],
    "empty": lambda x: x[:0],
    "empty columns": lambda x: x[:, :0],
}


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_are_read_as_their_values(way: Device, launch: Any, view: Any) -> None:
    tensor = view(torch.arange(24, dtype=torch.int32).reshape(4, 6))
    with Crossing(way) as cross:
        result, target = cross.output(tensor.shape, torch.int32)
        launch(way, "double_into", tensor.numel(), cross.read(tensor), target)
    assert torch.equal(result, 2 * tensor)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_are_updated_in_place_and_nothing_else_is(way: Device, launch: Any, view: Any) -> None:
    whole = torch.arange(24, dtype=torch.int32).reshape(4, 6)
    expected = whole.clone()
    view(expected).add_(1)
    with Crossing(way) as cross:
        tensor = view(whole)
        launch(way, "add_one", tensor.numel(), cross.update(tensor))
    assert torch.equal(whole, expected)


def test_expanded_tensors_are_read_but_not_updated(way: Device, launch: Any) -> None:
    tensor = torch.arange(3, dtype=torch.int32)[:, None].expand(3, 4)
    with Crossing(way) as cross:
        result, target = cross.output(tensor.shape, torch.int32)
        launch(way, "double_into", 12, cross.read(tensor), target)
    assert torch.equal(result, 2 * tensor)
    with pytest.raises(ValueError, match="lie apart"), Crossing(way) as cross:
        cross.update(tensor)
    with Crossing(way) as cross:  # a stride of 0 over one element shares nothing
        cross.update(torch.zeros(1, 4, dtype=torch.int32).as_strided((1, 4), (0, 1)))


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 200])
def test_copies_of_every_length_around_the_chunks(staged: Device, launch: Any, count: int, copies: list[str]) -> None:
    tensor = torch.randint(-1000, 1000, (count,), dtype=torch.int32)
    expected = tensor + 1
    with Crossing(staged) as cross:
        result, target = cross.output((count,), torch.int32)
        array = cross.update(tensor)
        launch(staged, "add_one", count, array)
        launch(staged, "double_into", count, array, target)
    assert torch.equal(tensor, expected)
    assert torch.equal(result, 2 * expected)
    assert copies == (["up", "down", "down"] if count else [])


@pytest.mark.parametrize("size", [63, 64, 65, 127, 128, 129])
def test_bytes_that_fill_no_whole_chunk(staged: Device, size: int) -> None:
    tensor = torch.randint(0, 256, (size,), dtype=torch.uint8)
    with Crossing(staged) as cross:
        array = cross.read(tensor)
        assert np.array_equal(array.numpy(), tensor.numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float64])
def test_types_arrive_as_they_are(way: Device, dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1, 0]).to(dtype)
    with Crossing(way) as cross:
        assert np.array_equal(cross.read(tensor).numpy(), tensor.numpy())


def test_bfloat16_crosses_by_its_bits(way: Device, launch: Any) -> None:
    tensor = torch.tensor([1.0, -2.5, 3e38, float("nan"), 0.0], dtype=torch.bfloat16)
    bits = tensor.view(torch.int16).clone()
    with Crossing(way) as cross:
        array = cross.update(tensor)
        assert array.dtype == np.int16
        launch(way, "add_one_short", 5, array)
    assert torch.equal(tensor.view(torch.int16), bits + 1)
    with Crossing(way) as cross:
        result, array = cross.output((3,), torch.bfloat16)
        assert result.dtype == torch.bfloat16
        assert array.dtype == np.dtype(np.int16)


def test_a_negated_view_is_its_values(way: Device) -> None:
    negated = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert negated.is_neg()
    with Crossing(way) as cross:
        assert np.array_equal(cross.read(negated).numpy(), [-2.0, 4.0])


def test_only_dense_host_tensors_cross(device: Device) -> None:
    for tensor in (torch.empty(2, device="meta"), torch.eye(2).to_sparse()):
        with pytest.raises(TypeError, match="expected a dense CPU tensor"):
            host_view(tensor)


def test_tensors_that_require_grad_cross_by_their_values(way: Device) -> None:
    tensor = torch.ones(3, requires_grad=True)
    with Crossing(way) as cross:
        assert np.array_equal(cross.read(tensor).numpy(), np.ones(3))


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_where_memory_is_shared_nothing_is_copied(device: Device, launch: Any, copies: list[str]) -> None:
    if not device.info.unified_memory:
        pytest.skip("this device has memory of its own")
    tensor = torch.arange(1000, dtype=torch.int32)[3:]
    with Crossing(device) as cross:
        array = cross.update(tensor)
        result, target = cross.output((997,), torch.int32)
        for one, host in ((array, tensor), (target, result)):
            view = one.map_host()
            assert view.ctypes.data == host.data_ptr()
            del view
        launch(device, "add_one", 997, array)
        launch(device, "double_into", 997, array, target)
    assert torch.equal(tensor, torch.arange(4, 1001, dtype=torch.int32))
    assert torch.equal(result, 2 * tensor)
    assert copies == []


def test_read_only_memory_is_not_updated(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch cannot say that a tensor is read-only; what can say so is refused."""
    if not device.info.unified_memory:
        pytest.skip("this device has memory of its own")
    locked = np.zeros(4, np.int32)
    locked.flags.writeable = False
    monkeypatch.setattr(bridge, "host_view", lambda tensor: locked)
    with pytest.raises(ValueError, match="read-only"), Crossing(device) as cross:
        cross.update(torch.zeros(4, dtype=torch.int32))


def test_one_tensor_named_twice_is_one_array(way: Device, launch: Any) -> None:
    tensor = torch.zeros(20, dtype=torch.int32)
    with Crossing(way) as cross:
        assert cross.read(tensor) is cross.update(tensor)
        launch(way, "add_one", 20, cross.update(tensor))
        launch(way, "add_one", 20, cross.read(tensor))
    assert torch.equal(tensor, torch.full((20,), 2, dtype=torch.int32))


def test_an_update_without_moments_keeps_the_scale(way: Device) -> None:
    """The launcher names the scale twice then, in place of the moment that is not there."""
    rule = CounterRule(8, False, lr=0.04, lr_scale=0.1, use_rms=False)
    state = torch.randint(0, 45, (3, 40), dtype=torch.uint8)
    scale, grad = torch.full((3, 1), 0.5), torch.randn(3, 40)
    given = [(state.clone(), scale.clone(), torch.zeros(3, dtype=torch.int64)) for _ in range(2)]
    with use_device(way):
        for launcher, (codes, scales, totals) in zip((ops, reference), given, strict=True):
            launcher.counter_update_(codes, scales, None, grad, totals, rule, seed=5)
    for ours, right in zip(*given, strict=True):
        assert torch.equal(ours, right)
    assert not torch.equal(given[0][1], scale)


def test_garbage_collection_inside_a_visit_harms_nothing(way: Device, launch: Any) -> None:
    for turn in range(5):
        with Crossing(way) as cross:
            result, target = cross.output((512,), torch.int32)
            launch(way, "double_into", 512, cross.read(torch.arange(512, dtype=torch.int32) + turn), target)
            gc.collect()
            torch.full((512,), -1, dtype=torch.int32)
        assert torch.equal(result, 2 * (torch.arange(512, dtype=torch.int32) + turn))


def test_an_error_inside_a_visit_passes_and_leaves_the_device_usable(way: Device, launch: Any) -> None:
    tensor = torch.arange(64, dtype=torch.int32)

    def fail() -> None:
        with Crossing(way) as cross:
            launch(way, "double_into", 64, cross.read(tensor), cross.output((64,), torch.int32)[1])
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with Crossing(way) as cross:
        result, target = cross.output((64,), torch.int32)
        launch(way, "double_into", 64, cross.read(tensor), target)
    assert torch.equal(result, 2 * tensor)


def test_updates_count_as_in_place_for_autograd(way: Device, launch: Any) -> None:
    saved = torch.ones(4, dtype=torch.float32)
    loss = (torch.ones(4, requires_grad=True) * saved).sum()
    with Crossing(way) as cross:
        launch(way, "add_one", 4, cross.update(saved))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- tensors that stay ----------------------------------------------------------------------------------------------


@pytest.fixture
def resident() -> torch.Tensor:
    tensor = torch.zeros(40, dtype=torch.int32)
    keep_resident(tensor)
    return tensor


def add_one(device: Device, launch: Any, tensor: torch.Tensor) -> None:
    with Crossing(device) as cross:
        launch(device, "add_one", tensor.numel(), cross.update(tensor))


def test_a_resident_travels_only_when_it_must(
    staged: Device, launch: Any, resident: torch.Tensor, copies: list[str]
) -> None:
    for _ in range(3):
        add_one(staged, launch, resident)
    assert copies == ["up"]
    refresh_host(resident)
    refresh_host(resident)
    assert copies == ["up", "down"]
    assert torch.equal(resident, torch.full((40,), 3, dtype=torch.int32))
    add_one(staged, launch, resident)
    assert copies == ["up", "down"]
    refresh_host(resident)
    resident.fill_(10)
    add_one(staged, launch, resident)
    assert copies == ["up", "down", "down", "up"]
    refresh_host(resident)
    assert torch.equal(resident, torch.full((40,), 11, dtype=torch.int32))


def test_a_resident_that_is_only_read_stays_fresh(
    staged: Device, launch: Any, resident: torch.Tensor, copies: list[str]
) -> None:
    resident.fill_(7)
    for _ in range(2):
        with Crossing(staged) as cross:
            result, target = cross.output((40,), torch.int32)
            launch(staged, "double_into", 40, cross.read(resident), target)
        assert torch.equal(result, torch.full((40,), 14, dtype=torch.int32))
    refresh_host(resident)
    assert copies == ["up", "down", "down"]  # once up; down are the two results


@pytest.mark.parametrize("look", ["visit", "read"])
def test_writing_through_an_old_reference_is_an_error_once(
    staged: Device, launch: Any, resident: torch.Tensor, look: str
) -> None:
    add_one(staged, launch, resident)
    resident.fill_(50)
    with pytest.raises(RuntimeError, match="written through an old reference"):
        add_one(staged, launch, resident) if look == "visit" else refresh_host(resident)
    add_one(staged, launch, resident)
    refresh_host(resident)
    assert torch.equal(resident, torch.full((40,), 2, dtype=torch.int32))


def test_a_resident_follows_to_another_device(
    device: Device, staged: Device, launch: Any, resident: torch.Tensor
) -> None:
    other = Device(device.info, device.handle).with_capabilities(unified_memory=False)
    for turn, one in enumerate((staged, other, device, staged, other, other, device), start=1):
        add_one(one, launch, resident)
        if turn % 3 == 0:
            refresh_host(resident)
            assert torch.equal(resident, torch.full((40,), turn, dtype=torch.int32))
    refresh_host(resident)
    assert torch.equal(resident, torch.full((40,), 7, dtype=torch.int32))


def test_residents_cost_nothing_where_memory_is_shared(
    device: Device, launch: Any, resident: torch.Tensor, copies: list[str]
) -> None:
    if not device.info.unified_memory:
        pytest.skip("this device has memory of its own")
    add_one(device, launch, resident)
    assert torch.equal(resident, torch.ones(40, dtype=torch.int32))
    assert copies == []


def test_a_resident_dies_with_its_tensor(staged: Device, launch: Any) -> None:
    gc.collect()
    before = len(bridge._residents)
    tensor = torch.zeros(8, dtype=torch.int32)
    keep_resident(tensor)
    add_one(staged, launch, tensor)
    assert len(bridge._residents) == before + 1
    del tensor
    gc.collect()
    assert len(bridge._residents) == before


def test_tensors_of_inference_mode_cross(staged: Device, launch: Any) -> None:
    with torch.inference_mode():
        tensor = torch.zeros(8, dtype=torch.int32)
        keep_resident(tensor)
        add_one(staged, launch, tensor)
        assert torch.equal(tensor, torch.ones(8, dtype=torch.int32))


def test_a_layer_on_a_device_of_its_own_memory_ends_with_the_same_bytes(device: Device, staged: Device) -> None:
    layers = []
    for one in (device, staged):
        torch.manual_seed(3)
        layer = PackedRMSCounterLinear(48, 20)
        with use_device(one):
            for _ in range(3):
                x = torch.randn(5, 48)
                # Integers, so that the products' sums are exact in any order.
                layer.apply_update_from_grad_w(torch.round(4 * torch.randn(20, 48)))
                layer.eval()(x)
        layers.append(layer)
    first, second = (layer.state_dict() for layer in layers)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
