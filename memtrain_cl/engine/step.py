"""One token through blocks of packed weights, five launches a block, all of them prepared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from memtrain_cl.array import empty
from memtrain_cl.device import Device
from memtrain_cl.engine.linear import Linear, PackedLinear, operand_of
from memtrain_cl.engine.weights import Block
from memtrain_cl.launchers.counter_matvec import prepare_counter_matvec
from memtrain_cl.launchers.token_attention import Cache, prepare_token_attention
from memtrain_cl.lm.config import ModelConfig
from memtrain_cl.operand import Operand
from memtrain_cl.program import Launch


class Step:
    """The launches of a token. x: float32 [1, dim], where its embedding is put and the last block's result is found."""

    def __init__(self, device: Device, config: ModelConfig, blocks: Sequence[Block], caches: Sequence[Cache]) -> None:
        widths = (config.dim, 3 * config.dim, config.dim, config.hidden)
        x, rows, mixed, hidden = (empty(device, (1, width), np.float32) for width in widths)
        self.x: Operand = operand_of(x)
        self._blocks: list[tuple[Launch, Callable[[int], Any], Launch, Launch, Launch]] = []
        for block, cache in zip(blocks, caches, strict=True):
            qkv, output, gate_up, down = map(_packed, (block.qkv, block.output, block.gate_up, block.down))
            self._blocks.append(
                (
                    prepare_counter_matvec(*qkv.arrays, x, rows, C=qkv.C, norm=block.attention_norm),
                    prepare_token_attention(rows, cache, mixed),
                    prepare_counter_matvec(*output.arrays, mixed, x, C=output.C, add=x),
                    prepare_counter_matvec(
                        *gate_up.arrays, x, hidden, C=gate_up.C, norm=block.feed_forward_norm, gated=True
                    ),
                    prepare_counter_matvec(*down.arrays, hidden, x, C=down.C, add=x),
                )
            )

    def __call__(self, position: int) -> None:
        """Enqueue all blocks for the token whose embedding is in x."""
        for qkv, attend, output, gate_up, down in self._blocks:
            qkv()
            attend(position)
            output()
            gate_up()
            down()


def _packed(linear: Linear) -> PackedLinear:
    if not isinstance(linear, PackedLinear):
        raise TypeError(f"expected packed weights, got {type(linear).__name__}")
    return linear
