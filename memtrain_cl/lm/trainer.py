"""One training run in memory: model, AdamW, the step, validation, and the state from which it continues bit for bit."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memtrain_cl.errors import MemtrainError
from memtrain_cl.lm.config import TrainConfig
from memtrain_cl.lm.data import Corpus, training_batch, validation_windows
from memtrain_cl.lm.keeping import Keeping
from memtrain_cl.lm.model import CausalLM, counter_layers

WARM_UP_STEPS = 40
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1  # of AdamW's matrices; gains of norms and counter layers have none
MAX_GRAD_NORM = 1.0  # over AdamW's parameters
VALIDATION_WINDOWS = 128
_VALIDATION_BATCH = 16


def schedule(step: int) -> float:
    """Share of the peak rates at `step` (from 0): linear warm-up, then the inverse square root of the step.

    It does not depend on the number of steps, so a run that is stopped, or lengthened later, takes the steps of one
    that went through.
    """
    return min((step + 1) / WARM_UP_STEPS, math.sqrt(WARM_UP_STEPS / (step + 1)))


class Trainer:
    """A run of `config` over `corpus`. `ops` is the counter layers' backend (None: OpenCL). `device`, torch's, holds
    the model, its gradients and the optimizer's state.

    torch.manual_seed(config.seed) rules the first weights and the counters' rounding; the batches follow from (seed,
    step). Two trainers of equal arguments on one device therefore hold equal bytes after equal steps, also across
    `state` and `load_state`.
    """

    def __init__(
        self, config: TrainConfig, corpus: Corpus, ops: Any = None, device: torch.device | str = "cpu"
    ) -> None:
        self.config = config
        self.corpus = corpus
        torch.manual_seed(config.seed)
        self.device = torch.device(device)
        # Made on the host, so that a seed gives the same first weights everywhere.
        self.model = CausalLM(config.model, ops).to(self.device)
        self.counters = counter_layers(self.model)
        for layer in self.counters:
            layer.update_enabled = not config.freeze_counters
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=BETAS, fused=True)
        self.keeping = Keeping(config, self.model, self.device)
        self.step = 0
        self.seconds = 0.0  # spent in steps; not part of the state, which holds nothing that a clock decides

    @property
    def tokens_per_step(self) -> int:
        """Bytes whose successors one step predicts."""
        return self.config.batch * self.config.model.seq

    def train_step(self) -> float:
        """One step; returns its loss in nats a byte, before the update. MemtrainError when that is not finite;
        nothing is updated then.
        """
        started = time.perf_counter()
        factor = schedule(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * factor
        for layer in self.counters:
            layer.lr = self.config.model.counter_lr * factor
        # Before the forward, whose activations then do not lie beside the last step's gradients.
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.next_loss()
        value = loss.item()
        if not math.isfinite(value):
            raise MemtrainError(
                f"the loss of step {self.step + 1} is {value}: a smaller --lr or --counter-lr than "
                f"{self.config.lr:g} and {self.config.model.counter_lr:g} may keep it finite"
            )
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.step += 1
        self.seconds += time.perf_counter() - started
        return value

    def next_loss(self) -> Tensor:
        """The loss of the next step's batch in nats a byte, with its graph."""
        text, seq = self.corpus.train, self.config.model.seq
        batch = training_batch(text, self.config.seed, self.step, self.config.batch, seq)
        with self.keeping.forward(self.step):
            return self._loss(batch, "mean")

    def learning_rates(self) -> tuple[float, float | None]:
        """The rates of the last step: AdamW's, and the counter layers' (None where there are none)."""
        return self.optimizer.param_groups[0]["lr"], self.counters[0].lr if self.counters else None

    def evaluate(self) -> float:
        """Mean loss in nats a byte over evenly spread windows of the validation text, the same ones each time.
        Changes no state.
        """
        windows = validation_windows(self.corpus.valid, VALIDATION_WINDOWS, self.config.model.seq)
        total = 0.0
        size = min(_VALIDATION_BATCH, self.keeping.validation_batch)
        self.model.eval()
        try:
            with torch.no_grad():
                for start in range(0, len(windows), size):
                    total += self._loss(windows[start : start + size], "sum").item()
        finally:
            self.model.train()
        return total / windows[:, 1:].size

    def _loss(self, windows: np.ndarray, reduction: str) -> Tensor:
        tokens = torch.from_numpy(windows).to(self.device)
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction=reduction)

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs, as tensors and plain values (the data position is the step)."""
        return {
            "step": self.step,
            "corpus": self.corpus.fingerprint(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "torch_rng": torch.get_rng_state(),
            **self.keeping.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`. ValueError when it was trained on other text or belongs to another model."""
        if state["corpus"] != self.corpus.fingerprint():
            raise ValueError(f"expected the text that the run began with, got other bytes from {self.corpus.name}")
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["torch_rng"])
            self.keeping.load_state(state)
        except (RuntimeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"expected the state of this model, got another: {str(error).splitlines()[0]}") from error
        self.step = state["step"]
