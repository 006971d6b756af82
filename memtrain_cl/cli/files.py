"""`memtrain-cl inspect` and `memtrain-cl export`: look into a file, turn it into another kind. Neither needs torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Target(StrEnum):
    """Kinds of files that export writes."""

    MOTIFCL = "motifcl"


def inspect(
    file: Annotated[Path, typer.Argument(help="An engine file (.safetensors) or a MotifCL tensor (.mt).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    C: Annotated[int | None, typer.Option("--C", help="C of a MotifCL state, which does not say its own.")] = None,
) -> None:
    """Check a file and print its tensors: shapes, types, bytes, bits a weight, shares of -1/0/+1, C, step."""
    from memtrain_cl.cli.file_tables import print_summary
    from memtrain_cl.export.summary import summarize

    summary = summarize(file, C)
    if as_json:
        counters = summary.counters
        typer.echo(json.dumps({**asdict(summary), "counters": asdict(counters) if counters else None}, indent=2))
    else:
        print_summary(summary)


def export(
    file: Annotated[Path, typer.Argument(help="An engine file (.safetensors).")],
    to: Annotated[Target, typer.Option("--to", help="Kind of files to write.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write into, new or empty.")],
    force: Annotated[
        bool, typer.Option("--force", help="Write into a folder that holds files, replacing its own.")
    ] = False,
) -> None:
    """Write the counter layers of an engine file as another program's files, all or none."""
    from memtrain_cl.cli.file_tables import print_layers
    from memtrain_cl.export.hostile import printable
    from memtrain_cl.export.motifcl import write_motifcl
    from memtrain_cl.export.packed import read_engine

    engine = read_engine(file)
    if not engine.layers:
        raise ValueError(f"expected counter layers in {printable(str(file))}, got a file without any")
    names = write_motifcl(out, engine.layers, force=force)
    left_out = f" (ordinary tensors, which the format leaves out: {len(engine.tensors)})" if engine.tensors else ""
    print_layers(engine.layers, f"{to.value}: {len(names)} files in {printable(str(out))}{left_out}")
