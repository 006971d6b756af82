"""Types of elementwise operations on the device "opencl": every one, torch's promotion, roundings of 16 bits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memtrain_cl.device import Device
from tests.torch_cases import ALL, near, on, same, values

Op = Callable[..., Any]


# ---- types ----


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_every_type_is_computed(device: Device, dtype: torch.dtype) -> None:
    x, y = values(dtype, 3, 41), values(dtype, 3, 41, seed=1)
    for op in (torch.add, torch.mul, torch.lt, torch.maximum):
        same(op(on(device, x), on(device, y)), op(x, y))
    if dtype != torch.bool:
        same(on(device, x) - on(device, y), x - y)
        same(on(device, x).abs(), x.abs())


def _scalars() -> list[Any]:
    return [3, 2.5, True]


_PROMOTING: dict[str, Op] = {
    "add": torch.add,
    "mul": torch.mul,
    "div": torch.div,
    "eq": torch.eq,
    "where": lambda a, b: torch.where(torch.ones(0, dtype=torch.bool, device=a.device), a, b),
}


@pytest.mark.parametrize("name", list(_PROMOTING))
def test_types_are_promoted_as_by_torch(device: Device, name: str) -> None:
    op = _PROMOTING[name]
    # Tensors without elements have a type, and launch nothing.
    for one, two in itertools.product(ALL, ALL):
        a, b = torch.empty(0, dtype=one), torch.empty(0, dtype=two)
        number = torch.ones((), dtype=two)
        for left, right in ((a, b), (a, number), (number, a)):
            got = op(on(device, left), on(device, right))
            assert got.dtype == op(left, right).dtype, (left, right)
    for one in ALL:
        a = torch.empty(0, dtype=one)
        for scalar in _scalars():
            assert op(on(device, a), scalar).dtype == op(a, scalar).dtype, (one, scalar)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (torch.float32, torch.int64),
        (torch.float16, torch.bfloat16),
        (torch.int64, torch.uint8),
        (torch.int8, torch.uint8),
        (torch.bool, torch.float16),
        (torch.bool, torch.int8),
        (torch.int32, torch.bfloat16),
    ],
    ids=str,
)
def test_mixed_types_are_computed(device: Device, one: torch.dtype, two: torch.dtype) -> None:
    a, b = values(one, 37), values(two, 37, seed=1)
    condition = values(torch.bool, 37, seed=2)
    da, db = on(device, a), on(device, b)
    same(da + db, a + b)
    same(da * db, a * b)
    same(da == db, a == b)
    same(torch.where(on(device, condition), da, db), torch.where(condition, a, b))
    near(da / (db + 10), a / (b + 10), rtol=1e-6 if torch.float32 in (one, two) else 0, atol=0)


def test_numbers_and_cpu_scalars(device: Device) -> None:
    x, i = values(torch.float32, 9), values(torch.int64, 9)
    dx, di = on(device, x), on(device, i)
    double = torch.tensor(2.5, dtype=torch.float64)
    for scalar in (2, 0.5, True, -3, torch.tensor(1.5), torch.tensor(2)):
        same(dx * scalar, x * scalar)
        same(di + scalar, i + scalar)
    same(dx * double, x * double)
    with pytest.raises(TypeError, match=r"holds float32, .* got float64"):
        torch.add(di, double)
    same(3 - dx, 3 - x)
    same(2 ** di.abs(), 2 ** i.abs())
    same(di + (1 << 40), i + (1 << 40))
    same(torch.where(dx > 0, 1.0, dx), torch.where(x > 0, 1.0, x))
    assert (on(device, torch.tensor(3.0)) + 1).item() == 4.0


# ---- roundings of the 16-bit types ----


def _every(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)


def _same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    host = got.cpu()
    assert torch.equal(host.isnan(), want.isnan())
    kept = ~want.isnan()
    bits = {4: torch.int32, 2: torch.int16}[want.itemsize]
    wrong = (host.view(bits) != want.view(bits)) & kept
    assert not wrong.any(), f"{int(wrong.sum())} differ, the first: {host[wrong][0]} is not {want[wrong][0]}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_all_numbers_of_16_bits_widen_and_return(device: Device, dtype: torch.dtype) -> None:
    every = _every(dtype)
    wide = every.float()
    if not device.info.subnormals:
        every = every[(wide == 0) | (wide.abs() >= torch.finfo(torch.float32).tiny)]
        wide = every.float()
    _same_bits(on(device, every).float(), wide)
    _same_bits(on(device, wide).to(dtype), every)
    _same_bits(on(device, every).clone(), every)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_numbers_round_to_the_nearest_of_16_bits(device: Device, dtype: torch.dtype) -> None:
    every = _every(dtype)
    wide = every[every.isfinite()].float()
    halfway = (wide + wide.nextafter(torch.tensor(math.inf))) / 2
    bits = (wide.view(torch.int32)[:, None] + torch.tensor([0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001])).view(-1)
    near_ties = torch.cat([bits.view(torch.float32), halfway, torch.tensor([65519.0, 65520.0, 65536.0, 3.4e38])])
    # Ties of float16's subnormals, where the last place is 2^-24.
    small = torch.arange(0, 4096, dtype=torch.float32) * 2.0**-26
    numbers = torch.cat([near_ties, small, -small, torch.tensor([math.nan, math.inf, -math.inf])])
    if not device.info.subnormals:
        numbers = numbers[(numbers == 0) | ~(numbers.abs() < torch.finfo(torch.float32).tiny)]
    _same_bits(on(device, numbers).to(dtype), numbers.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_results_of_16_bits_are_rounded_once(device: Device, dtype: torch.dtype) -> None:
    chance = torch.Generator().manual_seed(3)
    one, two = ((torch.randn(20000, generator=chance) * 4).to(dtype) for _ in range(2))
    _same_bits(on(device, one) + on(device, two), one + two)
    _same_bits(on(device, one) * on(device, two), one * two)
    _same_bits(on(device, one) * 0.3, one * 0.3)
