"""What is promised of memory: time for bytes, limits that are met, forecasts that hold, and models that just fit."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from bench.recompute import CONFIG, DEPTHS, reversible, settings
from memtrain_cl.device import get_device
from memtrain_cl.errors import OutOfMemory
from memtrain_cl.lm.bill import REGIMES, Bill, forecast, largest, weights_of, widest_with, width_step
from memtrain_cl.lm.config import MIB, ModelConfig, TrainConfig
from memtrain_cl.lm.data import Corpus
from memtrain_cl.lm.measure import random_corpus
from memtrain_cl.lm.trainer import Trainer

PLACE = "opencl:0"
#: A step may take so many times as long as one that keeps everything.
SLOWER = {"recompute": 1.4, "4": 1.25}
#: The most bytes of a reversible chain may grow so much from the first depth to the last.
DEEPER = 1.3
#: A forecast may be off by so much.
WITHIN = {"weights and state": 0.05, "gradients": 0.05, "optimizer": 0.05, "activations": 0.15}
#: The memory of the search, and how much larger a model must not fit any more.
LIMIT = 256 * MIB
TOO_LARGE = 1.3
STEPS = 3


def _apart(measured: int, foretold: int) -> float:
    return abs(measured - foretold) / max(measured, foretold, 1)


def compare_settings(linear: str) -> dict[str, Any]:
    """Time and bytes of every setting, and how far forecasts are off."""
    found = settings(PLACE, linear, turns=7)
    ratios = {kept: setting.seconds / found["fp"].seconds for kept, setting in found.items()}
    config = replace(CONFIG.model, linear=linear)
    off = {}
    for kept in ("fp", "8", "4", "recompute"):
        bill = forecast(config, CONFIG.batch, kept, info=get_device(0).info)
        off[kept] = {pool: _apart(found[kept].bill.pools[pool], bill.pools[pool]) for pool in WITHIN}
        off[kept]["peak"] = _apart(found[kept].bill.peak, bill.peak)
    auto = found["auto"]
    fine = {
        "time": all(ratios[kept] <= most for kept, most in SLOWER.items()),
        "forecast": all(off[kept][pool] <= most for kept in off for pool, most in WITHIN.items()),
        "auto": auto.bill.peak <= auto.limit,
    }
    rows = {kept: asdict(setting) for kept, setting in found.items()}
    print(f"{linear}: times of a full step {ratios}, forecasts off by {off}, {fine}", flush=True)
    return {"settings": rows, "times_full": ratios, "forecast_off": off, "fine": fine, "ok": all(fine.values())}


def compare_depths() -> dict[str, Any]:
    """Bytes of reversible chains."""
    rows = {depth: dict(zip(("kept", "peak", "seconds"), reversible(PLACE, depth), strict=True)) for depth in DEPTHS}
    first, last = rows[DEPTHS[0]], rows[DEPTHS[-1]]
    growth = {name: last[name] / first[name] for name in ("kept", "peak")}
    return {"depths": rows, "growth": growth, "ok": all(ratio <= DEEPER for ratio in growth.values())}


def _trains(config: ModelConfig, kept: str, corpus: Corpus) -> bool:
    """Whether some steps go through under the limit."""
    run = TrainConfig(config, batch=CONFIG.batch, activations=kept, memory_limit=LIMIT / MIB)
    trainer = None
    try:
        trainer = Trainer(run, corpus, None, PLACE)
        for _ in range(STEPS):
            trainer.train_step()
    except OutOfMemory:
        return False
    finally:
        if trainer is not None:
            trainer.keeping.release()
    return True


def confirm_largest() -> dict[str, Any]:
    """Whether the widest model of each way to train goes through under the limit, and one 1.3 times as large fails."""
    shape = replace(CONFIG.model, layers=4)
    corpus = random_corpus(shape.seq)
    rows: dict[str, Any] = {}
    for name, (linear, kept) in REGIMES.items():
        found: tuple[ModelConfig, Bill] | None = largest(
            replace(shape, linear=linear), CONFIG.batch, kept, LIMIT, info=get_device(0).info
        )
        if found is None:
            rows[name] = {"ok": False}
            continue
        config, bill = found
        below = widest_with(config, int(TOO_LARGE * weights_of(config)))
        wider = replace(below, dim=below.dim + width_step(config.heads), hidden=0)
        fits, overflows = _trains(config, kept, corpus), not _trains(wider, kept, corpus)
        rows[name] = {
            "width": config.dim,
            "peak": bill.peak,
            "fits": fits,
            "wider": wider.dim,
            "size": weights_of(wider) / weights_of(config),
            "wider_fails": overflows,
            "ok": fits and overflows,
        }
        print(f"{name}: {rows[name]}", flush=True)
    return {"limit": LIMIT, "models": rows, "ok": all(row["ok"] for row in rows.values())}


def run() -> dict[str, Any]:
    """All of it."""
    from memtrain_cl.torch_device.backend import require_registered

    require_registered()
    parts = {
        "counter": compare_settings("counter"),
        "dense": compare_settings("dense"),
        "reversible": compare_depths(),
        "largest": confirm_largest(),
    }
    return {**parts, "ok": all(part["ok"] for part in parts.values())}
