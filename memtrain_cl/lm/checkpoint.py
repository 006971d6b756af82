"""The trainer's own checkpoint: tensors and plain values in one file, replaced whole, read with weights_only=True."""

from __future__ import annotations

import os
import sys
import zipfile
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
    "corpus": str,
    "model": dict,
    "optimizer": dict,
    "torch_rng": torch.Tensor,
    "config": dict,
}


def save_checkpoint(path: str | os.PathLike[str], config: TrainConfig, state: Mapping[str, Any]) -> None:
    """Writes `Trainer.state()` and the run's configuration; equal ones make equal bytes.

    A kill at any moment leaves the old file or the new one, whole.
    """
    content = _canonical({"format": FORMAT, "config": config.to_json(), **state})
    # Through a file object, because torch writes a path's name into the file.
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        torch.save(content, file)


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
    with open(path, "rb"):  # so that a missing or forbidden file is told apart from a broken one
        pass
    try:
        with zipfile.ZipFile(path) as archive:  # torch does not compare the checksums that it writes
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"wrong checksum of {damaged}")
        # mmap=False: the file may be replaced while its tensors are still in use.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=False)
    except Exception as error:  # what torch raises for a damaged file depends on where the damage is
        raise CorruptFile(
            f"{Path(path)}: expected a checkpoint of memtrain-cl train, got a damaged or another file ({error})"
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
