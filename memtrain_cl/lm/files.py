"""The files of a training run's folder, and the model that stands in one. Imports no torch where none is needed."""

from __future__ import annotations

from pathlib import Path

from memtrain_cl.export.archive import is_archive
from memtrain_cl.export.hostile import open_regular, printable
from memtrain_cl.export.packed import EngineFile, read_engine

CHECKPOINT, METRICS, MODEL, PLOT, SUMMARY = (
    "checkpoint.pt",
    "metrics.jsonl",
    "model.safetensors",
    "loss.png",
    "summary.json",
)


def read_model(path: Path) -> EngineFile:
    """The model of an engine file, of a checkpoint of memtrain-cl train, or of a run's folder.

    Of a folder the exported model is taken where the run is finished, and the checkpoint of one that is not.
    ValueError for a folder that holds neither; CorruptFile for a damaged file, OSError when there is none.
    """
    file = _of_run(path) if path.is_dir() else path
    opened, _ = open_regular(file)
    with opened:
        head = opened.read(8)
    if not is_archive(head):
        return read_engine(file, mapped=True)
    from memtrain_cl.lm.checkpoint import read_checkpoint_model

    return read_checkpoint_model(file)


def _of_run(folder: Path) -> Path:
    model, checkpoint = folder / MODEL, folder / CHECKPOINT
    # A resumed run still has the model of its first end, and no summary until its own.
    if model.exists() and ((folder / SUMMARY).exists() or not checkpoint.exists()):
        return model
    if checkpoint.exists():
        return checkpoint
    raise ValueError(
        f"expected a folder of memtrain-cl train, with {MODEL} or {CHECKPOINT}, got {printable(str(folder))}"
    )
