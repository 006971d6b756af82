"""A step of Adam on compressed moments: torch's own Adam, what is left out, weights of 16 bits, layouts, places,
launches, and clear refusals. That the kernels give the reference's bytes is the table of cases' (test_cases.py).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import memtrain_cl.torch_device  # noqa: F401 (registers the device)
from memtrain_cl import ops, reference
from memtrain_cl.adam_rule import MOMENT_CODES, AdamStep, AdamTensor
from memtrain_cl.cases_adam import adam_case
from memtrain_cl.comparison import generator
from memtrain_cl.device import Device, use_device
from memtrain_cl.program import Kernel
from memtrain_cl.torch_device.fallback import strict
from memtrain_cl.verify_adam import CHANGED, adam_tensor, quantiles

each_code = pytest.mark.parametrize("code", MOMENT_CODES)


def rule_for(code: str, **options: Any) -> AdamStep:
    chosen = {"lr": 0.01, "step": 3, "block_size": 16} | options
    return AdamStep(code=code, **chosen)


def tensor_of(n: int, rule: AdamStep, *, param: str = "float32", grad: str = "float32") -> AdamTensor:
    """One in the middle of training."""
    case = adam_case(n, rule.block_size, rule.code, param=param, grad=grad)
    return adam_tensor(n, rule, case, generator(case))


def tables_of(rule: AdamStep, place: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor] | None:
    return (quantiles().to(place), quantiles().abs().to(place)) if rule.code == "profile" else None


def moved(tensor: AdamTensor, change: Callable[[torch.Tensor], torch.Tensor]) -> AdamTensor:
    """Every part of it changed so."""
    changed: dict[str, Any] = {}
    for name in (*CHANGED, "grad"):
        part = getattr(tensor, name)
        changed[name] = None if part is None else change(part)
    return replace(tensor, **changed)


def sent(place: torch.device | str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Copies of tensors, there."""
    return lambda part: part.clone().to(place)


def dense(weights: torch.Tensor, grad: torch.Tensor) -> AdamTensor:
    """One that has made no step, with moments in float32."""
    moments = torch.zeros(weights.shape), torch.zeros(weights.shape)
    return AdamTensor(weights, grad, *moments, None, None, torch.zeros(2, dtype=torch.int32), seed=5)


def same(got: AdamTensor, want: AdamTensor) -> bool:
    """Equal bytes of all that a step may change."""
    for name in CHANGED:
        a, b = getattr(got, name), getattr(want, name)
        if (a is None) != (b is None) or (a is not None and not torch.equal(a.cpu(), b.cpu())):
            return False
    return True


def stepped(room: Any, tensors: Sequence[AdamTensor], rule: AdamStep) -> list[AdamTensor]:
    """Copies of the tensors after a step."""
    ends = [moved(tensor, torch.clone) for tensor in tensors]
    room.adam_step_(ends, rule, tables=tables_of(rule, ends[0].param.device))
    return ends


# ---- the rule ----


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_dense_is_torchs_adam(shaped: Device, decoupled: bool, maximize: bool) -> None:
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    weight = torch.nn.Parameter(torch.cat([torch.ones(1), torch.randn(3000)]))
    own = dense(weight.detach().clone(), weight.detach())
    theirs = kind([weight], lr=0.1, weight_decay=0.1, maximize=maximize)
    for step in range(1, 6):
        weight.grad = torch.cat([torch.ones(1), torch.randn(3000)])
        theirs.step()
        own.grad = weight.grad
        rule = AdamStep(0.1, weight_decay=0.1, decoupled=decoupled, maximize=maximize, step=step, code="dense")
        ops.adam_step_([own], rule)
        assert torch.allclose(own.param, weight, rtol=3e-6, atol=3e-7)
    assert own.skipped.tolist() == [0, 0]


@each_code
def test_zero_gradients_leave_weights_alone(shaped: Device, code: str) -> None:
    rule = rule_for(code)
    fresh = moved(tensor_of(100, rule), torch.zeros_like)
    if code == "dynamic":
        fresh.exp_avg.fill_(127)
    for param in (torch.float32, torch.float16):
        weights = torch.randn(100).to(param)
        tensor = replace(fresh, param=weights.clone(), grad=torch.zeros(100, dtype=param))
        for step in (1, 2, 9):
            ops.adam_step_([tensor], replace(rule, step=step), tables=tables_of(rule))
        assert torch.equal(tensor.param, weights)
        moments = tensor.exp_avg.float() - (127 if code == "dynamic" else 0)
        assert not moments.any()
        assert not tensor.exp_avg_sq.any()


@pytest.mark.parametrize("code", ["linear", "dynamic", "profile"])
def test_no_step_is_longer_than_the_bound(shaped: Device, code: str) -> None:
    """Second moments that the codes can hardly hold, beside a large one."""
    rule = rule_for(code, block_size=64, lr=1.0)
    tensor = moved(tensor_of(640, rule), torch.zeros_like)
    if code == "dynamic":
        tensor.exp_avg.fill_(127)
    chance = torch.Generator().manual_seed(1)
    for step in range(1, 30):
        tensor.grad = torch.randn(640, generator=chance) * 10.0 ** (-12.0 * torch.rand(640, generator=chance))
        own = replace(rule, step=step)
        before = tensor.param.clone()
        ops.adam_step_([tensor], own, tables=tables_of(rule))
        assert bool(((tensor.param - before).abs() <= own.bound * 1.001).all())


