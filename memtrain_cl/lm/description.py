"""What an engine file says of the model that it holds, and whether its parts bear that out. Imports no torch."""

from __future__ import annotations

import os
from typing import Any

from memtrain_cl.errors import CorruptFile
from memtrain_cl.export.llama import ARCHITECTURE, Parts, llama_parts
from memtrain_cl.export.packed import EngineFile
from memtrain_cl.formats import LayerState
from memtrain_cl.lm.config import ModelConfig, require_bytes


def model_description(config: ModelConfig) -> dict[str, Any]:
    """What the engine file's `model` key holds: from it the model is built again."""
    return {"architecture": ARCHITECTURE, **config.to_json()}


def described_model(file: EngineFile, path: str | os.PathLike[str]) -> tuple[ModelConfig, Parts]:
    """The model that a file holds: its configuration, and its parts by the names of their weights, linears first.

    path: names the file in messages. CorruptFile when the file holds no model of memtrain-cl train, or its parts
    disagree with its description; nothing of the described size is allocated before.
    """
    try:
        # The parts first, which know what the architecture is.
        shape, parts = llama_parts(file)
        values = dict(file.model)
        del values["architecture"]
        config = ModelConfig.from_json(values)
        require_bytes(config)
        for name in shape.linears():
            _require_kind(name, parts, config)
    except ValueError as error:
        raise CorruptFile(f"{os.fspath(path)}: {error}") from error
    return config, parts


def _require_kind(name: str, parts: Parts, config: ModelConfig) -> None:
    part = parts[name]
    if isinstance(part, LayerState) != (config.linear == "counter"):
        raise ValueError(
            f"expected linears of the kind {config.linear} that the model describes, got another in {name!r}"
        )
    if isinstance(part, LayerState) and part.C != config.C:
        raise ValueError(f"expected layers of the model's C = {config.C}, got {part.C} in {name!r}")
