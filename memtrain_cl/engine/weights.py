"""A model's weights on the device: counter layers packed as in the file, everything else in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from memtrain_cl.array import DeviceArray, from_numpy
from memtrain_cl.device import Device
from memtrain_cl.engine.linear import DenseLinear, Linear, PackedLinear
from memtrain_cl.export.container import RawTensor, Tensor
from memtrain_cl.export.llama import Parts
from memtrain_cl.export.packed import EngineFile
from memtrain_cl.formats import LayerState
from memtrain_cl.launchers.counter_matvec import Norm
from memtrain_cl.lm.config import ModelConfig


@dataclass(frozen=True)
class Block:
    """One block's weights: query, key and value below each other, gate and up below each other."""

    attention_norm: Norm
    qkv: Linear
    output: Linear
    feed_forward_norm: Norm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Weights:
    """All of a model's. embedding: float32 [vocab, dim]."""

    embedding: DeviceArray
    blocks: tuple[Block, ...]
    norm: Norm
    head: Linear


def widened(file: EngineFile) -> EngineFile:
    """The file with its tensors of 16 floating bits as float32."""
    tensors = {name: _widened(tensor) for name, tensor in file.tensors.items()}
    return EngineFile(file.layers, tensors, file.model, file.created_by)


def _widened(tensor: Tensor) -> Tensor:
    if isinstance(tensor, RawTensor):
        if tensor.dtype != "BF16":
            return tensor
        bits = tensor.data.view("<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(tensor.shape)
    return tensor.astype(np.float32) if tensor.dtype == np.float16 else tensor


def upload(device: Device, config: ModelConfig, parts: Parts) -> Weights:
    """The parts of a model as `memtrain_cl.lm.description` gives them, on the device."""

    def norm(name: str) -> Norm:
        return Norm(from_numpy(device, _array(parts[f"{name}.weight"])), config.norm_eps)

    def block(name: str) -> Block:
        def linear(*names: str) -> Linear:
            return _stacked(device, [parts[f"{name}.{each}_proj.weight"] for each in names])

        return Block(
            norm(f"{name}.input_layernorm"),
            linear("self_attn.q", "self_attn.k", "self_attn.v"),
            linear("self_attn.o"),
            norm(f"{name}.post_attention_layernorm"),
            linear("mlp.gate", "mlp.up"),
            linear("mlp.down"),
        )

    return Weights(
        from_numpy(device, _array(parts["model.embed_tokens.weight"])),
        tuple(block(f"model.layers.{index}") for index in range(config.layers)),
        norm("model.norm"),
        _stacked(device, [parts["lm_head.weight"]]),
    )


def _array(part: LayerState | np.ndarray) -> np.ndarray:
    return cast("np.ndarray", part)  # as described_model found it to be


def _stacked(device: Device, parts: Sequence[LayerState | np.ndarray]) -> Linear:
    layers = [part for part in parts if isinstance(part, LayerState)]
    if not layers:
        return DenseLinear(from_numpy(device, np.concatenate([_array(part) for part in parts])))
    state, scale = (np.concatenate([getattr(layer, name) for layer in layers]) for name in ("state", "scale"))
    return PackedLinear(from_numpy(device, state), from_numpy(device, scale), layers[0].C)
