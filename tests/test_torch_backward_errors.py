"""Errors inside a backward: wherever they are raised, they arrive where it was called, and leave nothing behind."""

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
from torch.utils.checkpoint import checkpoint

import memtrain_cl
from memtrain_cl.torch_device import engine
from memtrain_cl.torch_device.fallback import FallbackRefused
from tests.small_classifier import examples, loss_of, mlp, on_home
from tests.torch_home import HOME, adamw

pytestmark = pytest.mark.device


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
