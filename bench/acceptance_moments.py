"""The byte-level model trained by Adam on moments held in each way, and how far each ends from dense moments.

All take the same steps on the same bytes from the same first weights, as `memtrain_cl.lm.trainer.Trainer` makes them
with dense linears; only the optimizer differs.
"""

from __future__ import annotations

import math
import time
from typing import Any

from bench.agreement import PLACE
from memtrain_cl import memory_report
from memtrain_cl.lm.config import ModelConfig, TrainConfig
from memtrain_cl.lm.data import load_corpus
from memtrain_cl.lm.trainer import BETAS, Trainer
from memtrain_cl.optim import CompressedAdam

STEPS = 400
#: Options of each run, and how far above dense moments its validation loss may end; None where it is only told.
RUNS: dict[str, tuple[dict[str, Any], float | None]] = {
    "dense": ({"compression_method": "dense"}, None),
    "int8": ({"compression_method": "int8"}, 0.02),
    "int8 stochastic": ({"compression_method": "int8", "moment_rounding": "stochastic"}, None),
    "dynamic": ({"compression_method": "int8", "code": "dynamic"}, 0.02),
    "dynamic stochastic": (
        {"compression_method": "int8", "code": "dynamic", "moment_rounding": "stochastic"},
        None,
    ),
    "profile": ({"compression_method": "profile"}, 0.05),
    "auto": ({"compression_method": "auto"}, None),
}


def train(steps: int, place: Any = PLACE, **options: Any) -> dict[str, Any]:
    """One run; its validation loss in bits a byte, its state's bytes a parameter, its time a step."""
    config = TrainConfig(model=ModelConfig(linear="dense"), steps=steps)
    trainer = Trainer(config, load_corpus(config.text, config.model.seq), device=place)
    groups = [
        {name: group[name] for name in ("params", "lr", "weight_decay")} for group in trainer.optimizer.param_groups
    ]
    # The trainer's own is torch's AdamW, which has taken no step.
    optimizer = CompressedAdam(groups, betas=BETAS, decoupled_weight_decay=True, **options)
    trainer.optimizer = optimizer  # type: ignore[assignment]
    started = time.monotonic()
    losses = [trainer.train_step() for _ in range(steps)]
    seconds = time.monotonic() - started
    report = memory_report(trainer.model, optimizer)
    return {
        "val_bpb": trainer.evaluate() / math.log(2),
        "last_train_bpb": sum(losses[-20:]) / len(losses[-20:]) / math.log(2),
        "state_bytes_a_parameter": report.totals["optimizer"] / sum(p.numel() for p in trainer.model.parameters()),
        "methods": sorted({str(method) for method in optimizer.methods().values()}),
        "seconds_a_step": seconds / steps,
    }


def run(steps: int = STEPS) -> dict[str, Any]:
    """Every run; ok where those with a bound keep to it."""
    rows: dict[str, dict[str, Any]] = {}
    fine = True
    for name, (options, within) in RUNS.items():
        rows[name] = train(steps, **options)
        above = rows[name]["val_bpb"] / rows["dense"]["val_bpb"] - 1
        fine = fine and (within is None or above <= within)
        rows[name].update({"above_dense": above, "within": within})
        print(f"moments {name}: {rows[name]['val_bpb']:.4f} bits per byte, {100 * above:+.2f} %", flush=True)
    return {"steps": steps, "runs": rows, "ok": fine}
