"""Training runs: learning, resume to the bit, the files they leave, generation from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from memtrain_cl.engine import Engine
from memtrain_cl.errors import CorruptFile, MemtrainError
from memtrain_cl.export.packed import read_engine
from memtrain_cl.lm import files, run
from memtrain_cl.lm.checkpoint import load_checkpoint
from memtrain_cl.lm.data import load_corpus
from memtrain_cl.lm.metrics import MetricsFile, read_metrics
from memtrain_cl.lm.report import Summary
from memtrain_cl.lm.run import plan_run, run_training
from memtrain_cl.lm.trainer import Trainer, schedule
from tests.engine_cases import torch_greedy

KINDS = [pytest.param("dense"), pytest.param("counter", marks=pytest.mark.device)]


@pytest.fixture
def tiny(tmp_path: Path) -> dict[str, Any]:
    """Flags of a run that takes a second."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {n} says {n * n % 97}\n" for n in range(400)))
    return {"text": (str(text),), "steps": 10, "layers": 1, "dim": 32, "heads": 2, "seq": 32, "batch": 4, "seed": 5}


def train(out: Path, flags: dict[str, Any], *, resume: bool = False) -> Summary:
    config, state = plan_run(out, flags, resume=resume)
    return run_training(config, out, state, quiet=True)


