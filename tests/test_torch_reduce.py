"""Reductions on the torch device: torch's samples, every geometry in both kernel shapes, NaN, ties, types, limits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import memtrain_cl.torch_device
from memtrain_cl.array import from_numpy
from memtrain_cl.device import Device
from memtrain_cl.launchers import reduce as launcher
from memtrain_cl.launchers.reduce import Layout, layout
from memtrain_cl.operand import Operand
from memtrain_cl.torch_device.fallback import strict
from memtrain_cl.torch_device.tensor import DTYPES, OpenCLTensor, opened, torch_device, wrap
from tests.torch_op_db import op_db, sample_inputs

memtrain_cl.torch_device.require_registered()

INF, NAN = math.inf, math.nan


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    with strict():
        yield


def placed(device: Device, tensor: torch.Tensor) -> OpenCLTensor:
    """The same bytes, strides and offset on this very device, which may be a twin of the one that torch names."""
    opened(torch_device(device))
    raw = torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())
    array = from_numpy(device, raw.numpy())
    shape, strides, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    return wrap(Operand(array, shape, strides, offset, DTYPES[tensor.dtype]))


def as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


# ---- torch's own samples ----
SAMPLED = (
    *("sum", "mean", "prod", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "var", "std", "var_mean"),
    *("std_mean", "linalg.vector_norm", "norm", "count_nonzero", "aminmax", "nansum", "logsumexp"),
)
#: The other types go through fewer operations: each is a program to build.
SAMPLED_OF = {
    torch.bfloat16: ("sum", "mean", "max", "var_mean", "linalg.vector_norm"),
    torch.int64: ("sum", "prod", "amax", "min", "any", "logsumexp"),
    torch.bool: ("sum", "all", "amin"),
}
OPS = [
    (op, dtype)
    for op in op_db
    for dtype in (torch.float32, *SAMPLED_OF)
    if op.name in SAMPLED_OF.get(dtype, SAMPLED) and op.variant_test_name not in ("binary", "nuc")
    if op.name in SAMPLED and op.supports_dtype(dtype, "cpu")
]


@pytest.mark.parametrize(
    ("op", "dtype"), OPS, ids=[f"{op.formatted_name}-{str(dtype).removeprefix('torch.')}" for op, dtype in OPS]
)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_samples_of_torch(device: Device, op: Any, dtype: torch.dtype) -> None:
    for sample in sample_inputs(op, dtype, requires_grad=False):
        want = as_tuple(op(sample.input, *sample.args, **sample.kwargs))
        got = as_tuple(op(placed(device, sample.input), *sample.args, **sample.kwargs))
        for mine, theirs in zip(got, want, strict=True):
            assert mine.dtype == theirs.dtype
            near, least = (2e-5, 1e-5) if theirs.dtype == torch.float32 else (None, None)
            assert_close(mine.cpu(), theirs, equal_nan=True, rtol=near, atol=least)


# ---- geometries, in both shapes of the kernel ----
GEOMETRIES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((1,), (0,)),
    ((0, 3), (0,)),
    ((3, 0), (0,)),
    *[((3, n), (1,)) for n in (7, 8, 9, 31, 32, 33, 255, 256, 257, 2049)],
    *[((40, n), (0,)) for n in (2, 7, 8, 9, 31, 32, 33, 71)],
    *[((n, 3), (0,)) for n in (8191, 8192, 8193)],
    *[((n,), (0,)) for n in (4095, 4096, 4097, 8193, 40001)],
    ((9000, 33), (0,)),
    ((2, 4200, 9), (1,)),
    ((5, 6, 7), (0, 2)),
    ((5, 6, 7), (1,)),
    ((4, 3, 2, 5), (1, 2)),
    ((600, 5), (1,)),
]


def check_sum(device: Device, x: torch.Tensor, dims: tuple[int, ...], near: float = 2e-6) -> None:
    """The error of a sum is relative to the sum of magnitudes, and grows with the root of its length at most."""
    got = placed(device, x).sum(dims).cpu().double()
    want, magnitude = x.double().sum(dims), x.double().abs().sum(dims)
    assert got.shape == want.shape
    assert ((got - want).abs() <= near * magnitude).all()


def check_places(device: Device, x: torch.Tensor, dim: int) -> None:
    """The largest elements, and the first places where they stand."""
    values, places = placed(device, x).max(dim)
    largest = x.amax(dim, keepdim=True)
    assert torch.equal(values.cpu(), largest.squeeze(dim))
    assert torch.equal(places.cpu(), (x == largest).to(torch.int8).argmax(dim))


@pytest.mark.parametrize(("shape", "dims"), GEOMETRIES, ids=str)
def test_geometries(shaped: Device, shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    check_sum(shaped, x, dims)
    if len(dims) == 1 and x.numel():
        check_places(shaped, x.mul(4).round(), dims[0])


def test_views(shaped: Device) -> None:
    base = torch.randn(6, 10, 12)
    views = [base[1:, 2:, 3:], base.permute(2, 0, 1), base[:, ::2], base[:, :, ::3].transpose(0, 2), base[3:4]]
    views += [base[0, 0].expand(5, 12), base[:, :1, :1].expand(6, 4, 5)]
    for x in views:
        for dims in itertools.chain.from_iterable(itertools.combinations(range(x.ndim), n) for n in range(1, 4)):
            check_sum(shaped, x, dims)
        for dim in range(x.ndim):
            check_places(shaped, x, dim)
        assert placed(shaped, x).argmin().item() == x.contiguous().argmin().item()


def test_empty_dimensions(device: Device) -> None:
    x = torch.empty(3, 0)
    mine = placed(device, x)
    assert torch.equal(mine.sum(1).cpu(), torch.zeros(3))
    assert torch.equal(mine.prod(1).cpu(), torch.ones(3))
    assert mine.mean(1).isnan().all()
    assert torch.equal(mine.logsumexp(1).cpu(), torch.full((3,), -INF))
    assert mine.sum().item() == 0
    assert not mine.any().item()
    assert mine.all().item()
    assert mine.amax(0).shape == (0,)
    calls: list[Callable[[torch.Tensor], Any]] = [
        *(lambda t, name=name: getattr(t, name)(1) for name in ("amax", "amin", "max", "min", "argmax", "argmin")),
        *(lambda t, name=name: getattr(t, name)() for name in ("amax", "max", "argmin")),
        lambda t: t.aminmax(dim=1),
        lambda t: t.sum(2),
        lambda t: t.sum((0, 0)),
        lambda t: t.int().var(),
        lambda t: t.int().mean(),
        lambda t: torch.linalg.vector_norm(t.int()),
        lambda t: torch.linalg.vector_norm(t, INF),
    ]
    for call in calls:
        with pytest.raises((IndexError, RuntimeError)) as theirs:
            call(x)
        with pytest.raises(theirs.type):
            call(mine)


# ---- values ----
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_nan_wins_at_its_first_place(shaped: Device, dtype: torch.dtype, dim: int) -> None:
    x = torch.randn(50, 50).to(dtype)
    x[20, 30] = x[40, 30] = x[20, 45] = NAN
    x[7, 8] = INF
    x[9, 9] = -INF
    mine = placed(shaped, x)
    for name in ("max", "min"):
        got, want = getattr(mine, name)(dim), getattr(x, name)(dim)
        assert_close(got[0].cpu(), want[0], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got[1].cpu(), want[1])
    assert mine.argmax().item() == 20 * 50 + 30


def test_places_of_equal_elements_are_the_first(shaped: Device) -> None:
    for value in (0, -INF, INF, NAN):
        x = torch.full((3, 700), float(value))
        for name in ("argmax", "argmin"):
            assert getattr(placed(shaped, x), name)(1).cpu().tolist() == [0, 0, 0]
            assert getattr(placed(shaped, x.T), name)(0).cpu().tolist() == [0, 0, 0]
    lowest = torch.full((5, 9), torch.iinfo(torch.int64).min)
    assert placed(shaped, lowest).max(1).indices.cpu().tolist() == [0] * 5


def test_logsumexp_of_infinities(shaped: Device) -> None:
    x = torch.randn(6, 40) * 50
    x[1], x[2, 3], x[3, 4], x[4, 5], x[4, 6] = -INF, INF, -INF, INF, -INF
    x[5, 0] = NAN
    assert_close(placed(shaped, x).logsumexp(1).cpu(), x.logsumexp(1), equal_nan=True)
    assert_close(placed(shaped, x.T).logsumexp(0).cpu(), x.logsumexp(1), equal_nan=True)


@pytest.mark.parametrize("dim", [0, 1])
def test_moments_far_from_zero(shaped: Device, dim: int) -> None:
    x = torch.randn(300, 310) + 1000
    variance, mean = torch.var_mean(placed(shaped, x), dim)
    want, middle = torch.var_mean(x.double(), dim)
    # Elements themselves are 6e-5 apart there, and a running mean is rounded 300 times.
    assert_close(variance.cpu().double(), want, rtol=1e-4, atol=0)
    assert_close(mean.cpu().double(), middle, rtol=1e-6, atol=0)
    assert_close(
        placed(shaped, x).std(dim, correction=7).cpu().double(), x.double().std(dim, correction=7), rtol=1e-4, atol=0
    )


def test_half_types_are_summed_in_float32(shaped: Device) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        ones = placed(shaped, torch.ones(70000, dtype=dtype))
        assert ones.mean().item() == 1
        assert ones.sum(dtype=torch.float32).item() == 70000
        assert abs(torch.linalg.vector_norm(ones).item() / 70000**0.5 - 1) < 2**-8
        assert placed(shaped, torch.full((3, 4096), 0.5, dtype=dtype)).sum(1).cpu().tolist() == [2048] * 3


def test_whole_numbers(shaped: Device) -> None:
    for dtype in (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool):
        x = torch.randint(-100, 100, (40, 1200)).to(dtype)
        mine = placed(shaped, x)
        assert torch.equal(mine.sum(1).cpu(), x.sum(1))
        assert torch.equal(mine.sum(0).cpu(), x.sum(0))
        assert torch.equal(mine.amax(1).cpu(), x.amax(1))
        assert torch.equal(mine.count_nonzero().cpu(), x.count_nonzero())
        assert mine.any(1).dtype == x.any(1).dtype
    large = torch.randint(-(2**62), 2**62, (9, 33))
    assert torch.equal(placed(shaped, large).sum(1).cpu(), large.sum(1))
    assert torch.equal(placed(shaped, large).max(0).values.cpu(), large.max(0).values)
    assert_close(placed(shaped, large).sum(1, dtype=torch.float32).cpu(), large.float().sum(1), rtol=1e-5, atol=1e14)


def test_results_do_not_change_between_runs(shaped: Device) -> None:
    x = placed(shaped, torch.randn(3, 50000))
    first = x.sum().item(), *x.norm(dim=1).cpu().tolist()
    assert all((x.sum().item(), *x.norm(dim=1).cpu().tolist()) == first for _ in range(3))


def test_too_few_elements_for_a_variance_are_said_aloud(device: Device) -> None:
    with pytest.warns(UserWarning, match="degrees of freedom is <= 0"):
        assert placed(device, torch.ones(3, 1)).var(1).isnan().all()


# ---- arithmetic of layouts and plans, without the elements ----
def test_layouts() -> None:
    wide = (1 << 20, 1 << 20)
    assert layout(wide, (1 << 20, 1), (0, 1), ordered=True) == Layout(1, 1, 0, 0, 1, 1 << 40)
    assert layout(wide, (1 << 20, 1), (1,), ordered=True) == Layout(1 << 20, 1, 1 << 20, 0, 1, 1 << 20)
    assert layout(wide, (1 << 20, 1), (0,), ordered=True) == Layout(1 << 20, 1 << 20, 0, 1, 1 << 20, 1 << 20)
    assert layout((2, 3, 4), (12, 4, 1), (1,), ordered=True) == Layout(8, 4, 12, 1, 4, 3)
    assert layout((2, 3, 4), (12, 4, 1), (0, 2), ordered=False) is None
    # A transposed matrix is one run for a sum, and is not for the places of its elements.
    assert layout((3, 4), (1, 3), (0, 1), ordered=False) == Layout(1, 1, 0, 0, 1, 12)
    assert layout((3, 4), (1, 3), (0, 1), ordered=True) is None


def test_more_than_a_kernel_counts_is_refused(device: Device) -> None:
    array = from_numpy(device, torch.zeros(8, dtype=torch.uint8).numpy())
    many = Operand(array, (1 << 32, 2), (0, 1), 0, "float32")
    with pytest.raises(ValueError, match="fewer than 2\\^32"):
        launcher.reduce("sum", many, (1,), Operand(array, (1 << 32,), (1,), 0, "float32"))
    with pytest.raises(ValueError, match="fewer than 2\\^32"):
        launcher.reduce("argmax", many, (0,), Operand(array, (2,), (1,), 0, "int64"))


@pytest.mark.parametrize("units", [1, 2, 132])
def test_parts_cover_runs_of_any_length(device: Device, units: int) -> None:
    info = replace(device.info, compute_units=units, max_work_group_size=1024)
    for length in (1, 7, 31, 32, 33, 255, 256, 257, 4097, 65536, (1 << 26) - 1, 1 << 26, 1 << 33):
        for at in (
            Layout(1, 1, 0, 0, 1, length),
            Layout(700, 1, length, 0, 1, length),
            Layout(33, 33, 0, 1, 33, length),
        ):
            for shape in (launcher._gpu_shape(info, at), launcher._cpu_shape(info, at)):
                assert (shape.parts - 1) * shape.chunk < length <= shape.parts * shape.chunk
            lanes, lane_shift, place_shift = launcher._gpu_shape(info, at).own
            assert lanes & (lanes - 1) == 0
            assert {lane_shift, place_shift} >= {0}


@pytest.mark.parametrize("largest", [64, 100, 256])
def test_smaller_work_groups(device: Device, largest: int) -> None:
    twin = device.with_capabilities(type="gpu", max_work_group_size=largest)
    for shape, dims in (((5, 700), (1,)), ((700, 45), (0,)), ((40001,), (0,))):
        check_sum(twin, torch.randn(shape), dims)
