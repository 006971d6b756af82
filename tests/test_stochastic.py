"""Rows in few bits: golden values, every layout, type and place, hard rows, and clear refusals.

That each kernel gives the reference's bytes is the table of cases' (test_cases.py), that the estimates are unbiased the
estimators' (test_matmul_int8.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import memtrain_cl.torch_device  # noqa: F401 (registers the device)
from memtrain_cl import effective_bits, ops, reference
from memtrain_cl.device import Device
from memtrain_cl.errors import NotFinite, UnsupportedDevice
from memtrain_cl.faults import raise_pending
from memtrain_cl.operand import Operand
from memtrain_cl.ops.stochastic import launch_quantize
from memtrain_cl.ops.stochastic_plan import Columns, Rows, Style
from memtrain_cl.torch_device.fallback import strict
from tests.operands import same

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "counter.json").read_text())
FLOATING = (torch.float32, torch.float16, torch.bfloat16)


#: Each operation on x [rows, columns], by room.
OPERATIONS: dict[str, Callable[[ModuleType, torch.Tensor], Any]] = {
    "int8 rows": lambda room, x: room.quantize_int8(x, dim=1, seed=5),
    "int8 columns": lambda room, x: room.quantize_int8(x, dim=0),
    "int8 transposed": lambda room, x: room.quantize_int8(x, dim=0, seed=5, transposed=True),
    "codes": lambda room, x: room.quantize_codes(x, 4, seed=6),
    "codes of columns": lambda room, x: room.quantize_codes(x, 12, 0, seed=6),
    "there and back": lambda room, x: room.stochastic_quantize(x, 3, -2, seed=7),
    "saved": lambda room, x: room.save_rows(x, 4, seed=8),
    "saved wide": lambda room, x: room.save_rows(x, 8, seed=8),
}
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "every second row": lambda x: torch.stack([x, x * 9], dim=1).flatten(0, 1)[::2],
    "every second column": lambda x: torch.stack([x, x * 9], dim=-1).flatten(-2)[..., ::2],
    "transposed": lambda x: x.t().contiguous().t(),
    "offset": lambda x: torch.cat([x.new_full((8,), 9.0), x.flatten()])[8:].view(x.shape),
    "offset by one": lambda x: torch.cat([x.new_full((1,), 9.0), x.flatten()])[1:].view(x.shape),
    "expanded": lambda x: x[:1].expand(x.shape[0], -1),
}
each_operation = pytest.mark.parametrize("run", OPERATIONS.values(), ids=OPERATIONS.keys())


# ---- golden values ----


def test_golden_pairs(device: Device) -> None:
    case = GOLDEN["pack_int4"]
    codes = torch.tensor(case["codes"], dtype=torch.int8)
    for room in (ops, reference):
        packed = room.pack_int4(codes)
        assert packed.tolist() == case["packed"]
        assert torch.equal(room.unpack_int4(packed, len(codes)), codes)


def test_golden_effective_bits() -> None:
    for case in GOLDEN["effective_bits"]:
        assert effective_bits(case["bits"], case["row_len"]) == case["value"]


# ---- layouts, types, places ----


@each_operation
@pytest.mark.parametrize("arrange", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_is_its_contiguous_copy(
    device: Device, place: torch.device, run: Callable[..., Any], arrange: Callable[..., Any]
) -> None:
    x = arrange(torch.randn(6, 20))
    want = run(reference, x.contiguous())
    assert same(run(ops, x), want)
    with strict():
        there = arrange(torch.randn(6, 20, device=place)).copy_(x) if x.stride(0) else arrange(x.to(place))
        assert same(run(ops, there), want)


@each_operation
@pytest.mark.parametrize("dtype", FLOATING)
def test_every_floating_type(place: torch.device, run: Callable[..., Any], dtype: torch.dtype) -> None:
    x = torch.randn(5, 23).to(dtype)
    want = run(reference, x)
    with strict():
        assert same(run(ops, x), want)
        got = run(ops, x.to(place))
    assert all(t.device == place for t in (got if isinstance(got, tuple) else (got,)))
    assert same(got, want)


@each_operation
def test_device_of_memory_of_its_own(discrete: Device, run: Callable[..., Any]) -> None:
    x = torch.randn(6, 20)
    assert same(run(ops, x), run(reference, x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool])
def test_other_types_are_refused(device: Device, dtype: torch.dtype) -> None:
    x = torch.ones(4, 4, dtype=dtype)
    for run in OPERATIONS.values():
        with pytest.raises(TypeError, match=r"torch\.float32.*torch\.float16.*torch\.bfloat16, got"):
            run(ops, x)
        with pytest.raises(TypeError, match=r"torch\.float32.*torch\.float16.*torch\.bfloat16, got"):
            run(reference, x)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [((), -1), ((7,), 0), ((3, 4, 6), 1), ((3, 4, 6), -3), ((2, 3, 1, 5), 2), ((2, 1, 5, 1), -1), ((1, 1), 0)],
)
@pytest.mark.parametrize("bits", [3, 12])
def test_any_dimension_of_any_rank(shaped: Device, shape: tuple[int, ...], dim: int, bits: int) -> None:
    x = torch.randn(shape)
    codes, scale = ops.quantize_codes(x, bits, dim, seed=3)
    assert same((codes, scale), reference.quantize_codes(x, bits, dim, seed=3))
    assert codes.dtype == (torch.int8 if bits <= 8 else torch.int16)
    kept = list(shape)
    if shape:
        kept[dim] = 1
    assert list(scale.shape) == kept
    assert int(codes.abs().max()) <= 2 ** (bits - 1) - 1
    assert same(ops.dequantize_codes(codes, scale), codes.float() * scale)
    again = ops.stochastic_quantize(x, bits, dim, seed=3)
    assert float((again - x).abs().max()) <= float(scale.max()) * (1 + 1e-6)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_empty_in_empty_out(device: Device, place: torch.device, shape: tuple[int, ...]) -> None:
    for x in (torch.empty(shape), torch.empty(shape, device=place)):
        for room in (ops, reference) if x.is_cpu else (ops,):
            codes, scale = room.quantize_codes(x, 4, seed=1)
            assert codes.shape == shape
            assert room.dequantize_codes(codes, scale).shape == shape
            assert room.stochastic_quantize(x, 9).shape == shape
            assert room.unpack_int4(room.pack_int4(codes), 0).shape == (0,)
            if len(shape) == 2:
                saved = room.save_rows(x, 4, seed=1)
                assert saved[1].shape == shape[:1]
                assert room.restore_rows(*saved, 4, shape).shape == shape
                for dim in (0, 1):
                    codes, scale = room.quantize_int8(x, dim=dim)
                    assert (codes.shape, scale.shape) == (shape, (shape[1 - dim],))


# ---- hard rows ----


def test_zero_rows_and_tiny_numbers(shaped: Device) -> None:
    x = torch.randn(4, 40)
    x[0] = 0.0
    x[1] = 1e-39  # subnormal: counts as zero
    x[2, :20] = 1e-39
    x[3] = 6e-35
    for seed in range(20):
        for made in (ops.quantize_codes(x, 4, seed=seed), ops.save_rows(x, 5, seed=seed)):
            codes, scale = made
            assert not codes[:2].any()
            assert not codes[2, :20].any()
            assert bool(torch.isfinite(scale).all())
    assert not ops.stochastic_quantize(torch.zeros(8, 8), 4).any()


def _unmixed(x: int) -> int:
    """What `hash_u32` makes x of."""
    x ^= x >> 16
    x = x * pow(0x846CA68B, -1, 1 << 32) & 0xFFFFFFFF
    x ^= x >> 15 ^ x >> 30
    x = x * pow(0x7FEB352D, -1, 1 << 32) & 0xFFFFFFFF
    return x ^ x >> 16


@pytest.mark.parametrize("most", [1e-20, 1.0, 3e38])
def test_where_chance_is_zero_any_number_above_zero_counts(shaped: Device, most: float) -> None:
    seed = 5
    place = _unmixed(_unmixed(7 << 24) ^ seed)
    assert float(reference.uniform01(torch.tensor(seed) ^ reference.hash_u32(torch.tensor(place)))) == 0.0
    tiny = [2.0**-126, 2.0**-127, 2.0**-149, -(2.0**-126), most * 2.0**-140, most * 2.0**-142, most * 2.0**-143]
    found = []
    for number in tiny:
        x = torch.zeros(4, 4)
        x[0, place % 4] = number
        x[3] = x[:, 3 - place % 4] = most
        for options in ({"dim": 1}, {"dim": 0}, {"dim": 0, "transposed": True}):
            got, want = (
                room.quantize_int8(x, seed=seed, index_base=place - place % 4, **options) for room in (ops, reference)
            )
            assert torch.equal(got[0], want[0])
            assert torch.equal(got[1], want[1])
            found.append(int(got[0].t()[place % 4, 0] if "transposed" not in options else got[0][place % 4, 0]))
    assert {0, 1} == set(found)


def test_rows_that_are_not_finite_come_back_as_nan(shaped: Device) -> None:
    x = torch.randn(5, 33)
    x[1, 32], x[3, 0] = math.nan, -math.inf
    for dim, source in ((1, x), (0, x.t().contiguous())):
        codes, scale = ops.quantize_codes(source, 4, dim, seed=2)
        rows = codes if dim else codes.t()
        assert not rows[[1, 3]].any()
        assert scale.flatten().isnan().tolist() == [False, True, False, True, False]
        back = ops.stochastic_quantize(source, 4, dim, seed=2)
        assert (back if dim else back.t()).isnan().all(1).tolist() == [False, True, False, True, False]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_saving_what_is_not_finite_is_refused(place: torch.device, device: Device, wrong: float) -> None:
    x = torch.randn(6, 10)
    x[4, 3] = wrong
    for room in (ops, reference):
        with pytest.raises(NotFinite, match=r"expected finite numbers .* in row 4"):
            room.save_rows(x, 4, seed=1)
    with strict():
        ops.save_rows(x.to(place), 4, seed=1)
        with pytest.raises(NotFinite, match="in row 4"):
            raise_pending(device)
        raise_pending(device)
        ops.save_rows(x.to(place), 4, seed=1)
        with pytest.raises(ValueError, match="in row 4"):
            torch.ones(3, device=place).cpu()


def test_saving_what_the_scale_cannot_give_back_is_refused(device: Device) -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.full((2, 6), largest)
    for room in (ops, reference):
        with pytest.raises(NotFinite, match="in row 0"):
            room.save_rows(x, 2, seed=1)
        restored = room.restore_rows(*room.save_rows(x / 1.01, 4, seed=1), 4, (2, 6))
        assert bool(torch.isfinite(restored).all())


# ---- what is saved ----


@pytest.mark.parametrize("bits", [2, 4, 7, 12])
@pytest.mark.parametrize("shape", [(7, 33), (5, 64)])
def test_rows_saved_and_restored(shaped: Device, bits: int, shape: tuple[int, int]) -> None:
    x = torch.randn(shape) * 10.0 ** torch.randint(-6, 7, (shape[0], 1))
    codes, scale = ops.save_rows(x, bits, seed=4)
    assert same((codes, scale), reference.save_rows(x, bits, seed=4))
    levels = 2 ** (bits - 1) - 1
    # No element lies beyond the codes: what would be cut there would be biased.
    assert bool((x.abs().amax(1) <= scale.float() * levels * (1 + 2**-23)).all())
    assert bool((scale.float() <= x.abs().amax(1) / levels * (1 + 2**-7)).all())
    for dtype in FLOATING:
        restored = ops.restore_rows(codes, scale, bits, shape, dtype=dtype)
        assert restored.dtype == dtype
        assert same(restored, reference.restore_rows(codes, scale, bits, shape, dtype=dtype))
    restored = ops.restore_rows(codes, scale, bits, shape)
    assert bool(((restored - x).abs() <= scale.float()[:, None] * (1 + 1e-6)).all())


def test_bytes_of_saved_rows(device: Device) -> None:
    for bits, columns in ((4, 64), (4, 4096), (8, 256), (12, 256)):
        codes, scale = ops.save_rows(torch.randn(32, columns), bits, seed=1)
        stored = bits if bits in (4, 8) else 16
        measured = 8 * (codes.numel() * codes.element_size() + scale.numel() * scale.element_size())
        assert measured / (32 * columns) == effective_bits(stored, columns)


def test_seeds_make_the_rounding(device: Device) -> None:
    x = torch.randn(20, 50)
    first, again, other = (ops.quantize_codes(x, 4, seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    drawn = []
    for start in (9, 9, 10):
        torch.manual_seed(start)
        drawn.append(ops.stochastic_quantize(x, 4))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


# ---- refusals ----


@pytest.mark.parametrize("bits", [1, 16, 4.0, True, None])
def test_bits_out_of_range(device: Device, bits: Any) -> None:
    for room in (ops, reference):
        for run in (room.quantize_codes, room.stochastic_quantize):
            with pytest.raises(ValueError, match=r"bits as an integer in 2\.\.15"):
                run(torch.ones(3, 3), bits)
        with pytest.raises(ValueError, match=r"bits as an integer in 2\.\.15"):
            room.save_rows(torch.ones(3, 3), bits, seed=0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, c, s: ops.quantize_codes(x, 4, 2), ValueError, r"expected dim in -2\.\.1, got 2"),
        (lambda x, c, s: ops.quantize_codes(x, 4, seed=1 << 32), ValueError, r"expected a seed in 0\.\.2\^32-1"),
        (lambda x, c, s: ops.quantize_int8(x, dim=2), ValueError, "dim 2"),
        (lambda x, c, s: ops.quantize_int8(x, dim=1, transposed=True), ValueError, "transposed"),
        (lambda x, c, s: ops.quantize_int8(x, dim=1, multiplier=torch.ones(4)), ValueError, r"shape \[6\], got \[4\]"),
        (lambda x, c, s: ops.quantize_int8(x[0], dim=0), ValueError, r"expected x \[M, N\]"),
        (lambda x, c, s: ops.quantize_codes(x.numpy(), 4), TypeError, "expected x as a torch tensor, got ndarray"),
        (lambda x, c, s: ops.dequantize_codes(x, s), TypeError, r"codes of dtype torch.int8 or torch.int16, got"),
        (lambda x, c, s: ops.dequantize_codes(c, s[:2]), ValueError, r"\[2, 1\] for \[4, 6\]"),
        (lambda x, c, s: ops.pack_int4(x), TypeError, "codes of dtype torch.int8, got torch.float32"),
        (lambda x, c, s: ops.unpack_int4(c.view(torch.uint8)[0], 3), ValueError, r"shape \[2\], got \[6\]"),
        (lambda x, c, s: ops.unpack_int4(c.view(torch.uint8)[0], -1), ValueError, "integer >= 0, got -1"),
        (lambda x, c, s: ops.save_rows(x[0], 4, seed=0), ValueError, r"expected x \[M, n\], got \[6\]"),
        (lambda x, c, s: ops.restore_rows(c, s[:, 0], 8, (4, 6)), TypeError, "scale of dtype torch.bfloat16"),
        (
            lambda x, c, s: ops.restore_rows(*ops.save_rows(x, 8, seed=0), 8, (4, 6), dtype=torch.float64),
            TypeError,
            "expected dtype as torch.float32",
        ),
    ],
)
def test_wrong_input_is_refused(device: Device, call: Callable[..., Any], error: type[Exception], message: str) -> None:
    x = torch.randn(4, 6)
    with pytest.raises(error, match=message):
        call(x, *ops.quantize_codes(x, 4, seed=1))


def test_launches_are_checked(device: Device) -> None:
    from memtrain_cl.array import empty

    array, codes, scale = (
        empty(device, (4, 6), "float32"),
        empty(device, (4, 6), "int8"),
        empty(device, (4,), "float32"),
    )
    x = Operand(array, (4, 6), (6, 1), 0, "float32")
    sizes: dict[str, Any] = {"outer": 4, "length": 6, "inner": 1, "bits": 8, "seed": None}
    assert launch_quantize(device, x, codes, scale, **sizes) is not None
    for wrong, error in (
        ({"length": 5}, "expected x contiguous"),
        ({"bits": 9}, "codes of int16"),
        ({"outer": 1, "inner": 4, "transposed": True, "bits": 9}, "codes of int16"),
        ({"transposed": True}, "outer 1 and at most 8 bits"),
    ):
        with pytest.raises(ValueError, match=error):
            launch_quantize(device, x, codes, scale, **{**sizes, **wrong})
    integers = Operand(codes, (4, 6), (6, 1), 0, "int8")
    with pytest.raises(TypeError, match="expected x of float32 or float16 or bfloat16, got int8"):
        launch_quantize(device, integers, codes, scale, **sizes)


# ---- plans ----


def test_sizes_that_cannot_be_indexed_are_refused(device: Device) -> None:
    style = Style("float32", "int8", stochastic=True)
    for sizes in ((1, 1 << 31, 2), (1 << 31, 2, 2), (2, 2, 1 << 31)):
        with pytest.raises(UnsupportedDevice, match="below 2"):
            Columns(device, style, *sizes, aligned=True)
    with pytest.raises(UnsupportedDevice, match="fewer than 2"):
        Rows(device, style, 1 << 31, 4, aligned=True)


@pytest.mark.parametrize("n", [1, 100, (1 << 15) - 1, 1 << 15, 100_003, (1 << 31) - 1])
@pytest.mark.parametrize("rows", [1, 3, 5000])
def test_parts_of_rows_cover_them(shaped: Device, rows: int, n: int) -> None:
    plan = Rows(shaped, Style("float32", "int8"), rows, n, aligned=False)
    assert (plan.splits - 1) * plan.part < n <= plan.splits * plan.part
    # Pairs of codes and vectors of four lie in one part.
    assert plan.splits == 1 or plan.part % 4 == 0


@pytest.mark.parametrize("sizes", [(1, 1, 2), (1, 5000, 3), (70, 3, 2), (2, 4096, 4096), (1, (1 << 31) - 1, 2)])
def test_chunks_of_columns_cover_them(shaped: Device, sizes: tuple[int, int, int]) -> None:
    plan = Columns(shaped, Style("float32", "int8"), *sizes, aligned=False)
    assert (plan.splits - 1) * plan.chunk < sizes[1] <= plan.splits * plan.chunk
    assert 1 <= plan.splits <= sizes[1]
