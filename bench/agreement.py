"""Whether the default model trains on "opencl" as it does in torch on the host: ``python -m bench.agreement``.

1. dense linears: the losses of 100 steps follow torch CPU's to 1e-3, relatively;
2. counters, one step from equal state (the first weights, and the state after 50 steps): losses within 1e-5, and at
   most one code in 10,000 another, by one quantum;
3. counters, 100 steps of three seeds: the mean loss of the last 20 steps within 3 % (rounding flips make runs part);
4. a run saved and resumed on the device ends with the bytes of one that went through.

Everything on the device runs in strict mode. What the host computes is kept in --host FILE, so that several platforms
are compared with one run of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import memtrain_cl
import memtrain_cl.torch_device
from bench.harness import RESULTS, slug
from memtrain_cl.device import devices
from memtrain_cl.export.atomic import atomic_path
from memtrain_cl.lm.checkpoint import load_checkpoint, save_checkpoint
from memtrain_cl.lm.config import ModelConfig, TrainConfig
from memtrain_cl.lm.data import Corpus, load_corpus
from memtrain_cl.lm.trainer import Trainer
from memtrain_cl.reference import decode_state
from memtrain_cl.torch_device.fallback import strict

PLACE = "opencl:0"
#: What `compare` does.
EVERY = ("one step", "resume", "dense", "seeds")
STEPS = 100
SEEDS = (0, 1, 2)
LAST = 20
#: Steps before the state from which one step is compared, and steps of the resumed run.
APART, RESUMED = 50, 10


def make(corpus: Corpus, linear: str, seed: int, place: str) -> Trainer:
    """A trainer of the default configuration."""
    return Trainer(TrainConfig(model=ModelConfig(linear=linear), seed=seed), corpus, None, place)


def losses(corpus: Corpus, linear: str, seed: int, place: str) -> list[float]:
    """Of STEPS steps."""
    trainer = make(corpus, linear, seed, place)
    return [trainer.train_step() for _ in range(STEPS)]


def host_side(corpus: Corpus, file: Path | None) -> dict[str, list[float]]:
    """The host's curves, from `file` where it exists."""
    if file is not None and file.exists():
        kept: dict[str, list[float]] = json.loads(file.read_text())
        return kept
    curves = {"dense": losses(corpus, "dense", 0, "cpu")}
    curves |= {f"counter {seed}": losses(corpus, "counter", seed, "cpu") for seed in SEEDS}
    if file is not None:
        file.write_text(json.dumps(curves))
    return curves


def one_step(corpus: Corpus, before: int) -> dict[str, Any]:
    """The device and the host from one state, `before` steps into a run."""
    host, device = make(corpus, "counter", 0, "cpu"), make(corpus, "counter", 0, PLACE)
    for _ in range(before):
        host.train_step()
    device.load_state(host.state())
    first = [trainer.train_step() for trainer in (host, device)]
    different, weights, farthest = 0, 0, 0
    for ours, theirs in zip(device.counters, host.counters, strict=True):
        values = []
        for layer in (ours, theirs):
            t, c = decode_state(layer.codes().cpu(), layer.C)
            values.append(t.to(torch.int64) * layer.C + c)
        apart = (values[0] - values[1]).abs()
        different += int((apart > 0).sum())
        weights += apart.numel()
        farthest = max(farthest, int(apart.max()))
    loss = abs(first[1] - first[0])
    return {
        "after_steps": before,
        "loss_difference": loss,
        "codes": weights,
        "codes_that_differ": different,
        "quanta_at_most": farthest,
        "ok": loss <= 1e-5 and different * 10_000 <= weights and farthest <= 1,
    }


def resume(corpus: Corpus) -> dict[str, Any]:
    """Two halves with a checkpoint between them against a run that went through."""
    through, half = (make(corpus, "counter", 0, PLACE) for _ in range(2))
    for _ in range(RESUMED):
        through.train_step()
    for _ in range(RESUMED // 2):
        half.train_step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        save_checkpoint(path, half.config, half.state())
        config, state = load_checkpoint(path)
        rest = Trainer(config, corpus, None, PLACE)
        rest.load_state(state)
        while rest.step < RESUMED:
            rest.train_step()
        ends = [Path(folder) / name for name in ("through", "rest")]
        for end, trainer in zip(ends, (through, rest), strict=True):
            save_checkpoint(end, trainer.config, trainer.state())
        same = ends[0].read_bytes() == ends[1].read_bytes()
    return {"steps": RESUMED, "ok": same}


def compare(host_file: Path | None, parts: set[str]) -> dict[str, Any]:
    """All of it, or the parts named."""
    corpus = load_corpus((), ModelConfig().seq)
    found: dict[str, Any] = {}
    with strict():
        if "one step" in parts:
            found["one_step"] = [one_step(corpus, before) for before in (0, APART)]
        if "resume" in parts:
            found["resume"] = resume(corpus)
        curves = host_side(corpus, host_file) if parts & {"dense", "seeds"} else {}
        if "dense" in parts:
            own = losses(corpus, "dense", 0, PLACE)
            apart = max(abs(a / b - 1) for a, b in zip(own, curves["dense"], strict=True))
            found["dense"] = {"steps": STEPS, "last_loss": own[-1], "largest_difference": apart, "ok": apart <= 1e-3}
        if "seeds" in parts:
            ends = {seed: statistics.mean(losses(corpus, "counter", seed, PLACE)[-LAST:]) for seed in SEEDS}
            wanted = statistics.mean(statistics.mean(curves[f"counter {seed}"][-LAST:]) for seed in SEEDS)
            given = statistics.mean(ends.values())
            found["seeds"] = {
                "device": given,
                "host": wanted,
                "difference": given / wanted - 1,
                "ok": abs(given / wanted - 1) <= 0.03,
            }
    return found


def all_hold(found: dict[str, Any]) -> bool:
    """Whether every part of what `compare` found is as it should be."""
    rows = [row for value in found.values() for row in (value if isinstance(value, list) else [value])]
    return all(row["ok"] for row in rows)


def main() -> None:
    """Compare, file, and exit 1 when something does not hold."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.agreement", description="Training on opencl beside the host."
    )
    parser.add_argument("--host", type=Path, help="file that keeps the host's losses between runs")
    parser.add_argument("--out", type=Path, help="file to write")
    parser.add_argument("--parts", nargs="+", choices=EVERY, default=EVERY)
    options = parser.parse_args()
    started = time.monotonic()
    found = compare(options.host, set(options.parts))
    info = devices()[0]
    name = f"agreement-{slug(f'{info.platform} {info.platform_version[:40]} {info.name}')}.json"
    target = options.out or RESULTS / memtrain_cl.__version__ / name
    head = {"version": memtrain_cl.__version__, "date": time.strftime("%Y-%m-%d"), "device": info.label}
    body = {**head, "torch": torch.__version__, "seconds": round(time.monotonic() - started), **found}
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(target) as temporary:
        temporary.write_text(json.dumps(body, indent=1) + "\n")
    print(json.dumps(body, indent=1))
    print(f"wrote {os.path.relpath(target)}")
    sys.exit(0 if all_hold(found) else 1)


if __name__ == "__main__":
    main()
