"""`memtrain-cl budget`: what training a model takes of memory, by formula, forecast, and measured."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from memtrain_cl.lm.bill import Bill
    from memtrain_cl.lm.config import ModelConfig

_MIB, _GIB = 2**20, 2**30


def budget(
    layers: Annotated[int, typer.Option(help="Blocks of the model.")] = 12,
    dim: Annotated[int, typer.Option(help="Width of the model.")] = 256,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    seq: Annotated[int, typer.Option(help="Tokens of context.")] = 512,
    batch: Annotated[int, typer.Option(help="Sequences a step.")] = 8,
    vocab: Annotated[int, typer.Option(help="Kinds of tokens.")] = 256,
    params: Annotated[
        float, typer.Option(metavar="MILLIONS", help="The widest model with so many parameters, in place of --dim.")
    ] = 0.0,
    memory: Annotated[
        float, typer.Option(metavar="GiB", help="Also find the widest model that this memory holds.")
    ] = 0.0,
    measure: Annotated[
        bool, typer.Option("--measure", help="Train each for two steps, and show what it took.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            help="OpenCL device to measure on, index or part of its name; forecasts count what its kernels work on."
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the pools as bars into a PNG.")] = None,
) -> None:
    """Show what training the model of `train` takes of memory, in six ways to train it."""
    from dataclasses import replace

    from memtrain_cl.device import get_device
    from memtrain_cl.lm.bill import REGIMES, forecast, largest, widest_with
    from memtrain_cl.lm.config import ModelConfig

    if batch < 1:
        raise ValueError(f"expected --batch of at least 1, got {batch}")
    for name, value in (("params", params), ("memory", memory)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"expected --{name} as a finite number >= 0, got {value}")
    config = ModelConfig(layers=layers, dim=dim, heads=heads, seq=seq, vocab=vocab)
    if params:
        config = widest_with(config, round(params * 1e6))
    kinds = {name: (replace(config, linear=linear), kept) for name, (linear, kept) in REGIMES.items()}
    info = get_device(device).info if measure or device is not None else None
    bills = {name: forecast(model, batch, kept, info=info) for name, (model, kept) in kinds.items()}
    found = _measured(kinds, batch, device) if measure else {}
    _print_formula(config, batch)
    _print_bills(config, batch, bills, found)
    if memory:
        limit = round(memory * _GIB)
        widest = {name: largest(model, batch, kept, limit, info=info) for name, (model, kept) in kinds.items()}
        _print_widest(widest, memory)
    if plot is not None:
        _draw(plot, bills, found)


def _measured(kinds: dict[str, tuple[ModelConfig, str]], batch: int, device: str | None) -> dict[str, Bill]:
    """The bill of each way to train, from steps on the device; ways that it cannot hold are left out."""
    from memtrain_cl.cli.train import prepare
    from memtrain_cl.errors import OutOfMemory
    from memtrain_cl.lm.config import TrainConfig
    from memtrain_cl.lm.measure import measure

    found: dict[str, Bill] = {}
    with contextlib.ExitStack() as stack:
        _, place = prepare(device, "counter", stack)
        for name, (model, kept) in kinds.items():
            try:
                found[name] = measure(TrainConfig(model, batch=batch, activations=kept), place)
            except OutOfMemory as error:
                typer.echo(f"memtrain-cl: {name}: {error}", err=True)
    return found


def _print_formula(config: ModelConfig, batch: int) -> None:
    from rich.text import Text

    from memtrain_cl.budget import training_budget
    from memtrain_cl.cli.tables import console, table

    rows = training_budget(
        layers=config.layers,
        d_model=config.dim,
        vocab=config.vocab,
        tied_lm_head=False,
        batch=batch,
        seq=config.seq,
        misc_gib=0.0,
    )
    grid = table("by formula, GiB", "weights", "gradients", "optimizer", "activations", "sum")
    for row in rows:
        sizes = (row.persistent_gib, row.grad_gib, row.optim_gib, row.acts_gib, row.total_gib)
        grid.add_row(Text(row.name), *(f"{size:.4f}" for size in sizes))
    console().print(grid)


def _print_bills(config: ModelConfig, batch: int, bills: dict[str, Bill], found: dict[str, Bill]) -> None:
    from rich.text import Text

    from memtrain_cl.cli.tables import console, table

    shape = f"{config.layers} layers of {config.dim}, {batch} x {config.seq} tokens"
    grid = table(f"{shape}, MiB", "", "weights", "gradients", "optimizer", "activations", "rest", "peak", left=2)

    def row(name: str, source: str, bill: Bill) -> None:
        sizes = (*bill.pools.values(), bill.peak)
        grid.add_row(Text(name), Text(source), *(f"{size / _MIB:.2f}" for size in sizes))

    for name, bill in bills.items():
        row(name, "forecast", bill)
        if name in found:
            row("", "measured", found[name])
    console().print()
    console().print(grid)


def _print_widest(widest: dict[str, Any], memory: float) -> None:
    from rich.text import Text

    from memtrain_cl.cli.tables import console, table

    grid = table(f"widest in {memory:g} GiB", "width", "parameters", "peak, MiB")
    for name, answer in widest.items():
        if answer is None:
            grid.add_row(Text(name), "none", "", "")
            continue
        model, bill = answer
        grid.add_row(Text(name), str(model.dim), f"{bill.parameters:,}", f"{bill.peak / _MIB:.2f}")
    console().print()
    console().print(grid)


def _draw(path: Path, bills: dict[str, Bill], found: dict[str, Bill]) -> None:
    """Stacked bars of the pools, measured ones beside forecasts."""
    try:
        from matplotlib.figure import Figure  # an extra
    except ModuleNotFoundError as error:
        raise ValueError("expected matplotlib for --plot, got none: pip install 'memtrain-cl[plot]'") from error
    from memtrain_cl.export.atomic import atomic_path

    bars = [
        (f"{name}\n{source}", bill)
        for name, forecast in bills.items()
        for source, bill in (("forecast", forecast), ("measured", found.get(name)))
        if bill is not None
    ]
    figure = Figure(figsize=(10, 1 + 0.5 * len(bars)), layout="constrained")
    axes = figure.add_subplot()
    places, left = list(range(len(bars))), [0.0] * len(bars)
    for pool in next(iter(bills.values())).pools:
        sizes = [bill.pools[pool] / _MIB for _, bill in bars]
        axes.barh(places, sizes, left=left, label=pool)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.set_yticks(places, [name for name, _ in bars])
    axes.invert_yaxis()
    axes.set(xlabel="MiB")
    axes.legend()
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
