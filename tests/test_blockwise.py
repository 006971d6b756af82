"""Numbers in 8 bits by blocks: golden values, the maps, every layout, type and place, hard blocks, and clear refusals.

That each kernel gives the reference's bytes is the table of cases' (test_cases.py); how they are rounded is here.
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
from memtrain_cl.code_maps import CODES, dynamic_map, dynamic_midpoints, zero_code
from memtrain_cl.device import Device
from memtrain_cl.errors import UnsupportedDevice
from memtrain_cl.ops.blocks import block_shape
from memtrain_cl.torch_device.fallback import strict
from tests.operands import same

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "moments.json").read_text())
FLOATING = (torch.float32, torch.float16, torch.bfloat16)
LEAST = 2.0**-126


#: Each operation on x, by room.
OPERATIONS: dict[str, Callable[[ModuleType, torch.Tensor], Any]] = {
    "int8": lambda room, x: room.quantize_int8_blockwise(x, 7),
    "dynamic": lambda room, x: room.quantize_blockwise(x, 16, code="dynamic", seed=5),
    "there and back": lambda room, x: room.dequantize_int8_blockwise(*room.quantize_int8_blockwise(x, 24), 24),
}
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "every second row": lambda x: torch.stack([x, x * 9], dim=1).flatten(0, 1)[::2],
    "every second place of three": lambda x: torch.stack([x, x * 9], dim=-1).flatten(-2).view(3, -1, 40)[..., ::2],
    "transposed": lambda x: x.t(),
    "offset": lambda x: torch.cat([x.new_full((8,), 9.0), x.flatten()])[8:].view(x.shape),
    "offset by one": lambda x: torch.cat([x.new_full((1,), 9.0), x.flatten()])[1:],
    "expanded": lambda x: x[:1].expand(x.shape[0], -1),
}
each_operation = pytest.mark.parametrize("run", OPERATIONS.values(), ids=OPERATIONS.keys())


# ---- golden values and maps ----


def test_golden_blocks(shaped: Device) -> None:
    case = GOLDEN["int8_blockwise"]
    x, size = torch.tensor(case["input"]), case["block_size"]
    for room in (ops, reference):
        codes, scales = room.quantize_int8_blockwise(x, size)
        assert codes.tolist() == case["codes"]
        assert torch.equal(scales, torch.tensor(case["scales"]))
        assert torch.equal(room.dequantize_int8_blockwise(codes, scales, size), torch.tensor(case["dequantized"]))
        codes, scales = room.quantize_int8_blockwise(torch.zeros(8), 4)
        assert (codes.tolist(), scales.tolist()) == tuple(GOLDEN["int8_zero_block"].values())


@pytest.mark.parametrize("signed", [True, False])
def test_dynamic_maps(signed: bool) -> None:
    numbers = dynamic_map(signed)
    assert numbers.dtype == np.float32
    assert len(set(numbers.tolist())) == 256
    assert np.all(np.diff(numbers) > 0)
    assert {0.0, 1.0} <= set(numbers.tolist())
    assert numbers[zero_code(signed)] == 0.0
    assert (numbers[0] < 0) == signed
    if signed:
        assert np.array_equal(numbers[:-1], -numbers[:-1][::-1])
    assert np.all((numbers[:-1] < dynamic_midpoints(signed)) & (dynamic_midpoints(signed) < numbers[1:]))
    with pytest.raises(ValueError, match="read-only"):
        numbers[0] = 0.0


# ---- rounding ----


@pytest.mark.parametrize("signed", [True, False])
def test_dynamic_codes_are_the_nearest_numbers(shaped: Device, signed: bool) -> None:
    """At every number of the map, at every midpoint, and a step of float32 to either side of both."""
    borders = np.concatenate([dynamic_map(signed), dynamic_midpoints(signed)])
    around = [np.nextafter(borders, np.float32(side)) for side in (-2, 2)]
    y = np.concatenate([borders, *around, np.linspace(-1 if signed else 0, 1, 3001, dtype=np.float32)])
    y = y[np.abs(y) <= 1]
    x = torch.from_numpy(np.concatenate([y, np.ones(1, np.float32)]))
    codes, scales = ops.quantize_blockwise(x, x.numel(), code="dynamic", signed=signed)
    assert scales.tolist() == [1.0]
    numbers = dynamic_map(signed).astype(np.float64)
    distance = np.abs(x.numpy().astype(np.float64)[:, None] - numbers)
    chosen = distance[np.arange(len(x)), codes.numpy()]
    # A midpoint that float32 rounds is off by half a step of it.
    assert np.all(chosen <= distance.min(axis=1) + np.abs(x.numpy()) * 2.0**-23)
    assert same((codes, scales), reference.quantize_blockwise(x, x.numel(), code="dynamic", signed=signed))
    assert codes[:256].tolist() == list(range(256))


@pytest.mark.parametrize(("code", "signed"), [("linear", True), ("dynamic", True), ("dynamic", False)])
def test_stochastic_codes_are_unbiased(shaped: Device, code: str, signed: bool) -> None:
    numbers = torch.tensor([0.9, 0.013, 3e-4, 4e-6, -0.07, -0.6, 0.0])
    numbers = numbers if signed else numbers.abs()
    x = torch.cat([numbers.repeat_interleave(4096), torch.ones(1)])
    codes, scales = ops.quantize_blockwise(x, x.numel(), code=code, signed=signed, seed=11)
    assert same((codes, scales), reference.quantize_blockwise(x, x.numel(), code=code, signed=signed, seed=11))
    back = ops.dequantize_blockwise(codes, scales, x.numel(), code=code, signed=signed)[:-1].reshape(-1, 4096).double()
    assert bool(((back.mean(1) - numbers).abs() <= 5 * back.std(1) / 64 + 1e-6 * numbers.abs()).all())
    assert int((back.std(1) > 0).sum()) >= 5
    assert not back[-1].any()
    other = ops.quantize_blockwise(x, x.numel(), code=code, signed=signed, seed=12)[0]
    assert not torch.equal(other, codes)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("seed", [None, 3])
def test_positive_numbers_keep_positive_codes(shaped: Device, code: str, seed: int | None) -> None:
    x = torch.cat([torch.logspace(-37, 0, 300), torch.zeros(4), torch.full((4,), 1e-39), torch.full((64,), 1e-37)])
    options: dict[str, Any] = {"code": code, "signed": False, "positive": True, "seed": seed}
    codes, scales = ops.quantize_blockwise(x, 308, **options)
    assert same((codes, scales), reference.quantize_blockwise(x, 308, **options))
    back = ops.dequantize_blockwise(codes, scales, 308, code=code, signed=False)
    assert bool((back[:300] > 0).all())
    assert not back[300:].any()  # zeros, what counts as zero, and a zero block
    assert not ops.quantize_blockwise(x, 308, **{**options, "positive": False, "seed": None})[0][0]


@pytest.mark.parametrize("size", [64, 128, 256, 512, 1024, 2048, 4096, 5000])
def test_error_of_block_sizes(shaped: Device, size: int) -> None:
    x = torch.randn(128, 160)
    for code, bound in (("linear", 0.5 / 127), ("dynamic", 0.0071)):
        codes, scales = ops.quantize_blockwise(x, size, code=code)
        assert same((codes, scales), reference.quantize_blockwise(x, size, code=code))
        error = (ops.dequantize_blockwise(codes, scales, size, code=code) - x).abs().flatten()
        largest = torch.tensor([float(part.abs().max()) for part in x.flatten().split(size)])
        assert bool((error <= bound * 1.001 * largest[torch.arange(x.numel()) // size]).all())


# ---- layouts, types, places ----


@each_operation
@pytest.mark.parametrize("arrange", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_is_its_contiguous_copy(
    device: Device, place: torch.device, run: Callable[..., Any], arrange: Callable[..., Any]
) -> None:
    x = torch.randn(6, 20)
    want = run(reference, arrange(x).contiguous())
    assert same(run(ops, arrange(x)), want)
    with strict():
        assert same(run(ops, arrange(x.to(place))), want)


@each_operation
def test_every_floating_type_and_place(place: torch.device, discrete: Device, run: Callable[..., Any]) -> None:
    for dtype in FLOATING:
        x = torch.randn(5, 23).to(dtype)
        want = run(reference, x)
        assert same(run(ops, x), want)
        with strict():
            got = run(ops, x.to(place))
        assert all(t.device == place for t in (got if isinstance(got, tuple) else (got,)))
        assert same(got, want)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (), (1, 1), (2, 3, 5)])
def test_any_shape_and_the_empty_ones(device: Device, place: torch.device, shape: tuple[int, ...]) -> None:
    for x in (torch.randn(shape), torch.randn(shape).to(place)):
        for code in CODES:
            codes, scales = ops.quantize_blockwise(x, 4, code=code)
            assert same((codes, scales), reference.quantize_blockwise(x.cpu(), 4, code=code))
            assert (codes.shape, codes.device, scales.device) == (x.shape, x.device, x.device)
            assert ops.dequantize_blockwise(codes, scales, 4, code=code).shape == x.shape
    huge = ops.quantize_int8_blockwise(torch.randn(shape), 1 << 40)
    assert huge[1].shape == (min(1, math.prod(shape)),)


# ---- hard blocks ----


@pytest.mark.parametrize("code", CODES)
def test_zero_blocks_and_tiny_numbers(shaped: Device, code: str) -> None:
    x = torch.randn(6, 40)
    x[0] = 0.0
    x[1] = 1e-39  # subnormal: counts as zero
    x[2, :20] = 1e-39
    x[3] = 6e-35
    x[4] = 100 * LEAST  # below 127 * 2^-126
    x[5] = 127 * LEAST
    zero = 0 if code == "linear" else zero_code(True)
    for dtype in (torch.float32, torch.bfloat16):
        for seed in (None, 1):
            codes, scales = ops.quantize_blockwise(x.to(dtype), 40, code=code, seed=seed)
            assert same((codes, scales), reference.quantize_blockwise(x.to(dtype), 40, code=code, seed=seed))
            assert scales[[0, 1, 4]].tolist() == [1.0] * 3
            assert bool((codes[[0, 1, 4]] == zero).all())
            assert bool((codes[2, :20] == zero).all())
            assert bool((codes[[3, 5]] != zero).all())
            assert bool((scales >= LEAST).all())


@pytest.mark.parametrize("code", CODES)
def test_blocks_that_are_not_finite_come_back_as_nan(shaped: Device, code: str) -> None:
    x = torch.randn(5, 33)
    x[1, 32], x[3, 0] = math.nan, -math.inf
    x[4, 0] = torch.finfo(torch.float32).max
    codes, scales = ops.quantize_blockwise(x, 33, code=code)
    assert same((codes, scales), reference.quantize_blockwise(x, 33, code=code))
    back = ops.dequantize_blockwise(codes, scales, 33, code=code)
    assert back.isnan().all(1).tolist() == [False, True, False, True, False]
    assert bool(torch.isfinite(back[[0, 2]]).all())


# ---- refusals and plans ----


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda room, x: room.quantize_int8_blockwise(x, 0), ValueError, "block_size as an integer >= 1, got 0"),
        (lambda room, x: room.quantize_int8_blockwise(x, True), ValueError, "block_size .* got True"),
        (lambda room, x: room.quantize_int8_blockwise(x, 4.0), ValueError, r"block_size .* got 4\.0"),
        (lambda room, x: room.quantize_blockwise(x, 4, code="fp4"), ValueError, "linear, dynamic, got 'fp4'"),
        (lambda room, x: room.quantize_blockwise(x, 4, seed=1 << 32), ValueError, r"a seed in 0\.\.2\^32-1"),
        (lambda room, x: room.quantize_blockwise(x, 4, seed=True), ValueError, r"a seed in 0\.\.2\^32-1"),
        (lambda room, x: room.quantize_blockwise(x.double(), 4), TypeError, "torch.float32.*, got torch.float64"),
        (lambda room, x: room.quantize_blockwise(x.int(), 4), TypeError, "torch.float32.*, got torch.int32"),
        (lambda room, x: room.quantize_blockwise([1.0], 4), TypeError, "expected x as a .*tensor.* got list"),
        (lambda room, x: room.dequantize_int8_blockwise(x.byte(), x, 1), TypeError, "torch.int8"),
        (lambda room, x: room.dequantize_blockwise(x.char(), x, 1, code="dynamic"), TypeError, "torch.uint8"),
        (lambda room, x: room.dequantize_int8_blockwise(x.char(), x.half(), 1), TypeError, "torch.float32"),
        (lambda room, x: room.dequantize_int8_blockwise(x.char(), x, 2), ValueError, r"shape \[3\], got \[6\]"),
        (lambda room, x: room.dequantize_int8_blockwise(x.char(), x, 0), ValueError, "block_size"),
    ],
)
def test_wrong_input_is_refused(device: Device, call: Callable[..., Any], error: type[Exception], message: str) -> None:
    for room in (ops, reference):
        with pytest.raises(error, match=message):
            call(room, torch.ones(6))


@pytest.mark.parametrize("size", [1, 2, 32, 33, 128, 256, 512, 513, 2048, 2049, 4096, 4097, (1 << 31) - 1])
@pytest.mark.parametrize("blocks", [1, 7, 100_003, (1 << 31) + 5])
def test_launches_cover_the_blocks(shaped: Device, blocks: int, size: int) -> None:
    shape = block_shape(shaped, blocks, size, aligned=False, mapped=blocks == 7)
    lanes, slots, held = (shape.constants[name] for name in ("LANES", "SLOTS", "HELD"))
    taken = shape.global_size[0] // (lanes * slots) * slots * shape.per
    assert taken >= blocks
    assert shape.global_size[0] % shape.local_size[0] == 0
    if shape.constants["GPU"]:
        assert held == 0 or 4 * lanes * held >= size
        assert lanes * slots <= shaped.info.max_work_group_size


def test_blocks_that_cannot_be_indexed_are_refused(device: Device) -> None:
    with pytest.raises(UnsupportedDevice, match="fewer than 2"):
        block_shape(device, 1, 1 << 31, aligned=False, mapped=False)
