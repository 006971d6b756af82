"""Adam and AdamW in one kernel a tensor against torch's on the CPU, fused and written out."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import memtrain_cl
from memtrain_cl.device import Device
from tests.torch_cases import on, same, values

SHAPES = ((), (1,), (7, 5), (3, 300), (0, 4))
STEPS = 50
_KINDS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}


def parameters(move: Any) -> list[torch.Tensor]:
    made = [values(torch.float32, *shape, seed=position) for position, shape in enumerate(SHAPES)]
    return [torch.nn.Parameter(move(x)) for x in made]


def gradient(position: int, step: int) -> torch.Tensor:
    """Magnitudes from 1e-4 to 10, and now and then zeros."""
    chance = torch.Generator().manual_seed(1000 * position + step)
    size = 10 ** (5 * torch.rand(SHAPES[position], generator=chance) - 4)
    grad = torch.randn(SHAPES[position], generator=chance) * size
    return grad * (torch.rand(SHAPES[position], generator=chance) > 0.1)


def trained(kind: str, move: Any, steps: int = STEPS, **options: Any) -> tuple[list[torch.Tensor], Any]:
    mine = parameters(move)
    optimizer = _KINDS[kind](mine, **options)
    for step in range(steps):
        for position, parameter in enumerate(mine):
            parameter.grad = move(gradient(position, step))
        optimizer.step()
    return mine, optimizer


def close(device: Device, kind: str, steps: int, reference: dict[str, Any], **options: Any) -> None:
    """The device's steps and torch's on the CPU end alike, up to 1e-6 and a rounding of float32 a step."""
    relative = 1e-6 + steps * 2.0**-24
    with memtrain_cl.strict():
        got, optimizer = trained(kind, lambda x: on(device, x), steps, fused=True, **options)
    want, truth = trained(kind, lambda x: x, steps, **reference, **options)
    for position, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        if not theirs.numel():
            continue
        way = float(values(torch.float32, *SHAPES[position], seed=position).abs().max())
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach(), rtol=relative, atol=steps * 2.0**-24 * way)
        largest = max(float(gradient(position, step).abs().max()) for step in range(steps))
        for name, value in truth.state[theirs].items():
            # The first moment is a sum that cancels: its roundings are those of its largest terms. So is Adam's
            # gradient with weight decay, whose square may be small.
            slack = 4 * 2.0**-24 * largest if name == "exp_avg" else 1e-12
            torch.testing.assert_close(optimizer.state[mine][name].cpu(), value, rtol=3 * relative, atol=slack)


@pytest.mark.parametrize("kind", list(_KINDS))
@pytest.mark.parametrize(("amsgrad", "maximize"), list(itertools.product([False, True], repeat=2)), ids=str)
def test_steps_are_torch_s(device: Device, kind: str, amsgrad: bool, maximize: bool) -> None:
    if device.info.index:
        pytest.skip("torch differentiates on opencl:0 alone")
    options = {"lr": 3e-3, "weight_decay": 0.1, "amsgrad": amsgrad, "maximize": maximize}
    for steps in (1, 2, STEPS):
        close(device, kind, steps, {"fused": True}, **options)


@pytest.mark.parametrize("kind", list(_KINDS))
def test_steps_are_those_that_torch_writes_out(device: Device, kind: str) -> None:
    if device.info.index:
        pytest.skip("torch differentiates on opencl:0 alone")
    close(device, kind, STEPS, {"foreach": False}, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.02)
    close(device, kind, STEPS, {"foreach": False}, lr=1e-2, betas=(0.0, 0.999), weight_decay=0.0)


def test_the_rate_may_be_a_tensor(device: Device) -> None:
    if device.info.index:
        pytest.skip("torch differentiates on opencl:0 alone")
    number, _ = trained("AdamW", lambda x: on(device, x), fused=True, lr=0.25)
    for rate in (torch.tensor(0.25), on(device, torch.tensor(0.25))):
        tensor, _ = trained("AdamW", lambda x: on(device, x), fused=True, lr=rate)
        for one, other in zip(tensor, number, strict=True):
            same(one, other.detach().cpu())


def test_the_device_s_other_optimizers_take_the_same_steps(device: Device) -> None:
    if device.info.index:
        pytest.skip("torch differentiates on opencl:0 alone")
    ways = ({"fused": True}, {"foreach": False}, {"foreach": True})
    with memtrain_cl.strict():
        ends = [trained("AdamW", lambda x: on(device, x), lr=1e-3, **way)[0] for way in ways]
    for one, two, three in zip(*ends, strict=True):
        for other in (two, three):
            # Each rounds in places of its own, twice a step.
            rounding = 2 * STEPS * 2.0**-24
            torch.testing.assert_close(other.detach().cpu(), one.detach().cpu(), rtol=1e-6 + rounding, atol=rounding)


def test_scaled_gradients_go_another_way(device: Device) -> None:
    if device.info.index:
        pytest.skip("torch differentiates on opencl:0 alone")
    mine = on(device, torch.ones(3))
    one = on(device, torch.zeros(3))
    arguments = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    with memtrain_cl.strict(), pytest.raises(NotImplementedError, match="_fused_adamw_"):
        torch._fused_adamw_(
            [mine],
            [one + 1],
            [one.clone()],
            [one.clone()],
            [],
            [on(device, torch.tensor(1.0))],
            **arguments,
            amsgrad=False,
            maximize=False,
            grad_scale=on(device, torch.tensor(2.0)),
            found_inf=on(device, torch.tensor(0.0)),
        )
    same(mine, torch.ones(3))
