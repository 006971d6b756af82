"""What training loops use: optimizers, checkpoints, clipping, schedules, loaders, hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import memtrain_cl
from memtrain_cl.errors import UnsupportedDevice
from tests.small_classifier import examples, loss_of, mlp, on_home
from tests.torch_home import HOME, assert_same_losses

pytestmark = pytest.mark.device


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "adamw-single": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True, maximize=True),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd-single": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name: str) -> None:
    with memtrain_cl.strict():
        assert_same_losses(mlp, loss_of, [examples()] * 10, rtol=1e-5, optimizer=OPTIMIZERS[name])


def test_optimizer_made_before_the_move_trains_the_moved_parameters() -> None:
    model = mlp()
    steps = torch.optim.SGD(model.parameters(), lr=0.5)
    weight = next(model.parameters())
    model.to(HOME)
    assert next(model.parameters()) is weight
    before = weight.detach().cpu()
    loss_of(model, *on_home(*examples())).backward()
    steps.step()
    assert not torch.equal(weight.detach().cpu(), before)


CLIPS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda p: nn.utils.clip_grad_norm_(p, 0.1, error_if_nonfinite=True),
    "norm-foreach": lambda p: nn.utils.clip_grad_norm_(p, 0.1, foreach=True),
    "norm-single": lambda p: nn.utils.clip_grad_norm_(p, 0.1, foreach=False),
    "norm-inf": lambda p: nn.utils.clip_grad_norm_(p, 0.1, norm_type=float("inf")),
    "value": lambda p: nn.utils.clip_grad_value_(p, 0.01),
    "value-foreach": lambda p: nn.utils.clip_grad_value_(p, 0.01, foreach=True),
}


@pytest.mark.parametrize("name", CLIPS)
def test_clipping(name: str) -> None:
    with memtrain_cl.strict():
        assert_same_losses(mlp, loss_of, [examples()] * 4, rtol=1e-5, clip=CLIPS[name])


@pytest.mark.parametrize("kind", ["cosine", "one-cycle", "lambda"])
def test_schedules(kind: str) -> None:
    rates = []
    for device in (torch.device("cpu"), HOME):
        torch.manual_seed(0)
        model = mlp().to(device)
        steps = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule: Any = {
            "cosine": lambda s=steps: lr_scheduler.CosineAnnealingLR(s, 5),
            "one-cycle": lambda s=steps: lr_scheduler.OneCycleLR(s, 0.1, total_steps=8),
            "lambda": lambda s=steps: lr_scheduler.LambdaLR(s, lambda n: 1 / (n + 1)),
        }[kind]()  # type: ignore[no-untyped-call]
        for _ in range(5):
            loss = loss_of(model, *(x.to(device) for x in examples()))
            loss.backward()
            steps.step()
            schedule.step()
        rates.append((schedule.get_last_lr()[0], loss.item()))
    assert rates[0][0] == rates[1][0]
    assert rates[1][1] == pytest.approx(rates[0][1], rel=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("chance", [0.0, 0.5])
def test_recompute_gives_the_same_gradients(reentrant: bool, chance: float) -> None:
    def gradients(recompute: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(chance), nn.Linear(16, 16), nn.Dropout(chance))
        outer = nn.Linear(16, 3)
        inner.to(HOME), outer.to(HOME)
        x = torch.randn(4, 6).to(HOME).requires_grad_()
        torch.manual_seed(5)
        hidden = checkpoint(inner, x, use_reentrant=reentrant) if recompute else inner(x)
        outer(hidden).square().sum().backward()
        return [p.grad.cpu() for p in (x, *inner.parameters(), *outer.parameters()) if p.grad is not None]

    plain, again = gradients(False), gradients(True)
    assert len(plain) == len(again) == 7
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


def test_recompute_without_its_random_state_draws_anew() -> None:
    x = torch.ones(64, device=HOME, requires_grad=True)
    y = checkpoint(functional.dropout, x, use_reentrant=False, preserve_rng_state=False)
    y.sum().backward()
    assert x.grad is not None
    assert not torch.equal(x.grad, y.detach())


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_gradients_accumulate(parts: int) -> None:
    torch.manual_seed(0)
    model, (x, y) = mlp(), examples()
    loss_of(model, x, y).backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    model.to(HOME)
    for some, labels in zip(*(t.chunk(parts) for t in on_home(x, y)), strict=True):
        (functional.cross_entropy(model(some), labels, reduction="sum") / len(x)).backward()
    for p, grad in zip(model.parameters(), expected, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad.cpu(), grad, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_loader_with_workers(start: str, pinned: bool) -> None:
    if pinned and start == "spawn":
        start = ""  # once is enough of a second's start; pinning without workers is another path
    torch.ones(1, device=HOME)
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": start} if start else {}
    seen = [
        (x.to(HOME, non_blocking=True), y.to(HOME))
        for x, y in DataLoader(TensorDataset(*examples(12)), batch_size=4, pin_memory=pinned, **options)
    ]
    x, y = (torch.cat(parts).cpu() for parts in zip(*seen, strict=True))
    assert torch.equal(x, examples(12)[0])
    assert torch.equal(y, examples(12)[1])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_forked_worker_cannot_use_the_device() -> None:
    loader = DataLoader(
        TensorDataset(torch.ones(4, device=HOME)), num_workers=1, multiprocessing_context="fork", timeout=60
    )
    with pytest.raises(UnsupportedDevice, match=r"forked.*'spawn'"):
        next(iter(loader))


def test_numeric_gradients() -> None:
    torch.manual_seed(0)
    model, (x, y) = mlp().to(HOME), on_home(*examples())
    loss_of(model, x, y).backward()
    for p in model.parameters():
        assert p.grad is not None
        flat, step = p.data.view(-1), 1e-2
        for place in range(0, flat.numel(), 7):
            with torch.no_grad():
                sides = []
                for change in (step, -2 * step):
                    flat[place] += change
                    sides.append(loss_of(model, x, y).item())
                flat[place] += step
            assert p.grad.view(-1)[place].item() == pytest.approx((sides[0] - sides[1]) / (2 * step), abs=1e-4)


def test_second_derivatives() -> None:
    x = torch.tensor([1.0, -2.0], device=HOME, requires_grad=True)
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    first.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [6.0, -12.0]


def test_functional_transforms() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=HOME)
    assert torch.vmap(lambda row: (row * row).sum())(x).tolist() == [5.0, 25.0]
    assert torch.func.grad(lambda t: (t**2).sum())(x).tolist() == [[2.0, 4.0], [6.0, 8.0]]
    assert torch.func.jacrev(torch.square)(x[0]).tolist() == [[2.0, 0.0], [0.0, 4.0]]


def test_hooks() -> None:
    seen: list[str] = []
    model = mlp().to(HOME)
    weight = next(model.parameters())
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    model[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    gradients = []
    for factor in (1, 2):
        handle = weight.register_hook(lambda grad, factor=factor: grad * factor)
        model(torch.ones(2, 6, device=HOME, requires_grad=True)).sum().backward()
        handle.remove()
        assert weight.grad is not None
        gradients.append(weight.grad)
        weight.grad = None
    assert torch.equal(gradients[1], gradients[0] * 2)
    assert sorted(seen) == sorted(["forward", "backward", "accumulated"] * 2)
