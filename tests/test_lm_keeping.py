"""`--activations` and `--memory-limit`: what is kept, the limit, and runs that are resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from memtrain_cl.device import Device
from memtrain_cl.errors import OutOfMemory
from memtrain_cl.lm.checkpoint import load_checkpoint, save_checkpoint
from memtrain_cl.lm.config import MIB, ModelConfig, TrainConfig
from memtrain_cl.lm.data import Corpus, load_corpus
from memtrain_cl.lm.run import plan_run, run_training
from memtrain_cl.lm.trainer import Trainer
from tests.test_lm_run import assert_same_run

PLACE = "opencl:0"
MODEL: dict[str, Any] = {"layers": 3, "dim": 64, "heads": 2, "seq": 64}


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {n} says {n * n % 97}\n" for n in range(1500)))
    return str(path)


def trainer_of(corpus: Corpus, place: str = PLACE, linear: str = "dense", **options: Any) -> Trainer:
    return Trainer(TrainConfig(ModelConfig(**MODEL, linear=linear), batch=4, **options), corpus, None, place)


def peak_of(trainer: Trainer, steps: int = 4) -> int:
    """The most bytes of the last of some steps, beside those of before the trainer."""
    module = torch.opencl  # type: ignore[attr-defined]
    for _ in range(steps - 1):
        trainer.train_step()
    module.reset_peak_memory_stats(PLACE)
    trainer.train_step()
    return int(module.max_memory_allocated(PLACE))


@pytest.mark.parametrize("linear", ["dense", "counter"])
def test_less_is_held_and_the_loss_is_the_same(device: Device, text: str, linear: str) -> None:
    corpus = load_corpus((text,), MODEL["seq"])
    peaks, losses = {}, {}
    for activations in ("fp", "8", "4", "recompute"):
        trainer = trainer_of(corpus, linear=linear, activations=activations)
        peaks[activations] = peak_of(trainer, 3)
        losses[activations] = trainer.train_step()
        del trainer
    assert losses["recompute"] == losses["fp"]
    for few in ("8", "4"):
        assert losses[few] == pytest.approx(losses["fp"], rel=0.02)
    assert peaks["4"] < peaks["8"] < peaks["fp"]
    assert peaks["recompute"] < 0.75 * peaks["fp"]


def test_auto_meets_its_limit_or_says_which_it_could(device: Device, text: str) -> None:
    corpus = load_corpus((text,), MODEL["seq"])
    allowed = torch.opencl.memory_stats(PLACE)["limit"]  # type: ignore[attr-defined]
    free = trainer_of(corpus, activations="auto")
    most = peak_of(free)
    assert free.keeping.plan is not None
    assert free.keeping.plan.actions == ("store",) * 3
    del free
    limit = (most - 300_000) / MIB
    trainer = trainer_of(corpus, activations="auto", memory_limit=limit)
    try:
        assert peak_of(trainer) <= limit * MIB
        assert torch.opencl.memory_stats(PLACE)["limit"] == round(limit * MIB)  # type: ignore[attr-defined]
        trainer.evaluate()
    finally:
        trainer.keeping.release()
    assert torch.opencl.memory_stats(PLACE)["limit"] == allowed  # type: ignore[attr-defined]
    assert trainer.keeping.plan is not None
    assert set(trainer.keeping.plan.actions) > {"store"}
    del trainer
    small = trainer_of(corpus, activations="auto", memory_limit=0.5)
    with pytest.raises(ValueError, match=r"expected --memory-limit of at least \d+ \(MiB\), .* got 0.5"):
        peak_of(small)
    del small
    plain = trainer_of(corpus, memory_limit=limit)
    try:
        with pytest.raises(OutOfMemory, match="out of memory"):
            peak_of(plain)
    finally:
        plain.keeping.release()


def test_a_resumed_run_ends_with_the_same_bytes(device: Device, tmp_path: Path, text: str) -> None:
    flags = {**MODEL, "text": (text,), "batch": 4, "linear": "counter", "activations": "4"}
    for name, stops in (("through", [6]), ("half", [4, 6])):
        for steps in stops:
            resume = steps > stops[0]
            config, state = plan_run(tmp_path / name, {"steps": steps, **({} if resume else flags)}, resume=resume)
            run_training(config, tmp_path / name, state, quiet=True, place=PLACE)
    assert_same_run(tmp_path / "through", tmp_path / "half")


def test_what_auto_chose_is_kept_with_the_run(device: Device, tmp_path: Path, text: str) -> None:
    corpus = load_corpus((text,), MODEL["seq"])
    # Too little for all that blocks compute, so that some of it is rounded or run again.
    options: dict[str, Any] = {"linear": "counter", "activations": "auto", "memory_limit": 4.0}
    trainer = trainer_of(corpus, **options)
    for _ in range(4):
        trainer.train_step()
    save_checkpoint(tmp_path / "file", trainer.config, trainer.state())
    state = load_checkpoint(tmp_path / "file")[1]
    assert len(state["activations"]) == 3
    expected = [trainer.train_step() for _ in range(2)]
    theirs = {
        name: value.cpu() for name, value in trainer.model.state_dict().items() if isinstance(value, torch.Tensor)
    }
    trainer.keeping.release()
    del trainer
    resumed = trainer_of(corpus, **options)
    resumed.load_state(state)
    got = [resumed.train_step() for _ in range(2)]
    resumed.keeping.release()
    assert got == expected
    ours = resumed.model.state_dict()
    assert all(torch.equal(ours[name].cpu(), value) for name, value in theirs.items())


def test_a_limit_on_the_host_is_refused(text: str) -> None:
    corpus = load_corpus((text,), MODEL["seq"])
    for options in ({"memory_limit": 5.0}, {"activations": "auto"}):
        with pytest.raises(ValueError, match="expected a run on an OpenCL device beside --memory-limit"):
            trainer_of(corpus, "cpu", **options)
    with pytest.raises(ValueError, match="expected activations to be one of fp, 8, 4, recompute, auto, got '2'"):
        TrainConfig(activations="2")
    with pytest.raises(ValueError, match="expected memory_limit as a finite number >= 0, got -1"):
        TrainConfig(memory_limit=-1.0)