# ---- gradients that are not finite ----


@each_code
@pytest.mark.parametrize("wrong", [math.inf, math.nan, -2e19])
def test_what_is_not_finite_is_left_out_and_told(shaped: Device, code: str, wrong: float) -> None:
    for skip in ("tensor", "block"):
        rule = rule_for(code, skip=skip, step=7)
        tensors = [tensor_of(n, rule) for n in (100, 50, 16)]
        tensors[1].grad[20] = wrong
        tensors[1].grad[21] = wrong
        ends = stepped(ops, tensors, rule)
        assert [end.skipped.tolist() for end in ends] == [[4, 1], [5, 7], [4, 1]]
        whole = slice(None) if skip == "tensor" or code == "dense" else slice(16, 32)
        for name in ("param", "exp_avg", "exp_avg_sq"):
            before, after = getattr(tensors[1], name), getattr(ends[1], name)
            assert torch.equal(after[whole], before[whole])
            assert bool(torch.isfinite(after.float()).all())
        assert torch.equal(ends[1].param, tensors[1].param) == (whole == slice(None))
        assert not torch.equal(ends[0].param, tensors[0].param)
        assert all(same(end, want) for end, want in zip(ends, stepped(reference, tensors, rule), strict=True))


# ---- weights of 16 bits ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_rounded_without_bias(shaped: Device, dtype: torch.dtype) -> None:
    n = 1 << 14
    info = torch.finfo(dtype)
    starts = [1.0, -0.3, 1e-5, info.max, info.smallest_normal * 0.5]
    for start in starts:
        weights = torch.full((n,), start).to(dtype)
        tensor = dense(weights.clone(), torch.ones(n))
        # One step moves every weight by lr, a fraction of what lies between two numbers of the type.
        spacing = float((torch.nextafter(weights[0], weights[0] * 0).float() - weights[0].float()).abs())
        rule = AdamStep(lr=min(spacing * 0.3, 1e6), code="dense", maximize=start == info.max, eps=1e-12)
        ops.adam_step_([tensor], rule)
        assert bool(torch.isfinite(tensor.param.float()).all())
        moves = (tensor.param.double() - weights.double()) / spacing
        if start == info.max:
            assert not moves.any()
            continue
        assert set(moves.abs().unique().tolist()) <= {0.0, 1.0}
        assert float(moves.mean()) == pytest.approx(-0.3, abs=5 * 0.46 / n**0.5)


def test_seeds_and_steps_make_the_rounding(device: Device) -> None:
    rule = rule_for("linear", stochastic_moments=True)
    tensor = tensor_of(500, rule, param="bfloat16")
    first, again, other = (stepped(ops, [replace(tensor, seed=seed)], rule)[0] for seed in (1, 1, 2))
    assert same(first, again)
    assert not torch.equal(first.param, other.param)
    assert not torch.equal(first.exp_avg, other.exp_avg)
    # Two equal tensors of one step.
    both = stepped(ops, [replace(tensor, seed=1), replace(tensor, seed=2)], rule)
    assert same(both[0], first)
    assert same(both[1], other)


# ---- layouts, places, devices ----


@each_code
def test_every_layout_and_place(device: Device, place: torch.device, code: str) -> None:
    rule = rule_for(code)
    param = "bfloat16" if code == "linear" else "float32"
    tensors = [tensor_of(n, rule, param=param) for n in (60, 1, 33)]
    want = stepped(reference, tensors, rule)
    with strict():
        there = stepped(ops, [moved(tensor, sent(place)) for tensor in tensors], rule)
    assert all(end.param.device == place for end in there)
    assert all(same(end, one) for end, one in zip(there, want, strict=True))
    # A transposed weight, and a gradient with gaps, of memory that begins elsewhere.
    shaped = [moved(tensors[0], lambda part: part.view(6, 10) if part.numel() == 60 else part)]
    want = stepped(reference, shaped, rule)
    for where in ("cpu", place):
        end = moved(shaped[0], sent(where))
        weights = torch.empty(11, 6, dtype=end.param.dtype, device=where)[1:].t()
        end.param = weights.copy_(end.param)
        end.grad = torch.stack([end.grad, end.grad * 9], dim=-1)[..., 0]
        ops.adam_step_([end], rule, tables=tables_of(rule, where))
        assert end.param is weights
        assert same(end, want[0])


@each_code
def test_device_of_memory_of_its_own(discrete: Device, code: str) -> None:
    rule = rule_for(code)
    tensors = [tensor_of(n, rule) for n in (60, 33)]
    ends = stepped(ops, tensors, rule)
    assert all(same(a, b) for a, b in zip(ends, stepped(reference, tensors, rule), strict=True))


