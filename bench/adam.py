"""A step of Adam on compressed moments beside torch's fused AdamW, an int8 Adam in plain torch and, where they are
installed, those of bitsandbytes and torchao: 67.1 million weights on GPUs, 4.2 million on CPUs; and many small tensors,
as a model's norms and biases are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bench.harness import Bench, Row, host_time
from bench.peers import on_cuda, step_time, time_peers
from memtrain_cl import ops, reference
from memtrain_cl.adam_rule import AdamStep, AdamTensor
from memtrain_cl.array import from_numpy
from memtrain_cl.cases_adam import adam_case
from memtrain_cl.comparison import generator
from memtrain_cl.device import use_device
from memtrain_cl.ops.adam import AdamArrays, launch_step
from memtrain_cl.probe import require_exact
from memtrain_cl.verify_adam import CHANGED, adam_tensor, quantiles

TURNS = 3
#: (code, block size, skip) of the steps that are measured.
STEPS = (
    ("linear", 2048, "block"),
    ("linear", 2048, "tensor"),
    ("linear", 256, "block"),
    ("dynamic", 2048, "block"),
    ("profile", 256, "block"),
    ("dense", 2048, "tensor"),
)
#: Small tensors of a step, and the elements of each.
MANY, FEW = 96, 1536


def plain_step(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, s: torch.Tensor, scale: torch.Tensor) -> Any:
    """A step on int8 moments, in blocks of 2048, as a torch user would write it; any device."""
    mean = 0.9 * (m.to(torch.float32) * scale) + 0.1 * g
    root = (0.999 * (s.to(torch.float32) * scale).square() + 0.001 * g.square()).sqrt()
    p.sub_(0.001 * mean / (root / 0.0316 + 1e-8))
    made = []
    for x in (mean, root):
        largest = (x.abs().amax(dim=1, keepdim=True) / 127).clamp_min(1e-38)
        made.append(((x / largest).round().clamp(-127, 127).to(torch.int8), largest))
    return made


def peers_of(n: int) -> dict[str, float]:
    """What others take for n weights."""
    x = torch.randn(n // 2048, 2048)
    codes = torch.randint(-127, 128, x.shape, dtype=torch.int8)
    scale = torch.full((n // 2048, 1), 1e-5)
    times = time_peers("plain int8", plain_step, x, x * 1e-3, codes, codes.abs(), scale)
    fused = f"torch {'CUDA' if torch.cuda.is_available() else 'CPU'} fused AdamW"
    times[fused] = step_time(lambda weights: torch.optim.AdamW(weights, fused=True), n, TURNS)
    if bitsandbytes := on_cuda("bitsandbytes"):
        times["bitsandbytes Adam8bit"] = step_time(bitsandbytes.optim.Adam8bit, n, TURNS)
    if torchao := on_cuda("torchao.optim"):
        times["torchao AdamW8bit"] = step_time(torchao.AdamW8bit, n, TURNS)
    return times


def _tensor(n: int, rule: AdamStep) -> AdamTensor:
    case = adam_case(n, rule.block_size, rule.code)
    tensor = adam_tensor(1 << 16, rule, case, generator(case))
    if n <= 1 << 16:
        return adam_tensor(n, rule, case, generator(case))
    parts: dict[str, Any] = {}
    for name in (*CHANGED[:-1], "grad"):
        part = getattr(tensor, name)
        parts[name] = None if part is None else part.repeat(n >> 16, *[1] * (part.ndim - 1))
    return replace(tensor, **parts)


def _arrays(bench: Bench, tensor: AdamTensor) -> AdamArrays:
    def there(part: torch.Tensor) -> Any:
        return from_numpy(bench.device, part.numpy())

    scales = tuple(there(s) for s in (tensor.exp_avg_scale, tensor.exp_avg_sq_scale) if s is not None)
    moments = (there(tensor.exp_avg), there(tensor.exp_avg_sq))
    places = there(tensor.param), there(tensor.grad)
    return AdamArrays(*places, moments, scales, there(tensor.skipped), tensor.seed, ("float32", "float32"))


def check(bench: Bench, rule: AdamStep) -> str:
    """What differs from the oracle after a step of 2^16 weights."""
    ends = [_tensor(1 << 16, rule) for _ in range(2)]
    tables = (quantiles(), quantiles()) if rule.code == "profile" else None
    with use_device(bench.device):
        ops.adam_step_(ends[:1], rule, tables=tables)
    reference.adam_step_(ends[1:], rule, tables=tables)
    pairs = [(getattr(ends[0], name), getattr(ends[1], name)) for name in CHANGED]
    wrong = sum(int((a != b).sum()) for a, b in pairs if b is not None)
    return "0 bytes differ" if not wrong else f"{wrong} numbers differ"


def _launcher(bench: Bench, rule: AdamStep, sets: list[list[AdamArrays]]) -> Callable[[], Any]:
    flags = from_numpy(bench.device, np.zeros(len(sets[0]), np.int32))
    table = from_numpy(bench.device, quantiles().numpy())
    turns = [0]

    def launch() -> Any:
        turns[0] += 1
        tables = (table, table) if rule.code == "profile" else None
        return launch_step(bench.device, sets[turns[0] % len(sets)], rule, flags, tables)

    return launch


def run(bench: Bench) -> None:
    """All of it at the size of this device's kind."""
    require_exact(bench.device)
    n = 1 << 26 if bench.events else 1 << 22
    peers = peers_of(n)
    for code, size, skip in STEPS:
        rule = AdamStep(lr=1e-3, step=100, code=code, block_size=size, skip=skip)
        error = check(bench, rule)
        start = _tensor(n, rule)
        launch = _launcher(bench, rule, [[_arrays(bench, copy.copy(start))] for _ in range(TURNS)])
        us = bench.time_several(launch)
        case = adam_case(n, size, code)
        line = f"adam {n}, {code}" + ("" if code == "dense" else f", blocks of {size}, skips a {skip}")
        bench.add(Row("adam", line, us, case.bytes_moved, case.flops, error=error, peers=peers))
    rule = AdamStep(lr=1e-3, step=100)
    many = [_arrays(bench, _tensor(FEW, rule)) for _ in range(MANY)]
    us = bench.time_several(_launcher(bench, rule, [many]))
    weights = [torch.nn.Parameter(torch.randn(FEW)) for _ in range(MANY)]
    for weight in weights:
        weight.grad = torch.randn(FEW)
    theirs = torch.optim.AdamW(weights, fused=True)
    theirs.step()
    beside = {"torch CPU fused AdamW": host_time(lambda turn: theirs.step(), 5)}
    case = adam_case(FEW)
    moved, flops = MANY * case.bytes_moved, MANY * case.flops
    bench.add(
        Row("adam", f"adam {MANY} tensors of {FEW}, linear", us, moved, flops, error=check(bench, rule), peers=beside)
    )