def tensors_of(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Every tensor in a checkpoint, by its path."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return {key: tensor for part, inner in items for key, tensor in tensors_of(inner, f"{name}/{part}").items()}


def assert_same_run(first: Path, second: Path) -> None:
    (config, state), (other_config, other) = (
        load_checkpoint(first / files.CHECKPOINT),
        load_checkpoint(second / files.CHECKPOINT),
    )
    assert config == other_config
    assert state["step"] == other["step"]
    ours, theirs = tensors_of(state), tensors_of(other)
    assert ours.keys() == theirs.keys()
    assert any("exp_avg" in name for name in ours)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    for name in (files.MODEL, files.CHECKPOINT):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


@pytest.mark.parametrize("linear", KINDS)
def test_a_lengthened_run_ends_with_the_bytes_of_one_that_went_through(
    tmp_path: Path, tiny: dict[str, Any], linear: str
) -> None:
    flags = {**tiny, "linear": linear}
    train(tmp_path / "whole", flags)
    train(tmp_path / "halves", {**flags, "steps": 5})
    half = (tmp_path / "halves" / files.MODEL).read_bytes()
    train(tmp_path / "halves", {"steps": 10}, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "halves")
    assert (tmp_path / "halves" / files.MODEL).read_bytes() != half  # the second half did train
    steps = [row["step"] for row in read_metrics(tmp_path / "halves" / files.METRICS)]
    assert steps == list(range(1, 11))


@pytest.mark.parametrize("linear", KINDS)
def test_a_stopped_run_ends_with_the_bytes_of_one_that_went_through(
    tmp_path: Path, tiny: dict[str, Any], linear: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {**tiny, "linear": linear}
    train(tmp_path / "whole", flags)
    step = Trainer.train_step

    def step_and_interrupt(trainer: Trainer) -> float:
        loss = step(trainer)
        if trainer.step == 4:
            import signal

            signal.raise_signal(signal.SIGTERM)
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", step_and_interrupt)
        with pytest.raises(
            run.Interrupted, match="after step 4 of 10 and saved; go on with: memtrain-cl train --resume --out"
        ):
            train(tmp_path / "stopped", flags)
    assert not (tmp_path / "stopped" / files.MODEL).exists()
    with pytest.raises(ValueError, match="without an unfinished run"):
        train(tmp_path / "stopped", flags)
    train(tmp_path / "stopped", {}, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_weights_alone_do_not_make_a_resume(tmp_path: Path, tiny: dict[str, Any]) -> None:
    """The comparison above has teeth: leaving AdamW's moments behind changes the bytes."""
    config, _ = plan_run(tmp_path, {**tiny, "linear": "dense"}, resume=False)
    corpus = load_corpus(config.text, config.model.seq)
    live = Trainer(config, corpus)
    for _ in range(3):
        live.train_step()
    saved = torch.load(_saved(tmp_path, live), weights_only=True)
    resumed, weights_only = Trainer(config, corpus), Trainer(config, corpus)
    resumed.load_state(saved)
    weights_only.model.load_state_dict(saved["model"])
    weights_only.step = 3
    for trainer in (live, resumed, weights_only):
        trainer.train_step()
    name = "model.embed_tokens.weight"
    after = [trainer.model.state_dict()[name] for trainer in (live, resumed, weights_only)]
    assert torch.equal(after[0], after[1])
    assert not torch.equal(after[0], after[2])


def _saved(folder: Path, trainer: Trainer) -> Path:
    torch.save(trainer.state(), folder / "state.pt")
    return folder / "state.pt"


@pytest.mark.parametrize("linear", KINDS)
def test_a_run_leaves_true_files(
    tmp_path: Path, tiny: dict[str, Any], linear: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "VALIDATE_EVERY_STEPS", 4)
    out = tmp_path / "run"
    summary = train(out, {**tiny, "linear": linear})
    assert {file.name for file in out.iterdir()} == {
        "model.safetensors",
        "checkpoint.pt",
        "metrics.jsonl",
        "loss.png",
        "summary.json",
    }
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert all(isinstance(row["loss"], float) and row["tokens_per_second"] > 0 for row in rows)
    assert [row["step"] for row in rows if "val_bpb" in row] == [4, 8, 10]
    assert rows[-1]["val_bpb"] == summary.val_bpb == pytest.approx(summary.val_loss / 0.6931472, rel=1e-6)
    assert rows[-1]["lr"] == pytest.approx(2e-3 * schedule(9))
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((out / "summary.json").read_text())
    assert written["val_bpb"] == summary.val_bpb
    assert written["export_differs"] == []
    engine = read_engine(out / "model.safetensors")
    assert engine.model["architecture"] == "llama"
    weights = 4 * 32 * 32 + 3 * 32 * 96
    rows_of_layers = 4 * 32 + 2 * 96 + 32
    assert summary.linear_weights == weights
    if linear == "dense":
        assert not engine.layers
        assert weights * 12 <= summary.linear_bytes <= weights * 12 + 7 * 4  # and AdamW's step numbers
    else:
        assert sum(layer.state.nbytes for layer in engine.layers.values()) == weights * 3 // 4
        assert summary.linear_bytes == weights * 3 // 4 + 12 * rows_of_layers
        assert {layer.step for layer in engine.layers.values()} == {10}


@pytest.mark.device
def test_counters_learn_and_frozen_ones_do_not_move(tmp_path: Path, tiny: dict[str, Any]) -> None:
    learning = train(tmp_path / "learning", {**tiny, "steps": 40})
    frozen = train(tmp_path / "frozen", {**tiny, "steps": 40, "freeze_counters": True})
    first = train(tmp_path / "first", {**tiny, "steps": 1, "freeze_counters": True})
    assert learning.val_bpb < frozen.val_bpb < first.val_bpb
    name = "model.layers.0.mlp.up_proj"
    states = {
        key: read_engine(tmp_path / key / files.MODEL).layers[name].state.tobytes()
        for key in ("learning", "frozen", "first")
    }
    assert states["frozen"] == states["first"] != states["learning"]


def test_a_loss_that_is_not_finite_stops_the_run_before_the_update(tmp_path: Path, tiny: dict[str, Any]) -> None:
    config, _ = plan_run(tmp_path, {**tiny, "linear": "dense"}, resume=False)
    trainer = Trainer(config, load_corpus(config.text, config.model.seq))
    with torch.no_grad():
        trainer.model.lm_head.weight[0, 0] = float("nan")
    before = trainer.model.model.embed_tokens.weight.clone()
    with pytest.raises(MemtrainError, match="loss of step 1 is nan"):
        trainer.train_step()
    assert torch.equal(trainer.model.model.embed_tokens.weight, before)
    assert trainer.step == 0


def test_validation_changes_nothing(tmp_path: Path, tiny: dict[str, Any]) -> None:
    config, _ = plan_run(tmp_path, {**tiny, "linear": "dense"}, resume=False)
    trainer = Trainer(config, load_corpus(config.text, config.model.seq))
    trainer.train_step()
    before = {name: tensor.clone() for name, tensor in tensors_of(trainer.state()).items()}
    assert trainer.evaluate() == trainer.evaluate()
    assert trainer.model.training
    for name, tensor in tensors_of(trainer.state()).items():
        assert torch.equal(tensor, before[name]), name


def test_the_schedule_warms_up_and_does_not_know_the_end() -> None:
    values = [schedule(step) for step in range(1000)]
    peak = max(values)
    assert peak == 1.0
    assert values[: values.index(peak)] == sorted(values[: values.index(peak)])
    assert values[values.index(peak) :] == sorted(values[values.index(peak) :], reverse=True)
    assert 0 < values[-1] < 0.5


def test_resume_refuses_what_contradicts_the_run(tmp_path: Path, tiny: dict[str, Any]) -> None:
    flags = {**tiny, "linear": "dense", "steps": 2}
    out = tmp_path / "run"
    with pytest.raises(ValueError, match=r"no .*checkpoint\.pt"):
        plan_run(out, {}, resume=True)
    train(out, flags)
    assert plan_run(out, flags, resume=True)[0] == plan_run(out, {}, resume=True)[0]
    with pytest.raises(ValueError, match="--seed 6, which differs"):
        plan_run(out, {**flags, "seed": 6}, resume=True)
    with pytest.raises(ValueError, match=r"--steps of at least 2"):
        plan_run(out, {"steps": 1}, resume=True)
    Path(tiny["text"][0]).write_text("another text\n" * 100)
    with pytest.raises(ValueError, match="text that the run began with"):
        train(out, {"steps": 3}, resume=True)
    assert json.loads((out / "summary.json").read_text())["steps"] == 2


def test_a_new_run_replaces_a_finished_one(tmp_path: Path, tiny: dict[str, Any]) -> None:
    flags = {**tiny, "linear": "dense", "steps": 2}
    train(tmp_path / "run", flags)
    train(tmp_path / "run", {**flags, "steps": 1})
    assert [row["step"] for row in read_metrics(tmp_path / "run" / files.METRICS)] == [1]


@pytest.mark.parametrize("damage", [b"", b"not a checkpoint", None])
def test_a_broken_checkpoint_is_named(tmp_path: Path, tiny: dict[str, Any], damage: bytes | None) -> None:
    out = tmp_path / "run"
    train(out, {**tiny, "linear": "dense", "steps": 1})
    path = out / files.CHECKPOINT
    path.write_bytes(path.read_bytes()[:-100] if damage is None else damage)
    with pytest.raises(CorruptFile, match=r"checkpoint\.pt"):
        plan_run(out, {}, resume=True)


def test_one_changed_bit_in_a_checkpoint_is_noticed(tmp_path: Path, tiny: dict[str, Any]) -> None:
    out = tmp_path / "run"
    train(out, {**tiny, "linear": "dense", "steps": 1})
    path = out / files.CHECKPOINT
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1  # within a weight
    path.write_bytes(whole)
    with pytest.raises(CorruptFile, match="CRC"):
        plan_run(out, {}, resume=True)


def test_a_checkpoint_with_other_contents_is_named(tmp_path: Path) -> None:
    for content in ([1, 2], {"format": 2}, {"format": 1, "step": "three"}):
        torch.save(content, tmp_path / files.CHECKPOINT)
        with pytest.raises(CorruptFile, match=r"checkpoint\.pt: expected"):
            plan_run(tmp_path, {}, resume=True)


def test_metrics_drop_rows_behind_the_checkpoint_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 5.0}\n{"step": 2, "loss": 4.0}\n{"step": 3, "loss": 3.0}\n{"step": 4, "lo')
    with MetricsFile(path, keep=2) as metrics:
        metrics.add(3, 2.5, val_loss=None)
    assert read_metrics(path) == [{"step": 1, "loss": 5.0}, {"step": 2, "loss": 4.0}, {"step": 3, "loss": 2.5}]


@pytest.mark.device
@pytest.mark.parametrize("linear", ["dense", "counter"])
def test_text_from_the_file_follows_the_live_model(tmp_path: Path, tiny: dict[str, Any], linear: str) -> None:
    out = tmp_path / "run"
    train(out, {**tiny, "linear": linear})
    config, state = plan_run(out, {}, resume=True)
    assert state is not None
    trainer = Trainer(config, load_corpus(config.text, config.model.seq))
    trainer.load_state(state)
    made = bytes(Engine.load(out / files.MODEL).generate(b"line", 28, 0.0))
    assert made == torch_greedy(trainer.model.eval(), b"line", 28)
