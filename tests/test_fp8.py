"""Casts to 8-bit floating types and their guard: torch's own bits, the golden table, every type, layout and place.

That each kernel gives the reference's bytes at every size is the table of cases' (test_cases.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memtrain_cl.torch_device  # noqa: F401 (registers the device)
from memtrain_cl import Fp8CastResult, fp8_cast_with_guard, ops, reference
from memtrain_cl.device import Device, use_device
from memtrain_cl.errors import BuildError
from memtrain_cl.formats import FP8_FORMATS
from memtrain_cl.ops import fp8 as launchers
from memtrain_cl.program import Kernel, _cached_kernel
from memtrain_cl.torch_device.fallback import strict

GOLDEN: list[dict[str, Any]] = json.loads((Path(__file__).parent / "golden" / "moments.json").read_text())["fp8_guard"]
#: What the table's words mean.
INPUTS: dict[str, torch.Tensor] = {
    "1.0,1e5,-3": torch.tensor([1.0, 1e5, -3.0]),
    "448": torch.tensor([448.0]),
    "449": torch.tensor([449.0]),
    "full(2048,1e-4)": torch.full((2048,), 1e-4),
    "inf": torch.tensor([math.inf]),
    "nan": torch.tensor([math.nan]),
    "empty": torch.empty(0),
    "57344 e5m2": torch.tensor([57344.0]),
    "6e4 e5m2": torch.tensor([6e4]),
    "half flush: [1e-4,1.0]": torch.tensor([1e-4, 1.0]),
    "3 of 4 flush": torch.tensor([1e-4, -1e-4, 1.0, 1e-5]),
    "zeros(4)": torch.zeros(4),
}
FLOATING = (torch.float32, torch.float16, torch.bfloat16)
each_form = pytest.mark.parametrize("name", FP8_FORMATS)
each_type = pytest.mark.parametrize("dtype", FLOATING, ids=str)


def type_of(name: str) -> torch.dtype:
    """torch's type; the test is skipped where this torch lacks it."""
    own = getattr(torch, name, None)
    if own is None:
        pytest.skip(f"this torch has no {name}")
    assert isinstance(own, torch.dtype)
    return own


def every(dtype: torch.dtype) -> torch.Tensor:
    """All 2^16 numbers of a type of 16 bits; of float32 those of bfloat16, and what lies around both types' ties."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    if dtype != torch.float32:
        return bits.to(torch.uint16).view(dtype)
    ties = torch.tensor([0x7FFFF, 0x80000, 0x80001, 0xFFFFF, 0x100000, 0x100001, 0x1FFFFF, 1])
    near = (bits[::16, None].to(torch.int64) << 16 | ties).flatten()
    return torch.cat([bits.to(torch.int64) << 16, near]).to(torch.int32).view(torch.float32)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal bits; a NaN equals every other."""
    got, want = got.cpu(), want.cpu()
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    if not got.is_floating_point() or got.element_size() == 1:
        return torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    bits = {2: torch.int16, 4: torch.int32}[got.element_size()]
    kept = ~want.isnan()
    return torch.equal(got.isnan(), ~kept) and torch.equal(got.view(bits)[kept], want.view(bits)[kept])


def alike(got: Fp8CastResult, want: Fp8CastResult) -> bool:
    """Equal receipts and equal bits, be they torch's type or codes."""
    both = [result.tensor.view(torch.uint8) if result.used_fp8 else result.tensor for result in (got, want)]
    receipts = [(it.used_fp8, it.reason, it.max_abs, it.underflow_fraction) for it in (got, want)]
    return receipts[0] == receipts[1] and same(*both)


# ---- torch's own bits ----


@each_form
@each_type
def test_every_number_is_cast_as_by_torch(shaped: Device, name: str, dtype: torch.dtype) -> None:
    x = every(dtype)
    want = x.to(type_of(name)).view(torch.uint8)
    codes, counts = ops.fp8_cast_counted(x, name)
    assert torch.equal(codes, want)
    assert torch.equal(ops.fp8_cast(x, type_of(name)), want)
    own = reference.fp8_cast_counted(x, name)
    assert torch.equal(own[0], want)
    assert torch.equal(counts, own[1])


