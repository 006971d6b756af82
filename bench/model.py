"""A training step of the demo model on "opencl" beside torch's own device: time, and the most memory held.

    python -m bench.model --device opencl:0|cpu|cuda [--linear dense|counter|reference] [--large]   one, as JSON

Each side is measured in a process of its own, in turn: torch's engine runs one accelerator a process. "reference" are
counter layers as plain torch would compute them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from bench.harness import Bench, Row
from memtrain_cl.lm.config import ModelConfig, TrainConfig

WARM = 3
#: The size for GPUs: dim 768, 12 layers, 16 x 512 tokens.
LARGE = {"layers": 12, "dim": 768, "heads": 12, "seq": 512, "batch": 16}


def measure(device: str, linear: str, large: bool, steps: int) -> dict[str, Any]:
    """Median seconds of a step after the warm-up, and the device's peak of allocated bytes (None on the host)."""
    import torch

    from memtrain_cl import reference
    from memtrain_cl.lm.data import load_corpus
    from memtrain_cl.lm.trainer import Trainer

    if device.startswith("opencl"):
        # Here alone: where "opencl" is registered, CUDA's backward ends in an assertion of torch's.
        from memtrain_cl.torch_device.fallback import strict

        strict()
    sizes: dict[str, Any] = {**(LARGE if large else {})}
    batch = sizes.pop("batch", TrainConfig().batch)
    kind, room = ("counter", reference) if linear == "reference" else (linear, None)
    config = TrainConfig(model=ModelConfig(linear=kind, **sizes), batch=batch)
    trainer = Trainer(config, load_corpus(config.text, config.model.seq), room, device)
    module: Any = getattr(torch, device.partition(":")[0], None)
    times, losses = [], []
    for step in range(WARM + steps):
        if step == WARM and hasattr(module, "reset_peak_memory_stats"):
            module.reset_peak_memory_stats()
        if hasattr(module, "synchronize"):
            module.synchronize()
        started = time.perf_counter()
        losses.append(trainer.train_step())
        if hasattr(module, "synchronize"):
            module.synchronize()
        times.append(time.perf_counter() - started)
    peak = module.max_memory_allocated() if hasattr(module, "max_memory_allocated") else None
    reserved = module.max_memory_reserved() if hasattr(module, "max_memory_reserved") else None
    return {
        "seconds": statistics.median(times[WARM:]),
        "tokens": trainer.tokens_per_step,
        "peak_bytes": peak,
        "reserved_bytes": reserved,
        "losses": losses,
    }


def _child(device: str, linear: str, large: bool, steps: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.model", "--device", device, "--linear", linear, "--steps", str(steps)]
    done = subprocess.run(
        command + (["--large"] if large else []), env=dict(os.environ), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the measurement on {device} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def run(bench: Bench) -> None:
    """The large model on GPUs beside torch CUDA; the default one on CPUs beside torch, in turns."""
    import torch

    large = bench.events
    place = "cuda" if torch.cuda.is_available() else "cpu"
    if large and place == "cpu":
        return  # no peer on this machine finishes a step of that size
    turns, steps = (1, 10) if large else (3, 8)
    sides = [("opencl:0", "dense"), ("opencl:0", "counter"), (place, "dense")]
    sides += [] if large else [(place, "reference")]
    # In turn, so that a busy machine slows all alike.
    results = [[_child(*side, large, steps) for side in sides] for _ in range(turns)]
    of = {side: [turn[i] for turn in results] for i, side in enumerate(sides)}
    us = {side: statistics.median(result["seconds"] for result in found) * 1e6 for side, found in of.items()}
    names = {"dense": f"torch {place} float32, dense", "reference": "counter layers in plain torch"}
    for linear in ("dense", "counter"):
        own = of["opencl:0", linear][0]
        memory = f"peak {own['peak_bytes'] / 2**20:.0f} MiB, reserved {own['reserved_bytes'] / 2**20:.0f}"
        peers = {names[kind]: us[place, kind] for at, kind in sides if at == place}
        error = "checked by the tests"
        if linear == "dense":
            other = of[place, "dense"][0]
            apart = max(abs(a / b - 1) for a, b in zip(own["losses"], other["losses"], strict=True))
            error = f"losses differ by {apart:.1e}"
            if other["peak_bytes"]:
                memory += f"; torch {place} {other['peak_bytes'] / 2**20:.0f} MiB"
        size = "12 x 768, 16 x 512 tokens" if large else "the default size"
        rate = own["tokens"] / us["opencl:0", linear] * 1e6
        name = f"step, {linear} linears, {size} ({rate:.0f} tokens/s; {memory})"
        bench.add(Row("model", name, us["opencl:0", linear], error=error, peers=peers))


def main() -> None:
    """One measurement."""
    parser = argparse.ArgumentParser(prog="python -m bench.model", description=__doc__)
    parser.add_argument("--device", default="opencl:0")
    parser.add_argument("--linear", default="dense")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    print(json.dumps(measure(options.device, options.linear, options.large, options.steps)))


if __name__ == "__main__":
    main()
