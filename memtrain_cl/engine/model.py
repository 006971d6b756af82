"""The model of an engine file on a device."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Self

import numpy as np

from memtrain_cl.device import Device, get_device
from memtrain_cl.engine.context import Context
from memtrain_cl.engine.weights import Weights, upload, widened
from memtrain_cl.export.packed import read_engine
from memtrain_cl.lm.config import ModelConfig
from memtrain_cl.lm.description import described_model
from memtrain_cl.probe import require_exact


class Engine:
    """A model that memtrain-cl train exported, in float32 with packed weights (whatever the counter layers computed in
    while they were trained). config: its shape. device: where it is.
    """

    def __init__(self, device: Device, config: ModelConfig, weights: Weights) -> None:
        self.device = device
        self.config = config
        self._weights = weights

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str | int | Device | None = None) -> Self:
        """The model of an engine file, on the device of a selector (see `get_device`). Tensors beside the counter
        layers may be float32, float16 or bfloat16.

        CorruptFile for a damaged file and for one that holds another kind of model, OSError where there is no file,
        UnsupportedDevice without a device.
        """
        config, parts = described_model(widened(read_engine(path, mapped=True)), path)
        home = get_device(device)
        home.check_process()
        require_exact(home)
        return cls(home, config, upload(home, config, parts))

    def context(self, capacity: int | None = None) -> Context:
        """Room for a sequence of at most `capacity` tokens, by default (and at most) config.seq.

        UnsupportedDevice where the device gives no buffer of that size.
        """
        most = self.config.seq
        if capacity is not None and not 1 <= capacity <= most:
            raise ValueError(f"expected a capacity of 1..{most} tokens, got {capacity}")
        return Context(self.device, self.config, self._weights, capacity or most)

    def logits(self, tokens: bytes | Sequence[int] | np.ndarray) -> np.ndarray:
        """The logits after each of the tokens, float32 [tokens, vocab]. Errors as in `Context.extend`."""
        return self.context(min(max(1, len(tokens)), self.config.seq)).extend(tokens, every=True)

    def generate(
        self, prompt: bytes | Sequence[int], count: int, temperature: float = 0.8, seed: int = 0
    ) -> Iterator[int]:
        """Yields `count` tokens that continue `prompt`; equal arguments on one device give equal tokens.

        temperature 0 takes the likeliest token, otherwise tokens are drawn from softmax(logits / temperature). When the
        context is full, it begins again with its newer half, so that text of any length can be made. Raises ValueError
        for an empty prompt, count < 1 or a temperature that is negative or not finite, and while it runs when logits
        are not finite.
        """
        if len(prompt) == 0:
            raise ValueError("expected a prompt of at least one byte, got an empty one")
        if count < 1:
            raise ValueError(f"expected at least 1 byte to generate, got {count}")
        if not (math.isfinite(temperature) and temperature >= 0):
            raise ValueError(f"expected a temperature of 0 or above, got {temperature}")
        if not 0 <= seed < 2**63:
            raise ValueError(f"expected 0 <= seed < 2^63, got {seed}")
        return self._continue(list(prompt), count, temperature, np.random.default_rng(seed))

    def _continue(self, text: list[int], count: int, temperature: float, chance: np.random.Generator) -> Iterator[int]:
        capacity = min(self.config.seq, len(text) + count)
        context = self.context(capacity)
        pending = text[-capacity:]
        for _ in range(count):
            if context.length + len(pending) > capacity:
                context.clear()
                pending = text[-max(1, capacity // 2) :]
            token = draw(context.extend(pending), temperature, chance)
            text.append(token)
            pending = [token]
            yield token


def draw(logits: np.ndarray, temperature: float, chance: np.random.Generator) -> int:
    """A token: the likeliest (the first of equals) at temperature 0, else from softmax(logits / temperature)."""
    if not np.isfinite(logits).all():
        raise ValueError("expected finite logits, got others: the model's weights are no numbers or far too large")
    if temperature == 0:
        return int(logits.argmax())
    weights = np.exp((logits.astype(np.float64) - float(logits.max())) / temperature)
    return int(chance.choice(len(weights), p=weights / weights.sum()))