@pytest.mark.parametrize(("items", "memory"), [(256, 1 << 15), (64, 1 << 14), (1, 1 << 14)])
def test_small_groups_and_little_local_memory(device: Device, items: int, memory: int) -> None:
    twin = device.with_capabilities(type="gpu", max_work_group_size=items, local_mem_bytes=memory)
    rule = rule_for("linear", block_size=300)
    tensor = tensor_of(1000, rule)
    with use_device(twin):
        assert same(*stepped(ops, [tensor], rule), *stepped(reference, [tensor], rule))


# ---- launches ----


def test_small_tensors_share_launches(device: Device, place: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    enqueue = Kernel.enqueue

    def watched(self: Kernel, *arguments: Any) -> Any:
        seen.append(self.label.partition("(")[0])
        return enqueue(self, *arguments)

    rule = rule_for("linear")
    kinds = ("float32", "bfloat16")
    tensors = [tensor_of(20, rule, param=kinds[turn % 2]) for turn in range(24)]
    there = [moved(tensor, sent(place)) for tensor in tensors]
    want = stepped(reference, tensors, rule)
    monkeypatch.setattr(Kernel, "enqueue", watched)
    # Nothing may wait, either.
    monkeypatch.setattr(Device, "synchronize", None)
    ops.adam_step_(there, rule)
    monkeypatch.undo()
    assert sorted(seen) == ["adam.adam_scan"] * 2 + ["adam.adam_step"] * 2 + ["elementwise.elementwise"]
    assert all(same(end, one) for end, one in zip(there, want, strict=True))


def test_empty_tensors_are_no_launch(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = rule_for("linear")
    empty, some = tensor_of(20, rule), tensor_of(20, rule)
    empty = moved(empty, lambda part: part if part.shape == (2,) and part.dtype == torch.int32 else part[:0])
    end = stepped(ops, [empty, some, empty.__class__(**{**vars(empty), "param": empty.param.clone()})], rule)[1]
    assert same(end, stepped(reference, [some], rule)[0])
    monkeypatch.setattr(Kernel, "enqueue", None)
    ops.adam_step_([empty], rule)
    ops.adam_step_([], rule)


# ---- refusals ----


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"param": torch.ones(40, dtype=torch.float64)}, TypeError, "expected param of dtype torch.float32"),
        ({"grad": torch.ones(40, dtype=torch.bfloat16)}, TypeError, "expected grad of dtype torch.float32, got"),
        ({"grad": torch.ones(41)}, ValueError, r"expected grad of shape \[40\], got \[41\]"),
        ({"exp_avg": torch.ones(40)}, TypeError, "expected exp_avg of dtype torch.int8"),
        ({"exp_avg_sq": torch.ones(39, dtype=torch.int8)}, ValueError, r"exp_avg_sq of shape \[40\]"),
        ({"exp_avg_sq": torch.ones(80, dtype=torch.int8)[::2]}, ValueError, "expected exp_avg_sq contiguous"),
        ({"exp_avg_scale": None}, ValueError, "expected exp_avg_scale for codes"),
        ({"exp_avg_sq_scale": torch.ones(2)}, ValueError, r"exp_avg_sq_scale of shape \[3\], got \[2\]"),
        ({"skipped": torch.zeros(2)}, TypeError, "expected skipped of dtype torch.int32"),
        ({"seed": 1 << 32}, ValueError, r"a seed in 0\.\.2\^32-1"),
        ({"seed": 1.5}, ValueError, r"a seed in 0\.\.2\^32-1"),
        ({"grad": [1.0]}, TypeError, "expected grad as a torch tensor, got list"),
    ],
)
def test_wrong_tensors_are_refused_before_anything_changes(
    device: Device, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    rule = rule_for("linear")
    good, bad = tensor_of(40, rule), replace(tensor_of(40, rule), **change)
    before = copy.deepcopy(good)
    with pytest.raises(error, match=message):
        ops.adam_step_([good, bad], rule)
    assert same(good, before)


def test_wrong_calls_are_refused(device: Device, place: torch.device) -> None:
    rule = rule_for("linear")
    good = tensor_of(40, rule)
    there = moved(good, sent(place))
    tables = tables_of(rule_for("profile"))
    calls: list[tuple[Any, AdamStep, Any, type[Exception], str]] = [
        ([good], rule, tables, ValueError, "expected tables for the code 'profile' and no other, got code 'linear'"),
        ([good], rule_for("profile"), None, ValueError, "got code 'profile'"),
        ([tensor_of(40, rule_for("profile"))], rule_for("profile"), (torch.ones(255),) * 2, ValueError, r"\[256\]"),
        ([good, there], rule, None, ValueError, "expected tensors on one device"),
        ([replace(good, grad=there.grad)], rule, None, ValueError, "expected tensors on one device"),
        ([good, good], rule, None, ValueError, "expected each parameter once"),
        ([good.param], rule, None, TypeError, "expected tensors as AdamTensor, got Tensor"),
        ([good], rule_for("dense"), None, TypeError, "expected exp_avg of dtype torch.float32"),
    ]
    for tensors, own, given, error, message in calls:
        with pytest.raises(error, match=message):
            ops.adam_step_(tensors, own, tables=given)
