"""Attention, forward and with backward, beside torch's own on the same machine (on CUDA its memory-efficient one)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.harness import Bench, Row, host_time
from bench.peers import cuda_time
from memtrain_cl.array import from_numpy
from memtrain_cl.device import Device
from memtrain_cl.launchers.attention import attention, attention_backward
from memtrain_cl.operand import Operand, empty_operand


def _operand(device: Device, tensor: torch.Tensor) -> Operand:
    array = from_numpy(device, tensor.view(torch.uint8).numpy())
    return Operand(array, tuple(tensor.shape), tensor.stride(), 0, "float32")


class _Span:
    """From one launch's start to another's end, read as an event is."""

    def __init__(self, first: Any, last: Any) -> None:
        self._events = first, last

    @property
    def profile(self) -> Any:
        first, last = (event.profile for event in self._events)
        return SimpleNamespace(start=first.start, end=last.end)


def _peer_time(shape: tuple[int, ...], causal: bool, backward: bool) -> float:
    """Microseconds of torch's own attention, on CUDA where it is there."""
    cuda = torch.cuda.is_available()
    place = "cuda" if cuda else "cpu"
    q, k, v = leaves = [torch.randn(shape, device=place, requires_grad=backward) for _ in range(3)]
    grad = torch.randn(shape, device=place)

    def work() -> None:
        out = scaled_dot_product_attention(q, k, v, is_causal=causal)
        if backward:
            torch.autograd.grad(out, leaves, grad)

    if not cuda:
        work()
        return host_time(lambda _turn: work(), 9)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return cuda_time(work)


def _peers(shape: tuple[int, ...], causal: bool, backward: bool) -> dict[str, float]:
    if not torch.cuda.is_available():
        return {"torch CPU float32": _peer_time(shape, causal, backward)}
    # In a process of its own: where "opencl" is registered, CUDA's backward ends in an assertion of torch's.
    asked = json.dumps([shape, causal, backward])
    done = subprocess.run([sys.executable, "-m", "bench.attention", asked], capture_output=True, text=True, check=True)
    return {"torch CUDA float32, memory-efficient": float(done.stdout.split()[-1])}


def bench_attention(bench: Bench, shape: tuple[int, int, int, int], *, causal: bool) -> None:
    """One [B, H, T, D], keys of the same shape."""
    device = bench.device
    B, H, T, D = shape
    inputs = [torch.randn(shape) for _ in range(3)]
    upstream = torch.randn(shape)
    q, k, v = (_operand(device, tensor) for tensor in inputs)
    grad_out = _operand(device, upstream)
    out, *grads = (empty_operand(device, shape, "float32") for _ in range(4))
    logsumexp = empty_operand(device, shape[:3], "float32")

    def forward() -> Any:
        return attention(q, k, v, None, out, logsumexp, causal=causal)

    def both() -> Any:
        first = forward()
        wanted = (grads[0], grads[1], grads[2])
        return _Span(first, attention_backward(grad_out, q, k, v, None, out, logsumexp, wanted, causal=causal))

    both()
    # The first and last heads suffice: every head is made by the same code.
    ends = [tensor[:: max(B - 1, 1), :: max(H - 1, 1)].double().requires_grad_() for tensor in inputs]
    with sdpa_kernel(SDPBackend.MATH):
        wanted = scaled_dot_product_attention(ends[0], ends[1], ends[2], is_causal=causal)
    slopes = torch.autograd.grad(wanted, ends, upstream[:: max(B - 1, 1), :: max(H - 1, 1)].double())
    errors = []
    for operand, want in zip((out, *grads), (wanted.detach(), *slopes), strict=True):
        found = torch.from_numpy(operand.array.numpy()).view(torch.float32).reshape(shape)
        found = found[:: max(B - 1, 1), :: max(H - 1, 1)]
        errors.append(float((found.double() - want).norm() / want.norm()))
    # Two products forward; the five of the gradients backward, whatever is computed twice.
    pairs = B * H * T * T // (2 if causal else 1)
    moved = 4 * q.size
    work: dict[str, tuple[Callable[[], Any], int, int, float]] = {
        "forward": (forward, 4 * pairs * D, 4 * moved, errors[0]),
        "forward+backward": (both, 14 * pairs * D, 12 * moved, max(errors)),
    }
    for name, (launch, flops, nbytes, error) in work.items():
        us = bench.time(lambda _turn: launch())  # noqa: B023 - called within this turn of the loop
        size = f"{name} {B}x{H}x{T}x{D}{' causal' if causal else ''}"
        peers = _peers(shape, causal, name != "forward")
        bench.add(Row("attention", size, us, nbytes, flops, error=f"{error:.1e} relative", peers=peers))


def run(bench: Bench) -> None:
    """Heads of the demo model on CPUs, of a large one on GPUs."""
    shapes = [(16, 12, 1024, 64), (4, 16, 2048, 128)] if bench.events else [(4, 4, 128, 64), (1, 8, 512, 64)]
    for shape in shapes:
        for causal in (True, False):
            bench_attention(bench, shape, causal=causal)


if __name__ == "__main__":
    shape, *options = json.loads(sys.argv[1])
    print(_peer_time(tuple(shape), *options))
