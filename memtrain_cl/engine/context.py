"""A sequence of tokens under way: keys and values on the device, and the passes that continue it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memtrain_cl.array import empty, from_numpy
from memtrain_cl.device import Device
from memtrain_cl.engine.linear import array_of, normed, operand_of
from memtrain_cl.engine.step import Step
from memtrain_cl.engine.weights import Block, Weights
from memtrain_cl.launchers.attention import attention
from memtrain_cl.launchers.index import select
from memtrain_cl.launchers.token_attention import Cache, rotate_rows, token_attention
from memtrain_cl.lm.config import ModelConfig
from memtrain_cl.operand import Operand, empty_operand
from memtrain_cl.runtimes import import_pyopencl


def rotary_angles(config: ModelConfig, positions: int) -> np.ndarray:
    """Cosine and sine of the angles by which the pairs of a head turn, float32 [positions, head_dim/2, 2].

    Frequencies and angles are float32, as in the model that was trained: far on, their rounding is seen.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = (config.rope_theta ** -exponents.astype(np.float64)).astype(np.float32)
    angles = np.outer(np.arange(positions, dtype=np.float32), frequencies).astype(np.float64)
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)


class Context:
    """Tokens that a model has seen, at most `capacity` of them. `Engine.context` makes it."""

    def __init__(self, device: Device, config: ModelConfig, weights: Weights, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._device = device
        self._config = config
        self._weights = weights
        shape = (config.heads, capacity, config.head_dim)
        # First what the device may refuse: a file may tell of any length.
        kept = [[empty(device, shape, np.float32) for _ in range(2)] for _ in weights.blocks]
        scores = empty(device, shape[:2], np.float32)
        angles = from_numpy(device, rotary_angles(config, capacity))
        self._caches = [Cache(keys, values, angles, scores) for keys, values in kept]
        packed = config.linear == "counter"
        self._step = Step(device, config, weights.blocks, self._caches) if packed else None

    def clear(self) -> None:
        """Forget all tokens."""
        self.length = 0

    def extend(self, tokens: bytes | Sequence[int] | np.ndarray, *, every: bool = False) -> np.ndarray:
        """The logits after the last of the tokens, float32 [vocab]; every: after each of them, [tokens, vocab].

        ValueError without a token, for one outside the vocabulary, and where the capacity does not suffice.
        """
        values = self._checked(tokens)
        if len(values) == 1 and self._step is not None:
            x = self._step.x
            self._embed_one(values[0], x)
            self._step(self.length)
        else:
            x = self._embedded(values)
            for block, cache in zip(self._weights.blocks, self._caches, strict=True):
                x = self._through(block, cache, x)
        if not every:
            x = x.viewed((1, x.shape[1]), offset=(x.shape[0] - 1) * x.shape[1])
        logits = array_of(self._weights.head.apply(normed(x, self._weights.norm))).numpy()
        self.length += len(values)
        return logits if every else logits[0]

    def _checked(self, tokens: bytes | Sequence[int] | np.ndarray) -> np.ndarray:
        values = np.frombuffer(tokens, np.uint8) if isinstance(tokens, bytes) else np.asarray(tokens)
        if values.ndim != 1 or values.size == 0 or values.dtype.kind not in "iu":
            raise ValueError(f"expected a list of at least one token, got {values.dtype} {list(values.shape)}")
        if values.min() < 0 or values.max() >= self._config.vocab:
            raise ValueError(f"expected tokens in 0..{self._config.vocab - 1}, got {values.min()} to {values.max()}")
        if self.length + values.size > self.capacity:
            raise ValueError(f"expected at most {self.capacity} bytes of context, got {self.length + values.size}")
        return values.astype(np.int64)

    def _embedded(self, tokens: np.ndarray) -> Operand:
        """[tokens, dim]"""
        x = empty_operand(self._device, (len(tokens), self._config.dim), "float32")
        if len(tokens) == 1:
            self._embed_one(tokens[0], x)
        else:
            index = Operand(from_numpy(self._device, tokens), tokens.shape, (1,), 0, "int64")
            select(operand_of(self._weights.embedding), 0, index, x)
        return x

    def _embed_one(self, token: np.int64, x: Operand) -> None:
        """By a copy, which needs no list of tokens on the device."""
        row = 4 * self._config.dim
        self._device.check_process()
        import_pyopencl().enqueue_copy(
            self._device.queue,
            x.buffer,
            self._weights.embedding.buffer,
            byte_count=row,
            src_offset=row * int(token),
            dst_offset=0,
        )

    def _through(self, block: Block, cache: Cache, x: Operand) -> Operand:
        rows = block.qkv.apply(x, norm=block.attention_norm)
        x = block.output.apply(self._attended(rows, cache), add=x)
        hidden = block.gate_up.apply(x, norm=block.feed_forward_norm, gated=True)
        return block.down.apply(hidden, add=x)

    def _attended(self, rows: Operand, cache: Cache) -> Operand:
        """[tokens, dim] of rows [tokens, 3*dim]: query, key and value."""
        config, start, count = self._config, self.length, rows.shape[0]
        heads, head, dim = config.heads, config.head_dim, config.dim
        out = empty_operand(self._device, (count, dim), "float32")
        if count == 1:
            token_attention(array_of(rows), cache, start, array_of(out))
            return out
        rotate_rows(array_of(rows), cache, start, count)
        end, plane = start + count, self.capacity * head
        query = rows.viewed((1, heads, count, head), (3 * dim * count, head, 3 * dim, 1))
        key, value = (
            operand_of(kept).viewed((1, heads, end, head), (heads * plane, plane, head, 1))
            for kept in (cache.keys, cache.values)
        )
        mask = None
        if start:
            seen = from_numpy(self._device, np.tri(count, end, start, dtype=np.bool_))
            mask = Operand(seen, seen.shape, (end, 1), 0, "bool")
        by_head = out.viewed((1, heads, count, head), (dim * count, head, dim, 1))
        levels = empty_operand(self._device, (1, heads, count), "float32")
        attention(query, key, value, mask, by_head, levels, causal=mask is None)
        return out
