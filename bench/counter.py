"""Counter kernels: update, pack, unpack. Bytes and operations come from the package's table of cases."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from bench.harness import Bench, Row, host_time, mismatches
from bench.peers import plain_pack, plain_unpack, plain_update, time_peers
from memtrain_cl import reference
from memtrain_cl.array import from_numpy
from memtrain_cl.cases import codec_case, update_case
from memtrain_cl.formats import CounterRule
from memtrain_cl.ops.codec import launch_codec
from memtrain_cl.ops.counter import launch_update
from memtrain_cl.probe import require_exact

SEED = 7
RULE = CounterRule(11, True, lr=3e-3, lr_scale=2e-4)


def layer(rows: int, columns: int) -> dict[str, torch.Tensor]:
    """A layer in the middle of its training, and a gradient for it."""
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 63, (rows, columns), dtype=torch.uint8, generator=generator)
    return {
        "codes": codes,
        "state": plain_pack(codes).reshape(rows, -1),
        "scale": torch.full((rows, 1), 0.05),
        "v": torch.full((rows, 1), 1e-3),
        "grad_w": torch.randn(rows, columns, generator=generator) * 0.03,
        "totals": torch.zeros(3, dtype=torch.int64),
    }


def check(bench: Bench) -> str:
    """Bytes that differ from the oracle after one update of a layer of the same kind, small enough for the oracle."""
    tensors = layer(64, 2048)
    arrays = {
        name: from_numpy(bench.device, tensors[name].numpy()) for name in ("state", "scale", "v", "grad_w", "totals")
    }
    launch_update(bench.device, **arrays, rule=RULE, seed=SEED, row_offset=0, index_base=0)
    expected = {name: tensors[name].clone() for name in ("state", "scale", "v", "totals")}
    reference.counter_update_(
        expected["state"], expected["scale"], expected["v"], tensors["grad_w"], expected["totals"], RULE, seed=SEED
    )
    return mismatches(
        {name: arrays[name] for name in expected}, {name: tensor.numpy() for name, tensor in expected.items()}
    )


def bench_update(bench: Bench, rows: int, columns: int) -> None:
    """One update of a packed layer in exact mode, counts included."""
    tensors = layer(rows, columns)
    shared = {name: from_numpy(bench.device, tensors[name].numpy()) for name in ("scale", "v", "totals")}
    turns = [
        {**shared, **{name: from_numpy(bench.device, tensors[name].numpy()) for name in ("state", "grad_w")}}
        for _ in range(3)
    ]
    us = bench.time(
        lambda turn: launch_update(
            bench.device, **turns[turn % 3], rule=RULE, seed=SEED + turn, row_offset=0, index_base=0
        )
    )
    case = update_case(rows, columns)
    peers = time_peers(
        "plain", plain_update, tensors["state"], tensors["scale"], tensors["v"], tensors["grad_w"], seed=SEED
    )
    if not bench.events:
        peers["torch reference"] = _reference_time(tensors)
    name = f"update {rows}x{columns}"
    bench.add(Row("counter", name, us, case.bytes_moved, case.flops, error=check(bench), peers=peers))


def _reference_time(tensors: dict[str, torch.Tensor]) -> float:
    state, scale, v = (tensors[name].clone() for name in ("state", "scale", "v"))
    return host_time(
        lambda turn: reference.counter_update_(
            state, scale, v, tensors["grad_w"], tensors["totals"].clone(), RULE, seed=SEED
        ),
        3,
    )


def bench_codecs(bench: Bench, rows: int, columns: int) -> None:
    """pack_codes and unpack_codes of a layer."""
    tensors = layer(rows, columns)
    codes = [from_numpy(bench.device, tensors["codes"].numpy()) for _ in range(4)]
    packed = [from_numpy(bench.device, tensors["state"].numpy()) for _ in range(4)]
    groups = rows * columns // 4
    work = {
        "pack_codes": (codes, packed, plain_pack, tensors["codes"]),
        "unpack_codes": (packed, codes, plain_unpack, tensors["state"]),
    }
    for name, (sources, targets, peer, source) in work.items():

        def launch(turn: int, name: str = name, sources: Any = sources, targets: Any = targets) -> Any:
            return launch_codec(bench.device, name, sources[turn % 4], targets[turn % 4], groups)

        us = bench.time(launch)
        error = mismatches(
            {"codes": codes[0], "packed": packed[0]},
            {"codes": tensors["codes"].numpy(), "packed": tensors["state"].numpy()},
        )
        bench.add(
            Row(
                "counter",
                f"{name} {rows}x{columns}",
                us,
                codec_case(name, rows, columns).bytes_moved,
                error=error,
                peers=time_peers("plain", peer, source),
            )
        )


def bench_launch(bench: Bench) -> None:
    """What the host spends on enqueuing one update, Python included."""
    tensors = layer(4, 64)
    arrays = {
        name: from_numpy(bench.device, tensors[name].numpy()) for name in ("state", "scale", "v", "grad_w", "totals")
    }
    times = []
    for _ in range(200):
        start = time.perf_counter()
        launch_update(bench.device, **arrays, rule=RULE, seed=SEED, row_offset=0, index_base=0)
        times.append((time.perf_counter() - start) * 1e6)
        bench.device.queue.finish()
    bench.add(Row("counter", "host time to enqueue an update", statistics.median(times), error="not a kernel"))


def run(bench: Bench) -> None:
    """All counter kernels at the sizes of this device's kind."""
    require_exact(bench.device)
    sizes = [(8192, 8192), (4096, 4096)] if bench.events else [(2048, 2048), (1024, 1024)]
    for rows, columns in sizes:
        bench_update(bench, rows, columns)
    bench_codecs(bench, *(sizes[0]))
    bench_launch(bench)
