"""Casts to 8-bit floating types and back, beside torch's own: 67.1 million numbers on GPUs, 4.2 million on CPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bench.harness import Bench, Row, mismatches
from bench.peers import time_peers
from memtrain_cl import reference
from memtrain_cl.array import empty, from_numpy
from memtrain_cl.cases_fp8 import fp8_case
from memtrain_cl.formats import FP8_FORMATS
from memtrain_cl.ops.fp8 import COUNTS, launch_cast, launch_restore
from memtrain_cl.probe import require_exact

TURNS = 3


def bench_casts(bench: Bench, n: int, name: str) -> None:
    """fp8_cast, fp8_cast_counted and fp8_restore of n numbers of float32."""
    form = FP8_FORMATS[name]
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    sources = [from_numpy(bench.device, x.numpy()) for _ in range(TURNS)]
    codes = [empty(bench.device, (n,), np.uint8) for _ in range(TURNS)]
    counts = empty(bench.device, (COUNTS,), np.int64)
    options: dict[str, Any] = {"element": "float32", "form": form}

    def cast(turn: int) -> Any:
        at = turn % TURNS
        return launch_cast(bench.device, sources[at], codes[at], beyond=form.largest_code, **options)

    def counted(turn: int = 0) -> Any:
        at = turn % TURNS
        return launch_cast(bench.device, sources[at], codes[at], beyond=form.largest_code, counts=counts, **options)

    def restore(turn: int) -> Any:
        at = turn % TURNS
        return launch_restore(bench.device, codes[at], sources[at], **options)

    want, sums = reference.fp8_cast_counted(x, name, saturate=True)
    peers: dict[str, dict[str, float]] = {"fp8_cast": {}, "fp8_cast_counted": {}, "fp8_restore": {}}
    own = getattr(torch, name, None)
    if own is not None:
        there = x.to(own)
        peers["fp8_cast"] = time_peers("cast", lambda given: given.to(own), x)
        peers["fp8_cast_counted"] = time_peers("cast and statistics", lambda given: plain_guard(given, own), x)
        peers["fp8_restore"] = time_peers("cast back", lambda given: given.to(torch.float32), there)
    expected = {"codes": want.numpy(), "counts": sums.numpy()}
    for op in peers:
        if op == "fp8_cast_counted":
            counted()
            error = mismatches({"codes": codes[0], "counts": counts}, expected)
            us = bench.time_several(counted)
        elif op == "fp8_cast":
            cast(0)
            error = mismatches({"codes": codes[0]}, expected)
            us = bench.time(cast)
        else:
            restore(0)
            error = mismatches({"y": sources[0]}, {"y": reference.fp8_restore(want, name).numpy()})
            us = bench.time(restore)
        case = fp8_case(op, n, name)
        bench.add(Row("fp8", f"{op} {n}, {name}", us, case.bytes_moved, case.flops, error=error, peers=peers[op]))


def plain_guard(x: torch.Tensor, dtype: torch.dtype) -> Any:
    """The cast and what a guard asks for, as a torch user would write it."""
    cast = x.to(dtype)
    filled = x != 0
    lost = (filled & (cast.to(torch.float32) == 0)).sum()
    return cast, x.abs().max(), torch.isfinite(x).all(), lost, filled.sum()


def run(bench: Bench) -> None:
    """All of it at the sizes of this device's kind."""
    require_exact(bench.device)
    for name in FP8_FORMATS:
        bench_casts(bench, (1 << 26) if bench.events else (1 << 22), name)