@each_form
@each_type
def test_every_code_comes_back_as_by_torch(shaped: Device, name: str, dtype: torch.dtype) -> None:
    codes = torch.arange(256).to(torch.uint8)
    want = codes.view(type_of(name)).to(dtype)
    assert same(ops.fp8_restore(codes, name, dtype=dtype), want)
    assert same(reference.fp8_restore(codes, name, dtype=dtype), want)


def test_tensors_of_the_torch_device(device: Device, place: torch.device) -> None:
    x, codes = every(torch.bfloat16), torch.arange(256).to(torch.uint8)
    for name in FP8_FORMATS:
        with strict():
            got = ops.fp8_cast(x.to(place), name)
            back = ops.fp8_restore(codes.to(place), name)
        assert got.device == back.device == place
        assert torch.equal(got.cpu(), reference.fp8_cast(x, name))
        assert same(back, reference.fp8_restore(codes, name))


def test_beyond_the_largest(device: Device) -> None:
    x = torch.tensor([448.0, 464.0, 465.0, 3e10, math.inf, -465.0, math.nan, 57344.0, 61439.0, 61440.0])
    cases: dict[tuple[str, bool], list[int]] = {
        ("float8_e4m3fn", True): [126, 126, 126, 126, 126, 254, 127, 126, 126, 126],
        ("float8_e4m3fn", False): [126, 126, 127, 127, 127, 255, 127, 127, 127, 127],
        ("float8_e5m2", True): [95, 95, 95, 123, 123, 223, 127, 123, 123, 123],
        ("float8_e5m2", False): [95, 95, 95, 124, 124, 223, 127, 123, 123, 124],
    }
    for (name, saturate), want in cases.items():
        for room in (ops, reference):
            assert room.fp8_cast(x, name, saturate=saturate).tolist() == want
    for name in FP8_FORMATS:
        assert torch.equal(ops.fp8_cast(x, name), x.to(type_of(name)).view(torch.uint8))
        for number in x:
            result = fp8_cast_with_guard(number, name)
            assert result.used_fp8 == (abs(float(number)) <= FP8_FORMATS[name].largest)


# ---- the guard ----


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["input"])
@pytest.mark.parametrize("where", ["host", "opencl"])
def test_golden_table(device: Device, place: torch.device, where: str, case: dict[str, Any]) -> None:
    x = INPUTS[case["input"]]
    name = case.get("fp8_dtype", "float8_e4m3fn")
    with strict():
        result = fp8_cast_with_guard(x if where == "host" else x.to(place), name)
    receipt = (result.used_fp8, result.reason, result.max_abs, result.underflow_fraction)
    assert receipt == (case["used_fp8"], case["reason"], float(case["max_abs"]), case["underflow_fraction"])
    codes = where == "opencl" and result.used_fp8
    assert str(result.tensor.dtype) == ("torch.uint8" if codes else case["dtype"])
    assert result.tensor.device.type == ("cpu" if where == "host" else where)
    want = x.to(type_of(name)) if result.used_fp8 else x.to(torch.bfloat16)
    assert same(result.tensor.cpu().view(want.dtype), want)


def test_the_order_of_refusals_and_the_options(device: Device) -> None:
    flushed = torch.tensor([1e-5, 1e-5, 1e-5, 1.0])
    everything = torch.tensor([math.nan, 1e6, 1e-5, 1e-5])
    assert fp8_cast_with_guard(everything).reason == "non-finite"
    result = fp8_cast_with_guard(everything[1:])
    assert (result.reason, result.max_abs, result.underflow_fraction) == ("overflow", 1e6, 2 / 3)
    assert fp8_cast_with_guard(flushed).reason == "underflow"
    # The threshold itself is accepted, and so is an underflow that the other type would not have.
    assert fp8_cast_with_guard(flushed, underflow_fraction_threshold=0.75).used_fp8
    assert not fp8_cast_with_guard(flushed, underflow_fraction_threshold=0.7499).used_fp8
    assert fp8_cast_with_guard(flushed * 2, "float8_e5m2").used_fp8
    result = fp8_cast_with_guard(flushed, fallback_dtype=torch.float32)
    assert result.tensor.dtype == torch.float32
    assert torch.equal(result.tensor, flushed)
    tracked = torch.ones(3, requires_grad=True)
    assert not fp8_cast_with_guard(tracked).tensor.requires_grad
    assert not fp8_cast_with_guard(tracked * 1e6).tensor.requires_grad


