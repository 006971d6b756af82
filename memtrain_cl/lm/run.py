"""A training run on disk: the folder, the loop with its checkpoints and its stop, and what is written at the end."""

from __future__ import annotations

import json
import shlex
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from memtrain_cl.errors import MemtrainError
from memtrain_cl.export.atomic import atomic_path
from memtrain_cl.export.packed import export_model, verify_export
from memtrain_cl.lm.checkpoint import load_checkpoint, save_checkpoint
from memtrain_cl.lm.config import TrainConfig
from memtrain_cl.lm.data import load_corpus
from memtrain_cl.lm.description import model_description
from memtrain_cl.lm.files import CHECKPOINT, METRICS, MODEL, PLOT, SUMMARY
from memtrain_cl.lm.metrics import MetricsFile, bits_per_byte, plot_loss, read_metrics
from memtrain_cl.lm.report import DENSE_BYTES, ProgressView, Summary, measure_memory, megabytes, peak_rss
from memtrain_cl.lm.trainer import Trainer

SAVE_EVERY_SECONDS = 60.0
VALIDATE_EVERY_STEPS = 100


class Interrupted(MemtrainError):
    """The run was asked to stop, has saved, and can be resumed."""


class StopRequest:
    """Whether SIGINT or SIGTERM came. A second one acts as if nobody listened."""

    def __init__(self) -> None:
        self.requested = False


@contextmanager
def listen_for_stop() -> Iterator[StopRequest]:
    """Within the block, the first SIGINT or SIGTERM sets `requested` (in the main thread; others get no signals)."""
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.requested = True
        restore()

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        restore()


def plan_run(out: Path, flags: Mapping[str, Any], *, resume: bool) -> tuple[TrainConfig, dict[str, Any] | None]:
    """The run's configuration and the state to go on from (None: from the start). `flags` are the options that the user
    gave.

    A resumed run takes its options from the checkpoint: flags may repeat them, and `steps` may lengthen the run. Raises
    ValueError when there is nothing to resume, a flag contradicts the checkpoint, or a new run would replace one that
    is not finished.
    """
    path = out / CHECKPOINT
    if not resume:
        if path.exists() and not (out / SUMMARY).exists():
            raise ValueError(
                f"expected an --out without an unfinished run, got one in {out}: "
                f"add --resume to go on with it, or delete {path}"
            )
        return TrainConfig().with_flags(flags), None
    if not path.exists():
        raise ValueError(
            f"expected a checkpoint to resume from, got no {path}: leave out --resume to begin a run there"
        )
    stored, state = load_checkpoint(path)
    for name, value in flags.items():
        if name != "steps" and stored.with_flags({name: value}) != stored:
            raise ValueError(
                f"expected the options of the run in {out}, got --{name.replace('_', '-')} {value}, which differs"
            )
    config = stored.with_flags({"steps": flags.get("steps", stored.steps)})
    if config.steps < state["step"]:
        raise ValueError(
            f"expected --steps of at least {state['step']}, which the run in {out} has done, got {config.steps}"
        )
    return config, state


def run_training(
    config: TrainConfig,
    out: Path,
    state: Mapping[str, Any] | None = None,
    *,
    quiet: bool = False,
    device: str | None = None,
    console: Console | None = None,
    ops: Any = None,
    place: str = "cpu",
) -> Summary:
    """Trains from the start, or on from `state`, and writes model, checkpoint, metrics, plot and summary into `out`.

    `config` and `state` are what `plan_run` gave. device: its name, for the table. console: where progress is shown
    (default: stderr). ops: the counter layers' backend. place: torch's device that holds the run. Raises Interrupted
    after SIGINT or SIGTERM, when the step is finished and saved; ValueError, OSError or MemtrainError for unusable text
    or state, before anything is written.
    """
    console = console or Console(stderr=True, markup=False, highlight=False)
    corpus = load_corpus(config.text, config.model.seq)
    trainer = Trainer(config, corpus, ops, place)
    try:
        if state is not None:
            trainer.load_state(state)
        _prepare_folder(out, fresh=state is None)
        return _run(trainer, out, device, console, quiet=quiet)
    finally:
        trainer.keeping.release()


