"""Operations of the torch device "opencl" on large tensors beside torch's own, and the Python cost of a small one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import Bench, Row
from bench.peers import cuda_time
from memtrain_cl.device import Device, use_device

aten = torch.ops.aten
_SMALL = 64


@dataclass(frozen=True)
class Work:
    """An operation over float32 inputs of `shapes`. moves: floats read and written, a multiple of the first input's."""

    name: str
    call: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    moves: float


def _layer_norm_backward(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return aten.native_layer_norm_backward(g, x, weight.shape, mean, rstd, weight, bias, [True, True, True])


def _rms_norm_backward(g: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> Any:
    if x.device.type == "cpu":  # which has no such operation
        scaled, xhat = g * weight, x * rstd
        return (scaled - xhat * (scaled * xhat).mean(-1, keepdim=True)) * rstd, (g * xhat).sum(0)
    return aten._fused_rms_norm_backward(g, x, weight.shape, rstd, weight, [True, True])


def works(rows: int, columns: int) -> list[Work]:
    """What is timed, over [rows, columns]."""
    x, w, r = (rows, columns), (columns,), (rows, 1)
    return [
        Work("add", torch.add, (x, x), 3),
        Work("add_", Tensor.add_, (x, x), 3),
        Work("silu", F.silu, (x,), 2),
        Work("gelu", F.gelu, (x,), 2),
        Work("add of a row", torch.add, (x, w), 2),
        Work("to bfloat16", lambda t: t.to(torch.bfloat16), (x,), 1.5),
        Work("sum of all", torch.sum, (x,), 1),
        Work("sum of rows", lambda t: t.sum(-1), (x,), 1),
        Work("sum of columns", lambda t: t.sum(0), (x,), 1),
        Work("softmax", lambda t: F.softmax(t, -1), (x,), 2),
        Work("softmax backward", lambda g, y: aten._softmax_backward_data(g, y, -1, torch.float32), (x, x), 3),
        Work("layer_norm", lambda t, g, b: F.layer_norm(t, w, g, b), (x, w, w), 2),
        Work("layer_norm backward", _layer_norm_backward, (x, x, r, r, w, w), 3),
        Work("rms_norm", lambda t, g: F.rms_norm(t, w, g, 1e-5), (x, w), 2),
        Work("rms_norm backward", _rms_norm_backward, (x, x, r, w), 3),
    ]


def _loop(device: Device, call: Callable[[], Any], repeats: int) -> float:
    """Microseconds a call, launches and all, until the device has ended."""
    for _ in range(3):
        call()
    device.synchronize()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        device.synchronize()
        times.append((time.perf_counter() - start) / repeats * 1e6)
    return statistics.median(times)


def _peer(work: Work, inputs: list[Tensor]) -> dict[str, float]:
    if torch.cuda.is_available():
        moved = [tensor.cuda() for tensor in inputs]
        return {"torch CUDA": cuda_time(lambda: work.call(*moved))}
    work.call(*inputs)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        work.call(*inputs)
        times.append((time.perf_counter() - start) * 1e6)
    return {"torch CPU": statistics.median(times)}


def _difference(found: Any, expected: Any) -> float:
    """The largest relative error of any result."""
    given, wanted = ((value,) if isinstance(value, Tensor) else value for value in (found, expected))
    pairs = zip(given, wanted, strict=True)
    return max(float((f.detach().cpu().float() - e.float()).norm() / e.float().norm()) for f, e in pairs)


def bench_work(bench: Bench, work: Work, elements: int) -> None:
    """One operation, checked against the CPU and timed."""
    device = bench.device
    place = torch.device("opencl", device.info.index)
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in work.shapes]
    moved = [tensor.to(place) for tensor in inputs]
    with torch.no_grad():
        error = _difference(work.call(*[t.clone() for t in moved]), work.call(*[t.clone() for t in inputs]))
        us = _loop(device, lambda: work.call(*moved), 10 if bench.events else 3)
        peers = _peer(work, inputs)
    moved_bytes = int(4 * work.moves * elements)
    bench.add(Row("aten", f"{work.name}, {elements} elements", us, moved_bytes, 0, error=f"{error:.1e}", peers=peers))


def bench_python(bench: Bench) -> None:
    """The host's time for an operation on 64 elements: enqueued, not waited for."""
    place = torch.device("opencl", bench.device.info.index)
    cpu = torch.randn(_SMALL)
    own = cpu.to(place)
    calls: dict[str, Callable[[Tensor], Any]] = {
        "x + x": lambda t: t + t,
        "x * 2.0": lambda t: t * 2.0,
        "x.add_(x)": lambda t: t.add_(t),
        "x.view(8, 8)": lambda t: t.view(8, 8),
        "F.silu(x)": F.silu,
        "x.sum()": torch.sum,
    }
    with torch.no_grad():
        for name, call in calls.items():
            us, peer = (_python(bench.device, call, tensor) for tensor in (own, cpu))
            bench.add(Row("aten", f"Python cost of {name}", us, error="not a kernel", peers={"torch CPU": peer}))


def _python(device: Device, call: Callable[[Tensor], Any], tensor: Tensor) -> float:
    times = []
    for _ in range(15):
        device.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            call(tensor)
        times.append((time.perf_counter() - start) / 200 * 1e6)
    return statistics.median(times)


def run(bench: Bench) -> None:
    """64M elements on GPUs, 4M on CPUs."""
    import memtrain_cl.torch_device  # noqa: F401 (registers the device)

    rows, columns = (1 << 14, 1 << 12) if bench.events else (1 << 12, 1 << 10)
    with use_device(bench.device):
        for work in works(rows, columns):
            bench_work(bench, work, rows * columns)
        bench_python(bench)
