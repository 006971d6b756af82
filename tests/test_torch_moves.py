"""Tensors on the way to the device "opencl", on it and back: moves, copies, conversions, factories."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from memtrain_cl.device import Device, devices
from memtrain_cl.torch_device.tensor import torch_device
from tests.torch_cases import ALL, FLOATS, HARD, on, same, values

# ---- moves ----


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (5, 7), (1025, 3)], ids=str)
def test_there_and_back(device: Device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = values(dtype, *shape)
    moved = x.to(torch_device(device))
    assert moved.device == torch.device("opencl", device.info.index)
    assert not moved.is_cpu
    same(moved, x)
    same(moved.to("cpu", copy=True), x)
    assert moved.to(torch_device(device)) is moved
    twin = moved.to(torch_device(device), copy=True)
    assert twin is not moved
    same(twin, x)


def test_a_discrete_device_stages_what_it_moves(discrete: Device) -> None:
    x = values(torch.float32, 1000, 333)
    moved = on(discrete, x)
    same(moved, x)
    same(moved[::2, 1:].contiguous(), x[::2, 1:].contiguous())
    host = torch.empty(500, 332)
    host.copy_(moved[::2, 1:])
    assert torch.equal(host, x[::2, 1:])


def test_geometry_travels(device: Device) -> None:
    x = values(torch.float32, 2, 3, 4, 5)
    for view in (x.permute(3, 1, 0, 2), x.transpose(1, 2), x.contiguous(memory_format=torch.channels_last)):
        same(on(device, view), view)
        same(on(device, view).cpu(), view)
        same(on(device, view).clone(), view.clone())
        same(torch.empty_like(on(device, view)).zero_(), torch.zeros_like(view))
    cut = on(device, x)[:, ::2, 1:]
    same(cut.cpu().contiguous(), x[:, ::2, 1:].contiguous())
    same(on(device, x[:, ::2, 1:]), x[:, ::2, 1:].clone())
    for layout in (torch.contiguous_format, torch.channels_last, torch.preserve_format):
        same(on(device, x).clone(memory_format=layout), x.clone(memory_format=layout))
        same(on(device, x).to(torch.float16, memory_format=layout), x.to(torch.float16, memory_format=layout))
        same(torch.empty(x.shape, memory_format=torch.contiguous_format, device=torch_device(device)).copy_(x), x)
    wide = torch.empty(x.shape, memory_format=torch.channels_last, device=torch_device(device))
    assert wide.stride() == x.contiguous(memory_format=torch.channels_last).stride()


def test_types_change_on_the_way(device: Device) -> None:
    x = values(torch.float32, 33)
    home = torch_device(device)
    same(x.to(home, torch.float16), x.half())
    same(x.to(home, torch.int32), x.int())
    same(on(device, x).to("cpu", torch.bfloat16), x.bfloat16())
    same(on(device, x).half(), x.half())
    for wide in (torch.float64, torch.complex64):
        with pytest.raises(TypeError, match="holds float32, float16"):
            on(device, x).to(wide)
        with pytest.raises(TypeError, match="holds float32, float16"):
            x.to(home, wide)
    same(x.double().to(home, torch.float32), x)


def test_copies_that_need_not_wait(device: Device) -> None:
    x = values(torch.float32, 4096)
    moved = x.to(torch_device(device), non_blocking=True)
    x_then = x.clone()
    x.zero_()
    same(moved, x_then)
    host = torch.empty(4096)
    host.copy_(moved, non_blocking=True)
    torch.opencl.synchronize(device.info.index)  # type: ignore[attr-defined]
    assert torch.equal(host, x_then)


def test_between_devices(device: Device) -> None:
    others = [info.index for info in devices() if info.index != device.info.index]
    if not others:
        pytest.skip("one device alone")
    x = values(torch.float32, 6, 7)
    other = torch.device("opencl", others[0])
    there = on(device, x).to(other)
    assert there.device == other
    same(there, x)
    there.mul_(2)
    same(on(device, torch.zeros(6, 7)).copy_(there), x * 2)
    same(on(device, x).t().to(other, torch.float16), x.t().half())
    with pytest.raises(RuntimeError, match="same device"):
        there + on(device, x)
    with pytest.raises(RuntimeError, match="same device"):
        torch.cat([there, on(device, x)])


def test_numpy_and_lists(device: Device) -> None:
    home = torch_device(device)
    same(torch.tensor([[1, 2], [3, 4]], device=home), torch.tensor([[1, 2], [3, 4]]))
    same(torch.as_tensor(np.arange(5, dtype=np.float32), device=home), torch.arange(5.0))
    x = torch.arange(5.0, device=home)
    assert x.tolist() == [0, 1, 2, 3, 4]
    assert x[3].item() == 3
    assert float(x[2]) == 2
    assert int(x[2]) == 2
    assert bool(x[1])
    assert len(x) == 5
    assert [v.item() for v in x] == x.tolist()
    with pytest.raises(TypeError, match=r"can't convert opencl:\d device type tensor to numpy"):
        x.numpy()
    with pytest.raises(TypeError, match="can't convert"):
        np.asarray(x)
    assert np.array_equal(x.numpy(force=True), np.arange(5))


def test_copies_of_objects(device: Device) -> None:
    x = on(device, values(torch.float32, 4, 5))
    twin = copy.deepcopy({"a": x, "b": x})
    assert twin["a"] is twin["b"]
    assert twin["a"].operand.array is not x.operand.array
    same(twin["a"], x.cpu())
    same(copy.copy(x), x.cpu())
    loaded = pickle.loads(pickle.dumps(x))
    assert torch.equal(loaded.cpu(), x.cpu())
    file = io.BytesIO()
    torch.save({"x": x, "view": x.t()}, file)
    file.seek(0)
    state = torch.load(file, map_location="cpu", weights_only=True)
    assert torch.equal(state["x"], x.cpu())
    assert torch.equal(state["view"], x.cpu().t())


# ---- copy_ ----


@pytest.mark.parametrize("source", ALL, ids=str)
def test_every_type_converts_to_every_other(device: Device, source: torch.dtype) -> None:
    x = values(source, 3, 17)
    if source.is_floating_point:
        x = torch.cat([x.flatten(), torch.tensor([0.0, -0.0, 0.25, -0.75, 1.5, 100.0]).to(source)])
    for target in ALL:
        # Negative floats have no defined unsigned value.
        clean = x.abs() if target == torch.uint8 and source.is_floating_point else x
        same(on(device, clean).to(target), clean.to(target))
    other = torch.zeros(x.shape, dtype=torch.float32, device=torch_device(device))
    other.copy_(x)
    same(other, x.float())


def test_truth_of_hard_values(device: Device) -> None:
    for dtype in FLOATS:
        x = torch.tensor([v for v in HARD if v != 1e-40]).to(dtype)
        same(on(device, x).bool(), x.bool())
    wide = torch.tensor([1 << 40, -(1 << 40), 256, 0, -1])
    for dtype in (torch.bool, torch.int32, torch.int16, torch.int8, torch.uint8, torch.float32):
        same(on(device, wide).to(dtype), wide.to(dtype))


def test_copies_broadcast_and_stride(device: Device) -> None:
    x = torch.zeros(4, 5, 6)
    moved = on(device, x)
    for row in (values(torch.float32, 6), values(torch.int64, 5, 1), values(torch.float32)):
        for left, right in ((x, row), (moved, on(device, row)), (moved, row)):
            left.copy_(right)
        same(moved, x)
        x[1].t()[::2].copy_(row.reshape(-1)[0])
        moved[1].t()[::2].copy_(on(device, row).reshape(-1)[0])
        same(moved, x)
    host = torch.zeros(6, 5, 4)
    host.permute(2, 1, 0).copy_(moved)
    assert torch.equal(host.permute(2, 1, 0), x)
    with pytest.raises(RuntimeError, match="must match the size"):
        moved.copy_(on(device, torch.zeros(5, 5)))
    with pytest.raises(RuntimeError, match="must match the size"):
        moved.copy_(torch.zeros(2, 4, 5, 6))
    with pytest.raises(RuntimeError, match="single memory location"):
        moved[:, :1].expand(4, 5, 6).copy_(torch.zeros(4, 5, 6))


def test_copies_within_one_tensor(device: Device) -> None:
    x = values(torch.float32, 64)
    for first, second in (((4, 60), (0, 56)), ((0, 56), (4, 60)), ((0, 32), (32, 64))):
        moved = on(device, x)
        moved[slice(*second)].copy_(moved[slice(*first)])
        want = x.clone()
        want[slice(*second)] = x[slice(*first)]
        same(moved, want)
    square = values(torch.float32, 9, 9)
    moved = on(device, square)
    moved.copy_(moved.t())
    same(moved, square.t().contiguous())
    moved.copy_(moved)
    same(moved, square.t().contiguous())
    line = on(device, x)
    line.view(torch.int32)[:32].copy_(line[32:])
    assert torch.equal(line.view(torch.int32)[:32].cpu(), x[32:].int())


def test_joined_and_stacked(device: Device) -> None:
    x, y = values(torch.float32, 3, 4), values(torch.int32, 2, 4)
    dx, dy = on(device, x), on(device, y)
    same(torch.cat([dx, dy]), torch.cat([x, y]))
    same(torch.cat([dx, torch.empty(0, device=dx.device), dx.t().contiguous().t()], -1), torch.cat([x, x], 1))
    same(torch.stack([dx, dx + 1], 1), torch.stack([x, x + 1], 1))
    same(torch.hstack([dx, dx]), torch.hstack([x, x]))
    out = torch.empty(0, device=dx.device)
    torch.cat([dx, dx], out=out)
    same(out, torch.cat([x, x]))
    with pytest.raises(RuntimeError, match="must match"):
        torch.cat([dx, dy[:, :3]])
    with pytest.raises(RuntimeError, match="equal size"):
        torch.stack([dx, dy])


# ---- factories ----


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_filled_tensors(device: Device, dtype: torch.dtype) -> None:
    home = torch_device(device)
    fill: Any = True if dtype == torch.bool else 3
    for made, want in (
        (torch.zeros(3, 4, dtype=dtype, device=home), torch.zeros(3, 4, dtype=dtype)),
        (torch.ones(0, dtype=dtype, device=home), torch.ones(0, dtype=dtype)),
        (torch.full((5,), fill, dtype=dtype, device=home), torch.full((5,), fill, dtype=dtype)),
        (torch.eye(3, 5, dtype=dtype, device=home), torch.eye(3, 5, dtype=dtype)),
        (torch.scalar_tensor(1, dtype=dtype, device=home), torch.scalar_tensor(1, dtype=dtype)),
    ):
        same(made, want)
    like = on(device, values(dtype, 4, 3))
    for op in (torch.zeros_like, torch.ones_like, lambda x: torch.full_like(x, fill)):
        same(op(like), op(like.cpu()))
    same(like.new_zeros(2, 2), like.cpu().new_zeros(2, 2))
    same(like.new_full((2,), fill), like.cpu().new_full((2,), fill))
    assert torch.zeros_like(like, device="cpu").device.type == "cpu"
    assert torch.ones_like(like.cpu(), device=home).device == home


def test_ranges(shaped: Device) -> None:
    home = torch_device(shaped)
    for arguments in ((5,), (2, 9), (9, 2, -3), (0, 1, 0.125), (1.5,), (3, 3), (0,), (-4, 5, 2)):
        same(torch.arange(*arguments, device=home), torch.arange(*arguments))
    for dtype in (torch.int8, torch.uint8, torch.float16, torch.int64):
        same(torch.arange(7, dtype=dtype, device=home), torch.arange(7, dtype=dtype))
    big = 1 << 40
    same(torch.arange(big, big + 5, device=home), torch.arange(big, big + 5))
    out = torch.empty(0, dtype=torch.int64, device=home)
    same(torch.arange(2, 8, out=out), torch.arange(2, 8))
    torch.testing.assert_close(torch.linspace(-1, 3, 9, device=home).cpu(), torch.linspace(-1, 3, 9))
    torch.testing.assert_close(torch.logspace(0, 3, 4, device=home).cpu(), torch.logspace(0, 3, 4))
    for bad in ((1, 5, 0), (5, 1, 1)):
        with pytest.raises(RuntimeError, match="step"):
            torch.arange(*bad, device=home)


def test_triangles(shaped: Device) -> None:
    for shape, diagonal in itertools.product(((4, 6), (2, 5, 3), (1, 1), (0, 3)), (-2, 0, 1, 7)):
        x = values(torch.float32, *shape)
        same(on(shaped, x).tril(diagonal), x.tril(diagonal))
        same(on(shaped, x).triu(diagonal), x.triu(diagonal))
    same(on(shaped, x.t()).tril(), x.t().tril().contiguous())


def test_what_a_device_does_not_hold_is_refused(device: Device) -> None:
    home = torch_device(device)
    for dtype in (torch.float64, torch.complex64, torch.uint16, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match=r"the device 'opencl' holds float32, .*, got"):
            torch.empty(3, dtype=dtype, device=home)
    with pytest.raises(NotImplementedError, match="Sparseopencl"):
        torch.empty(3, layout=torch.sparse_coo, device=home)
    with pytest.raises(TypeError, match="dense"):
        torch.zeros(3, 3, device=home).to_sparse()
    with pytest.raises(RuntimeError, match="negative dimension"):
        torch.empty(2, -1, device=home)
    with pytest.raises(RuntimeError, match="negative dimension"):
        torch.zeros(1, device=home).new_ones(-1)
