"""A step of Automagic beside the same one in plain torch: 67.1 million weights on GPUs, 1 and 4.2 million on CPUs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bench.harness import Bench, Row
from bench.peers import time_peers
from memtrain_cl import ops, reference
from memtrain_cl.array import from_numpy
from memtrain_cl.automagic_rule import AutomagicStep, AutomagicTensor
from memtrain_cl.bridge import host_view
from memtrain_cl.cases_automagic import automagic_case
from memtrain_cl.device import use_device
from memtrain_cl.ops.automagic import AutomagicArrays, launch_rate, launch_step
from memtrain_cl.probe import require_exact

TURNS = 2
ROT = 256
RULE = AutomagicStep(step=100, entered=99)
BOUNDS = (1e-30, 1e3)


def plain_step(
    p: torch.Tensor, g: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, ring: torch.Tensor, matrix: torch.Tensor
) -> Any:
    """The step as a torch user would write it, any device. ring: bool [8, rows, columns]."""
    wide = g.to(torch.float32)
    wide = torch.where(torch.isfinite(wide), wide, 0.0)
    held = ((codes.to(torch.float32) * scale).view(-1, ROT) @ matrix).view_as(wide).clamp_min(0)
    v = 0.999 * held.square() + 0.001 * wide.square()
    u = wide / (v.sqrt() / 0.31 + 1e-8)
    u = (u / u.square().mean().sqrt().clamp_min(1.0)).clamp(-1.0, 1.0)
    y = (v.sqrt().view(-1, ROT) @ matrix).view_as(wide)
    fresh = y.abs().amax(dim=1, keepdim=True).clamp_min(1e-30) / 127
    code = (y / fresh).round().clamp(-127, 127).to(torch.int8)
    ring = torch.cat([ring[1:], (wide > 0)[None]])
    up, down = ring.all(0) | ~ring.any(0), (ring[1:] ^ ring[:-1]).all(0)
    weight = u.abs()
    signal = ((weight * up).sum() - (weight * down).sum()) / weight.sum().clamp_min(1e-30)
    return (p.to(torch.float32) - 1e-3 * u).to(p.dtype), code, fresh, ring, torch.exp(signal.clamp(-1, 1))


def _tensor(rows: int, columns: int, dtype: torch.dtype) -> AutomagicTensor:
    chance = torch.Generator().manual_seed(rows)
    shape = (rows, columns)
    codes, scale = reference.encode_rotated(torch.randn(shape, generator=chance).abs() * 1e-3, ROT)
    return AutomagicTensor(
        torch.randn(shape, generator=chance).to(dtype),
        (torch.randn(shape, generator=chance) * 1e-3).to(dtype),
        codes,
        scale,
        torch.randint(0, 256, (1, rows * columns), generator=chance, dtype=torch.uint8),
        torch.zeros(1, dtype=torch.int32),
        RULE,
    )


def check(bench: Bench, dtype: torch.dtype) -> str:
    """What differs from the oracle after a step of 64 rows."""
    ends = []
    for room in (ops, reference):
        tensor, lr, tally = _tensor(64, 1024, dtype), torch.tensor([1e-3]), torch.zeros(1, 2)
        with use_device(bench.device):
            room.automagic_step_([tensor], lr, tally)
            room.automagic_rate_(lr, tally, *BOUNDS)
        ends.append((tensor.param, tensor.exp_avg_sq, tensor.scale, tensor.signs, lr))
    wrong = sum(int((a != b).sum()) for a, b in zip(*ends, strict=True))
    return "0 bytes differ" if not wrong else f"{wrong} numbers differ"


def _arrays(bench: Bench, tensor: AutomagicTensor) -> AutomagicArrays:
    def there(part: torch.Tensor) -> Any:
        return from_numpy(bench.device, host_view(part))

    element = str(tensor.param.dtype).removeprefix("torch.")
    return AutomagicArrays(
        there(tensor.param),
        there(tensor.grad),
        there(tensor.exp_avg_sq),
        None if tensor.scale is None else there(tensor.scale),
        there(tensor.signs),
        there(tensor.skipped),
        tensor.rule,
        tensor.place,
        tensor.seed,
        (element, element),
        tuple(tensor.param.shape),
    )


def bench_step(bench: Bench, rows: int, columns: int, dtype: torch.dtype) -> None:
    """The step of one matrix, and the learning rate's."""
    start = _tensor(rows, columns, dtype)
    sets = [_arrays(bench, start) for _ in range(TURNS)]
    lr = from_numpy(bench.device, np.full(1, 1e-3, np.float32))
    tally = from_numpy(bench.device, np.zeros((1, 2), np.float32))
    turns = itertools.count()

    def launch() -> Any:
        turn = next(turns)
        own = replace(sets[turn % TURNS], rule=replace(RULE, step=100 + turn, entered=99 + turn))
        launch_step(bench.device, own, lr, tally)
        return launch_rate(bench.device, lr, tally, *BOUNDS)

    ring = torch.rand(8, rows, columns) < 0.5
    matrix = reference.regular_hadamard(ROT)
    peers = time_peers("plain", plain_step, start.param, start.grad, start.exp_avg_sq, start.scale, ring, matrix)  # type: ignore[arg-type]
    us = bench.time_several(launch)
    element = str(dtype).removeprefix("torch.")
    case = automagic_case(rows, columns, element=element)
    line = f"automagic {rows}x{columns}, {element}"
    error = check(bench, dtype)
    bench.add(Row("automagic", line, us, case.bytes_moved, case.flops, error=error, peers=peers))


def run(bench: Bench) -> None:
    """All of it at the sizes of this device's kind."""
    require_exact(bench.device)
    for side in (8192,) if bench.events else (1024, 2048):
        for dtype in (torch.float32, torch.bfloat16):
            bench_step(bench, side, side, dtype)
