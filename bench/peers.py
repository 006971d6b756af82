"""The same work by others: plain torch on this processor, and eager and compiled torch on CUDA where it is there."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch

from bench.harness import host_time
from memtrain_cl.reference.codes import hash_u32


def plain_update(
    packed: torch.Tensor, scale: torch.Tensor, v: torch.Tensor, grad_w: torch.Tensor, seed: int, C: int = 11
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The exact-mode counter update as a torch user would write it: torch's own sums, packed state in and out."""
    out, n = grad_w.shape
    p = packed.to(torch.int32).reshape(out, n // 4, 3)
    word = p[..., 0] | p[..., 1] << 8 | p[..., 2] << 16
    codes = torch.stack([word & 63, word >> 6 & 63, word >> 12 & 63, word >> 18 & 63], dim=-1).reshape(out, n)
    t = (codes // (2 * C - 1) - 1).to(torch.float32)
    c = (codes % (2 * C - 1) - (C - 1)).to(torch.float32)
    v = 0.9 * v + 0.1 * grad_w.square().mean(dim=1, keepdim=True)
    denom = v.sqrt().clamp_min(1e-3)
    s_new = (scale - 2e-4 * ((grad_w * t).sum(dim=1, keepdim=True) / n**0.5)).clamp(1e-5, 10)
    val = c * (scale / s_new) - grad_w * (3e-3 / denom * (C / s_new))
    index = torch.arange(out * n, device=grad_w.device).reshape(out, n)
    u = (hash_u32(seed ^ hash_u32(index)) & 0xFFFFFF).to(torch.float32) * 2.0**-24
    floor = val.floor()
    cc = floor + (u < val - floor)
    carry = (cc / C).trunc()
    t_new = (t + carry).clamp(-1, 1)
    rest = torch.where(t + carry != t_new, cc.sign() * (C - 1), cc - carry * C).clamp(1 - C, C - 1)
    new = ((t_new + 1) * (2 * C - 1) + rest + (C - 1)).to(torch.int32).reshape(out, n // 4, 4)
    word = new[..., 0] | new[..., 1] << 6 | new[..., 2] << 12 | new[..., 3] << 18
    return torch.stack([word & 255, word >> 8 & 255, word >> 16 & 255], dim=-1).to(torch.uint8), s_new, v


def plain_pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [out, in] -> packed bytes, any device."""
    c = codes.to(torch.int32).reshape(codes.shape[0], -1, 4)
    word = c[..., 0] | c[..., 1] << 6 | c[..., 2] << 12 | c[..., 3] << 18
    return torch.stack([word & 255, word >> 8 & 255, word >> 16 & 255], dim=-1).to(torch.uint8)


def plain_unpack(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `plain_pack`, [out, in/4, 4]."""
    p = packed.to(torch.int32).reshape(packed.shape[0], -1, 3)
    word = p[..., 0] | p[..., 1] << 8 | p[..., 2] << 16
    return torch.stack([word & 63, word >> 6 & 63, word >> 12 & 63, word >> 18 & 63], dim=-1).to(torch.uint8)


def cuda_time(work: Callable[[], Any], repeats: int = 20) -> float:
    """Median microseconds on CUDA, by its events."""
    for _ in range(3):
        work()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) * 1e3 for start, end in pairs))


def time_peers(
    name: str, function: Callable[..., Any], *tensors: torch.Tensor, cpu: bool = True, **options: Any
) -> dict[str, float]:
    """Microseconds of `function(*tensors)` by torch on the CPU and, where CUDA is there, eager and compiled on it."""
    times = {}
    if torch.cuda.is_available():
        moved = [tensor.cuda() for tensor in tensors]
        times[f"torch CUDA eager {name}"] = cuda_time(lambda: function(*moved, **options))
        compiled = torch.compile(function)
        times[f"torch.compile CUDA {name}"] = cuda_time(lambda: compiled(*moved, **options))
    elif cpu:
        function(*tensors, **options)
        times[f"torch CPU {name}"] = host_time(lambda turn: function(*tensors, **options), 3)
    return times


def on_cuda(module: str) -> Any:
    """A peer's module, where it is installed and torch sees CUDA; None elsewhere."""
    if torch.cuda.is_available() and importlib.util.find_spec(module.partition(".")[0]):
        return importlib.import_module(module)
    return None


def step_time(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], n: int, turns: int) -> float:
    """Microseconds of a step of an optimizer of n float32 weights, on CUDA where that is there. Weights, gradients and
    moments rotate, as ours do. No backward pass is made.
    """
    place = "cuda" if torch.cuda.is_available() else "cpu"
    steps = []
    for _ in range(turns):
        weight = torch.nn.Parameter(torch.randn(n, device=place))
        weight.grad = torch.randn(n, device=place) * 1e-3
        steps.append(make([weight]).step)
        steps[-1]()
    if place == "cuda":
        turn = itertools.count()
        return cuda_time(lambda: steps[next(turn) % turns]())
    return host_time(lambda turn: steps[turn % turns](), 5 * turns)
