"""What training loops use: optimizers, checkpoints, clipping, schedules, loaders, hooks; errors inside a backward."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
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
from memtrain_cl.torch_device import engine
from memtrain_cl.torch_device.fallback import FallbackRefused
from tests.torch_home import HOME, adamw, assert_same_losses

pytestmark = pytest.mark.device


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), y)


def examples(n: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(1)
    return torch.randn(n, 6, generator=chance), torch.randint(0, 3, (n,), generator=chance)


def on_home(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.to(HOME) for x in tensors)


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


# ---- errors inside a backward ----


class Faulty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fail: Callable[[], Any]) -> torch.Tensor:
        ctx.fail = fail
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.fail(), None


def twice(x: torch.Tensor, fail: Callable[[], Any]) -> torch.Tensor:
    """2x, whose backward fails."""
    result: torch.Tensor = Faulty.apply(x, fail)  # type: ignore[no-untyped-call]
    return result


def _raise() -> None:
    raise KeyError("of the user's own")


def _look_up(place: int) -> torch.Tensor:
    return functional.embedding(torch.tensor([place]).to(HOME), torch.ones(3, 2, device=HOME)).cpu()


FAULTS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "user": (_raise, KeyError, "of the user's own"),
    "shapes": (lambda: torch.ones(2, 3, device=HOME) @ torch.ones(2, 3, device=HOME), RuntimeError, "dim|shapes"),
    "memory": (lambda: torch.empty(1 << 50, device=HOME), torch.OutOfMemoryError, "bytes were asked for"),
    "type": (lambda: torch.ones(2, device=HOME).double(), TypeError, "float64"),
    "strict": (lambda: torch.linalg.inv(torch.eye(2, device=HOME)), FallbackRefused, "strict mode"),
    "index": (lambda: _look_up(9), IndexError, "9"),
}


def _in_hook(x: torch.Tensor, fail: Callable[[], Any]) -> torch.Tensor:
    y = x * 2
    y.register_hook(lambda grad: fail())
    return y


def _in_hook_after(x: torch.Tensor, fail: Callable[[], Any]) -> torch.Tensor:
    x.register_post_accumulate_grad_hook(lambda x: fail())
    return x * 2


def _in_hook_of_a_module(x: torch.Tensor, fail: Callable[[], Any]) -> torch.Tensor:
    module = nn.Tanh()
    module.register_full_backward_hook(lambda *args: fail())
    return torch.as_tensor(module(x))


def _while_unpacking(x: torch.Tensor, fail: Callable[[], Any]) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: fail()):
        return x * x


def _while_recomputing(x: torch.Tensor, fail: Callable[[], Any], reentrant: bool = False) -> torch.Tensor:
    turns = iter((lambda: None, fail))

    def part(x: torch.Tensor) -> torch.Tensor:
        next(turns)()
        return (x * x).sin()

    return torch.as_tensor(checkpoint(part, x, use_reentrant=reentrant))


def _in_a_backward_within(x: torch.Tensor, fail: Callable[[], Any]) -> torch.Tensor:
    return _while_recomputing(x, fail, reentrant=True)


WAYS_OUT = (
    twice,
    _in_hook,
    _in_hook_after,
    _in_hook_of_a_module,
    _while_unpacking,
    _while_recomputing,
    _in_a_backward_within,
)


@pytest.mark.parametrize("way", WAYS_OUT, ids=lambda way: way.__name__.lstrip("_"))
@pytest.mark.parametrize("name", FAULTS)
def test_an_error_in_a_backward_arrives_as_itself(name: str, way: Callable[..., torch.Tensor]) -> None:
    fail, kind, text = FAULTS[name]
    x = torch.ones(2, 2, device=HOME, requires_grad=True)
    with memtrain_cl.strict(), pytest.raises(kind, match=text):
        way(x, fail).sum().backward()
    x = x.detach().requires_grad_()
    (x * 3).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_errors_of_threads_arrive_where_they_belong() -> None:
    arrived: dict[int, list[str]] = {0: [], 1: []}

    def run(thread: int) -> None:
        for turn in range(10):
            x = torch.ones(4, device=HOME, requires_grad=True)

            def fail(turn: int = turn) -> None:
                raise KeyError(f"{thread} {turn}")

            try:
                _in_hook(x, fail).sum().backward()
            except KeyError as error:
                arrived[thread].append(error.args[0])

    threads = [threading.Thread(target=run, args=(thread,)) for thread in arrived]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert arrived == {thread: [f"{thread} {turn}" for turn in range(10)] for thread in arrived}


def test_a_garbage_collection_takes_no_error_away() -> None:
    thresholds = gc.get_threshold()
    x = torch.ones(4, device=HOME, requires_grad=True)
    loss = _in_hook(x, _raise).sum()
    gc.set_threshold(1, 1, 1)
    try:
        for _ in range(20):
            with pytest.raises(KeyError, match="of the user's own"):
                loss.backward(retain_graph=True)
    finally:
        gc.set_threshold(*thresholds)


def test_what_a_collection_found_is_raised_or_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    lost = SimpleNamespace(err_msg="Exception ignored in tp_clear of", exc_value=KeyError("mine"))

    def run(error: Exception | None) -> None:
        sys.unraisablehook(lost)
        if error is not None:
            raise error

    running = engine.Engine(SimpleNamespace(run_backward=run))
    with pytest.raises(KeyError, match="mine"):
        running.run_backward(SystemError("returned NULL without setting an exception"))
    assert told == []
    with pytest.raises(ValueError, match="another"):
        running.run_backward(ValueError("another"))
    running.run_backward(None)
    assert told == [lost]
    sys.unraisablehook(lost)  # outside of a backward
    assert told == [lost, lost]


def test_after_an_error_nothing_is_held() -> None:
    def fail() -> Any:
        return torch.empty(1 << 50, device=HOME)

    def step() -> None:
        x = torch.ones(1 << 18, device=HOME, requires_grad=True)
        with pytest.raises(torch.OutOfMemoryError):
            twice(x, fail).sum().backward()

    step()
    gc.collect()
    gc.disable()
    try:
        before = memtrain_cl.memory_allocated()
        for _ in range(3):
            step()
        assert memtrain_cl.memory_allocated() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError])
def test_an_interrupt_outside_a_backward_is_not_lost(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise kind

    def ask() -> None:
        engine.Guard().type_()
        time.sleep(1)

    monkeypatch.setattr(engine, "_raise_what_is_set", interrupt)
    # Where tests are started in the background, nobody listens to it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(kind):
            ask()
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_inside_a_backward_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4, device=HOME, requires_grad=True)
    calls = iter([*(lambda: None,) * 3, _interrupt])
    monkeypatch.setattr(engine, "_raise_what_is_set", lambda: next(calls, lambda: None)())
    loss = (x * 2).sum()
    calls = iter([_interrupt])
    with pytest.raises(KeyboardInterrupt):
        loss.backward()


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_errors_of_backwards_within_backwards_belong_to_their_own() -> None:
    """A node of the host's runs a backward of its own while one of the device's fails."""
    inside, failed = threading.Event(), threading.Event()

    def wait(grad: torch.Tensor) -> None:
        inside.set()
        failed.wait(5)

    def within(grad: torch.Tensor) -> None:
        with torch.enable_grad():
            z = torch.ones(2, requires_grad=True) * 2
            z.register_hook(wait)
            z.sum().backward()

    def fail() -> None:
        inside.wait(5)
        failed.set()
        raise ValueError("mine")

    on_host, on_device = (torch.ones(3, device=place, requires_grad=True) for place in ("cpu", HOME))
    a = on_host * 2
    a.register_hook(within)
    loss = a.sum() + _in_hook(on_device, fail).sum().cpu()
    with pytest.raises(ValueError, match="mine"):
        loss.backward()


def test_an_error_can_be_caught_inside_a_backward() -> None:
    def need_less() -> torch.Tensor:
        try:
            return torch.empty(1 << 50, device=HOME)
        except torch.OutOfMemoryError:
            return torch.full((2,), 5.0, device=HOME)

    x = torch.ones(2, device=HOME, requires_grad=True)
    twice(x, need_less).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [5.0, 5.0]


def test_a_changed_saved_tensor_is_noticed() -> None:
    x = torch.ones(3, device=HOME, requires_grad=True)
    y = x.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        x.add_(1)


def test_an_interrupted_step_leaves_the_next_one_right() -> None:
    torch.manual_seed(0)
    model, (x, y) = mlp().to(HOME), on_home(*examples())
    steps = adamw(model.parameters())
    with contextlib.suppress(KeyError):
        twice(model(x), _raise).sum().backward()
    steps.zero_grad()
    loss_of(model, x, y).backward()
    got = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model.cpu()
    loss_of(model, *examples()).backward()
    for one, p in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(one, p.grad, rtol=1e-5, atol=1e-6)
