"""Numbers in 8 bits by blocks, there and back, beside plain torch and bitsandbytes: 67.1 million on GPUs, 4.2 million
on CPUs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bench.harness import Bench, Row, mismatches
from bench.peers import cuda_time, on_cuda, time_peers
from memtrain_cl import reference
from memtrain_cl.array import empty, from_numpy
from memtrain_cl.cases_blockwise import blockwise_case
from memtrain_cl.code_maps import dynamic_map, dynamic_midpoints
from memtrain_cl.ops.blockwise import Blocks, launch_dequantize, launch_quantize
from memtrain_cl.probe import require_exact

SIZE = 2048
TURNS = 3


def plain_linear(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """quantize_int8_blockwise as a torch user would write it, of whole blocks, any device."""
    blocks = x.view(-1, SIZE)
    scales = blocks.abs().amax(dim=1, keepdim=True) / 127
    return (blocks / scales.clamp_min(1e-38)).round().clamp(-127, 127).to(torch.int8), scales


def plain_linear_back(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The way back of `plain_linear`."""
    return codes.to(torch.float32) * scales


def plain_dynamic(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with the dynamic map."""
    blocks = x.view(-1, SIZE)
    scales = blocks.abs().amax(dim=1, keepdim=True)
    middles = torch.tensor(dynamic_midpoints(True), device=x.device)
    return torch.bucketize(blocks / scales.clamp_min(1e-38), middles).to(torch.uint8), scales


def plain_dynamic_back(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The way back of `plain_dynamic`."""
    return torch.tensor(dynamic_map(True), device=codes.device)[codes.to(torch.int64)] * scales


def _bitsandbytes(x: torch.Tensor) -> tuple[dict[str, float], dict[str, float]]:
    """What bitsandbytes takes there and back, by its dynamic map, of blocks of the same size."""
    functional = on_cuda("bitsandbytes.functional")
    if functional is None:
        return {}, {}
    moved = x.cuda()
    codes, state = functional.quantize_blockwise(moved, blocksize=SIZE)
    forth = cuda_time(lambda: functional.quantize_blockwise(moved, blocksize=SIZE))
    back = cuda_time(lambda: functional.dequantize_blockwise(codes, state))
    return {"bitsandbytes": forth}, {"bitsandbytes": back}


def bench_map(bench: Bench, n: int, code: str) -> None:
    """Both ways of one map, to nearest."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    blocks = Blocks(SIZE, code)
    sources = [from_numpy(bench.device, x.numpy()) for _ in range(TURNS)]
    stored = np.int8 if code == "linear" else np.uint8
    codes = [empty(bench.device, (n,), stored) for _ in range(TURNS)]
    scales = [empty(bench.device, (n // SIZE,), np.float32) for _ in range(TURNS)]

    def forth(turn: int) -> Any:
        at = turn % TURNS
        return launch_quantize(bench.device, sources[at], codes[at], scales[at], blocks, element="float32")

    def back(turn: int) -> Any:
        at = turn % TURNS
        return launch_dequantize(bench.device, codes[at], scales[at], sources[at], blocks)

    want = reference.quantize_blockwise(x, SIZE, code=code)
    plain = {"linear": (plain_linear, plain_linear_back), "dynamic": (plain_dynamic, plain_dynamic_back)}[code]
    made = plain[0](x)
    options: dict[str, Any] = {"dynamic": True} if code == "dynamic" else {}
    theirs = _bitsandbytes(x)
    for way, launch, found, peers in (
        ("quantize", forth, {"codes": codes[0], "scales": scales[0]}, time_peers("plain", plain[0], x) | theirs[0]),
        ("dequantize", back, {"x": sources[0]}, time_peers("plain", plain[1], *made) | theirs[1]),
    ):
        launch(0)
        expected = {"codes": want[0].numpy(), "scales": want[1].numpy()}
        if way == "dequantize":
            expected = {"x": reference.dequantize_blockwise(*want, SIZE, code=code).numpy()}
        error = mismatches(found, expected)
        us = bench.time(launch)
        case = blockwise_case(f"{way}_blockwise", n, SIZE, **options)
        line = f"{way} {n}, {code}, blocks of {SIZE}"
        bench.add(Row("blockwise", line, us, case.bytes_moved, case.flops, error=error, peers=peers))


def run(bench: Bench) -> None:
    """All of it at the size of this device's kind."""
    require_exact(bench.device)
    for code in ("linear", "dynamic"):
        bench_map(bench, 1 << 26 if bench.events else 1 << 22, code)
