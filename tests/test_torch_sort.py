"""Sorts and running sums on the torch device: every geometry in both kernel shapes, ties, NaN, types, limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import memtrain_cl.torch_device
from memtrain_cl.array import from_numpy
from memtrain_cl.device import Device
from memtrain_cl.launchers.scan import scan as launch_scan
from memtrain_cl.launchers.sort import sort as launch_sort
from memtrain_cl.operand import Operand
from memtrain_cl.torch_device.fallback import strict
from tests.test_torch_reduce import placed

memtrain_cl.torch_device.require_registered()

INF, NAN = math.inf, math.nan
#: Lengths around the tiles of both shapes: 16 * 4^j pairs, powers of two, and their largest, 1024.
LENGTHS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 257, 1023, 1024, 1025, 2049, 5000)


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    with strict():
        yield


def some(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values with ties among them."""
    if dtype.is_floating_point:
        return torch.randn(shape).mul(20).round().div(4).to(dtype)
    return torch.randint(-(2**40) if dtype == torch.int64 else -100, 100, shape).to(dtype)


def check_sort(device: Device, x: torch.Tensor, dim: int, descending: bool) -> None:
    values, places = placed(device, x).sort(dim, descending)
    want = x.sort(dim=dim, descending=descending, stable=True)
    assert_close(values.cpu(), want.values, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(places.cpu(), want.indices)


@pytest.mark.parametrize("length", LENGTHS)
def test_sort_of_rows_and_columns(shaped: Device, length: int) -> None:
    x = some((3, length))
    for descending in (False, True):
        check_sort(shaped, x, 1, descending)
        check_sort(shaped, x.T.contiguous(), 0, descending)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool]
)
def test_sort_of_types(shaped: Device, dtype: torch.dtype) -> None:
    x = some((2, 1500), dtype)
    for descending in (False, True):
        check_sort(shaped, x, 1, descending)


def test_sort_of_views(shaped: Device) -> None:
    base = some((5, 6, 40))
    for x in (base[1:, ::2, 3:], base.permute(2, 0, 1), base[0, 0].expand(4, 40), base[:, :, 0], base[2, 3, 4]):
        for dim in range(-x.ndim, x.ndim) if x.ndim else (0, -1):
            check_sort(shaped, x, dim, False)
    assert torch.equal(placed(shaped, base).argsort(dim=1, stable=True).cpu(), base.argsort(dim=1, stable=True))
    assert torch.equal(placed(shaped, base).msort().cpu(), base.msort())


def test_nan_is_the_greatest_and_zeros_are_equal(shaped: Device) -> None:
    x = torch.tensor([0.0, NAN, -0.0, INF, -INF, 1e-45, -1e-45, 1e-38, -NAN, 0.0, -1.0, 3.4e38, -0.0])
    for descending in (False, True):
        check_sort(shaped, x, 0, descending)
    signs = placed(shaped, x).sort().values.cpu()[3:8]
    assert torch.equal(signs.signbit(), torch.tensor([False, True, False, True, False]))
    limits = torch.tensor([torch.iinfo(torch.int64).max, 0, torch.iinfo(torch.int64).min, -1, 1])
    check_sort(shaped, limits, 0, True)


@pytest.mark.parametrize(
    ("length", "k"),
    [(1, 1), (20, 7), (1500, 1), (5000, 5), (5000, 64), (5000, 65), (5000, 1400), (9000, 9000), (40, 0)],
)
def test_topk(shaped: Device, length: int, k: int) -> None:
    x = some((3, length))
    for largest in (True, False):
        values, places = placed(shaped, x).topk(k, largest=largest)
        want = x.sort(dim=1, descending=largest, stable=True)
        assert torch.equal(values.cpu(), want.values[:, :k])
        assert torch.equal(places.cpu(), want.indices[:, :k])
    assert torch.equal(placed(shaped, x.T).topk(k, 0).values.cpu(), x.topk(k).values.T)


def test_kthvalue(device: Device) -> None:
    x = some((4, 33, 3))
    for keepdim in (False, True):
        values, places = placed(device, x).kthvalue(5, 1, keepdim)
        assert torch.equal(values.cpu(), x.kthvalue(5, 1, keepdim).values)
        found = x.gather(1, places.cpu() if keepdim else places.cpu().unsqueeze(1))
        assert torch.equal(found if keepdim else found.squeeze(1), values.cpu())


