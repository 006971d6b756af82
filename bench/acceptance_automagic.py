"""Whether Automagic finds its learning rate: the byte-level model with dense linears, 800 steps from three rates that
lie six decades apart, beside AdamW at five rates with the trainer's schedule.

Losses are means in nats a byte over the validation text. They must lie within a tenth of each other, and each within a
tenth of AdamW's best.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from memtrain_cl.export.atomic import atomic_path
from memtrain_cl.lm.config import ModelConfig, TrainConfig
from memtrain_cl.lm.data import Corpus, load_corpus, training_batch
from memtrain_cl.lm.trainer import Trainer
from memtrain_cl.optim import Automagic

STEPS = 800
STARTS = (1e-8, 1e-6, 1e-2)
PEAKS = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)
WITHIN = 0.1
#: Steps between the points of a curve that are filed.
EVERY = 10


def _trainer(corpus: Corpus, lr: float, place: str) -> Trainer:
    return Trainer(TrainConfig(model=ModelConfig(linear="dense"), lr=lr, steps=STEPS), corpus, None, place)


def automagic_run(corpus: Corpus, lr: float, place: str, steps: int = STEPS) -> dict[str, Any]:
    """(validation loss, learning rates, losses of the last steps) of a run that starts at lr."""
    trainer = _trainer(corpus, 1e-3, place)
    config = trainer.config
    optimizer = Automagic(trainer.model.parameters(), lr=lr)
    rates, losses = [], []
    for step in range(steps):
        windows = training_batch(corpus.train, config.seed, step, config.batch, config.model.seq)
        tokens = torch.from_numpy(windows).to(trainer.device)
        logits = trainer.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if step % EVERY == 0 or step == steps - 1:
            rates.append(optimizer.param_groups[0]["lr"])
            losses.append(loss.item())
    return {"start": lr, "val_loss": trainer.evaluate(), "rates": rates, "losses": losses}


def adamw_run(corpus: Corpus, lr: float, place: str, steps: int = STEPS) -> dict[str, Any]:
    """The validation loss of AdamW with this peak rate."""
    trainer = _trainer(corpus, lr, place)
    for _ in range(steps):
        trainer.train_step()
    return {"peak": lr, "val_loss": trainer.evaluate()}


def plot(runs: list[dict[str, Any]], path: Path, every: int = EVERY) -> bool:
    """The learning rates, one each `every` steps, as a picture; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for run in runs:
        axes.semilogy(
            range(0, every * len(run["rates"]), every),
            run["rates"],
            label=f"from {run['start']:g}: loss {run['val_loss']:.3f}",
        )
    axes.set(xlabel="step", ylabel="learning rate", title="Automagic finds its learning rate")
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return True


def run(place: str, picture: Path | None = None) -> dict[str, Any]:
    """All runs; ok where the losses are as near to each other, and to AdamW's best, as they must be."""
    corpus = load_corpus((), ModelConfig().seq)
    mine = []
    for start in STARTS:
        mine.append(automagic_run(corpus, start, place))
        print(f"automagic from {start:g}: {mine[-1]['val_loss']:.4f}, rate {mine[-1]['rates'][-1]:.2e}", flush=True)
    theirs = []
    for peak in PEAKS:
        theirs.append(adamw_run(corpus, peak, place))
        print(f"adamw at {peak:g}: {theirs[-1]['val_loss']:.4f}", flush=True)
    if picture is not None:
        plot(mine, picture)
    losses = [own["val_loss"] for own in mine]
    best = min(own["val_loss"] for own in theirs)
    apart, above = max(losses) / min(losses) - 1, max(losses) / best - 1
    fine = apart <= WITHIN and above <= WITHIN
    return {"automagic": mine, "adamw": theirs, "apart": apart, "above_adamw": above, "within": WITHIN, "ok": fine}
