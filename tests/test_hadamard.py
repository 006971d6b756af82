"""Rotations and rotated rows: published values, every layout, type and place, and clear refusals.

That each kernel gives the reference's bytes is the table of cases' (test_cases.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import memtrain_cl.torch_device  # noqa: F401 (registers the device)
from memtrain_cl import ops, reference
from memtrain_cl.device import Device
from memtrain_cl.errors import UnsupportedDevice
from memtrain_cl.formats import row_rotation
from memtrain_cl.ops.hadamard import launch_encode
from memtrain_cl.torch_device.fallback import strict
from tests.operands import same
from tests.test_stochastic import LAYOUTS

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "automagic.json").read_text())
ROTATIONS = (1, 4, 16, 64, 256)


def there_and_back(room: ModuleType, x: torch.Tensor, rot: int = 4) -> Any:
    """All that is made of x in rotated rows, by a room."""
    codes, scale = room.encode_rotated(x, rot)
    rows = room.quantize_int8_rows(x)
    return (
        room.rotate(x, rot),
        codes,
        scale,
        room.decode_rotated(codes, scale, rot),
        *rows,
        room.dequantize_int8_rows(*rows),
    )


# ---- published values ----


def test_published_values(device: Device) -> None:
    for room in (ops, reference):
        assert room.regular_hadamard(4).tolist() == GOLDEN["regular_hadamard_4"]
        for case in GOLDEN["rotate"]:
            assert room.rotate(torch.tensor(case["input"]), case["rot"]).tolist() == case["output"]
        for number, power in GOLDEN["largest_pow4_divisor"].items():
            assert room.largest_pow4_divisor(int(number)) == power
        case = GOLDEN["int8_rows"]
        codes, scale = room.quantize_int8_rows(torch.tensor(case["input"]))
        assert (codes.tolist(), scale.tolist()) == (case["codes"], case["scales"])
        case = GOLDEN["convrot8_state_square"]
        codes, scale = room.encode_rotated(torch.tensor(case["input"])[None], case["rot"])
        assert (codes.tolist(), scale.tolist()) == (case["codes"], case["scale"])
        case = GOLDEN["convrot8_state"]
        x = torch.from_numpy(np.abs(np.random.default_rng(4).standard_normal((2, 3, 16))).astype(np.float32))
        codes, scale = room.encode_rotated(x, case["rot"])
        assert codes.shape == x.shape
        assert (codes.view(2, 48).tolist(), scale.tolist()) == (case["codes"], case["scale"])
        back = room.decode_rotated(codes, scale, case["rot"]).flatten()
        # Sums in another order than ours.
        torch.testing.assert_close(back, torch.tensor(case["dequantized"]), rtol=0, atol=5e-7)
    for columns, rot in GOLDEN["rot_for_K"].items():
        assert row_rotation(int(columns)) == rot


@pytest.mark.parametrize("rot", ROTATIONS)
def test_the_matrix_is_its_own_inverse(shaped: Device, rot: int) -> None:
    matrix = reference.regular_hadamard(rot)
    assert torch.equal(matrix, matrix.t())
    assert torch.equal(matrix @ matrix, torch.eye(rot))
    assert torch.equal(ops.regular_hadamard(rot), matrix)
    x = torch.randn(5, 512)
    y = ops.rotate(x, rot)
    torch.testing.assert_close(y, (x.view(-1, rot) @ matrix).view_as(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ops.rotate(y, rot), x, rtol=1e-5, atol=1e-5)


def test_rotation_spreads_what_stands_alone(device: Device) -> None:
    """A row of small numbers and a large one keeps its small ones, which plain rows lose."""
    x = torch.rand(8, 1024) * 1e-2
    x[:, 77] = 10.0
    plain = ops.dequantize_int8_rows(*ops.quantize_int8_rows(x)) - x
    rotated = ops.decode_rotated(*ops.encode_rotated(x, 256), 256) - x
    others = torch.arange(1024) != 77
    assert float(rotated[:, others].norm()) < 0.9 * float(plain[:, others].norm())


# ---- layouts, types, places ----


@pytest.mark.parametrize("arrange", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_is_its_contiguous_copy(device: Device, place: torch.device, arrange: Callable[..., Any]) -> None:
    x = arrange(torch.randn(6, 20))
    want = there_and_back(reference, x.contiguous())
    assert same(there_and_back(ops, x), want)
    with strict():
        there = arrange(torch.randn(6, 20, device=place)).copy_(x) if x.stride(0) else arrange(x.to(place))
        assert same(there_and_back(ops, there), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_floating_type(place: torch.device, dtype: torch.dtype) -> None:
    x = torch.randn(5, 2, 32).to(dtype)
    want = there_and_back(reference, x, 16)
    with strict():
        got = there_and_back(ops, x.to(place), 16)
    assert all(tensor.device == place for tensor in got)
    assert same(got, want)


def test_device_of_memory_of_its_own(discrete: Device) -> None:
    x = torch.randn(6, 64)
    assert same(there_and_back(ops, x, 64), there_and_back(reference, x, 64))


def test_nothing_takes_no_kernel(device: Device, place: torch.device) -> None:
    for room, where in ((ops, "cpu"), (ops, place), (reference, "cpu")):
        for shape in ((0, 16), (3, 0), (0,)):
            made = there_and_back(room, torch.empty(shape, device=where), 1)
            assert [tuple(made[i].shape) for i in (0, 1, 3, 4, 6)] == [shape] * 5
            assert made[2].numel() == made[5].numel() == 0


def test_rows_that_are_zero_or_not_finite(shaped: Device) -> None:
    x = torch.randn(4, 256)
    x[0], x[1] = 0.0, 1e-39
    x[2, 100] = math.inf
    for rot in (16, 256):
        codes, scale = ops.encode_rotated(x, rot)
        assert not codes[:3].any()
        assert scale[:2].tolist() == [1.0, 1.0]
        assert scale.isnan().tolist() == [False, False, True, False]
        assert same((codes, scale), reference.encode_rotated(x, rot))


# ---- refusals ----


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda room, x: room.rotate(x.double(), 4), TypeError, r"torch\.float32.*torch\.bfloat16, got"),
        (lambda room, x: room.rotate(x, 8), ValueError, "expected rot as one of 1, 4, 16, 64, 256, got 8"),
        (lambda room, x: room.rotate(x, 1024), ValueError, "expected rot as one of 1, 4, 16, 64, 256, got 1024"),
        (lambda room, x: room.rotate(x, True), ValueError, "expected rot as one of"),
        (lambda room, x: room.rotate(x, 16), ValueError, "expected rows that rot=16 divides, got rows of 12"),
        (lambda room, x: room.encode_rotated(x, 64), ValueError, "expected rows that rot=64 divides"),
        (lambda room, x: room.encode_rotated(x.int(), 4), TypeError, r"torch\.float32.*torch\.bfloat16, got"),
        (lambda room, x: room.decode_rotated(x, x[:, 0], 4), TypeError, "expected codes"),
        (lambda room, x: room.decode_rotated(x.to(torch.int8), x[0], 4), ValueError, r"of shape \[5\]"),
        (lambda room, x: room.regular_hadamard(2), ValueError, "expected rot as"),
        (lambda room, x: room.largest_pow4_divisor(0), ValueError, "expected d as an integer >= 1"),
    ],
)
def test_wrong_input_is_refused(device: Device, call: Callable[..., Any], error: type[Exception], message: str) -> None:
    for room in (ops, reference):
        with pytest.raises(error, match=message):
            call(room, torch.randn(5, 12))


def test_rows_beyond_32_bits_are_refused(device: Device) -> None:
    from memtrain_cl.array import empty

    array = empty(device, (16,), "float32")
    with pytest.raises(UnsupportedDevice, match="fewer than 2"):
        launch_encode(device, array, array, array, rows=1, columns=1 << 31, rot=256, element="float32")
