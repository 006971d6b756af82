"""Memory shared with CUDA: turns of torch and OpenCL on the same bytes, layers, optimizers, and what `share` refuses.

Tests run on the host's memory as it is, on host memory in the place of CUDA's (the same pool and the same visits), and
on CUDA where the device is its partner.
"""

from __future__ import annotations

import copy
import gc
import io
import os
from typing import Any

import pytest
import torch
from torch import nn

from memtrain_cl import reference
from memtrain_cl.activations import saved_activations
from memtrain_cl.bridge import Crossing
from memtrain_cl.device import Device, use_device
from memtrain_cl.nn import PackedRMSCounterLinear
from memtrain_cl.optim import CompressedAdam, adam_state, base
from memtrain_cl.sharing import cuda, share
from tests.layer_cases import assert_same
from tests.saving_cases import ROWS, WIDTH, network, saved_gradient
from tests.sharing_cases import Ground, real, stand_in

pytestmark = pytest.mark.device

CUDA = torch.cuda.is_available()
POOLED = ["stand-in", "cuda"] if CUDA else ["stand-in"]


@pytest.fixture(params=["host", *POOLED])
def ground(request: pytest.FixtureRequest, device: Device, monkeypatch: pytest.MonkeyPatch) -> Ground:
    if request.param == "cuda":
        return real(device)
    if request.param == "stand-in":
        return stand_in(device, monkeypatch)
    if not device.info.unified_memory:
        pytest.skip("this device has memory of its own")
    return Ground(device, torch.device("cpu"), None)


@pytest.fixture(params=POOLED)
def pooled(request: pytest.FixtureRequest, device: Device, monkeypatch: pytest.MonkeyPatch) -> Ground:
    """A ground where `share` moves tensors."""
    return real(device) if request.param == "cuda" else stand_in(device, monkeypatch)


def ints(ground: Ground, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=ground.place)


# ---- turns ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["torch", "opencl"])
def test_ten_thousand_turns(ground: Ground, first: str) -> None:
    """One side writes, the other updates, the first reads; a turn's values are its own, so that no old byte passes."""
    x, wrong = share(ints(ground, 300)), torch.zeros((), dtype=torch.int64, device=ground.place)
    for turn in range(10_000 if ground.place.type == "cuda" else 1_000):
        if first == "torch":
            x.fill_(turn)
            ground.add_one(x)
            wrong += (x != turn + 1).sum()
        else:
            ground.fill(x, turn)
            x.add_(1)
            wrong += (ground.copy(x) != turn + 1).sum()
    assert int(wrong) == 0


def test_neighbours_in_one_segment_do_not_touch_each_other(ground: Ground) -> None:
    tensors = [share(ints(ground, size)) for size in (1, 127, 128, 129, 300, 5000)]
    for value, tensor in enumerate(tensors):
        ground.fill(tensor, value)
    for value, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full_like(tensor, value))
        ground.add_one(tensor)
    for value, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full_like(tensor, value + 1))


VIEWS: dict[str, Any] = {
    "whole": lambda x: x,
    "rows": lambda x: x[::2],
    "columns": lambda x: x[:, 1:5],
    "transposed": lambda x: x.t(),
    "offset": lambda x: x.flatten()[8:],
    "block": lambda x: x.flatten()[128:],  # begins where a block may
    "one": lambda x: x[1, 1],
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_are_read_and_updated(ground: Ground, view: Any, shared: bool) -> None:
    whole = ints(ground, 20, 30)
    if shared:
        share(whole)
    whole.copy_(torch.arange(600, dtype=torch.int32).reshape(20, 30))
    expected = whole.clone()
    view(expected).add_(1)
    if view(whole).numel():
        ground.add_one(view(whole))
        assert torch.equal(ground.copy(view(whole)), view(expected))
    assert torch.equal(whole, expected)


def test_results_lie_in_shared_memory(ground: Ground) -> None:
    result = ground.copy(ints(ground, 3, 5))
    assert ground.is_shared(result)
    assert not result._is_view()
    assert result.device == ints(ground, 1).device


def test_an_error_in_a_visit_leaves_both_sides_usable(ground: Ground) -> None:
    x = share(ints(ground, 40))

    def fail() -> None:
        with Crossing(ground.device, x) as cross:
            cross.update(x)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    ground.add_one(x)
    assert torch.equal(x, torch.ones_like(x))


# ---- share ----------------------------------------------------------------------------------------------------------


def model(ground: Ground) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).to(ground.place)


def training_step(net: nn.Module, optimizer: torch.optim.Optimizer, ground: Ground, turn: int) -> None:
    chance = torch.Generator().manual_seed(turn)
    x = torch.randn(8, 6, generator=chance).to(ground.place)
    optimizer.zero_grad(set_to_none=False)
    net(x).square().sum().backward()
    optimizer.step()


