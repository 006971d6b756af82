"""The trainer's own checkpoint: tensors and plain values in one file, replaced whole, read with weights_only=True."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from memtrain_cl.errors import CorruptFile
from memtrain_cl.export.atomic import atomic_path
from memtrain_cl.export.hostile import corrupt
from memtrain_cl.export.packed import EngineFile, pack_module
from memtrain_cl.export.torch_archive import load_archive
from memtrain_cl.lm.config import TrainConfig

FORMAT = 1
_FIELDS: dict[str, type] = {
    "step": int,
    "corpus": str,
    "model": dict,
    "optimizer": dict,
    "torch_rng": torch.Tensor,
    "config": dict,
}


def save_checkpoint(path: str | os.PathLike[str], config: TrainConfig, state: Mapping[str, Any]) -> None:
    """Writes `Trainer.state()` and the run's configuration; equal ones make equal bytes.

    A kill at any moment leaves the old file or the new one, whole. OSError when the disk refuses.
    """
    content = _canonical({"format": FORMAT, "config": config.to_json(), **state})
    # Through a file object, because torch writes a path's name into the file.
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as fault:
            # What PyTorch's writer says about its own end hides that the disk refused.
            if isinstance(fault.__context__, OSError):
                raise fault.__context__ from None
            raise


def _canonical(value: Any) -> Any:
    """The same value with one object a string and plain containers of its own.

    Pickle writes what it has met before as a reference, so equal states would else make other bytes in a resumed run.
    """
    if isinstance(value, dict):
        return {_canonical(key): _canonical(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_canonical(inner) for inner in value)
    return sys.intern(value) if type(value) is str else value


def load_checkpoint(path: str | os.PathLike[str]) -> tuple[TrainConfig, dict[str, Any]]:
    """The configuration and the state of a run. OSError when there is no file, CorruptFile when it is not a whole
    checkpoint.
    """
    state = load_archive(path)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CorruptFile(f"{Path(path)}: expected a checkpoint of format {FORMAT}, got another kind of file")
    for name, kind in _FIELDS.items():
        if not isinstance(state.get(name), kind):
            raise CorruptFile(
                f"{Path(path)}: expected the field {name!r} as {kind.__name__}, got {type(state.get(name)).__name__}"
            )
    try:
        config = TrainConfig.from_json(state["config"])
    except ValueError as error:
        raise CorruptFile(f"{Path(path)}: {error}") from error
    if state["step"] < 0:
        raise CorruptFile(f"{Path(path)}: expected step >= 0, got {state['step']}")
    return config, state


def read_checkpoint_model(path: str | os.PathLike[str]) -> EngineFile:
    """The model of a run's checkpoint as the run's end would export it. Errors as in load_checkpoint."""
    from memtrain_cl.lm.description import model_description
    from memtrain_cl.lm.model import CausalLM, counter_layers
    from memtrain_cl.lm.trainer import schedule

    config, state = load_checkpoint(path)
    shape = config.model
    weights = shape.layers * (4 * shape.dim + 3 * shape.hidden) * shape.dim
    least, size = weights // 4 * 3 + 4 * 2 * shape.vocab * shape.dim, os.path.getsize(path)
    if least > size:  # before a model of that size is made
        raise corrupt(path, "config", f"a model within the file's {size} bytes", f"one of at least {least}")
    model = CausalLM(shape)
    try:
        model.load_state_dict(state["model"])
    except (RuntimeError, TypeError, AttributeError) as error:
        raise CorruptFile(
            f"{Path(path)}: expected the state of the model it describes, got another: {str(error).splitlines()[0]}"
        ) from error
    if state["step"]:
        for layer in counter_layers(model):
            layer.lr = shape.counter_lr * schedule(state["step"] - 1)
    return pack_module(model, model_description(shape))
