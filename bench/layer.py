"""A whole step of one layer, forward, backward and update, beside a dense layer under AdamW and the torch reference."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from bench.harness import Bench, Row
from memtrain_cl import reference
from memtrain_cl.device import use_device
from memtrain_cl.nn import PackedRMSCounterLinear

TURNS, WARM = 15, 3
INT8 = {"forward_compute": "int8", "update_compute": "int8"}


def _counter(size: int, tokens: int, place: str, **options: object) -> Callable[[], object]:
    """A step of a counter layer on tensors of `place`; what it returns has been waited for."""
    layer = PackedRMSCounterLinear(size, size, C=11, lr=1e-3, **options).to(place)  # type: ignore[arg-type]
    x, grad_out = (torch.randn(tokens, size).to(place) for _ in range(2))
    x.requires_grad_()

    def step() -> object:
        x.grad = None
        layer(x).backward(grad_out)
        return layer.scale.cpu()

    return step


def _dense(size: int, tokens: int) -> Callable[[], object]:
    """A step of torch.nn.Linear on the host under its fused AdamW."""
    layer = torch.nn.Linear(size, size, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    x, grad_out = torch.randn(tokens, size).requires_grad_(), torch.randn(tokens, size)

    def step() -> object:
        x.grad = None
        optimizer.zero_grad()
        layer(x).backward(grad_out)
        optimizer.step()
        return layer.weight

    return step


def run(bench: Bench) -> None:
    """1024 x 1024 and 256 tokens, all sides in turn, so that a busy machine slows all alike; CPUs alone have a peer."""
    import memtrain_cl.torch_device  # noqa: F401 (registers the device)

    if bench.events:
        return
    size, tokens = 1024, 256
    with use_device(bench.device):
        place = f"opencl:{bench.device.info.index}"
        sides = {
            "opencl fp": _counter(size, tokens, place),
            "opencl int8": _counter(size, tokens, place, **INT8),
            "opencl from-IO": _counter(size, tokens, place, update_from_io=True),
            "host fp": _counter(size, tokens, "cpu"),
            "torch CPU float32, dense, fused AdamW": _dense(size, tokens),
            "the torch reference": _counter(size, tokens, "cpu", ops=reference),
        }
        times: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(TURNS + WARM):
            for name, step in sides.items():
                if name.startswith("the ") and turn > WARM + 1:
                    continue  # half a second each
                started = time.perf_counter()
                step()
                if turn >= WARM:
                    times[name].append((time.perf_counter() - started) * 1e6)
    us = {name: statistics.median(taken) for name, taken in times.items()}
    peers = {name: us[name] for name in sides if name.startswith(("torch", "the"))}
    for name in sides.keys() - peers.keys():
        label = f"layer step {size} x {size}, {tokens} tokens, {name}"
        bench.add(Row("layer", label, us[name], error="checked by the tests", peers=peers))
