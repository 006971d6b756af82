"""The memory bill of training `CausalLM`, measured: a few steps on bytes drawn at random."""

from __future__ import annotations

import numpy as np
import torch

from memtrain_cl.lm.bill import Bill, weights_of
from memtrain_cl.lm.config import TrainConfig
from memtrain_cl.lm.data import Corpus
from memtrain_cl.lm.trainer import Trainer
from memtrain_cl.meter import metered
from memtrain_cl.nn.memory import POOLS, memory_report


def random_corpus(seq: int) -> Corpus:
    """Text of no meaning, enough to train on and to validate with; the same each time."""
    text = np.random.default_rng(0).integers(0, 256, 64 * (seq + 1), dtype=np.uint8)
    return Corpus("random bytes", 0, text, text[: 16 * (seq + 1)])


def measure(config: TrainConfig, place: torch.device | str, *, steps: int = 1) -> Bill:
    """The pools of a step after `steps` others, and the most bytes alive in the step after that one, with AdamW's part.

    OutOfMemory where the device, or config.memory_limit, does not hold it.
    """
    trainer = Trainer(config, random_corpus(config.model.seq), None, place)
    try:
        for _ in range(steps):
            trainer.train_step()
        trainer.optimizer.zero_grad(set_to_none=True)
        report = memory_report(trainer.model, trainer.optimizer, loss_of=trainer.next_loss)
        trainer.optimizer.step()
        peak = report.pools["peak"]
        if trainer.device.type != "cpu":
            with metered(trainer.device) as meter:
                trainer.train_step()
                peak = max(peak, meter.peak())
    finally:
        trainer.keeping.release()
    return Bill({name: report.pools[name] for name in POOLS}, peak, weights_of(config.model))
