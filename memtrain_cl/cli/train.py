"""`memtrain-cl train`: the main job."""

from __future__ import annotations

import contextlib
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

#: The value of --device that keeps tensors on the host, where counter layers visit the OpenCL device.
HOST_PATH = "cpu-torch"


class LinearKind(StrEnum):
    """Values of --linear."""

    counter = "counter"
    dense = "dense"


class Activations(StrEnum):
    """Values of --activations."""

    fp = "fp"
    eight = "8"
    four = "4"
    recompute = "recompute"
    auto = "auto"


class Compute(StrEnum):
    """Values of --counter-compute."""

    fp = "fp"
    int8 = "int8"


def train(
    ctx: typer.Context,
    more_text: Annotated[
        list[Path] | None, typer.Argument(metavar="PATH", help="Further paths after --text.", show_default=False)
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH...", help="Text files or folders.", show_default="Python's standard library"),
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 800,
    layers: Annotated[int, typer.Option(help="Blocks of the model.")] = 4,
    dim: Annotated[int, typer.Option(help="Width of the model.")] = 256,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    hidden: Annotated[
        int, typer.Option(help="Width of the feed-forward part.", show_default="8/3 of --dim, in whole 32s")
    ] = 0,
    seq: Annotated[int, typer.Option(help="Bytes of context.")] = 128,
    batch: Annotated[int, typer.Option(help="Sequences a step.")] = 4,
    lr: Annotated[float, typer.Option(help="Peak rate of AdamW.")] = 2e-3,
    counter_lr: Annotated[float, typer.Option(help="Peak rate of the counter layers.")] = 3e-3,
    counter_eps: Annotated[
        float, typer.Option(help="Least row moment that the counters' gradient is divided by.")
    ] = 1e-5,
    counter_compute: Annotated[Compute, typer.Option(help="Products of the counter layers.")] = Compute.fp,
    C: Annotated[int, typer.Option("--C", help="Carry radix of the counters, 1 to 11.")] = 11,
    device: Annotated[
        str | None,
        typer.Option(
            help="OpenCL device, index or part of its name, that holds the whole run; "
            "cpu-torch leaves all but the counter layers to torch on the host.",
            show_default="the best there is",
        ),
    ] = None,
    linear: Annotated[LinearKind, typer.Option(help="Kind of the linear layers.")] = LinearKind.counter,
    freeze_counters: Annotated[
        bool,
        typer.Option(
            "--freeze-counters", help="Control run: counter layers keep their first weights, the rest learns."
        ),
    ] = False,
    activations: Annotated[
        Activations,
        typer.Option(metavar="KIND", help="Kept for backward: fp (all), 8 or 4 (bits), recompute, auto."),
    ] = Activations.fp,
    memory_limit: Annotated[
        float, typer.Option(metavar="MiB", help="Memory that the device may hold; 0 sets no limit.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Rules first weights, batches and rounding.")] = 0,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for all files of the run.")] = Path("runs/train"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint in --out, with its options.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress and no table.")] = False,
) -> None:
    """Train a byte-level language model whose linear weights are 6-bit counters, and export it.

    Writes model.safetensors, checkpoint.pt, metrics.jsonl, loss.png and summary.json to --out.
    Ctrl-C saves; --resume goes on.
    """
    options = {
        "text": tuple(str(path.absolute()) for path in [*(text or []), *(more_text or [])]),
        "steps": steps,
        "layers": layers,
        "dim": dim,
        "heads": heads,
        "hidden": hidden,
        "seq": seq,
        "batch": batch,
        "lr": lr,
        "counter_lr": counter_lr,
        "counter_eps": counter_eps,
        "counter_compute": counter_compute.value,
        "C": C,
        "linear": linear.value,
        "freeze_counters": freeze_counters,
        "activations": activations.value,
        "memory_limit": memory_limit,
        "seed": seed,
    }
    given = {name for name in ctx.params if _is_given(ctx, name)} | ({"text"} if more_text else set())
    flags = {name: value for name, value in options.items() if name in given}
    from memtrain_cl.lm.run import Interrupted, plan_run, run_training

    config, state = plan_run(out, flags, resume=resume)
    with contextlib.ExitStack() as stack:
        label, place = prepare(device, config.model.linear, stack)
        try:
            summary = run_training(config, out, state, quiet=quiet, device=label, place=place)
        except Interrupted as stopped:
            typer.echo(f"memtrain-cl: {stopped}", err=True)
            raise typer.Exit(130) from stopped
    if not quiet:
        from rich.console import Console

        console = Console(markup=False, highlight=False)
        if not console.is_terminal:
            console.width = 120  # rich takes 80 for a pipe, and would fold every second line
        console.print(summary.table())
    if summary.export_differs:
        typer.echo(
            f"memtrain-cl: the exported file differs from the live state in {', '.join(summary.export_differs)}",
            err=True,
        )
        raise typer.Exit(1)


def prepare(device: str | None, linear: str, stack: contextlib.ExitStack) -> tuple[str | None, str]:
    """The name for the table and torch's device of a run, opened; fallbacks to the host are errors on "opencl"."""
    from memtrain_cl.device import get_device, put_first, use_device

    if device == HOST_PATH:
        return (get_device().info.name if linear == "counter" else None), "cpu"
    info = put_first(device)
    from memtrain_cl.torch_device.backend import require_registered
    from memtrain_cl.torch_device.fallback import strict

    require_registered()
    stack.enter_context(use_device(info.index))
    stack.enter_context(strict())
    return info.name, f"opencl:{info.index}"


def _is_given(ctx: typer.Context, name: str) -> bool:
    """Whether the user wrote the option; what they left out is the run's own when it is resumed."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
