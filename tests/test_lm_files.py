"""The model of a run's folder: exported when the run is finished, out of its checkpoint before that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import memtrain_cl.reference
from memtrain_cl.cli import main
from memtrain_cl.errors import CorruptFile
from memtrain_cl.export.packed import write_engine
from memtrain_cl.lm.files import CHECKPOINT, MODEL, SUMMARY, read_model
from memtrain_cl.lm.run import plan_run, run_training


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    text = folder / "text.txt"
    text.write_text("".join(f"line {n} says {n * n % 97}\n" for n in range(400)))
    flags = {"text": (str(text),), "steps": 3, "layers": 1, "dim": 32, "heads": 2, "seq": 32, "batch": 4}
    config, state = plan_run(folder / "out", flags, resume=False)
    run_training(config, folder / "out", state, quiet=True, ops=memtrain_cl.reference)
    return folder / "out"


def test_a_checkpoint_is_exported_as_the_end_of_its_run_would_be(run: Path, tmp_path: Path) -> None:
    for source in (run / CHECKPOINT, run / MODEL, run):
        file = read_model(source)
        write_engine(tmp_path / "m", file.layers, file.tensors, file.model)
        assert (tmp_path / "m").read_bytes() == (run / MODEL).read_bytes()


def test_a_folder_gives_the_checkpoint_of_a_run_that_is_not_finished(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"with model\.safetensors or checkpoint\.pt"):
        read_model(tmp_path)
    (tmp_path / MODEL).write_bytes(b"of an earlier end")
    with pytest.raises(CorruptFile, match="header length"):
        read_model(tmp_path)
    (tmp_path / CHECKPOINT).write_bytes((run / CHECKPOINT).read_bytes())
    assert len(read_model(tmp_path).layers) == 7
    (tmp_path / SUMMARY).write_text("{}")
    with pytest.raises(CorruptFile, match="header length"):
        read_model(tmp_path)


def test_the_commands_take_runs(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run), "--to", "engine", "--out", str(tmp_path / "m")]) == 0
    assert (tmp_path / "m").read_bytes() == (run / MODEL).read_bytes()
    capsys.readouterr()
    told = []
    for file in (CHECKPOINT, MODEL):
        assert main(["inspect", str(run / file), "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out))
    checkpoint, model = told
    assert checkpoint["format"] == "checkpoint of memtrain-cl train"
    assert checkpoint["model"]["step"] == 3
    same = ("C", "step", "weights", "minus", "zero", "plus")
    assert [checkpoint["counters"][name] for name in same] == [model["counters"][name] for name in same]


@pytest.mark.parametrize("change", [{"dim": 2**20, "hidden": 2**20}, {"layers": 2**40}, {"vocab": 2**40}, {"C": "x"}])
def test_a_configuration_beyond_its_file_is_refused_before_a_model_is_made(
    run: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    content = torch.load(run / CHECKPOINT, weights_only=True)
    content["config"]["model"] |= change
    torch.save(content, tmp_path / "c.pt")
    with pytest.raises(CorruptFile, match=r"c\.pt: .*expected"):
        read_model(tmp_path / "c.pt")


def test_a_scale_that_is_not_finite_is_refused_and_no_file_appears(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = torch.load(run / CHECKPOINT, weights_only=True)
    name = "model.layers.0.mlp.up_proj.scale"
    for value in (float("nan"), float("inf"), -1.0):
        content["model"][name][2] = value
        torch.save(content, tmp_path / "c.pt")
        for target in ("engine", "mncc", "npz", "motifcl", "gguf:f16"):
            assert main(["export", str(tmp_path / "c.pt"), "--to", target, "--out", str(tmp_path / "out")]) == 2
            printed = capsys.readouterr()
            assert "model.layers.0.mlp.up_proj" in printed.err
            assert "scale" in printed.err
            assert printed.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]


def test_weights_of_another_model_are_refused(run: Path, tmp_path: Path) -> None:
    content = torch.load(run / CHECKPOINT, weights_only=True)
    del content["model"]["lm_head.weight"]
    torch.save(content, tmp_path / "c.pt")
    with pytest.raises(CorruptFile, match="expected the state of the model it describes"):
        read_model(tmp_path / "c.pt")
