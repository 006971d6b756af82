"""What the launchers take: every memory layout, empty sizes, and clear refusals of the rest; packing there and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memtrain_cl import ops, reference
from memtrain_cl.device import Device, use_device
from memtrain_cl.errors import UnsupportedDevice
from memtrain_cl.formats import CounterRule
from memtrain_cl.ops.launch import require_tensor
from memtrain_cl.tuning import flat_shape, matmul_shape, row_shape

TOKENS, OUT, IN, C = 9, 10, 12, 11
RULE = CounterRule(C, True, lr=0.3, lr_scale=0.1)
Arguments = dict[str, torch.Tensor]


def arguments() -> Arguments:
    codes = torch.randint(0, 63, (OUT, IN), dtype=torch.uint8)
    return {
        "codes": codes,
        "packed": reference.pack_codes(codes),
        "state": reference.pack_codes(codes),
        "scale": torch.rand(OUT, 1) + 0.1,
        "v": torch.rand(OUT, 1),
        "grad_w": torch.randn(OUT, IN),
        "x": torch.randn(TOKENS, IN),
        "grad_out": torch.randn(TOKENS, OUT),
        "totals": torch.zeros(3, dtype=torch.int64),
    }


def _backward(a: Arguments) -> Any:
    return ops.counter_backward_(a["x"], a["grad_out"], a["state"], a["scale"], a["v"], a["totals"], RULE, seed=3)


def _update(a: Arguments) -> Any:
    return ops.counter_update_(a["state"], a["scale"], a["v"], a["grad_w"], a["totals"], RULE, seed=3)


#: Each launcher over named arguments, and the names it uses.
LAUNCHERS: dict[str, tuple[Callable[[Arguments], Any], str]] = {
    "pack_codes": (lambda a: ops.pack_codes(a["codes"]), "codes"),
    "unpack_codes": (lambda a: ops.unpack_codes(a["packed"], IN), "packed"),
    "decode_dense": (lambda a: ops.decode_dense(a["state"], a["scale"], IN, C=C, packed=True), "state scale"),
    "row_statistics": (lambda a: ops.row_statistics(a["state"], a["grad_w"], C=C, packed=True), "state grad_w"),
    "counter_update_": (_update, "state scale v grad_w totals"),
    "counter_forward": (
        lambda a: ops.counter_forward(a["x"], a["state"], a["scale"], C=C, packed=True),
        "x state scale",
    ),
    "counter_grad_input": (
        lambda a: ops.counter_grad_input(a["grad_out"], a["state"], a["scale"], IN, C=C, packed=True),
        "grad_out state scale",
    ),
    "grad_weight": (lambda a: ops.grad_weight(a["grad_out"], a["x"], 3, 5), "grad_out x"),
    "counter_backward_": (_backward, "x grad_out state scale v totals"),
}
USES = [
    pytest.param(name, used, id=f"{name}-{used}") for name, (_, names) in LAUNCHERS.items() for used in names.split()
]


# ---- layouts ----


def every_second_row(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, torch.full_like(x, 9)], dim=1).flatten(0, 1)[::2]


def every_second_column(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, torch.full_like(x, 9)], dim=-1).flatten(-2)[..., ::2]


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t() if x.ndim == 2 else every_second_row(x)


def offset(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.full_like(x.flatten(), 9)[:3], x.flatten()])[3:].view(x.shape)


LAYOUTS = [every_second_row, every_second_column, transposed, offset]


def test_layouts_are_what_they_say() -> None:
    x = torch.randn(6, 8)
    for layout in LAYOUTS:
        assert torch.equal(layout(x), x)
    assert [layout(x).is_contiguous() for layout in LAYOUTS] == [False, False, False, True]
    assert offset(x).data_ptr() % 16 == 12


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "used"), USES)
def test_layout_changes_nothing(device: Device, name: str, used: str, layout: Callable[..., torch.Tensor]) -> None:
    launcher, _ = LAUNCHERS[name]
    plain = arguments()
    laid_out = {key: layout(value.clone()) if key == used else value.clone() for key, value in plain.items()}
    got, want = launcher(laid_out), launcher(plain)
    assert got is want is None or torch.equal(got, want)
    for key, value in plain.items():
        assert torch.equal(laid_out[key], value), f"{key} after {name}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_updates_in_place_leave_the_gaps(device: Device, layout: Callable[..., torch.Tensor]) -> None:
    plain = arguments()
    laid_out = {
        key: layout(plain[key].clone()) if key in ("state", "scale", "v", "totals") else plain[key] for key in plain
    }
    bases = {key: laid_out[key]._base for key in ("state", "scale", "v", "totals")}
    nines = {
        key: int((base == 9).sum() - (laid_out[key] == 9).sum()) for key, base in bases.items() if base is not None
    }
    assert len(nines) == 4 or layout is transposed
    _update(laid_out)
    for key, count in nines.items():
        base = bases[key]
        assert base is not None
        assert int((base == 9).sum() - (laid_out[key] == 9).sum()) == count, key


@pytest.mark.parametrize(
    ("name", "used"), [use for use in USES if use.values[1] in ("x", "grad_out", "grad_w", "codes")]
)
def test_expanded_rows(device: Device, name: str, used: str) -> None:
    launcher, _ = LAUNCHERS[name]
    plain = arguments()
    plain[used] = plain[used][:1].expand(plain[used].shape)
    copied = {key: value.contiguous().clone() for key, value in plain.items()}
    expanded = {key: value if key == used else value.clone() for key, value in plain.items()}
    got, want = launcher(expanded), launcher(copied)
    assert got is want is None or torch.equal(got, want)
    assert torch.equal(expanded["state"], copied["state"])


# ---- packing ----


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(0, 5), groups=st.integers(0, 40), data=st.data())
def test_packing_there_and_back(device: Device, rows: int, groups: int, data: st.DataObject) -> None:
    values = data.draw(st.binary(min_size=4 * rows * groups, max_size=4 * rows * groups))
    codes = torch.from_numpy(np.frombuffer(values, np.uint8).reshape(rows, 4 * groups) % 64)
    packed = ops.pack_codes(codes)
    assert packed.shape == (rows, 3 * groups)
    assert torch.equal(packed, reference.pack_codes(codes))
    assert torch.equal(ops.unpack_codes(packed, 4 * groups), codes)
    assert torch.equal(reference.unpack_codes(packed, 4 * groups), codes)


def test_any_bytes_unpack_and_pack_again(shaped: Device) -> None:
    packed = torch.arange(256, dtype=torch.uint8).repeat(3).reshape(4, 192)
    codes = ops.unpack_codes(packed, 256)
    assert torch.equal(codes, reference.unpack_codes(packed, 256))
    assert torch.equal(ops.pack_codes(codes), packed)


def test_only_the_low_six_bits_are_packed(shaped: Device) -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(4, 64)
    for room in (ops, reference):
        assert torch.equal(room.pack_codes(codes), room.pack_codes(codes & 63)), room.__name__


# ---- empty sizes ----


@pytest.mark.parametrize("empty", ["tokens", "rows", "columns"])
def test_empty_in_empty_out_without_a_kernel(empty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("a kernel was asked for")

    for room in ("codec", "counter", "from_io", "matmul_counter"):
        monkeypatch.setattr(f"memtrain_cl.ops.{room}.ready_device", refuse)
    m, out, n = (0 if empty == name else size for name, size in (("tokens", 3), ("rows", 5), ("columns", 8)))
    x, grad_out, scale, v = torch.ones(m, n), torch.ones(m, out), torch.ones(out, 1), torch.ones(out, 1)
    state, totals = torch.zeros(out, n // 4 * 3, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)
    if empty != "tokens":
        assert ops.pack_codes(torch.zeros(out, n, dtype=torch.uint8)).shape == (out, n // 4 * 3)
        assert ops.unpack_codes(state, n).shape == (out, n)
        assert ops.decode_dense(state, scale, n, C=C, packed=True).shape == (out, n)
        assert torch.equal(ops.row_statistics(state, torch.ones(out, n), C=C, packed=True), torch.zeros(out, 2))
        ops.counter_update_(state, scale, v, torch.ones(out, n), totals, RULE, seed=0)
    # A sum over nothing is zero.
    assert torch.equal(ops.counter_forward(x, state, scale, C=C, packed=True), torch.zeros(m, out))
    assert torch.equal(ops.counter_grad_input(grad_out, state, scale, n, C=C, packed=True), torch.zeros(m, n))
    assert torch.equal(ops.grad_weight(grad_out, x), torch.zeros(out, n))
    ops.counter_update_from_io_(state, scale, v, x, grad_out, totals, RULE, seed=0)
    grad_x = ops.counter_backward_(x, grad_out, state, scale, v, totals, RULE, seed=0)
    assert grad_x is not None
    assert torch.equal(grad_x, torch.zeros(m, n))
    assert torch.equal(scale, torch.ones(out, 1))
    assert totals.tolist() == [0, 0, 0]


# ---- the backward of a layer ----


@pytest.mark.parametrize("tile_rows", [0, 1, 4, 10, 99])
def test_backward_is_its_parts(shaped: Device, tile_rows: int) -> None:
    a, b = arguments(), {}
    b = {key: value.clone() for key, value in a.items()}
    grad_x = ops.counter_backward_(
        a["x"], a["grad_out"], a["state"], a["scale"], a["v"], a["totals"], RULE, seed=3, tile_rows=tile_rows
    )
    want = ops.counter_grad_input(b["grad_out"], b["state"], b["scale"], IN, C=C, packed=True)
    b["grad_w"] = ops.grad_weight(b["grad_out"], b["x"])
    _update(b)
    assert grad_x is not None
    assert torch.equal(grad_x, want), "by the old weight"
    for key in ("state", "scale", "v", "totals"):
        assert torch.equal(a[key], b[key]), key


def test_backward_without_update_or_without_input_gradient(device: Device) -> None:
    a = arguments()
    before = {key: value.clone() for key, value in a.items()}
    tensors = (a["x"], a["grad_out"], a["state"], a["scale"], a["v"], a["totals"], RULE)
    assert ops.counter_backward_(*tensors, seed=None) is not None
    assert all(torch.equal(a[key], before[key]) for key in a)
    assert ops.counter_backward_(*tensors, seed=3, needs_grad_input=False) is None
    assert not torch.equal(a["state"], before["state"])


@pytest.mark.parametrize(("offset", "rows"), [(-1, 2), (0, 11), (9, 2), (11, None), (3, -1)])
def test_gradient_rows_outside_the_layer_are_refused(offset: int, rows: int | None) -> None:
    a = arguments()
    with pytest.raises(ValueError, match="expected rows"):
        ops.grad_weight(a["grad_out"], a["x"], offset, rows)


# ---- other types, shapes, sizes ----


@pytest.mark.parametrize(("name", "used"), USES)
def test_other_types_are_refused_by_name(name: str, used: str) -> None:
    launcher, _ = LAUNCHERS[name]
    dtype = arguments()[used].dtype
    for other in {torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8} - {dtype}:
        wrong = arguments()
        wrong[used] = wrong[used].to(other)
        with pytest.raises(TypeError, match=f"expected {used} of dtype {dtype}, got {other}"):
            launcher(wrong)
    for value, got in ((np.zeros((2, 2)), "ndarray"), (None, "NoneType"), ([1.0], "list")):
        with pytest.raises((TypeError, AttributeError), match=rf"expected {used} as a torch tensor, got {got}"):
            launcher({**arguments(), used: value})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match=f"expected {used} on the CPU or on .*, got a tensor on meta"):
        launcher({**arguments(), used: torch.empty(2, 2, dtype=dtype, device="meta")})


@pytest.mark.parametrize(("name", "used"), USES)
def test_other_shapes_are_refused_before_anything_changes(name: str, used: str) -> None:
    launcher, _ = LAUNCHERS[name]
    for change in (lambda t: t[None], lambda t: torch.cat([t.flatten(), t.flatten()[:1]])):
        wrong = arguments()
        wrong[used] = change(wrong[used])
        before = {key: value.clone() for key, value in wrong.items()}
        with pytest.raises(ValueError, match=f"expected {used} of shape"):
            launcher(wrong)
        assert all(torch.equal(wrong[key], before[key]) for key in wrong)


def test_widths_that_do_not_pack_are_refused() -> None:
    with pytest.raises(ValueError, match="expected in_features divisible by 4 for 6-bit packing, got 6"):
        ops.pack_codes(torch.zeros(2, 6, dtype=torch.uint8))
    with pytest.raises(ValueError, match="divisible by 4"):
        ops.unpack_codes(torch.zeros(2, 6, dtype=torch.uint8), 7)


def test_sizes_beyond_the_index_are_refused_before_launch() -> None:
    # A tensor of stride 0 has any size in no memory.
    for shape in ((1 << 31, 4), (4, 1 << 31)):
        with pytest.raises(UnsupportedDevice, match=r"sizes below 2\^31 in x"):
            require_tensor("x", torch.zeros(1).expand(shape), torch.float32, (None, None))
    require_tensor("x", torch.zeros(1).expand((1 << 31) - 1, 4), torch.float32, (None, None))


@pytest.mark.parametrize("count", [(1 << 30) + 1, (1 << 31) - 1])
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_launch_sizes_of_huge_matrices(device: Device, count: int, kind: str) -> None:
    info = device.with_capabilities(type=kind).info
    rows = row_shape(info, count, 4)
    assert rows.global_size[0] // rows.local_size[0] * rows.per >= count
    size, per = flat_shape(info, 4 * count)
    assert size[0] * per >= 4 * count
    product = matmul_shape(info, count, 4)
    tiles = product.global_size[1] // product.local_size[1]
    assert tiles * (product.per if not product.gpu else product.tile) >= count
    assert product.per + count < 1 << 32, "a work-item's rows are counted in 32 bits"


def test_buffers_beyond_the_devices_limit_are_refused(device: Device) -> None:
    a = arguments()
    before = {key: value.clone() for key, value in a.items()}
    small = device.with_capabilities(max_alloc_bytes=256)
    with use_device(small):
        for name in ("counter_update_", "counter_backward_", "grad_weight", "decode_dense"):
            with pytest.raises(UnsupportedDevice, match=r"bytes was asked for, but .* gives at most 256"):
                LAUNCHERS[name][0](a)
    assert all(torch.equal(a[key], before[key]) for key in a)


@pytest.mark.parametrize("packed", [True, False])
def test_more_rows_than_a_second_dimension_holds(device: Device, packed: bool) -> None:
    rows = 70_001
    codes = torch.randint(0, 64, (rows, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8) % 62
    state, scale = reference.pack_codes(codes) if packed else codes, torch.ones(rows, 1)
    options: dict[str, Any] = {"C": C, "packed": packed}
    t = reference.decode_ternary(state, 4, **options)
    assert torch.equal(ops.decode_ternary(state, 4, **options), t)
    assert torch.equal(ops.decode_dense(state, scale, 4, **options), t.float())
    for dtype in (torch.int8, torch.float16):
        cache = torch.empty(rows, 4, dtype=dtype)
        ops.refresh_cache_(cache, state, **options)
        assert torch.equal(cache, t.to(dtype))