# ---- running sums, products and extremes ----
@pytest.mark.parametrize(
    "shape", [(1,), (7,), (3, 8), (2, 2047), (2, 2048), (2, 2049), (40000,), (17000, 2), (5, 6, 7)], ids=str
)
def test_cumsum(shaped: Device, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for dim in range(x.ndim):
        got = placed(shaped, x).cumsum(dim).cpu().double()
        assert ((got - x.double().cumsum(dim)).abs() <= 2e-6 * x.double().abs().cumsum(dim)).all()
        whole = x.mul(3).round().long()
        assert torch.equal(placed(shaped, whole).cumsum(dim).cpu(), whole.cumsum(dim))


@pytest.mark.parametrize("name", ["cummax", "cummin"])
def test_running_extremes(shaped: Device, name: str) -> None:
    for x in (some((3, 2100)), some((40000,), torch.int64), some((300, 5), torch.bfloat16), torch.full((9,), -INF)):
        x = x.clone()
        if x.dtype == torch.float32 and x.ndim == 2:
            x[1, 1000] = x[1, 1100] = NAN
        for dim in range(x.ndim):
            got, want = getattr(placed(shaped, x), name)(dim), getattr(x, name)(dim)
            assert_close(got[0].cpu(), want[0], rtol=0, atol=0, equal_nan=True)
            assert torch.equal(got[1].cpu(), want[1])


def test_other_running_results(device: Device) -> None:
    x = torch.rand(4, 5, 6) + 0.5
    for view in (x, x.permute(2, 0, 1), x[:, 1:, ::2], x[0, 0, 0]):
        for dim in range(view.ndim) if view.ndim else (0,):
            assert_close(placed(device, view).cumprod(dim).cpu(), view.cumprod(dim), rtol=1e-5, atol=0)
    ones = torch.ones(5000, dtype=torch.bfloat16)
    assert placed(device, ones).cumsum(0, dtype=torch.float32).cpu()[-1].item() == 5000
    assert torch.equal(placed(device, ones.bool()).cumsum(0).cpu(), ones.bool().cumsum(0))


# ---- limits and errors ----
def test_empty(device: Device) -> None:
    for shape in ((0,), (0, 3), (3, 0)):
        mine = placed(device, torch.empty(shape))
        for dim in range(len(shape)):
            assert [tuple(t.shape) for t in mine.sort(dim)] == [shape, shape]
            assert mine.cumsum(dim).shape == shape
            assert mine.cummax(dim)[1].shape == shape


def test_errors_are_those_of_torch(device: Device) -> None:
    x = torch.ones(3, 4)
    calls: list[Callable[[torch.Tensor], Any]] = [
        lambda t: t.sort(2),
        lambda t: t.topk(5),
        lambda t: t.topk(-1),
        lambda t: t.topk(1, 2),
        lambda t: t.kthvalue(0),
        lambda t: t.kthvalue(5),
        lambda t: t.cumsum(2),
        lambda t: t.cummax(-3),
    ]
    for call in calls:
        with pytest.raises((IndexError, RuntimeError)) as theirs:
            call(x)
        with pytest.raises(theirs.type):
            call(placed(device, x))


def test_more_than_a_kernel_counts_is_refused(device: Device) -> None:
    array = from_numpy(device, torch.zeros(8, dtype=torch.uint8).numpy())
    long = Operand(array, (1 << 32,), (0,), 0, "float32")
    with pytest.raises(ValueError, match="fewer than 2\\^32"):
        launch_sort(long, 0, long, long, descending=False)
    with pytest.raises(ValueError, match="fewer than 2\\^32"):
        launch_scan("cumsum", long, 0, long)


@pytest.mark.parametrize("largest", [64, 100])
def test_smaller_work_groups(device: Device, largest: int) -> None:
    twin = device.with_capabilities(type="gpu", max_work_group_size=largest, local_mem_bytes=1 << 14)
    check_sort(twin, some((2, 1500)), 1, False)
    check_sort(twin, some((2, 1500), torch.int64), 1, False)
    x = torch.arange(3000)
    assert torch.equal(placed(twin, x).cumsum(0).cpu(), x.cumsum(0))