def _run(trainer: Trainer, out: Path, device: str | None, console: Console, *, quiet: bool) -> Summary:
    """The steps, and what is written at the end."""
    config, corpus = trainer.config, trainer.corpus
    if not quiet:
        console.print(
            f"{corpus.files} files of {corpus.name}: {corpus.train.size:,} bytes to train on, "
            f"{corpus.valid.size:,} to validate with",
            soft_wrap=True,
        )
    with listen_for_stop() as stop:
        val_loss = _loop(trainer, out, stop, console, quiet=quiet)
        if trainer.step < config.steps:
            raise Interrupted(
                f"stopped after step {trainer.step} of {config.steps} and saved; "
                f"go on with: memtrain-cl train --resume --out {shlex.quote(str(out))}"
            )
        summary = _export(trainer, out, device, trainer.evaluate() if val_loss is None else val_loss)
        kind = "frozen counters" if config.freeze_counters else config.model.linear
        title = f"{kind}: {summary.val_bpb:.3f} bits per byte of validation text"
        if not plot_loss(read_metrics(out / METRICS), out / PLOT, title):
            console.print(f"no {PLOT}, for want of matplotlib: pip install matplotlib", soft_wrap=True)
        with atomic_path(out / SUMMARY) as temporary:  # last: it marks the run as finished
            temporary.write_text(
                json.dumps({**summary.to_json(), "config": config.to_json()}, indent=2) + "\n", encoding="utf-8"
            )
    return summary


def _prepare_folder(out: Path, *, fresh: bool) -> None:
    """Makes the folder and takes away what an earlier run left there, so that all files in it are of one run."""
    out.mkdir(parents=True, exist_ok=True)
    for name in (SUMMARY, CHECKPOINT, MODEL, PLOT) if fresh else (SUMMARY,):
        (out / name).unlink(missing_ok=True)


def _loop(trainer: Trainer, out: Path, stop: StopRequest, console: Console, *, quiet: bool) -> float | None:
    """Steps until the end or a stop, then saves. Returns the validation loss of the last step, where the run came
    that far here.
    """
    config = trainer.config
    val_loss: float | None = None
    state_bytes: int | None = None
    with (
        MetricsFile(out / METRICS, keep=trainer.step) as metrics,
        ProgressView(console, config.steps, trainer.step, quiet=quiet) as view,
    ):
        if metrics.kept:
            trainer.seconds = float(metrics.kept[-1].get("seconds", 0.0))
        saved = time.monotonic()
        told = False
        while trainer.step < config.steps and not stop.requested:
            before = trainer.seconds
            loss = trainer.train_step()
            rate = trainer.tokens_per_step / (trainer.seconds - before)
            plan = trainer.keeping.plan
            if plan is not None and plan.decided and not (told or quiet):
                told = True
                console.print(str(plan), soft_wrap=True)
            if state_bytes is None:  # the optimizer has its state from the first step on
                state_bytes = measure_memory(trainer.model, trainer.optimizer).total_bytes
            view.update(
                trainer.step, loss, rate, f"{megabytes(peak_rss())} (weights and optimizer {megabytes(state_bytes)})"
            )
            if trainer.step % VALIDATE_EVERY_STEPS == 0 or trainer.step == config.steps:
                val_loss = trainer.evaluate()
            else:
                val_loss = None
            lr, counter_lr = trainer.learning_rates()
            metrics.add(
                trainer.step,
                loss,
                tokens_per_second=round(rate, 1),
                seconds=round(trainer.seconds, 3),
                lr=lr,
                counter_lr=counter_lr,
                peak_rss_bytes=peak_rss(),
                val_loss=val_loss,
                val_bpb=None if val_loss is None else bits_per_byte(val_loss),
            )
            if time.monotonic() - saved >= SAVE_EVERY_SECONDS:
                save_checkpoint(out / CHECKPOINT, config, trainer.state())
                saved = time.monotonic()
        save_checkpoint(out / CHECKPOINT, config, trainer.state())
    return val_loss


def _export(trainer: Trainer, out: Path, device: str | None, val_loss: float) -> Summary:
    """Writes the engine file, compares it with the live state, and gathers the figures of the run."""
    config = trainer.config
    path = out / MODEL
    export_model(trainer.model, path, model_description(config.model))
    differs = verify_export(trainer.model, path)
    memory = measure_memory(trainer.model, trainer.optimizer)
    tokens = trainer.step * trainer.tokens_per_step
    return Summary(
        steps=trainer.step,
        tokens=tokens,
        train_seconds=trainer.seconds,
        tokens_per_second=tokens / trainer.seconds,
        val_loss=val_loss,
        val_bpb=bits_per_byte(val_loss),
        linear=config.model.linear,
        freeze_counters=config.freeze_counters,
        device=device,
        linear_weights=memory.weights,
        linear_bytes=memory.linear_bytes,
        bytes_per_weight=memory.bytes_per_weight,
        dense_bytes_per_weight=DENSE_BYTES,
        model_and_optimizer_bytes=memory.total_bytes,
        peak_rss_bytes=peak_rss(),
        exported_file=str(path),
        exported_bytes=path.stat().st_size,
        export_differs=tuple(differs),
    )
