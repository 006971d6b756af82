"""The Llama-shaped model that `memtrain-cl train` exports, seen without torch: its shape, and its parts by name.

Names are those of Llama checkpoints: ``model.layers.<i>.self_attn.q_proj.weight`` and its like. A linear is a counter
layer, or a float32 tensor in a dense model; every other part is a float32 tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from memtrain_cl.export.container import Tensor, code_and_shape
from memtrain_cl.export.hostile import shorten
from memtrain_cl.export.packed import EngineFile
from memtrain_cl.formats import LayerState, is_normal

ARCHITECTURE = "llama"
_LIMIT = 2**31

#: Part of a file -> a counter layer, or a float32 array.
Parts = dict[str, LayerState | np.ndarray]


@dataclass(frozen=True)
class LlamaShape:
    """layers, dim, heads: blocks, width, attention heads. hidden: width of the feed-forward part. seq: the longest
    context. vocab: kinds of tokens. rope_theta: base of the rotation's angles. norm_eps: what RMSNorm adds to the mean
    square.
    """

    layers: int
    dim: int
    heads: int
    hidden: int
    seq: int
    vocab: int
    rope_theta: float
    norm_eps: float

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    def linears(self) -> dict[str, tuple[int, int]]:
        """Shape [out, in] of each linear but the head, by the name of its weight, in the order of the forward pass."""
        square, up, down = (self.dim, self.dim), (self.hidden, self.dim), (self.dim, self.hidden)
        block = {
            **{f"self_attn.{name}_proj.weight": square for name in "qkvo"},
            **{f"mlp.{name}_proj.weight": up for name in ("gate", "up")},
            "mlp.down_proj.weight": down,
        }
        return {f"model.layers.{i}.{name}": shape for i in range(self.layers) for name, shape in block.items()}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the other parts: embedding and head [vocab, dim], norms [dim]."""
        norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
        table = (self.vocab, self.dim)
        return {
            "model.embed_tokens.weight": table,
            **{f"model.layers.{i}.{name}": (self.dim,) for i in range(self.layers) for name in norms},
            "model.norm.weight": (self.dim,),
            "lm_head.weight": table,
        }

    def part_count(self) -> int:
        """How many linears and other parts there are, without listing them."""
        return 9 * self.layers + 3


def llama_shape(model: Mapping[str, Any]) -> LlamaShape:
    """The shape out of an engine file's description. ValueError when it describes no such model."""
    if model.get("architecture") != ARCHITECTURE:
        raise ValueError(
            f"expected a model that memtrain-cl train exported, got architecture {shorten(model.get('architecture'))}"
        )
    values: dict[str, Any] = {}
    for field in fields(LlamaShape):
        value: Any = model.get(field.name)
        if field.type == "int":
            if type(value) is not int or not 1 <= value < _LIMIT:
                raise ValueError(f"expected the model's {field.name} in 1..{_LIMIT - 1}, got {shorten(value)}")
        elif type(value) not in (int, float) or not is_normal(value):
            raise ValueError(
                f"expected the model's {field.name} as a positive number within float32, got {shorten(value)}"
            )
        values[field.name] = value
    shape = LlamaShape(**values)
    if shape.dim % shape.heads or shape.head_dim % 2:
        raise ValueError(
            f"expected a dim of heads with an even width, got dim {shape.dim} and {shape.heads} heads in the model"
        )
    return shape


def llama_parts(file: EngineFile) -> tuple[LlamaShape, Parts]:
    """The model's shape and all of its parts, linears first, by the names of their weights.

    ValueError naming the first part that lacks, that the description does not know, or that has another shape or dtype.
    """
    shape = llama_shape(file.model)
    found = len(file.layers) + len(file.tensors)
    if found != shape.part_count():  # Before names of the described number are made.
        raise ValueError(f"expected {shape.part_count()} parts of a model of {shape.layers} blocks, got {found}")
    parts: Parts = {}
    for name, size in shape.linears().items():
        layer = file.layers.get(name.removesuffix(".weight"))
        if layer is None:
            parts[name] = _float32(file.tensors, name, size)
        elif (layer.out_features, layer.in_features) != size:
            got = (layer.out_features, layer.in_features)
            raise ValueError(f"layer {name.removesuffix('.weight')!r}: expected (out, in) = {size}, got {got}")
        else:
            parts[name] = layer
    for name, dims in shape.tensors().items():
        parts[name] = _float32(file.tensors, name, dims)
    return shape, parts


def _float32(tensors: Mapping[str, Tensor], name: str, size: tuple[int, ...]) -> np.ndarray:
    tensor = tensors.get(name)
    code_and_dims = None if tensor is None else code_and_shape(tensor)
    if not isinstance(tensor, np.ndarray) or code_and_dims != ("F32", size):
        got = "none" if code_and_dims is None else f"{code_and_dims[0]} {list(code_and_dims[1])}"
        raise ValueError(f"tensor {name!r}: expected F32 {list(size)}, got {got}")
    return tensor
