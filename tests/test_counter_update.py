"""The counter update on devices: every transition, fair rounding, tiles, rows left alone, small devices."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from memtrain_cl import ops, reference
from memtrain_cl.cases import MODES
from memtrain_cl.device import Device, use_device
from memtrain_cl.formats import CounterRule, code_count
from memtrain_cl.ops.launch import ready_device
from memtrain_cl.program import Kernel
from memtrain_cl.runtimes import import_pyopencl

#: A rule under which val = c - g exactly, in a layer whose scale is C/8: k = (lr/eps)*(C/scale) = 0.125*8 and r = 1.
EXACT_STEPS: dict[str, Any] = {"lr": 0.125 * 2.0**20, "lr_scale": 0.0, "rms_eps": 2.0**20}


@dataclass
class Layer:
    """What an update changes."""

    state: torch.Tensor
    scale: torch.Tensor
    v: torch.Tensor
    totals: torch.Tensor

    def clone(self) -> Layer:
        return Layer(self.state.clone(), self.scale.clone(), self.v.clone(), self.totals.clone())

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.state, self.scale, self.v, self.totals

    def update(self, grad_w: torch.Tensor, rule: CounterRule, room: Any = ops, seed: int = 7, **where: Any) -> Layer:
        v = self.v if rule.use_rms else None
        room.counter_update_(self.state, self.scale, v, grad_w, self.totals, rule, seed=seed, **where)
        return self


def assert_same(got: Layer, want: Layer) -> None:
    for name, left, right in zip(("state", "scale", "v", "totals"), got.tensors(), want.tensors(), strict=True):
        assert torch.equal(left, right), name


def layer_of(codes: torch.Tensor, rule: CounterRule, scale: torch.Tensor | None = None) -> Layer:
    rows = codes.shape[0]
    return Layer(
        reference.pack_codes(codes) if rule.packed else codes.clone(),
        torch.rand(rows, 1) + 0.1 if scale is None else scale,
        torch.rand(rows, 1) * 0.01,
        torch.zeros(3, dtype=torch.int64),
    )


def random_layer(rows: int, columns: int, rule: CounterRule) -> Layer:
    return layer_of(torch.randint(0, code_count(rule.C), (rows, columns), dtype=torch.uint8), rule)


def codes_of(layer: Layer, rule: CounterRule, columns: int) -> torch.Tensor:
    return reference.unpack_codes(layer.state, columns) if rule.packed else layer.state


def rule_of(C: int = 11, packed: bool = True, mode: str = "exact", **options: Any) -> CounterRule:
    return CounterRule(C, packed, **{"lr": 0.3, "lr_scale": 0.1, **MODES[mode], **options})


# ---- transitions ----


def transition(t: np.ndarray, cc: np.ndarray, C: int) -> tuple[np.ndarray, np.ndarray]:
    """(t', c') in whole numbers: carries move t, and pressure against a wall stays at the wall."""
    carry = np.sign(cc) * (np.abs(cc) // C)
    wanted = t + carry
    t_new = wanted.clip(-1, 1)
    rest = np.where(wanted != t_new, np.sign(cc) * (C - 1), cc - carry * C)
    return t_new, rest.clip(-(C - 1), C - 1)


def all_pairs(C: int) -> tuple[np.ndarray, np.ndarray]:
    """(code, cc), each [rows, 64]: every code with every rounded counter to just beyond +-4C."""
    codes, cc = np.meshgrid(np.arange(code_count(C)), np.arange(-4 * C - 3, 4 * C + 4))
    pad = -codes.size % 64
    return tuple(np.pad(part.ravel(), (0, pad), mode="edge").reshape(-1, 64) for part in (codes, cc))  # type: ignore[return-value]


@pytest.mark.parametrize(("C", "packed"), [(1, True), (11, True), (8, False), (43, False)])
def test_every_transition(shaped: Device, C: int, packed: bool) -> None:
    check_every_transition(C, packed)


@pytest.mark.parametrize(("C", "packed"), [(2, True), (8, True), (1, False), (11, False)])
def test_every_transition_of_more_radices(device: Device, C: int, packed: bool) -> None:
    check_every_transition(C, packed)


def check_every_transition(C: int, packed: bool) -> None:
    rule = rule_of(C, packed, **EXACT_STEPS)
    codes, cc = all_pairs(C)
    t = codes // (2 * C - 1) - 1
    c = codes - (t + 1) * (2 * C - 1) - (C - 1)
    t_new, c_new = transition(t, cc, C)
    layer = layer_of(torch.from_numpy(codes.astype(np.uint8)), rule, torch.full((len(codes), 1), C / 8))
    grad = torch.from_numpy((c - cc).astype(np.float32))
    expected = (t_new + 1) * (2 * C - 1) + c_new + C - 1
    for room in (reference, ops):
        after = layer.clone().update(grad, rule, room)
        assert codes_of(after, rule, 64).numpy().tolist() == expected.tolist(), room.__name__
        assert after.totals.tolist() == [int((cc != c).sum()), int((t_new != t).sum()), 0], room.__name__
        assert torch.equal(after.scale, layer.scale)


@pytest.mark.parametrize("case", [(8, 1, 9, 1, 7), (8, 1, -17, -1, -1), (11, 1, -22, -1, 0), (11, 0, 11, 1, 0)])
def test_the_rule_of_this_file_is_the_published_one(case: tuple[int, ...]) -> None:
    C, t, cc, t_out, rem_out = case
    assert [int(part) for part in transition(np.array(t), np.array(cc), C)] == [t_out, rem_out]


# ---- rounding ----


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rounding_is_fair(shaped: Device, sign: float) -> None:
    # Row o asks for a step of (o + 0.5)/128; what it gets on average over columns and seeds must be that.
    rule, rows, columns, seeds = rule_of(**EXACT_STEPS), 128, 64, 16
    want = sign * (torch.arange(rows) + 0.5) / rows
    middle = torch.full((rows, columns), 31, dtype=torch.uint8)  # t = 0, c = 0
    start = layer_of(middle, rule, torch.full((rows, 1), 11 / 8))
    grad = -want[:, None].expand(rows, columns).contiguous()
    steps = torch.stack(
        [
            codes_of(start.clone().update(grad, rule, seed=1000 * seed + 3), rule, columns).float() - 31
            for seed in range(seeds)
        ]
    )
    assert set(steps.unique().tolist()) == {0.0, sign}
    magnitude = want.abs()
    deviation = torch.sqrt(magnitude * (1 - magnitude) / (columns * seeds))
    score = (steps.mean(dim=(0, 2)) - want) / deviation
    assert float(score.abs().max()) < 4.5
    assert abs(float(score.mean())) < 4.5 / math.sqrt(rows)
    # Neither columns nor seeds share their luck.
    luck = (steps - want[:, None]) / (deviation[:, None] * math.sqrt(columns * seeds))
    assert abs(float((luck[:, :, 1:] * luck[:, :, :-1]).mean())) < 4.5 / math.sqrt(luck.numel())
    assert abs(float((luck[1:] * luck[:-1]).mean())) < 4.5 / math.sqrt(luck.numel())


def test_a_zero_gradient_leaves_codes_and_scale(shaped: Device) -> None:
    rule = rule_of()
    codes = torch.arange(63, dtype=torch.uint8).repeat(64 * 3)[: 3 * 64].reshape(3, 64)
    start = layer_of(codes, rule)
    after = start.clone().update(torch.zeros(3, 64), rule)
    assert torch.equal(after.state, start.state)
    assert torch.equal(after.scale, start.scale)
    assert torch.equal(after.v, start.v * 0.9)
    assert after.totals.tolist() == [0, 0, 0]


@pytest.mark.parametrize("eps", [1e-3, 1e-12])
def test_tiny_gradients_are_finite_and_agree(shaped: Device, eps: float) -> None:
    rule = rule_of(rms_eps=eps)
    start = random_layer(3, 64, rule)
    start.v.zero_()
    grad = torch.full((3, 64), 6e-35)
    grad[:, ::5] = 1e-39
    grad[2] = 0.0
    got, want = (start.clone().update(grad, rule, room) for room in (ops, reference))
    assert_same(got, want)
    assert bool(torch.isfinite(got.scale).all() and torch.isfinite(got.v).all())
    assert int(codes_of(got, rule, 64).max()) < 63
    assert got.totals.tolist() == [0, 0, 0], "a push far below a quantum's 2^-24 moves nothing"


@pytest.mark.parametrize("mode", ["exact", "clipped_scale_clip"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 3e25])
def test_rows_without_a_finite_gradient_are_left_alone_and_counted(shaped: Device, mode: str, poison: float) -> None:
    rule = rule_of(mode=mode)
    start = random_layer(6, 64, rule)
    grad = torch.randn(6, 64)
    grad[1, 63] = grad[4, 0] = poison
    after = start.clone().update(grad, rule)
    clean = start.clone().update(grad.nan_to_num(0.0, 0.0, 0.0).where(grad.abs() < 1e20, torch.zeros(())), rule)
    for before, now, other in zip(start.tensors()[:3], after.tensors()[:3], clean.tensors()[:3], strict=True):
        assert torch.equal(now[[1, 4]], before[[1, 4]])
        assert torch.equal(now[[0, 2, 3, 5]], other[[0, 2, 3, 5]])
    assert not torch.equal(after.state[0], start.state[0])
    assert after.totals[2] == 2


# ---- tiles and places ----


@pytest.mark.parametrize(("C", "packed", "columns"), [(11, True, 68), (8, False, 67)])
@pytest.mark.parametrize("height", [1, 3, 7])
def test_tiles_make_the_whole(shaped: Device, C: int, packed: bool, columns: int, height: int) -> None:
    rule = rule_of(C, packed)
    start = random_layer(7, columns, rule)
    grad = torch.randn(7, columns)
    whole = start.clone().update(grad, rule)
    tiled = start.clone()
    for row in range(0, 7, height):
        tiled.update(grad[row : row + height], rule, row_offset=row)
    assert_same(tiled, whole)


def test_a_tile_touches_its_rows_alone(shaped: Device) -> None:
    rule = rule_of()
    start = random_layer(7, 68, rule)
    after = start.clone().update(torch.randn(2, 68), rule, row_offset=3)
    others = [0, 1, 2, 5, 6]
    for before, now in zip(start.tensors()[:3], after.tensors()[:3], strict=True):
        assert torch.equal(now[others], before[others])
        assert not torch.equal(now[3:5], before[3:5])


def test_seeds_and_places_choose_other_roundings(device: Device) -> None:
    rule = rule_of()
    start, grad = random_layer(3, 64, rule), torch.randn(3, 64)
    seen = [
        start.clone().update(grad, rule, seed=seed, index_base=base).state for seed, base in ((7, 0), (8, 0), (7, 64))
    ]
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])


@pytest.mark.parametrize("mode", ["exact", "no_rms", "clipped_scale_clip"])
def test_updates_on_a_device_with_memory_of_its_own(discrete: Device, mode: str) -> None:
    # Without row moments v is absent, and nothing may come back in its place.
    rule = rule_of(mode=mode)
    start = random_layer(11, 68, rule)
    grad = torch.randn(11, 68)
    assert_same(start.clone().update(grad, rule), start.clone().update(grad, rule, reference))


def test_totals_add_up(device: Device) -> None:
    rule = rule_of()
    layer = random_layer(5, 64, rule)
    layer.totals += 2**40
    once = layer.clone().update(torch.ones(5, 64), rule)
    twice = once.clone().update(torch.ones(5, 64), rule, reference, seed=8)
    assert_same(once.clone().update(torch.ones(5, 64), rule, seed=8), twice)
    assert int(once.totals[0]) > 2**40
    # A sum of 32 bits carries into the upper half.
    near = layer.clone()
    near.totals.copy_(torch.tensor([2**32 - 1, 2**32 - 1, 2**32 - 1]))
    assert_same(near.clone().update(torch.ones(5, 64), rule), near.clone().update(torch.ones(5, 64), rule, reference))


# ---- small devices ----


@pytest.mark.parametrize("limit", [256, 64, 1])
def test_small_devices_give_the_same_bytes(device: Device, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of 16 KiB local memory that allows groups of `limit` items: sizes follow it, results do not."""
    small = device.with_capabilities(type="gpu", max_work_group_size=limit, local_mem_bytes=16 << 10, compute_units=1)
    launches: list[tuple[int, float]] = []
    launch, cl = Kernel.__call__, import_pyopencl()
    # rusticl reports twice the bytes; a kernel of known size tells what a reported byte is worth.
    text = "kernel void known(global float *x) { local float y[256]; y[get_local_id(0)] = 0; *x = y[0]; }"
    known = cl.Kernel(cl.Program(device.context, text).build(), "known")
    worth = 1024 / known.get_work_group_info(cl.kernel_work_group_info.LOCAL_MEM_SIZE, device.handle)
    ready_device()  # its probe is no part of what is recorded

    def record(self: Kernel, global_size: Any, local_size: Any, *args: Any) -> Any:
        used = self._handle().get_work_group_info(cl.kernel_work_group_info.LOCAL_MEM_SIZE, device.handle)
        launches.append((math.prod(local_size or (1,)), used * worth))
        return launch(self, global_size, local_size, *args)

    rule = rule_of()
    layers = [(random_layer(3, columns, rule), torch.randn(3, columns)) for columns in (68, 1028)]
    x, product_layer = torch.randn(130, 132), random_layer(129, 132, rule)
    wide = replace(rule, packed=False)
    odd = random_layer(3, 1029, wide)
    monkeypatch.setattr(Kernel, "__call__", record)
    with use_device(small):
        for start, grad in layers:
            assert_same(start.clone().update(grad, rule), start.clone().update(grad, rule, reference))
        grad = torch.randn(3, 1029)
        assert_same(odd.clone().update(grad, wide), odd.clone().update(grad, wide, reference))
        y = ops.counter_forward(x, product_layer.state, product_layer.scale, C=11, packed=True)
    dense = reference.decode_dense(product_layer.state, product_layer.scale, 132, C=11, packed=True)
    torch.testing.assert_close(y, x @ dense.t(), rtol=1e-4, atol=1e-4)
    assert len(launches) == 4
    assert max(items for items, _ in launches) <= limit
    assert max(used for _, used in launches) <= 16 << 10


