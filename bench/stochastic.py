"""Rows in few bits, there and back, beside plain torch: 67.1 million numbers on GPUs, 4.2 million on CPUs."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import torch

from bench.harness import Bench, Row, mismatches
from bench.peers import time_peers
from memtrain_cl import reference
from memtrain_cl.array import DeviceArray, empty, from_numpy
from memtrain_cl.cases_stochastic import quantize_case, save_case
from memtrain_cl.operand import Operand
from memtrain_cl.ops.saved_rows import launch_restore, launch_save
from memtrain_cl.ops.stochastic import launch_quantize
from memtrain_cl.probe import require_exact
from memtrain_cl.reference.codes import hash_u32

SEED, BITS = 7, 4
TURNS = 3


def plain_save(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """save_rows at most 4 bits as a torch user would write it, any device."""
    levels = (1 << bits - 1) - 1
    scale = x.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / levels
    y = x / scale
    index = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    u = (hash_u32(SEED ^ hash_u32(index)) & 0xFFFFFF).to(torch.float32) * 2.0**-24
    below = y.floor()
    codes = (below + (u < y - below)).clamp(-levels, levels).to(torch.uint8) + 8
    return codes[:, ::2] | codes[:, 1::2] << 4, scale.to(torch.bfloat16)


def plain_restore(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The way back of `plain_save`."""
    pairs = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
    return (pairs.to(torch.float32) - 8.0) * scale.to(torch.float32)


def _operand(array: DeviceArray) -> Operand:
    rows, columns = array.shape
    return Operand(array, (rows, columns), (columns, 1), 0, "float32")


def check_saved(bench: Bench) -> str:
    """Bytes that differ from the oracle, of rows of the same length and few of them; and of what comes back."""
    x = torch.randn(64, 2048, generator=torch.Generator().manual_seed(1))
    codes, scale = empty(bench.device, (64 * 1024,), np.uint8), empty(bench.device, (64,), np.int16)
    back = empty(bench.device, (64, 2048), np.float32)
    launch_save(bench.device, _operand(from_numpy(bench.device, x.numpy())), codes, scale, bits=BITS, seed=SEED)
    launch_restore(bench.device, codes, scale, back, bits=BITS, element="float32")
    saved = reference.save_rows(x, BITS, seed=SEED)
    expected = {
        "codes": saved[0].numpy(),
        "scale": saved[1].view(torch.int16).numpy(),
        "back": reference.restore_rows(*saved, BITS, (64, 2048)).numpy(),
    }
    return mismatches({"codes": codes, "scale": scale, "back": back}, expected)


def bench_saved(bench: Bench, rows: int, columns: int) -> None:
    """save_rows and restore_rows at 4 bits."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    sources = [from_numpy(bench.device, x.numpy()) for _ in range(TURNS)]
    codes = [empty(bench.device, (rows * columns // 2,), np.uint8) for _ in range(TURNS)]
    scales = [empty(bench.device, (rows,), np.int16) for _ in range(TURNS)]

    def save(turn: int) -> Any:
        at = turn % TURNS
        return launch_save(bench.device, _operand(sources[at]), codes[at], scales[at], bits=BITS, seed=SEED)

    def restore(turn: int) -> Any:
        at = turn % TURNS
        return launch_restore(bench.device, codes[at], scales[at], sources[at], bits=BITS, element="float32")

    error = check_saved(bench)
    packed, scale = plain_save(x, BITS)
    peers = {
        "save_rows": time_peers("plain", plain_save, x, bits=BITS),
        "restore_rows": time_peers("plain", plain_restore, packed, scale),
    }
    for name, launch in (("save_rows", save), ("restore_rows", restore)):
        case = save_case(name, rows, columns, BITS)
        us = bench.time(launch)
        line = f"{name} {rows}x{columns}, {BITS} bits"
        bench.add(Row("stochastic", line, us, case.bytes_moved, case.flops, error=error, peers=peers[name]))


def bench_int8(bench: Bench, rows: int, columns: int) -> None:
    """Codes of int8, of rows half to even and of columns stochastically, as a layer's int8 step makes them."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    sources = [_operand(from_numpy(bench.device, x.numpy())) for _ in range(TURNS)]
    for name, dim, seed, transposed in (
        ("rows, half to even", 1, None, False),
        ("rows", 1, SEED, False),
        ("columns", 0, SEED, False),
        ("columns, transposed", 0, SEED, True),
    ):
        codes = [empty(bench.device, (rows, columns), np.int8) for _ in range(TURNS)]
        scale = empty(bench.device, (x.shape[1 - dim],), np.float32)
        outer, length, inner = (rows, columns, 1) if dim == 1 else (1, rows, columns)
        turns = itertools.count()
        launch = functools.partial(
            launch_quantize,
            bench.device,
            scale=scale,
            outer=outer,
            length=length,
            inner=inner,
            bits=8,
            seed=seed,
            transposed=transposed,
        )

        def work(_turn: int = 0, launch: Any = launch, codes: Any = codes, turns: Any = turns) -> Any:
            at = next(turns) % TURNS
            return launch(sources[at], codes[at])

        work()
        want = reference.quantize_int8(x, dim=dim, seed=seed, transposed=transposed)
        found = {"codes": codes[0], "scale": scale}
        error = mismatches(found, {"codes": want[0].numpy(), "scale": want[1].numpy()})
        us = bench.time(work) if dim == 1 else bench.time_several(work)
        case = quantize_case(rows, columns, dim=dim)
        bench.add(Row("stochastic", f"int8 {name} {rows}x{columns}", us, case.bytes_moved, case.flops, error=error))


def run(bench: Bench) -> None:
    """All of it at the sizes of this device's kind."""
    require_exact(bench.device)
    side = 8192 if bench.events else 2048
    bench_saved(bench, side, side)
    bench_int8(bench, side // 2, side // 2)
