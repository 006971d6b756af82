"""Steps in backward: the bits of steps after it, gradients that are gone, and what is refused where it is written."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memtrain_cl import reference
from memtrain_cl.device import Device
from memtrain_cl.optim import CompressedAdam
from memtrain_cl.optim.fused_backward import FreedGradient
from tests.adam_cases import METHODS, oracle, rooms, same_bits, values

LR = 1e-2


class Shared(torch.nn.Module):
    """Layers of which one is used twice, and one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 2)
        self.frozen = torch.nn.Linear(16, 16).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.twice(torch.tanh(self.twice(torch.tanh(self.first(x)))))
        out: torch.Tensor = self.last(torch.tanh(self.frozen(y)))
        return out


def model_of(dtype: torch.dtype = torch.float32, place: Any = "cpu") -> Any:
    torch.manual_seed(0)
    return Shared().to(dtype).to(place)


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    parameter = next(model.parameters())
    x = values(12, 8, seed=step).to(parameter.dtype).to(parameter.device)
    loss: torch.Tensor = (model(x) - x[:, :2]).float().square().mean()
    return loss


def fused_and_plain(room: Any, dtype: torch.dtype = torch.float32, fused: Any = None, **options: Any) -> Any:
    pairs = []
    for extra in ({"fused_backward": True, **(fused or {})}, {}):
        model = model_of(dtype, room.place)
        pairs.append((model, CompressedAdam(model.parameters(), lr=LR, ops=room.ops, **options, **extra)))
    return pairs


@pytest.mark.parametrize("method", list(METHODS))
def test_the_bits_are_those_of_steps_after_backward(device: Device, method: str) -> None:
    for name, room in rooms(device).items():
        if name != "reference" and method != "int8":
            continue
        (fused, hooked), (plain, optimizer) = fused_and_plain(room, torch.bfloat16, **METHODS[method])
        for step in range(3):
            loss_of(fused, step).backward()
            assert all(isinstance(p.grad, FreedGradient) for p in fused.parameters() if p.requires_grad)
            hooked.step()
            optimizer.zero_grad()
            loss_of(plain, step).backward()
            optimizer.step()
        assert same_bits(hooked, optimizer), name
        assert not any(
            torch.equal(p.cpu(), q)
            for p, q in zip(fused.parameters(), model_of().parameters(), strict=True)
            if p.requires_grad
        )


def test_gradients_are_freed_one_by_one() -> None:
    """While one parameter is stepped no other's gradient is held."""
    model = model_of()
    optimizer = oracle(model.parameters(), fused_backward=True)
    held = []

    def count(tensors: Any, rule: Any, tables: Any = None) -> None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        held.append(sum(not isinstance(grad, FreedGradient) for grad in grads))
        reference.adam_step_(tensors, rule, tables=tables)

    optimizer.ops = type("Counting", (), {"adam_step_": staticmethod(count)})  # type: ignore[assignment]
    loss_of(model, 0).backward()
    assert held == [1] * 6


def test_backward_passes_accumulate(device: Device) -> None:
    for room in rooms(device).values():
        (fused, hooked), (plain, optimizer) = fused_and_plain(room, fused={"accumulate": 3})
        for step in range(2):
            optimizer.zero_grad()
            for part in range(3):
                assert not (part and any(isinstance(p.grad, FreedGradient) for p in fused.parameters()))
                for model in (fused, plain):
                    (loss_of(model, 3 * step + part) / 3).backward()
            hooked.step()
            optimizer.step()
        assert same_bits(hooked, optimizer)


@pytest.mark.parametrize("zero", ["optimizer", "model"])
def test_gradients_that_wait_are_dropped_by_zero_grad(zero: str) -> None:
    model = model_of()
    optimizer = oracle(model.parameters(), fused_backward=True, accumulate=2)
    loss_of(model, 0).backward()
    (optimizer if zero == "optimizer" else model).zero_grad()
    before = copy.deepcopy(model.state_dict())
    loss_of(model, 1).backward()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    loss_of(model, 2).backward()
    assert {state["step"] for state in optimizer.state.values()} == {1}


