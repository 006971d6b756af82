"""`memtrain-cl train`: the main job."""

from __future__ import annotations

import contextlib
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer


class LinearKind(StrEnum):
    """Values of --linear."""

    counter = "counter"
    dense = "dense"


def _option(help_text: str, default: Any, *names: str, metavar: str | None = None) -> Any:
    """An option whose default is None, to tell what the user gave from what they left; `default` is what --help
    shows.
    """
    return typer.Option(*names, help=help_text, show_default=str(default), metavar=metavar)


def train(
    more_text: Annotated[
        list[Path] | None, typer.Argument(metavar="[PATH]...", help="Further paths after --text.", show_default=False)
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH...", help="Text files or folders.", show_default="source of Python's standard library"
        ),
    ] = None,
    steps: Annotated[int | None, _option("Training steps.", 600)] = None,
    layers: Annotated[int | None, _option("Blocks of the model.", 4)] = None,
    dim: Annotated[int | None, _option("Width of the model.", 256)] = None,
    heads: Annotated[int | None, _option("Attention heads.", 4)] = None,
    seq: Annotated[int | None, _option("Bytes of context.", 256)] = None,
    batch: Annotated[int | None, _option("Sequences a step.", 8)] = None,
    lr: Annotated[float | None, _option("Peak rate of AdamW.", 2e-3)] = None,
    counter_lr: Annotated[float | None, _option("Peak rate of the counter layers.", 3e-3)] = None,
    C: Annotated[int | None, _option("Carry radix of the counters, 1 to 11.", 11, "--C")] = None,
    device: Annotated[str | None, _option("OpenCL device: index or part of its name.", "the best there is")] = None,
    linear: Annotated[LinearKind | None, _option("Kind of the linear layers.", "counter")] = None,
    freeze_counters: Annotated[
        bool,
        typer.Option(
            "--freeze-counters", help="Control run: counter layers keep their first weights, the rest learns."
        ),
    ] = False,
    seed: Annotated[int | None, _option("Rules first weights, batches and rounding.", 0)] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for model, checkpoint, metrics and plot.")] = Path(
        "runs/train"
    ),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint in --out, with its options.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress and no table.")] = False,
) -> None:
    """Train a byte-level language model whose linear weights are 6-bit counters, and export it.

    Writes model.safetensors, checkpoint.pt, metrics.jsonl, loss.png and summary.json to --out. Ctrl-C saves; --resume
    goes on.
    """
    given = {
        "text": tuple(str(path.absolute()) for path in [*(text or []), *(more_text or [])]) or None,
        "steps": steps,
        "layers": layers,
        "dim": dim,
        "heads": heads,
        "seq": seq,
        "batch": batch,
        "lr": lr,
        "counter_lr": counter_lr,
        "C": C,
        "linear": None if linear is None else linear.value,
        "freeze_counters": freeze_counters or None,
        "seed": seed,
    }
    flags = {name: value for name, value in given.items() if value is not None}
    from memtrain_cl.device import get_device, use_device
    from memtrain_cl.lm.run import Interrupted, plan_run, run_training

    config, state = plan_run(out, flags, resume=resume)
    with contextlib.ExitStack() as stack:
        label = None
        if config.model.linear == "counter" or device is not None:
            label = stack.enter_context(use_device(get_device(device))).info.name
        try:
            summary = run_training(config, out, state, quiet=quiet, device=label)
        except Interrupted as stopped:
            typer.echo(f"memtrain-cl: {stopped}", err=True)
            raise typer.Exit(130) from stopped
    if not quiet:
        from rich.console import Console

        Console(markup=False, highlight=False).print(summary.table())
    if summary.export_differs:
        typer.echo(
            f"memtrain-cl: the exported file differs from the live state in {', '.join(summary.export_differs)}",
            err=True,
        )
        raise typer.Exit(1)
