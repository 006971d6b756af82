"""Views of tensors on the device "opencl": torch's geometry over the same bytes, and changes that go through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from memtrain_cl.device import Device
from tests.torch_cases import on, same, values

View = Callable[[torch.Tensor], Any]

_VIEWS: dict[str, View] = {
    "alias": torch.ops.aten.alias.default,
    "as_strided": lambda x: x.as_strided((2, 3), (7, 2), 3),
    "chunk": lambda x: x.chunk(2, 1)[1],
    "detach": lambda x: x.detach(),
    "diagonal": lambda x: x.diagonal(1, 0, 2),
    "expand": lambda x: x[:, :1].expand(4, 3, 5),
    "expand_as": lambda x: x[:1].expand_as(x),
    "flatten": lambda x: x.flatten(1),
    "getitem": lambda x: x[1:3, None, -1, ::2],
    "hsplit": lambda x: x.hsplit([2])[1],
    "mT": lambda x: x.mT,
    "movedim": lambda x: x.movedim(0, 2),
    "narrow": lambda x: x.narrow(2, 1, 3),
    "permute": lambda x: x.permute(2, 0, 1),
    "ravel": lambda x: x.ravel(),
    "real": lambda x: x.real,
    "reshape": lambda x: x.reshape(2, 2, 15),
    "select": lambda x: x.select(1, 2),
    "slice": lambda x: x[1:4:2],
    "split": lambda x: x.split(3, 2)[1],
    "split with sizes": lambda x: x.split([1, 3], 0)[1],
    "squeeze": lambda x: x[:, :1].squeeze(),
    "squeeze a dimension": lambda x: x[:, :1].squeeze(1),
    "squeeze dimensions": lambda x: x[:1, :1].squeeze((0, 1)),
    "swapaxes": lambda x: x.swapaxes(0, 2),
    "t": lambda x: x[0].t(),
    "tensor_split": lambda x: x.tensor_split(3, 2)[2],
    "transpose": lambda x: x.transpose(0, -1),
    "unbind": lambda x: x.unbind(1)[2],
    "unflatten": lambda x: x.unflatten(0, (2, 2)),
    "unfold": lambda x: x.unfold(2, 3, 2),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "view": lambda x: x.view(12, 5),
    "view a type": lambda x: x.view(torch.int32),
    "view a narrow type": lambda x: x.view(torch.int16),
    "view_as": lambda x: x.view_as(torch.empty(2, 30, device=x.device)),
}


@pytest.mark.parametrize("name", list(_VIEWS))
def test_views_see_and_change_their_base(device: Device, name: str) -> None:
    x = values(torch.float32, 4, 3, 5)
    moved = on(device, x)
    view, seen = _VIEWS[name](x), _VIEWS[name](moved)
    same(seen, view)
    assert seen.storage_offset() == view.storage_offset()
    assert seen.operand.array is moved.operand.array
    if any(size > 1 and stride == 0 for size, stride in zip(seen.shape, seen.stride(), strict=True)):
        return
    view.fill_(3)
    seen.fill_(3)
    same(moved, x)
    moved.zero_()
    assert not seen.any().item()


@pytest.mark.parametrize("name", ["reshape", "contiguous", "flatten"])
def test_composite_views_copy_where_they_must(device: Device, name: str) -> None:
    x = values(torch.float32, 4, 6)
    ways: dict[str, View] = {
        "reshape": lambda x: x.t().reshape(-1),
        "contiguous": lambda x: x.t().contiguous(),
        "flatten": lambda x: x[:, ::2].flatten(),
    }
    op = ways[name]
    with torch.inference_mode():  # where such operations reach the device whole
        same(op(on(device, x)), op(x))
    same(op(on(device, x)), op(x))


def test_views_in_inference_mode_are_of_their_base_s_kind(device: Device) -> None:
    ordinary = on(device, values(torch.float32, 4, 6))
    with torch.inference_mode():
        made = ordinary + 1
        assert made.is_inference()
        assert made.t().is_inference()
        view = ordinary.t()
        assert not view.is_inference()
        view.add_(1)
    same(ordinary, made.cpu().clone())


def test_geometry_changes_in_place(device: Device) -> None:
    x = values(torch.float32, 3, 1, 5)
    moved = on(device, x)
    changes: tuple[View, ...] = (
        lambda x: x.squeeze_(1),
        lambda x: x.t_(),
        lambda x: x.unsqueeze_(0),
        lambda x: x.transpose_(0, 2),
        lambda x: x.squeeze_(),
        lambda x: x.swapaxes_(0, 1),
        lambda x: x.as_strided_((2, 2), (1, 5), 2),
    )
    for change in changes:
        same(change(moved), change(x))
        same(moved, x)
    moved.add_(1)
    x.add_(1)
    same(moved, x)


def test_as_strided_stays_within_the_bytes(device: Device) -> None:
    x = on(device, torch.arange(12.0))
    same(x[2:].as_strided((2, 2), (3, 1)).contiguous(), torch.tensor([[2.0, 3.0], [5.0, 6.0]]))
    same(x.as_strided((0,), (1,), 0), torch.empty(0))
    for arguments in (((13,), (1,)), ((2, 2), (11, 1)), ((1,), (1,), 12), ((4,), (4,), 0)):
        with pytest.raises(RuntimeError, match="out of bounds for storage of 12"):
            x.as_strided(*arguments)
    with pytest.raises(RuntimeError, match="at least 0"):
        x.as_strided((2,), (-1,), 3)


def test_bytes_seen_as_another_type(device: Device) -> None:
    x = torch.arange(48, dtype=torch.uint8).view(6, 8)
    moved = on(device, x)
    for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.int8, torch.bool):
        if dtype != torch.bool:
            same(moved.view(dtype), x.view(dtype))
    same(moved[2:].view(torch.int32), x[2:].view(torch.int32))
    moved.view(torch.int16)[1].fill_(257)
    x.view(torch.int16)[1].fill_(257)
    same(moved, x)
    with pytest.raises(RuntimeError, match="divisible"):
        moved[:, :3].view(torch.int16)
    with pytest.raises(RuntimeError, match="divisible"):
        moved.view(-1)[1:].view(torch.int32)
    with pytest.raises(TypeError, match="got float64"):
        moved.view(torch.float64)


def test_sizes_change_in_place(device: Device) -> None:
    x = torch.arange(12.0)
    moved = on(device, x)
    twin = moved.view(3, 4)
    moved.resize_(2, 3)
    same(moved, x[:6].view(2, 3))
    moved.fill_(9)
    assert twin.view(-1)[:6].eq(9).all().item()
    moved.resize_(4, 5)
    assert moved.shape == (4, 5)
    assert moved.view(-1)[:12].cpu().tolist() == [9.0] * 6 + x[6:].tolist()
    assert moved.is_contiguous()
    empty = torch.empty(0, device=moved.device)
    empty.resize_(3).fill_(2)
    assert empty.tolist() == [2.0] * 3


def test_a_tensor_takes_another_s_bytes(device: Device) -> None:
    x, y = on(device, torch.arange(6.0)), torch.empty(0, device=on(device, torch.zeros(1)).device)
    y.set_(x.view(2, 3))
    same(y, torch.arange(6.0).view(2, 3))
    y[0, 0] = 7
    assert x[0].item() == 7
    x.data = on(device, torch.ones(3))
    same(x + 0, torch.ones(3))


def test_windows_of_copies(device: Device) -> None:
    x = values(torch.float32, 5, 6)
    moved = on(device, x)
    row, block, line = values(torch.float32, 6, seed=1), values(torch.float32, 5, 3, seed=2), values(torch.float32, 5)
    same(moved.select_scatter(on(device, row), 0, 2), x.select_scatter(row, 0, 2))
    same(moved.slice_scatter(on(device, block), 1, 0, 6, 2), x.slice_scatter(block, 1, 0, 6, 2))
    same(moved.diagonal_scatter(on(device, line)), x.diagonal_scatter(line))
    same(moved, x)


def test_gradients_go_through_views(device: Device) -> None:
    if device.info.index:
        pytest.skip("torch differentiates on opencl:0 alone")
    for name, view in _VIEWS.items():
        if name in ("detach", "alias", "view a type", "view a narrow type"):
            continue
        x = values(torch.float32, 4, 3, 5).requires_grad_()
        leaf = on(device, x).detach().requires_grad_()
        weight = values(torch.float32, *view(x).shape, seed=4)
        (view(x) * weight).sum().backward()
        (view(leaf) * on(device, weight)).sum().backward()
        assert x.grad is not None
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad.cpu(), x.grad, rtol=1e-6, atol=1e-6, msg=name)


def test_changes_of_views_reach_gradients(device: Device) -> None:
    if device.info.index:
        pytest.skip("torch differentiates on opencl:0 alone")
    grads = []
    for place in (torch.device("cpu"), on(device, torch.zeros(1)).device):
        leaf = values(torch.float32, 4, 5).to(place).requires_grad_()
        y = leaf * 2
        y[1:3].mul_(3)
        y.t()[0].add_(leaf[:, 1])
        y[0, ::2] = 0
        y.sum().backward()
        assert leaf.grad is not None
        grads.append(leaf.grad.cpu())
    same(grads[1], grads[0])