def test_each_gradient_is_clipped_by_itself(device: Device) -> None:
    for room in rooms(device).values():
        (fused, hooked), (plain, optimizer) = fused_and_plain(room, fused={"max_grad_norm": 1e-2})
        for step in range(2):
            loss_of(fused, step).backward()
            hooked.step()
            optimizer.zero_grad()
            loss_of(plain, step).backward()
            for parameter in plain.parameters():
                if parameter.grad is not None:
                    torch.nn.utils.clip_grad_norm_([parameter], 1e-2)
            optimizer.step()
        for got, want in zip(fused.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_not_finite_is_skipped_clipped_or_not() -> None:
    for clip in (None, 1.0):
        model = model_of()
        optimizer = oracle(model.named_parameters(), fused_backward=True, max_grad_norm=clip)
        before = copy.deepcopy(model.state_dict())
        (loss_of(model, 0) * torch.inf).backward()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert set(optimizer.skipped_updates().values()) == {(1, 1)}


def test_a_norm_beyond_float32_is_no_gradient_of_zeros(device: Device) -> None:
    """Numbers are finite, their squares are not: a factor of 0 would let moments decay, and tell nobody."""
    for room in rooms(device).values():
        p = torch.nn.Parameter(torch.ones(6, device=room.place))
        optimizer = CompressedAdam([p], fused_backward=True, max_grad_norm=1.0, ops=room.ops)
        (p * 9e18).sum().backward()
        assert torch.equal(p.detach().cpu(), torch.ones(6))
        assert optimizer.skipped_updates() == {"0": (1, 1)}
        (p * 1e18).sum().backward()
        assert bool((p < 1).all())
        assert optimizer.skipped_updates() == {"0": (1, 1)}


def test_twenty_steps_train() -> None:
    model = model_of()
    optimizer = oracle(model.parameters(), lr=LR, fused_backward=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    first = loss_of(model, 0).item()
    for _ in range(20):
        optimizer.zero_grad()
        loss_of(model, 0).backward()
        optimizer.step()
        schedule.step()
    assert loss_of(model, 0).item() < 0.5 * first
    assert optimizer.param_groups[0]["lr"] == pytest.approx(LR * 0.99**20)


# ---- what is refused -------------------------------------------------------------------------------------------------


def stepped() -> tuple[Any, CompressedAdam]:
    model = model_of()
    optimizer = oracle(model.parameters(), fused_backward=True)
    loss_of(model, 0).backward()
    return model, optimizer


USES: dict[str, Callable[[Any], Any]] = {
    "clip_grad_norm_": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clip_grad_value_": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "arithmetic": lambda model: model.first.weight.grad * 2,
    "norm": lambda model: model.first.weight.grad.norm(),
    "item": lambda model: model.first.bias.grad.sum().item(),
    "assignment": lambda model: model.first.weight.grad.zero_(),
}


@pytest.mark.parametrize("use", list(USES))
def test_freed_gradients_refuse_to_be_used(use: str) -> None:
    model, _ = stepped()
    with pytest.raises(RuntimeError, match="expected no use of a gradient after backward"):
        USES[use](model)


def test_gradscaler_is_refused() -> None:
    for unscales in (False, True):
        model = model_of()
        optimizer = oracle(model.parameters(), fused_backward=True)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, 0)).backward()
        with pytest.raises(RuntimeError, match="GradScaler"):
            scaler.unscale_(optimizer) if unscales else scaler.step(optimizer)


def test_steps_that_cannot_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = stepped()
    with pytest.raises(RuntimeError, match=r"expected step\(\) without a closure"):
        optimizer.step(lambda: 0.0)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"expected a backward before step\(\)"):
        optimizer.step()
    model.first.weight.grad = torch.ones_like(model.first.weight)
    with pytest.raises(RuntimeError, match="expected gradients from backward alone"):
        optimizer.step()
    model.first.weight.grad = None
    model.frozen.requires_grad_(True)
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="of a parameter that was frozen when the optimizer was made"):
        optimizer.step()
    model.frozen.requires_grad_(False)
    free = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="expected a parameter that no optimizer steps in backward"):
        oracle([free, *model.parameters()], fused_backward=True)
    free.sum().backward()
    assert torch.equal(free, torch.ones(3)), "what was refused must not step the others"
    assert torch.equal(free.grad, torch.ones(3))  # type: ignore[arg-type]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"expected one process with fused_backward=True, got 2 ranks"):
        loss_of(model, 0).backward()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 2}, "with fused_backward=True alone"),
        ({"max_grad_norm": 1.0}, "with fused_backward=True alone"),
        ({"fused_backward": True, "accumulate": 0}, "expected accumulate"),
        ({"fused_backward": True, "max_grad_norm": 0.0}, "expected max_grad_norm"),
        ({"fused_backward": 1}, "expected fused_backward"),
    ],
    ids=str,
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        oracle(model_of().parameters(), **options)


# ---- copies, moves, an end -------------------------------------------------------------------------------------------


def test_copies_step_in_their_own_backward() -> None:
    ways: list[Callable[[Any], Any]] = [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))]
    for copied in ways:
        model, optimizer = stepped()
        twin_model, twin = copied((model, optimizer))
        for step in range(1, 3):
            for each in (model, twin_model):
                loss_of(each, step).backward()
        assert same_bits(optimizer, twin)
        loss_of(twin_model, 3).backward()
        assert not same_bits(optimizer, twin)


def test_models_move_and_change_type_between_steps() -> None:
    model, optimizer = stepped()
    model.to(torch.bfloat16)
    assert model.first.weight.grad.dtype == torch.bfloat16
    assert repr(model.first.weight.grad) == "FreedGradient((16, 8))"
    loss_of(model, 1).backward()
    assert {state["step"] for state in optimizer.state.values()} == {2}


def test_released_parameters_are_stepped_by_step() -> None:
    model, optimizer = stepped()
    optimizer.release_backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    before = model.first.weight.detach().clone()
    loss_of(model, 1).backward()
    assert torch.equal(model.first.weight, before)
    assert type(model.first.weight.grad) is torch.Tensor
    optimizer.step()
    assert not torch.equal(model.first.weight, before)
    oracle(model.parameters(), fused_backward=True)


def test_groups_that_come_later_are_stepped_too() -> None:
    model = model_of()
    optimizer = oracle(model.first.parameters(), fused_backward=True)
    optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 0.5})
    before = model.last.weight.detach().clone()
    loss_of(model, 0).backward()
    assert (model.last.weight - before).abs().max() > 0.4
    assert model.twice.weight.grad is not None
