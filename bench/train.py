"""Tokens a second of the default model, counter layers on the device beside the same model dense in torch."""

from __future__ import annotations

import statistics
from dataclasses import replace

from bench.harness import Bench, Row
from memtrain_cl.device import use_device
from memtrain_cl.lm.config import TrainConfig
from memtrain_cl.lm.data import load_corpus
from memtrain_cl.lm.trainer import Trainer

STEPS = 12


def run(bench: Bench) -> None:
    """Median step times of both models, taken in turn so that a busy machine slows both alike."""
    config = TrainConfig()
    corpus = load_corpus(config.text, config.model.seq)
    times: dict[str, list[float]] = {"counter": [], "dense": []}
    with use_device(bench.device):
        trainers = {
            kind: Trainer(replace(config, model=replace(config.model, linear=kind)), corpus, None) for kind in times
        }
        for turn in range(STEPS + 2):
            for kind, trainer in trainers.items():
                before = trainer.seconds
                trainer.train_step()
                if turn >= 2:
                    times[kind].append((trainer.seconds - before) * 1e6)
    us = {kind: statistics.median(values) for kind, values in times.items()}
    tokens = trainers["counter"].tokens_per_step
    bench.add(
        Row(
            "train",
            f"step of the default model, {tokens} tokens: {tokens / us['counter'] * 1e6:.0f} tokens/s",
            us["counter"],
            error="checked by the tests",
            peers={f"dense, torch AdamW ({tokens / us['dense'] * 1e6:.0f} tokens/s)": us["dense"]},
        )
    )