def test_zeros_and_tiny_numbers(shaped: Device) -> None:
    x = torch.zeros(256, 256)
    x[17, 4] = 1.0
    for name in FP8_FORMATS:
        result = fp8_cast_with_guard(x, name)
        assert (result.reason, result.max_abs, result.underflow_fraction) == ("accepted", 1.0, 0.0)
        assert torch.equal(ops.fp8_restore(result.tensor.view(torch.uint8), name), x)
        for dtype in (torch.float32, torch.bfloat16):
            # A subnormal number becomes zero, and counts as one that did.
            tiny = torch.full((300,), 6e-35).to(dtype)
            tiny[::3] = 1e-39
            codes, counts = ops.fp8_cast_counted(tiny, name)
            assert not codes.any()
            assert counts[1:].tolist() == [0, 300, 300]
            assert fp8_cast_with_guard(tiny, name).reason == "underflow"


def test_where_torch_lacks_the_type(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(50)
    want = [reference.fp8_cast(x * 1e6, name, saturate=name == "float8_e4m3fn") for name in FP8_FORMATS]
    monkeypatch.setattr(launchers, "_saturates", launchers._saturates.__wrapped__)
    for name in FP8_FORMATS:
        monkeypatch.delattr(torch, name, raising=False)
    for name, codes in zip(FP8_FORMATS, want, strict=True):
        result = fp8_cast_with_guard(x, name)
        assert (result.used_fp8, result.tensor.dtype) == (True, torch.uint8)
        assert torch.equal(result.tensor, reference.fp8_cast(x, name))
        for room in (ops, reference):
            assert torch.equal(room.fp8_cast(x * 1e6, name), codes)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_tensors_on_cuda(device: Device) -> None:
    x = torch.randn(70, 33)
    for one in (x, x * 1e4, x.t()):
        result = fp8_cast_with_guard(one.cuda())
        assert result.tensor.is_cuda
        assert alike(result, fp8_cast_with_guard(one))


def test_relaxed_arithmetic_is_refused(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.tensor([math.nan, math.inf, 1.0])
    assert fp8_cast_with_guard(x).reason == "non-finite"
    monkeypatch.setenv("PYOPENCL_BUILD_OPTIONS", "-cl-fast-relaxed-math")
    # What was built without the option still guards; nothing is built with it.
    assert fp8_cast_with_guard(x).reason == "non-finite"
    _cached_kernel.cache_clear()
    with pytest.raises(BuildError, match="-cl-fast-relaxed-math"):
        fp8_cast_with_guard(x)


# ---- layouts, types, sizes ----

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "every second row": lambda x: x[::2],
    "every second in the middle": lambda x: x[:12].view(3, 4, 6, -1)[:, ::2],
    "transposed": lambda x: x.t(),
    "offset": lambda x: x.flatten()[8:],
    "offset by one": lambda x: x.flatten()[1:],
    "expanded": lambda x: x[:1].expand(9, -1),
    "one number": lambda x: x[3, 5],
}


@pytest.mark.parametrize("arrange", LAYOUTS.values(), ids=LAYOUTS.keys())
@each_type
def test_every_layout_is_its_contiguous_copy(
    device: Device, place: torch.device, arrange: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    base = (torch.randn(64, 126) * 20).to(dtype)
    x = arrange(base)
    codes, counts = reference.fp8_cast_counted(x.contiguous())
    for one in (x, arrange(base.to(place))):
        with strict():
            found = ops.fp8_cast_counted(one)
            result = fp8_cast_with_guard(one)
            back = ops.fp8_restore(arrange(reference.fp8_cast(base).to(one.device)), dtype=dtype)
        assert same(found[0], codes)
        assert same(found[1], counts)
        assert alike(result, fp8_cast_with_guard(x.contiguous()))
        assert same(back, reference.fp8_restore(codes, dtype=dtype))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_empty_in_empty_out(
    device: Device, place: torch.device, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*arguments: Any) -> None:
        raise AssertionError("a kernel ran")

    monkeypatch.setattr(Kernel, "enqueue", none)
    for x in (torch.empty(shape), torch.empty(shape, device=place)):
        result = fp8_cast_with_guard(x)
        assert (result.used_fp8, result.max_abs, result.underflow_fraction) == (True, 0.0, 0.0)
        assert (result.tensor.shape, result.tensor.device) == (shape, x.device)
        for room in (ops, reference) if x.is_cpu else (ops,):
            codes, counts = room.fp8_cast_counted(x)
            assert counts.shape == (4,)
            assert (room.fp8_restore(codes).shape, room.fp8_cast(x).shape) == (shape, shape)
    assert fp8_cast_with_guard(torch.empty(shape)).tensor.dtype == type_of("float8_e4m3fn")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool], ids=str)
