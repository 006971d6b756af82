"""A causal language model in Llama's shape, by default over bytes: RMSNorm before each part, RoPE, SwiGLU, no biases.

Module names are those of Llama checkpoints. The attention and feed-forward linears are counter layers (or float32 ones
for comparison); embedding, norms and head are float32 parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from memtrain_cl.lm.config import ModelConfig
from memtrain_cl.nn.counter import CompactCounterLinear, PackedRMSCounterLinear

EMBED_STD = 0.5  # of the first residual stream: the same order as what a block adds, so that bytes are seen through it


def make_linear(
    config: ModelConfig, in_features: int, out_features: int, gain: float = 1.0, ops: Any = None
) -> nn.Module:
    """A linear layer without bias, [..., in_features] -> [..., out_features], of the kind that `config.linear` names.

    Both kinds start with weights of variance gain^2 / in_features. `ops` is the counter layers' backend (None: OpenCL).
    """
    if config.linear == "counter":
        return PackedRMSCounterLinear(
            in_features,
            out_features,
            C=config.C,
            lr=config.counter_lr,
            # Means over a step's tokens leave gradients around 1e-3, which the floor of the layer's own would damp.
            rms_eps=config.counter_eps,
            forward_compute=config.counter_compute,
            update_compute=config.counter_compute,
            init_gain=gain,
            tile_rows=config.tile_rows,
            ops=ops,
        )
    linear = nn.Linear(in_features, out_features, bias=False)
    nn.init.normal_(linear.weight, std=gain / math.sqrt(in_features))
    return linear


def counter_layers(model: nn.Module) -> list[CompactCounterLinear]:
    """The counter layers of `model`, in module order."""
    return [module for module in model.modules() if isinstance(module, CompactCounterLinear)]


def linear_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that `make_linear` made (counter or dense), without the head."""
    blocks = cast("CausalLM", model).model.layers
    return [m for m in blocks.modules() if isinstance(m, (CompactCounterLinear, nn.Linear))]


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps) over the last dimension, float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rope_tables(config: ModelConfig, start: int, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin [length, head_dim] for positions start .. start+length-1; both halves of a row hold the same
    angles.
    """
    inverse = config.rope_theta ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim)
    angles = torch.outer(torch.arange(start, start + length, dtype=torch.float32), inverse)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns pair (i, i + head_dim/2) of x [..., length, head_dim] by its position's angle: Llama's rotate-half
    convention.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class KVCache:
    """Keys and values of the positions seen so far, float32 [layers][batch, heads, capacity, head_dim]."""

    def __init__(
        self, config: ModelConfig, batch: int, capacity: int, device: torch.device | str | None = None
    ) -> None:
        shape = (config.layers, batch, config.heads, capacity, config.head_dim)
        self.keys = torch.zeros(shape, device=device)
        self.values = torch.zeros(shape, device=device)
        self.capacity = capacity
        self.length = 0

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores [batch, heads, n, head_dim] behind `length` and returns all keys and values up to there."""
        end = self.length + key.shape[2]
        self.keys[layer, :, :, self.length : end] = key
        self.values[layer, :, :, self.length : end] = value
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class Attention(nn.Module):
    """Causal self-attention over [batch, length, dim], as many key heads as query heads."""

    def __init__(self, config: ModelConfig, index: int, out_gain: float, ops: Any) -> None:
        super().__init__()
        self.index = index
        self.heads = config.heads
        self.q_proj = make_linear(config, config.dim, config.dim, ops=ops)
        self.k_proj = make_linear(config, config.dim, config.dim, ops=ops)
        self.v_proj = make_linear(config, config.dim, config.dim, ops=ops)
        self.o_proj = make_linear(config, config.dim, config.dim, out_gain, ops=ops)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None) -> Tensor:
        batch, length, dim = x.shape

        def split(y: Tensor) -> Tensor:
            return y.view(batch, length, self.heads, dim // self.heads).transpose(1, 2)

        query = apply_rope(split(self.q_proj(x)), cos, sin)
        key = apply_rope(split(self.k_proj(x)), cos, sin)
        value = split(self.v_proj(x))
        mask = None
        if cache is not None:
            key, value = cache.append(self.index, key, value)
            seen = key.shape[2]
            mask = torch.ones(length, seen, dtype=torch.bool, device=x.device).tril(seen - length)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=cache is None)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, dim))
        return out


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), [..., dim] -> [..., dim]."""

    def __init__(self, config: ModelConfig, out_gain: float, ops: Any) -> None:
        super().__init__()
        self.gate_proj = make_linear(config, config.dim, config.hidden, ops=ops)
        self.up_proj = make_linear(config, config.dim, config.hidden, ops=ops)
        self.down_proj = make_linear(config, config.hidden, config.dim, out_gain, ops=ops)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); the two write with gain 1/sqrt(2 layers), so depth adds
    up to 1.
    """

    def __init__(self, config: ModelConfig, index: int, ops: Any) -> None:
        super().__init__()
        out_gain = 1.0 / math.sqrt(2 * config.layers)
        self.input_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config, index, out_gain, ops)
        self.post_attention_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = FeedForward(config, out_gain, ops)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Backbone(nn.Module):
    """Embedding, blocks and the last norm: tokens int64 [batch, length] -> float32 [batch, length, dim].

    again: whether backward runs blocks again instead of keeping what they computed, all alike or each by itself.
    context_fn: what torch.utils.checkpoint then asks about each, such as `memtrain_cl.recompute`.
    """

    def __init__(self, config: ModelConfig, ops: Any) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab, config.dim)
        nn.init.normal_(self.embed_tokens.weight, std=EMBED_STD)
        self.layers = nn.ModuleList(Block(config, index, ops) for index in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.again: bool | list[bool] = False
        self.context_fn: Any = noop_context_fn
        self._tables: tuple[Tensor, Tensor] | None = None

    def _rope(self, start: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The tables of these positions, computed on the host once for each device; longer ones as they are needed."""
        tables, needed = self._tables, start + length
        have = 0 if tables is None or tables[0].device != device else tables[0].shape[0]
        if tables is None or have < needed:
            # Twice as long each time, but not beyond the context: a file may name any.
            rows = max(needed, min(2 * have, self.config.seq))
            with torch.device("cpu"):
                made = rope_tables(self.config, 0, rows)
            self._tables = tables = (made[0].to(device), made[1].to(device))
        cos, sin = tables
        return cos[start : start + length], sin[start : start + length]

    def forward(self, tokens: Tensor, cache: KVCache | None) -> Tensor:
        start = 0 if cache is None else cache.length
        limit = self.config.seq if cache is None else cache.capacity
        if start + tokens.shape[1] > limit:
            raise ValueError(f"expected at most {limit} bytes of context, got {start + tokens.shape[1]}")
        x: Tensor = self.embed_tokens(tokens)
        cos, sin = self._rope(start, tokens.shape[1], x.device)
        again = [self.again] * len(self.layers) if isinstance(self.again, bool) else self.again
        for block, recomputed in zip(self.layers, again, strict=True):
            if recomputed and cache is None and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, None, use_reentrant=False, context_fn=self.context_fn)
            else:
                x = block(x, cos, sin, cache)
        if cache is not None:
            cache.length += tokens.shape[1]
        out: Tensor = self.norm(x)
        return out


class CausalLM(nn.Module):
    """The whole model: tokens int64 [batch, length] -> logits float32 [batch, length, vocab].

    With a `KVCache` the tokens continue those that the cache has seen. ValueError when the context exceeds `config.seq`
    (or the cache's capacity). `ops` is the counter layers' backend; None takes OpenCL.
    """

    def __init__(self, config: ModelConfig, ops: Any = None) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config, ops)
        self.lm_head = nn.Linear(config.dim, config.vocab, bias=False)
        nn.init.normal_(self.lm_head.weight, std=0.5 / math.sqrt(config.dim))

    @property
    def d_model(self) -> int:
        """Width."""
        return self.config.dim

    @property
    def n_layer(self) -> int:
        """Number of blocks."""
        return self.config.layers

    @property
    def vocab(self) -> int:
        """Kinds of tokens."""
        return self.config.vocab

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks, in order."""
        return self.model.layers

    @property
    def gradient_checkpointing(self) -> bool | list[bool]:
        """Whether backward runs blocks again instead of keeping what they computed: one answer for all, or a list with
        one a block. ValueError for a list of another length, TypeError for anything else.
        """
        return self.model.again

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, again: bool | Sequence[bool]) -> None:
        self.model.again = self._checked(again)

    def _checked(self, again: bool | Sequence[bool]) -> bool | list[bool]:
        if isinstance(again, bool):
            return again
        if not isinstance(again, (list, tuple)) or not all(isinstance(one, bool) for one in again):
            raise TypeError(f"expected gradient_checkpointing as a bool or a list of them, got {again!r}")
        if len(again) != self.n_layer:
            raise ValueError(
                f"expected gradient_checkpointing with one answer a block ({self.n_layer}), got {len(again)}"
            )
        return list(again)

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        *,
        gradient_checkpointing: bool | Sequence[bool] | None = None,
    ) -> Tensor:
        """gradient_checkpointing: for this forward alone; None: the model's own."""
        own = self.model.again
        if gradient_checkpointing is not None:
            self.model.again = self._checked(gradient_checkpointing)
        try:
            logits: Tensor = self.lm_head(self.model(tokens, cache))
        finally:
            self.model.again = own
        return logits


def build_causal_lm(
    vocab: int,
    d_model: int,
    n_layer: int,
    n_head: int,
    block: int,
    gradient_checkpointing: bool | Sequence[bool] = False,
) -> CausalLM:
    """A `CausalLM` of float32 linears: vocab kinds of tokens, width d_model, n_layer blocks of n_head heads, a context
    of at most `block` tokens. ValueError for a shape that cannot be.
    """
    lm = CausalLM(ModelConfig(layers=n_layer, dim=d_model, heads=n_head, seq=block, vocab=vocab, linear="dense"))
    lm.gradient_checkpointing = gradient_checkpointing
    return lm
