"""Model files of 10^8 counter weights: how long writing and reading them takes, and how much memory beside the model.

Times hold the flush to the disk. Memory is the process's highest resident size less what it was before, as a share of
the file's size; the pages of a mapped file count in it, though the system can take them back.
"""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.harness import Bench, Row
from memtrain_cl.export.mncc import read_mncc, write_mncc
from memtrain_cl.export.npz import read_npz, write_npz
from memtrain_cl.export.packed import EngineReader, export_model, pack_module, read_engine, verify_export
from memtrain_cl.nn import PackedRMSCounterLinear

_LIBC = ctypes.CDLL("libc.so.6")
LAYERS, WIDTH = 6, 4096
REPEATS = 5


def resident(key: str) -> int:
    """Bytes of this process in memory: now (VmRSS) or at most since the last `forget` (VmHWM)."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{key}:"))


def measured(work: Callable[[], Any]) -> tuple[float, int]:
    """Median microseconds of some runs, and the largest number of bytes that one held beside what there was."""
    times, most = [], 0
    for _ in range(REPEATS):
        _LIBC.malloc_trim(0)  # else what earlier work has freed would be taken again unseen
        Path("/proc/self/clear_refs").write_text("5")  # the highest begins anew at what there is
        before, started = resident("VmRSS"), time.perf_counter()
        found = work()
        times.append((time.perf_counter() - started) * 1e6)
        most = max(most, resident("VmHWM") - before)
        del found
    return sorted(times)[REPEATS // 2], most


def read_mapped(path: Path, *, checked: bool = True) -> list[Any]:
    """The layers as views of the file."""
    with EngineReader(path, mapped=True, checked=checked) as reader:
        return [reader.layer(name) for name in reader.metadata.layers]


def run(bench: Bench) -> None:
    """Export and loading of an engine file beside torch.save and torch.load, and the formats of layers alone."""
    torch.manual_seed(0)
    model = nn.Sequential(*(PackedRMSCounterLinear(WIDTH, WIDTH, C=11) for _ in range(LAYERS)))
    weights = LAYERS * WIDTH * WIDTH
    with tempfile.TemporaryDirectory() as folder:
        engine, other, saved = (Path(folder) / name for name in ("m.safetensors", "other", "m.pt"))

        def add(what: str, path: Path, work: Callable[[], Any], error: str, **peers: Callable[[], Any]) -> None:
            work()
            size = path.stat().st_size
            us, most = measured(work)
            times = {name.replace("_", "."): measured(peer)[0] for name, peer in peers.items()}
            told = f"{what}, {weights / 1e6:.1f}M weights ({size / 1e6:.1f} MB, {most / size:.2f} of them in memory)"
            bench.add(Row("files", told, us, size, error=error, peers=times))

        def save() -> None:
            torch.save(model.state_dict(), saved)

        export_model(model, engine, {})
        different = f"{len(verify_export(model, engine))} tensors differ from the model's"
        add("export", engine, lambda: export_model(model, engine, {}), different, torch_save=save)
        load = {"torch_load": lambda: torch.load(saved, weights_only=True)}
        add("load", engine, lambda: read_engine(engine), "sums compared", **load)
        add("load by map", engine, lambda: read_mapped(engine), "sums compared")
        add("load by map, unchecked", engine, lambda: read_mapped(engine, checked=False), "sums not compared")
        layers = pack_module(model, {}).layers
        formats: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
            ("MNCC", write_mncc, read_mncc),
            ("npz", write_npz, read_npz),
        )
        for name, write, read in formats:
            add(f"write {name}", other, partial(write, other, layers), "codes as tested")
            add(f"read {name}", other, partial(read, other), "codes as tested")
