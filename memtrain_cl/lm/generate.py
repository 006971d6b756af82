"""Continue a prompt, byte by byte, from an exported engine file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memtrain_cl.errors import CorruptFile
from memtrain_cl.export.packed import EngineFile, load_into
from memtrain_cl.lm.config import ModelConfig, require_bytes
from memtrain_cl.lm.model import CausalLM, KVCache

ARCHITECTURE = "llama"
_LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")


def model_description(config: ModelConfig) -> dict[str, Any]:
    """What the engine file's `model` key holds: from it `build_model` builds the model again."""
    return {"architecture": ARCHITECTURE, **config.to_json()}


def build_model(file: EngineFile, path: Path, ops: Any = None) -> CausalLM:
    """The model that an engine file holds, in eval mode. path: names the file in messages. ops: the counter layers'
    backend.

    Raises CorruptFile when the file holds no model of memtrain-cl train, or its parts disagree with its description.
    """
    config = _read_config(file.model, path)
    _check_names(file, config, path)
    model = CausalLM(config, ops)
    try:
        load_into(model, file)
    except ValueError as error:
        raise CorruptFile(f"{path}: {error}") from error
    return model.eval()


def _read_config(description: Mapping[str, Any], path: Path) -> ModelConfig:
    values = dict(description)
    architecture = values.pop("architecture", None)
    if architecture != ARCHITECTURE:
        raise CorruptFile(
            f"{path}: expected a model that memtrain-cl train exported, got architecture {architecture!r}"
        )
    try:
        config = ModelConfig.from_json(values)
        require_bytes(config)
    except ValueError as error:
        raise CorruptFile(f"{path}: {error}") from error
    return config


def _check_names(file: EngineFile, config: ModelConfig, path: Path) -> None:
    """Compares the description with the tensors, before anything of the described size is allocated."""
    per_block = len(_LINEARS) + len(_NORMS)
    found = len(file.layers) + len(file.tensors)
    if found != per_block * config.layers + 3:
        raise CorruptFile(
            f"{path}: expected {config.layers} layers of {per_block} parts and 3 parts beside them, got {found}"
        )
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        shape = getattr(file.tensors.get(name), "shape", None)
        if shape != (config.vocab, config.dim):
            raise CorruptFile(f"{path}: expected the tensor {name} as {(config.vocab, config.dim)}, got {shape}")
    gate = "model.layers.0.mlp.gate_proj"
    width: object
    if gate in file.layers:
        width = file.layers[gate].out_features
    else:
        width = getattr(file.tensors.get(f"{gate}.weight"), "shape", (None,))[0]
    if width != config.hidden:
        raise CorruptFile(f"{path}: expected {gate} with {config.hidden} rows, got {width}")


def generate(model: CausalLM, prompt: bytes, count: int, temperature: float, seed: int) -> Iterator[int]:
    """Yields `count` bytes that continue `prompt`; equal arguments on one device give equal bytes.

    temperature 0 takes the likeliest byte, otherwise bytes are drawn from softmax(logits / temperature). When the
    context is full, it begins again with its newer half, so that text of any length can be made. Raises ValueError for
    an empty prompt, count < 1 or a temperature that is negative or not finite.
    """
    if not prompt:
        raise ValueError("expected a prompt of at least one byte, got an empty one")
    if count < 1:
        raise ValueError(f"expected at least 1 byte to generate, got {count}")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"expected a temperature of 0 or above, got {temperature}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"expected 0 <= seed < 2^63, got {seed}")
    return _continue(model, list(prompt), count, temperature, torch.Generator().manual_seed(seed))


@torch.no_grad()
def _continue(
    model: CausalLM, text: list[int], count: int, temperature: float, generator: torch.Generator
) -> Iterator[int]:
    capacity = min(model.config.seq, len(text) + count)
    cache = KVCache(model.config, batch=1, capacity=capacity)
    pending = text[-capacity:]
    for _ in range(count):
        if cache.length + len(pending) > capacity:
            cache.length = 0
            pending = text[-max(1, capacity // 2) :]
        logits = model(torch.tensor([pending]), cache)[0, -1]
        byte = _draw(logits, temperature, generator)
        text.append(byte)
        pending = [byte]
        yield byte


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits.double() / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