def test_other_types_are_refused(device: Device, dtype: torch.dtype) -> None:
    x = torch.ones(5, 10, dtype=dtype)
    for call in (fp8_cast_with_guard, ops.fp8_cast, ops.fp8_cast_counted, reference.fp8_cast):
        with pytest.raises(TypeError, match=r"torch\.float32.*torch\.float16.*torch\.bfloat16, got"):
            call(x)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: fp8_cast_with_guard(x, "float8"), ValueError, "fp8_dtype as one of float8_e4m3fn, float8_e5m2, got"),
        (lambda x: fp8_cast_with_guard(x, torch.float16), ValueError, "got torch.float16"),
        (lambda x: fp8_cast_with_guard(x, fallback_dtype=torch.float64), TypeError, "expected fallback_dtype as torch"),
        (lambda x: fp8_cast_with_guard(x, underflow_fraction_threshold=1.5), ValueError, r"in 0\.\.1, got 1\.5"),
        (lambda x: fp8_cast_with_guard(x, underflow_fraction_threshold=math.nan), ValueError, r"in 0\.\.1, got nan"),
        (lambda x: fp8_cast_with_guard(x.tolist()), TypeError, "expected x as a torch tensor, got list"),
        (
            lambda x: ops.fp8_cast(x, saturate=1),  # type: ignore[arg-type]
            ValueError,
            "saturate as True, False or None, got 1",
        ),
        (lambda x: ops.fp8_restore(x), TypeError, "codes of dtype torch.uint8, got torch.float32"),
        (lambda x: ops.fp8_restore(ops.fp8_cast(x), dtype=torch.float64), TypeError, "expected dtype as torch.float32"),
    ],
)
def test_wrong_input_is_refused(device: Device, call: Callable[..., Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(torch.ones(4))


@pytest.mark.parametrize("limit", [256, 64, 1])
def test_sizes_follow_the_device(device: Device, limit: int) -> None:
    x = torch.randn(5003) * 100
    twin = device.with_capabilities(type="gpu", max_work_group_size=limit, local_mem_bytes=16384, compute_units=1)
    with use_device(twin):
        codes, counts = ops.fp8_cast_counted(x)
    want = reference.fp8_cast_counted(x)
    assert torch.equal(codes, want[0])
    assert torch.equal(counts, want[1])


@pytest.mark.parametrize("n", [1, 8, (1 << 30) + 1, (1 << 31) - 1, 1 << 31, (1 << 33) + 5])
def test_launches_cover_any_size(shaped: Device, n: int) -> None:
    shape = launchers._shape(shaped, n)
    assert shape.global_size[0] == shape.parts * shape.local_size[0]
    if shape.constants["GPU"]:
        assert shape.parts <= shaped.info.compute_units * launchers.GROUPS_PER_UNIT
    else:
        assert (shape.parts - 1) * shape.per * 8 < n <= shape.parts * shape.per * 8