# ---- refusals ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row_offset": 5}, r"rows 5\.\.8 within the layer's 7"),
        ({"row_offset": -1}, r"rows -1\.\.2 within"),
        ({"seed": -1}, r"seed in 0\.\.2\^32-1, got -1"),
        ({"seed": 1 << 32}, "seed in"),
        ({"seed": 1.5}, "seed in"),
    ],
)
def test_wrong_places_and_seeds_change_nothing(device: Device, changes: dict[str, Any], message: str) -> None:
    rule = rule_of()
    start = random_layer(7, 64, rule)
    after = start.clone()
    with pytest.raises(ValueError, match=message):
        after.update(torch.randn(3, 64), rule, **changes)
    assert_same(after, start)


@pytest.mark.parametrize(
    ("C", "packed"), [(12, True), *((C, packed) for C in (0, 44, 2.0, True, None, "8") for packed in (True, False))]
)
def test_other_radices_are_refused(C: Any, packed: bool) -> None:
    with pytest.raises(ValueError, match=r"expected C as an integer in 1\.\." + ("11" if packed else "43")):
        rule_of(C, packed)


OUT_OF_RANGE = [
    *({"lr": value} for value in (-1.0, math.nan, math.inf, "0.1")),
    *({"rms_beta": value} for value in (1.0, -0.1)),
    *({"rms_eps": value} for value in (0.0, 1e-38, math.inf)),
    *({"clip": value} for value in (-1.0, math.nan)),
    {"lr_scale": -1e-9},
]


@pytest.mark.parametrize("change", OUT_OF_RANGE)
def test_options_out_of_range_are_refused(change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(ValueError, match=f"expected {name} "):
        rule_of(**change)