def test_a_module_and_its_adamw_train_on_as_before(ground: Ground) -> None:
    nets = [model(ground) for _ in range(2)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1, amsgrad=True) for net in nets]
    for turn in range(2):
        for net, optimizer in zip(nets, optimizers, strict=True):
            training_step(net, optimizer, ground, turn)
    net, optimizer = nets[0], optimizers[0]
    before = [id(it) for it in (*net.parameters(), *net.buffers())]
    state = {id(it): key for key, it in optimizer.state[net[0].weight].items()}  # type: ignore[index]
    assert share(net) is net
    assert share(optimizer) is optimizer
    assert [id(it) for it in (*net.parameters(), *net.buffers())] == before
    assert {id(it): key for key, it in optimizer.state[net[0].weight].items()} == state  # type: ignore[index]
    for parameter in net.parameters():
        moments = optimizer.state[parameter]
        for tensor in (parameter, parameter.grad, moments["exp_avg"], moments["exp_avg_sq"], moments["max_exp_avg_sq"]):
            assert tensor is not None
            assert ground.is_shared(tensor)
        assert moments["step"].device.type == "cpu"
    for turn in range(2, 4):
        for one, its in zip(nets, optimizers, strict=True):
            training_step(one, its, ground, turn)
    assert_same(net.state_dict(), nets[1].state_dict())
    for ours, right in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert ground.is_shared(ours.grad)  # type: ignore[arg-type]
        assert_same(optimizers[0].state[ours], optimizers[1].state[right])


