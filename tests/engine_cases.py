"""Small exported models, and what they compute in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memtrain_cl.export.packed import EngineFile, export_model, read_engine, write_engine
from memtrain_cl.lm.config import ModelConfig
from memtrain_cl.lm.description import model_description
from memtrain_cl.lm.model import CausalLM, KVCache, rope_tables

#: Rows of whole groups of sixteen codes, and such that are none; heads that vectors divide, and others.
EVEN = ModelConfig(layers=2, dim=64, heads=2, seq=40, hidden=96)
ODD = ModelConfig(layers=1, dim=36, heads=3, seq=24, hidden=44, C=8)


def exported(path: Path, config: ModelConfig, linear: str = "counter") -> CausalLM:
    """A model with random weights, in eval mode, and its engine file at `path`."""
    torch.manual_seed(3)
    config = replace(config, linear=linear)
    model = CausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 2.0)
    export_model(model, path, model_description(config))
    return model


def rewritten(path: Path, **changes: Any) -> None:
    """The engine file at `path` with some of its layers, tensors or description replaced; None takes one away."""
    file = read_engine(path)
    parts: dict[str, dict[str, Any]] = {
        "layers": dict(file.layers),
        "tensors": dict(file.tensors),
        "model": dict(file.model),
    }
    for room, values in changes.items():
        for name, value in values.items():
            if value is None:
                del parts[room][name]
            else:
                parts[room][name] = value
    write_engine(path, parts["layers"], parts["tensors"], parts["model"])


def some_bytes(count: int) -> bytes:
    return np.random.default_rng(1).integers(0, 256, count, dtype=np.uint8).tobytes()


def torch_logits(model: CausalLM, tokens: bytes) -> np.ndarray:
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([list(tokens)]))[0].numpy()
    return logits


def torch_greedy(model: CausalLM, prompt: bytes, count: int) -> bytes:
    """The likeliest continuation by torch, within the model's context."""
    cache = KVCache(model.config, batch=1, capacity=model.config.seq)
    pending, made = list(prompt), []
    with torch.no_grad():
        for _ in range(count):
            pending = [int(model(torch.tensor([pending]), cache)[0, -1].argmax())]
            made += pending
    return bytes(made)


def wide_logits(file: EngineFile, tokens: bytes) -> np.ndarray:
    """The model's logits in float64, [tokens, vocab]."""
    config = ModelConfig.from_json({name: value for name, value in file.model.items() if name != "architecture"})
    tables = [table.double().numpy() for table in rope_tables(config, 0, len(tokens))]

    def tensor(name: str) -> np.ndarray:
        return np.asarray(file.tensors[f"{name}.weight"], dtype=np.float64)

    def weight(name: str) -> Any:
        layer = file.layers.get(name)
        if layer is None:
            return tensor(name)
        groups = layer.state.reshape(layer.out_features, -1, 3).astype(np.int64) @ (1, 256, 65536)
        codes = np.stack([groups >> 6 * place & 63 for place in range(4)], axis=-1)
        t = codes.reshape(layer.out_features, layer.in_features) // (2 * layer.C - 1) - 1
        return layer.scale[:, None].astype(np.float64) * t

    def norm(name: str, x: np.ndarray) -> Any:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config.norm_eps) * tensor(name)

    def turned(x: np.ndarray) -> Any:
        first, second = np.split(x, 2, axis=-1)
        return x * tables[0][:, None] + np.concatenate([-second, first], axis=-1) * tables[1][:, None]

    def silu(x: np.ndarray) -> Any:
        return x / (1 + np.exp(-x))

    x = tensor("model.embed_tokens")[list(tokens)]
    shape = (len(tokens), config.heads, config.head_dim)
    for index in range(config.layers):
        block = f"model.layers.{index}"
        h = norm(f"{block}.input_layernorm", x)
        q, k, v = ((h @ weight(f"{block}.self_attn.{each}_proj").T).reshape(shape) for each in "qkv")
        scores = np.einsum("ihd,jhd->hij", turned(q), turned(k)) / np.sqrt(config.head_dim)
        scores = np.where(np.tri(len(tokens), dtype=bool), scores, -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = np.einsum("hij,jhd->ihd", p / p.sum(axis=-1, keepdims=True), v).reshape(len(tokens), config.dim)
        x = x + mixed @ weight(f"{block}.self_attn.o_proj").T
        h = norm(f"{block}.post_attention_layernorm", x)
        gate, up = (h @ weight(f"{block}.mlp.{each}_proj").T for each in ("gate", "up"))
        x = x + (silu(gate) * up) @ weight(f"{block}.mlp.down_proj").T
    logits: np.ndarray = norm("model.norm", x) @ tensor("lm_head").T
    return logits
