"""The trainer's own checkpoint: tensors and plain values in one file, replaced whole, read with weights_only=True."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from memtrain_cl.errors import CorruptFile
from memtrain_cl.export.atomic import atomic_path
from memtrain_cl.lm.config import TrainConfig

FORMAT = 1
_FIELDS: dict[str, type] = {
    "step": int,
    "seconds": float,
    "corpus": str,
    "model": dict,
    "optimizer": dict,
    "torch_rng": torch.Tensor,
    "config": dict,
}


def save_checkpoint(path: str | os.PathLike[str], config: TrainConfig, state: Mapping[str, Any]) -> None:
    """Writes `Trainer.state()` and the run's configuration; a kill at any moment leaves the old file or the new one,
    whole.
    """
    with atomic_path(path) as temporary:
        torch.save({"format": FORMAT, "config": config.to_json(), **state}, temporary)


def load_checkpoint(path: str | os.PathLike[str]) -> tuple[TrainConfig, dict[str, Any]]:
    """The configuration and the state of a run. OSError when there is no file, CorruptFile when it is not a whole
    checkpoint.
    """
    with open(path, "rb"):  # so that a missing or forbidden file is told apart from a broken one
        pass
    try:
        # mmap=False: the file may be replaced while its tensors are still in use.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=False)
    except (RuntimeError, ValueError, KeyError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise CorruptFile(
            f"{Path(path)}: expected a checkpoint of memtrain-cl train, got a file that torch cannot read"
        ) from error
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