@pytest.mark.parametrize("method", ["int8", "profile"])
def test_moments_in_codes_are_made_in_shared_memory(
    pooled: Ground, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CompressedAdam's state is shared when it is made and when it is loaded, and its steps are the oracle's."""
    if pooled.place.type == "cpu":
        for room in (adam_state, base):
            monkeypatch.setattr(room, "placed", share)  # what it is for CUDA
    options: dict[str, Any] = {"lr": 0.1, "compression_method": method}
    net, oracle = share(nn.Linear(40, 30).to(pooled.place)), nn.Linear(40, 30)
    oracle.load_state_dict(net.state_dict())
    optimizers = [CompressedAdam(net.parameters(), **options)]
    optimizers.append(CompressedAdam(oracle.parameters(), ops=reference, **options))
    for turn in range(4):
        for module, optimizer in zip((net, oracle), optimizers, strict=True):
            for parameter in module.parameters():
                grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(turn))
                parameter.grad = grad.to(parameter.device)
            optimizer.step()
        held = [it for state in optimizers[0].state.values() for it in state.values() if isinstance(it, torch.Tensor)]
        assert len(held) == 10
        assert all(map(pooled.is_shared, held))
        if turn == 1:
            optimizers[0] = CompressedAdam(net.parameters(), **options)
            optimizers[0].load_state_dict(optimizers[1].state_dict())
    for ours, right in zip(net.parameters(), oracle.parameters(), strict=True):
        assert torch.equal(ours.cpu(), right)
        want = optimizers[1].state[right]
        assert all(torch.equal(optimizers[0].state[ours][name].cpu(), want[name]) for name in ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_values_and_types_stay(ground: Ground, dtype: torch.dtype) -> None:
    values = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype).to(ground.place)
    moved = share(values.clone())
    assert ground.is_shared(moved)
    assert moved.dtype == dtype
    assert torch.equal(moved, values)
    where = moved.data_ptr()
    assert share(moved).data_ptr() == where, "what is shared stays where it is"


def test_tensors_that_fill_one_storage_go_on_sharing_it(ground: Ground) -> None:
    flat = torch.arange(12.0, device=ground.place)
    net = nn.Module()
    net.a, net.b = nn.Parameter(flat[:6].view(2, 3)), nn.Parameter(flat[6:].view(3, 2).t())
    net.register_buffer("flat", flat)
    strides = net.b.stride()
    share(net)
    assert ground.is_shared(net.a)
    assert net.b.stride() == strides
    flat.add_(1)
    assert torch.equal(net.a.flatten(), torch.arange(1.0, 7.0, device=ground.place))
    assert torch.equal(net.b.t().flatten(), torch.arange(7.0, 13.0, device=ground.place))


def test_tensors_of_other_strides_become_contiguous(ground: Ground) -> None:
    turned = torch.arange(12.0, device=ground.place).reshape(3, 4).t()
    values = turned.clone()
    share(turned)
    assert torch.equal(turned, values)
    assert turned.is_contiguous() == (ground.pool is not None)


def test_a_part_of_a_storage_is_refused(pooled: Ground) -> None:
    whole = torch.zeros(8, device=pooled.place)
    for part in (whole[2:], whole[:4], nn.Parameter(whole[::2])):
        with pytest.raises(ValueError, match="expected tensors that fill their storage of 32 bytes"):
            share(part)


def test_other_objects_are_refused(ground: Ground) -> None:
    for value, got in ((3, "int"), ([torch.zeros(2)], "list"), (None, "NoneType")):
        with pytest.raises(TypeError, match=f"expected a tensor, a module or an optimizer, got {got}"):
            share(value)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="on CUDA, on the CPU or on the device opencl, got one on meta"):
        share(torch.zeros(2, device="meta"))
    with pytest.raises(TypeError, match="dense"):
        share(torch.eye(2).to_sparse())


def test_host_tensors_of_a_device_with_its_own_memory_are_refused(discrete: Device) -> None:
    with pytest.raises(ValueError, match="expected tensors on CUDA, got host tensors"):
        share(nn.Linear(2, 2))


def test_empty_tensors_and_modules_without_any(ground: Ground) -> None:
    assert share(torch.zeros(0, 3, device=ground.place)).shape == (0, 3)
    share(nn.ReLU())


def test_copies_and_files_hold_no_more_than_the_tensor(ground: Ground) -> None:
    net = share(nn.Linear(4, 4).to(ground.place))
    twin = copy.deepcopy(net)
    assert_same(net.state_dict(), twin.state_dict())
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    assert file.tell() < 8192
    file.seek(0)
    assert_same(net.state_dict(), torch.load(file))


# ---- layers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
def test_a_counter_layer_ends_with_the_bytes_of_the_host(ground: Ground, shared: bool) -> None:
    layers = []
    for place in (torch.device("cpu"), ground.place):
        torch.manual_seed(5)
        layer = PackedRMSCounterLinear(48, 20).to(place)
        if shared and place == ground.place:
            share(layer)
        with use_device(ground.device):
            for _ in range(3):
                # Integers, so that the products' sums are exact in any order.
                x, out = torch.randint(-4, 5, (5, 48)).float(), torch.randint(-4, 5, (5, 20)).float()
                y = layer(x.to(place))
                assert y.device.type == place.type
                y.backward(out.to(place))
        layers.append(layer)
    host, there = (layer.state_dict() for layer in layers)
    assert_same(host, {name: value.cpu() for name, value in there.items()})
    assert layers[0].step == 3
    assert int(layers[1].update_events) > 0


# ---- lifetime -------------------------------------------------------------------------------------------------------


def test_memory_comes_back_and_lives_as_long_as_its_tensors(pooled: Ground) -> None:
    pool = pooled.pool
    assert pool is not None
    gc.collect()
    pool.release()
    before = pool.statistics()
    tensor = share(ints(pooled, 1 << 20))
    assert pool.statistics().allocated == before.allocated + (4 << 20)
    view = tensor[5:]
    del tensor
    gc.collect()
    pool.release()
    assert pool.statistics().allocated == before.allocated + (4 << 20), "a view holds the memory"
    view.fill_(1)
    del view
    gc.collect()
    pool.release()
    assert pool.statistics() == before


def test_visits_leave_nothing_behind(pooled: Ground) -> None:
    pool = pooled.pool
    assert pool is not None
    x, y = share(ints(pooled, 1000)), ints(pooled, 1000)
    sizes = set()
    for _ in range(60):
        pooled.add_one(x)
        pooled.add_one(y)
        pooled.copy(y)
        sizes.add(pool.statistics().reserved)
    assert len(sizes) == 1
    assert torch.equal(x, y)


@pytest.mark.skipif(not CUDA, reason="there is no CUDA device")
def test_descriptors_and_memory_are_given_back(device: Device) -> None:
    ground = real(device)
    assert ground.pool is not None
    ground.add_one(share(ints(ground, 10)))  # what is made once
    torch.cuda.synchronize()
    gc.collect()
    ground.pool.release()
    descriptors, free = len(os.listdir("/proc/self/fd")), torch.cuda.mem_get_info()[0]
    for _ in range(20):
        tensor = share(ints(ground, 8 << 20))
        ground.add_one(tensor)
        del tensor
        torch.cuda.empty_cache()
        gc.collect()
        ground.pool.release()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert torch.cuda.mem_get_info()[0] >= free - (8 << 20), "each of the twenty held 32 MiB"


@pytest.mark.skipif(not CUDA, reason="there is no CUDA device")
def test_cuda_without_a_partner_travels_through_the_host(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_search", lambda ordinal: "none, for a test")
    with use_device(device):
        ground = Ground(device, torch.device("cuda", 0), None)
        x = ints(ground, 10)
        ground.add_one(x)
        assert torch.equal(ground.copy(x), torch.ones_like(x))


# Here, because CUDA's backward is over in a process that has registered "opencl".
@pytest.mark.skipif(not CUDA, reason="there is no CUDA device")
def test_a_model_saves_in_few_bits(device: Device) -> None:
    model, x = network(nn.GELU), torch.randn(ROWS, WIDTH)
    want = saved_gradient(model, x, saved_activations(4, seed=3))
    got = saved_gradient(model.cuda(), x.cuda(), saved_activations(4, seed=3))
    assert float((got - want).norm() / want.norm()) < 0.05
