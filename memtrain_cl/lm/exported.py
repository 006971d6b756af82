"""An exported model as a torch module again."""

from __future__ import annotations

import os
from typing import Any

from memtrain_cl.errors import CorruptFile
from memtrain_cl.export.packed import EngineFile, load_into
from memtrain_cl.lm.description import described_model
from memtrain_cl.lm.model import CausalLM


def build_model(file: EngineFile, path: str | os.PathLike[str], ops: Any = None) -> CausalLM:
    """The model that an engine file holds, in eval mode. path: names the file in messages. ops: the counter layers'
    backend.

    Raises CorruptFile when the file holds no model of memtrain-cl train, or its parts disagree with its description.
    """
    config, _ = described_model(file, path)
    model = CausalLM(config, ops)
    try:
        load_into(model, file)
    except ValueError as error:
        raise CorruptFile(f"{os.fspath(path)}: {error}") from error
    return model.eval()
