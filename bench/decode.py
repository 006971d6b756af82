"""Decoding a token at a time: packed weights times one vector beside torch's product of one row, and whole tokens.

Weights rotate, so that caches hold none of them: torch's too, in bfloat16 on CUDA and float32 on CPUs.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.harness import Bench, Row, host_time
from bench.model import LARGE
from bench.peers import cuda_time, plain_pack
from memtrain_cl.array import empty, from_numpy
from memtrain_cl.cases_engine import counter_matvec_case
from memtrain_cl.engine import Engine
from memtrain_cl.export.packed import export_model
from memtrain_cl.formats import code_count
from memtrain_cl.launchers.counter_matvec import counter_matvec
from memtrain_cl.lm.config import ModelConfig
from memtrain_cl.lm.description import model_description
from memtrain_cl.lm.model import CausalLM, KVCache
from memtrain_cl.reference import decode_dense

C = 11
PROMPT = b"def main"
#: Bytes that rotating weights hold at least, beyond the last cache of a GPU (60 MB) and of a CPU.
_GPU_BYTES, _CPU_BYTES = 256 << 20, 96 << 20
#: Launches between two of torch's events, so that the gaps of its queue do not count.
_RUN = 20


def _peers(rows: int, columns: int, least: int) -> dict[str, Callable[[], float]]:
    """One row times a weight [rows, columns] by torch: what measures its microseconds."""
    place, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    copies = max(2, -(-least // (rows * columns * dtype.itemsize)))
    weights = [torch.randn(rows, columns, device=place, dtype=dtype) for _ in range(copies)]
    x = torch.randn(1, columns, device=place, dtype=dtype)
    turns = itertools.cycle(weights)
    if place == "cpu":
        return {"torch CPU float32, one row": lambda: host_time(lambda _turn: x @ next(turns).t(), 20)}

    def runs(work: Callable[[torch.Tensor], Any]) -> Callable[[], float]:
        return lambda: cuda_time(lambda: [work(next(turns)) for _ in range(_RUN)]) / _RUN

    return {
        "torch CUDA bfloat16 linear": runs(lambda weight: torch.nn.functional.linear(x, weight)),
        "torch CUDA bfloat16 mv": runs(lambda weight: torch.mv(weight, x[0])),
    }


def bench_product(bench: Bench, rows: int, columns: int) -> None:
    """A packed weight [rows, columns] times a vector; bytes are packed ones."""
    device = bench.device
    rng = np.random.default_rng(rows)
    codes = torch.from_numpy(rng.integers(0, code_count(C), (rows, columns), dtype=np.uint8))
    state = plain_pack(codes).reshape(rows, -1).numpy()
    scale, x = rng.uniform(0.5, 2.0, rows).astype(np.float32), rng.standard_normal(columns).astype(np.float32)
    least = _GPU_BYTES if bench.events else _CPU_BYTES
    states = [from_numpy(device, state) for _ in range(max(2, -(-least // state.nbytes)))]
    scales, inputs, out = from_numpy(device, scale), from_numpy(device, x), empty(device, (rows,), np.float32)
    counter_matvec(states[0], scales, inputs, out, C=C)
    # Every row is made by the same code, so some of them suffice.
    some = slice(0, rows, max(1, rows // 512))
    head = torch.from_numpy(state[some]), torch.from_numpy(scale[some, None])
    dense = decode_dense(*head, columns, C=C, packed=True).double().numpy()
    error = np.abs(out.numpy()[some] - dense @ x) / (np.abs(dense) @ np.abs(x))
    case = counter_matvec_case(rows, columns, C)
    turns = itertools.cycle(states)
    work: dict[str, Callable[[], float]] = {
        "ours": lambda: bench.time(lambda _turn: counter_matvec(next(turns), scales, inputs, out, C=C)),
        **_peers(rows, columns, least),
    }
    # In turn, so that a busy machine slows all alike.
    times = [{name: measure() for name, measure in work.items()} for _ in range(1 if bench.events else 5)]
    us, *others = (statistics.median(turn[name] for turn in times) for name in work)
    bench.add(
        Row(
            "decode",
            f"packed weight {rows}x{columns} times one vector",
            us,
            case.bytes_moved,
            case.flops,
            error=f"{error.max():.1e} of the terms",
            peers=dict(zip(list(work)[1:], others, strict=True)),
        )
    )


def _torch_text(model: CausalLM, count: int, place: str) -> tuple[bytes, float]:
    """The likeliest continuation of the prompt by a torch model, and the microseconds of one of its tokens."""
    cache = KVCache(model.config, batch=1, capacity=len(PROMPT) + count, device=place)
    pending, made = list(PROMPT), []
    with torch.no_grad():
        started = time.perf_counter()
        for _ in range(count):
            pending = [int(model(torch.tensor([pending], device=place), cache)[0, -1].argmax())]
            made += pending
    return bytes(made), (time.perf_counter() - started) / count * 1e6


def _engine_text(engine: Engine, count: int) -> tuple[bytes, float]:
    """The same by the engine."""
    started = time.perf_counter()
    made = bytes(engine.generate(PROMPT, count, 0.0))
    return made, (time.perf_counter() - started) / count * 1e6


def bench_tokens(bench: Bench, linear: str, count: int, **sizes: Any) -> None:
    """Greedy tokens of a model with random weights, checked by the torch model; beside that, or a dense one on CUDA."""
    torch.manual_seed(0)
    config = ModelConfig(linear=linear, **sizes)
    model = CausalLM(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        export_model(model, path, model_description(config))
        engine = Engine.load(path, bench.device)
    checked = 20
    expected, _ = _torch_text(model, checked, "cpu")
    made, _ = _engine_text(engine, checked)
    agree = sum(a == b for a, b in zip(made, expected, strict=True))
    place, peer = "cpu", "the torch model"
    if torch.cuda.is_available():
        place, peer = "cuda", "torch CUDA float32, dense"
        model = CausalLM(replace(config, linear="dense")).eval().cuda()
        _torch_text(model, checked, place)
    turns = [(_engine_text(engine, count)[1], _torch_text(model, count, place)[1]) for _ in range(3)]
    us, other = (statistics.median(times) for times in zip(*turns, strict=True))
    name = f"a token, {linear} linears, {config.layers} x {config.dim} ({1e6 / us:.0f} tokens/s)"
    error = f"{agree} of {checked} greedy tokens are the torch model's"
    bench.add(Row("decode", name, us, error=error, peers={peer: other}))


def run(bench: Bench) -> None:
    """The sizes that are asked for on GPUs and on CPUs, then whole tokens."""
    for size in (16384, 4096) if bench.events else (1024, 4096):
        bench_product(bench, size, size)
    for linear in ("counter", "dense"):
        bench_tokens(bench, linear, 100)
    if bench.events:
        bench_tokens(bench, "counter", 400, **{name: LARGE[name] for name in ("layers", "dim", "heads", "seq")})
