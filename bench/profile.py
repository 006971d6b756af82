"""Profiles of blocks, there and back, and a whole fit, beside plain torch: 2^26 numbers on GPUs, 2^22 on CPUs."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

import memtrain_cl.torch_device
from bench.harness import Bench, Row, mismatches
from bench.peers import time_peers
from memtrain_cl import reference
from memtrain_cl.array import DeviceArray, empty, from_numpy
from memtrain_cl.cases_profile import profile_case
from memtrain_cl.device import use_device
from memtrain_cl.operand import Operand
from memtrain_cl.ops.profile import launch_decode, launch_encode
from memtrain_cl.optim.profiles import fit_sorted_profile, normal_table
from memtrain_cl.probe import require_exact

BLOCK = 256
TURNS = 3


def plain_encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """encode_profile of blocks without zeros as a torch user would write it, any device."""
    rows = x.reshape(-1, BLOCK)
    order = rows.argsort(dim=1, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(BLOCK, device=x.device).expand_as(order))
    return (1 + rank * 255 // BLOCK).to(torch.uint8), rows.mean(1), rows.std(1, unbiased=False)


def plain_decode(codes: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The way back of `plain_encode`."""
    return mean[:, None] + scale[:, None] * table[codes.long()]


def _operand(array: DeviceArray) -> Operand:
    return Operand(array, array.shape, (1,), 0, "float32")


def check(bench: Bench) -> str:
    """Bytes that differ from the oracle's."""
    x = torch.randn(64 * BLOCK + 37, generator=torch.Generator().manual_seed(1))
    x[::7] = 0.0
    n, blocks, table = x.numel(), 65, normal_table(torch.device("cpu"))
    codes, pairs = empty(bench.device, (n,), np.uint8), empty(bench.device, (blocks, 2), np.float32)
    back = empty(bench.device, (n,), np.float32)
    launch_encode(bench.device, _operand(from_numpy(bench.device, x.numpy())), codes, pairs, BLOCK)
    held = from_numpy(bench.device, table.numpy())
    launch_decode(bench.device, codes, pairs, held, back, BLOCK, positive=True)
    want = reference.encode_profile(x, BLOCK)
    expected = {
        "codes": want[0].numpy(),
        "pairs": want[1].numpy(),
        "back": reference.decode_profile(*want, table, BLOCK, positive=True).numpy(),
    }
    return mismatches({"codes": codes, "pairs": pairs, "back": back}, expected)


def bench_codes(bench: Bench, n: int) -> None:
    """encode_profile and decode_profile."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    sources = [from_numpy(bench.device, x.numpy()) for _ in range(TURNS)]
    codes = [empty(bench.device, (n,), np.uint8) for _ in range(TURNS)]
    pairs = [empty(bench.device, (n // BLOCK, 2), np.float32) for _ in range(TURNS)]
    table = normal_table(torch.device("cpu"))
    held = from_numpy(bench.device, table.numpy())

    def encode(turn: int) -> Any:
        at = turn % TURNS
        return launch_encode(bench.device, _operand(sources[at]), codes[at], pairs[at], BLOCK)

    def decode(turn: int) -> Any:
        at = turn % TURNS
        return launch_decode(bench.device, codes[at], pairs[at], held, sources[at], BLOCK, positive=False)

    error = check(bench)
    coded = plain_encode(x)
    peers = {
        "encode_profile": time_peers("plain", plain_encode, x),
        "decode_profile": time_peers("plain", plain_decode, *coded, table),
    }
    for name, launch in (("encode_profile", encode), ("decode_profile", decode)):
        case = profile_case(name, n, BLOCK)
        us = bench.time(launch)
        line = f"{name} {n} in blocks of {BLOCK}"
        bench.add(Row("profile", line, us, case.bytes_moved, case.flops, error=error, peers=peers[name]))


def bench_fit(bench: Bench, n: int) -> None:
    """A whole fit with both receipts, of a tensor on the device, beside a whole tensor's on the host."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).square() + 0.1
    with use_device(bench.device):
        there = x.to(torch.device("opencl", bench.device.info.index))
        fit_sorted_profile(there, tail_family="gamma")
        start = time.perf_counter()
        made = fit_sorted_profile(there, tail_family="gamma", gof_threshold=1.0)
        us = (time.perf_counter() - start) * 1e6
    start = time.perf_counter()
    fit_sorted_profile(x, tail_family="gamma", gof_threshold=1.0)
    peers = {"whole tensor on the host": (time.perf_counter() - start) * 1e6}
    error = f"relative error {made.relative_error:.3f}, distance {made.goodness_of_fit:.4f}"
    bench.add(Row("profile", f"fit of {n} in blocks of {BLOCK}", us, error=error, peers=peers))


def run(bench: Bench) -> None:
    """All of it at the sizes of this device's kind."""
    require_exact(bench.device)
    memtrain_cl.torch_device.require_registered()
    n = 1 << 26 if bench.events else 1 << 22
    bench_codes(bench, n)
    bench_fit(bench, n // 4)
