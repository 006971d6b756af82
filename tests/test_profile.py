"""Profiles of blocks: every layout, type and place, hard blocks, what comes back, and clear refusals.

That each kernel gives the reference's bytes is the table of cases' (test_cases.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

import memtrain_cl.torch_device  # noqa: F401 (registers the device)
from memtrain_cl import ops, reference
from memtrain_cl.device import Device
from memtrain_cl.errors import UnsupportedDevice
from memtrain_cl.ops.profile import Blocks
from memtrain_cl.optim.profiles import normal_table
from memtrain_cl.torch_device.fallback import strict
from tests.operands import same
from tests.test_stochastic import LAYOUTS

HOST = torch.device("cpu")
#: Of blocks that end on fours, and of such that do not.
SIZES = (16, 7)
NORMAL = normal_table(HOST)


def there_and_back(room: ModuleType, x: torch.Tensor, size: int) -> Any:
    """All that a profile of x gives, by a room."""
    codes, pairs = room.encode_profile(x, size)
    table = NORMAL.to(x.device)
    return (
        codes,
        pairs,
        room.decode_profile(codes, pairs, table, size),
        room.decode_profile(codes, pairs, table, size, positive=True),
        room.pool_profile(x, pairs, size),
        torch.tensor(room.profile_error(x, codes, pairs, table, size)),
    )


@pytest.mark.parametrize("arrange", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_is_its_contiguous_copy(device: Device, place: torch.device, arrange: Callable[..., Any]) -> None:
    x = arrange(torch.randn(6, 20))
    for size in SIZES:
        want = there_and_back(reference, x.contiguous(), size)
        assert same(there_and_back(ops, x, size), want)
        with strict():
            there = arrange(torch.randn(6, 20, device=place)).copy_(x) if x.stride(0) else arrange(x.to(place))
            assert same(there_and_back(ops, there, size), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_floating_type(device: Device, place: torch.device, dtype: torch.dtype) -> None:
    x = torch.randn(5, 23).to(dtype)
    want = there_and_back(reference, x, 16)
    with strict():
        got = there_and_back(ops, x.to(place), 16)
    assert all(tensor.device == place for tensor in got[:-1])
    assert same(got, want)


def test_device_of_memory_of_its_own(discrete: Device) -> None:
    x = torch.randn(6, 20)
    assert same(there_and_back(ops, x, 16), there_and_back(reference, x, 16))


def test_nothing_takes_no_kernel(device: Device, place: torch.device) -> None:
    for room, where in ((ops, HOST), (ops, place), (reference, HOST)):
        x = torch.empty(3, 0, device=where)
        codes, pairs, *back, pooled, error = there_and_back(room, x, 16)
        assert (codes.shape, codes.dtype, pairs.shape) == ((3, 0), torch.uint8, (0, 2))
        assert all(values.shape == (3, 0) for values in back)
        assert pooled.shape == (0,)
        assert float(error) == 0.0
        assert room.profile_distance(pooled, NORMAL.to(where), -1.0, 1.0) == (0.0, 0)


def test_ranks_follow_value_and_place(shaped: Device) -> None:
    x = torch.tensor([3.0, 0.0, -1.0, 3.0, 2e-39, -1.0, -0.0, 0.5])
    # Ranks 3, -, 0, 4, -, 1, -, 2 of five; the first of equals comes first.
    want = [179, 0, 26, 230, 0, 77, 0, 128]
    for room in (ops, reference):
        assert room.encode_profile(x, 8)[0].tolist() == want
    full = torch.randperm(256).float() + 1
    for room in (ops, reference):
        codes, pairs = room.encode_profile(full)
        assert torch.equal(codes.long(), 1 + (2 * full.long() - 1) * 255 // 512)
        assert pairs.tolist() == [[128.5, pytest.approx(full.std(unbiased=False).item(), rel=1e-6)]]


def test_zeros_and_equal_numbers_come_back_as_they_were(shaped: Device) -> None:
    # A third of a power of two is such that sums of three of it are rounded.
    x = torch.zeros(4, 200)
    x[1, ::3] = -1 / 3
    x[2] = 1e-37 / 3
    x[3, 7] = 3e38
    for size in (200, 25, 1):
        codes, pairs = ops.encode_profile(x, size)
        assert torch.equal(ops.decode_profile(codes, pairs, NORMAL, size), x)
        assert not pairs[:, 1].any()


def test_a_block_that_is_not_finite_comes_back_as_nan(shaped: Device) -> None:
    x = torch.randn(4, 32)
    x[0, 3], x[2, 31], x[3] = math.nan, -math.inf, 0.0
    x[2, 4] = 0.0
    codes, pairs = ops.encode_profile(x, 32)
    back = ops.decode_profile(codes, pairs, NORMAL, 32)
    assert back.isnan().all(1).tolist() == [True, False, True, False]
    assert not back.isnan()[[1, 3]].any()
    assert math.isnan(ops.profile_error(x, codes, pairs, NORMAL, 32))


@pytest.mark.parametrize("size", [1e-35, 1e-22, 1.0, 1e18, 1e35])
def test_any_magnitude_has_the_same_relative_error(device: Device, size: float) -> None:
    x = torch.randn(40, 256)
    codes, pairs = ops.encode_profile(x * size)
    # Of the smallest, what lies below 2^-126 is a zero more.
    want = reference.profile_error(x, *reference.encode_profile(x), NORMAL)
    assert ops.profile_error(x * size, codes, pairs, NORMAL) == pytest.approx(want, rel=2e-2)
    back = ops.decode_profile(codes, pairs, NORMAL).double()
    assert float((back / size - x).norm() / x.norm()) < 0.1


def test_positive_numbers_stay_so(device: Device) -> None:
    x = torch.randn(30, 256).square() + 1e-8
    codes, pairs = ops.encode_profile(x)
    assert bool((ops.decode_profile(codes, pairs, NORMAL) < 0).any())
    back = ops.decode_profile(codes, pairs, NORMAL, positive=True)
    assert bool((back >= pairs[:, :1] / 16).all())


@pytest.mark.parametrize("block_size", [0, 257, 16.0, True, None])
def test_block_sizes_out_of_range(device: Device, block_size: Any) -> None:
    for room in (ops, reference):
        with pytest.raises(ValueError, match=r"block_size as an integer in 1\.\.256"):
            room.encode_profile(torch.ones(3, 3), block_size)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda room, x, c, p: room.encode_profile(x.double()), TypeError, r"torch\.float32.*torch\.bfloat16, got"),
        (lambda room, x, c, p: room.decode_profile(x, p, NORMAL), TypeError, "codes of dtype torch.uint8, got"),
        (lambda room, x, c, p: room.decode_profile(c, p[:1], NORMAL), ValueError, r"mean_scale of shape \[2, 2\]"),
        (lambda room, x, c, p: room.decode_profile(c, p, NORMAL[1:]), ValueError, r"table of shape \[256\], got"),
        (lambda room, x, c, p: room.profile_distance(x[0], NORMAL, 1.0, 1.0), ValueError, "start below stop"),
        (lambda room, x, c, p: room.profile_distance(x[0], NORMAL[:1], 0.0, 1.0), ValueError, "two places or more"),
    ],
)
def test_wrong_input_is_refused(device: Device, call: Callable[..., Any], error: type[Exception], message: str) -> None:
    x = torch.randn(4, 100)
    for room in (ops, reference):
        with pytest.raises(error, match=message):
            call(room, x, *reference.encode_profile(x))


def test_plans_cover_all_blocks(shaped: Device) -> None:
    for n, block in ((1, 256), (10**12, 256), (999, 7)):
        if n > 10**11:
            with pytest.raises(UnsupportedDevice, match="fewer than 2"):
                Blocks(shaped, n, block, aligned=False)
            continue
        plan = Blocks(shaped, n, block, aligned=True)
        assert (plan.count - 1) * block < n <= plan.count * block
        assert plan.constants["GPU"] == 0 or 4 * plan.constants["LANES"] >= block
