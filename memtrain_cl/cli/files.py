"""`memtrain-cl inspect` and `memtrain-cl export`: look into a file, turn a model into another kind of file.

Neither needs torch, but for files of torch.save.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memtrain_cl.cli.per_layer import per_layer

if TYPE_CHECKING:
    from memtrain_cl.export.packed import EngineFile


class Target(StrEnum):
    """Kinds of files that export writes."""

    ENGINE = "engine"
    MOTIFCL = "motifcl"
    MNCC = "mncc"
    TQ2_0 = "gguf:tq2_0"
    TQ1_0 = "gguf:tq1_0"
    F16 = "gguf:f16"
    NPZ = "npz"


#: What the formats of counter layers alone leave out.
LEFT_OUT = {
    Target.MOTIFCL: "C, s_base, seed, step, options",
    Target.MNCC: "v, s_base, seed, step, options",
    Target.NPZ: "seed, step, options",
}


def inspect(
    file: Annotated[
        Path,
        typer.Argument(
            help="An engine file, MotifCL tensor (.mt) or folder of them, MNCC, .npz, GGUF or PyTorch checkpoint."
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    C: Annotated[
        list[str] | None,
        typer.Option("--C", metavar="N|PATTERN=N", help="C of layers whose file does not say it; repeatable."),
    ] = None,
    in_features: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N|PATTERN=N", help="Columns of a checkpoint's layers, where they may be two; repeatable."
        ),
    ] = None,
) -> None:
    """Check a file and print its tensors: shapes, types, bytes, bits a weight, shares of -1/0/+1, C, step."""
    from memtrain_cl.cli.file_tables import print_summary
    from memtrain_cl.export.inspection import summarize

    summary = summarize(file, per_layer("--C", C), per_layer("--in-features", in_features))
    if as_json:
        counters = summary.counters
        typer.echo(json.dumps({**asdict(summary), "counters": asdict(counters) if counters else None}, indent=2))
    else:
        print_summary(summary)


def export(
    model: Annotated[
        Path, typer.Argument(help="An engine file (.safetensors), or a folder or checkpoint of memtrain-cl train.")
    ],
    to: Annotated[Target, typer.Option("--to", help="Kind of file to write.")],
    out: Annotated[Path, typer.Option("--out", help="File to write; a folder, new or empty, for motifcl.")],
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing file, or write into a folder that holds files.")
    ] = False,
) -> None:
    """Write a model as another kind of file, whole or not at all."""
    from memtrain_cl.export.hostile import printable
    from memtrain_cl.lm.files import read_model

    file = read_model(model)
    if not file.layers and to in LEFT_OUT:
        raise ValueError(f"expected counter layers in {printable(str(model))}, got a file without any")
    if to is not Target.MOTIFCL:
        require_new(out, force=force)
    if to in (Target.TQ2_0, Target.TQ1_0, Target.F16):
        _write_gguf(out, file, to)
    else:
        _write(out, file, to, force)


def require_new(out: Path, *, force: bool) -> None:
    """FileExistsError for a file that is there already, unless force."""
    if out.exists() and not force:
        raise FileExistsError(errno.EEXIST, "expected a new file (or --force)", str(out))


def _write(out: Path, file: EngineFile, to: Target, force: bool) -> None:
    from memtrain_cl.cli.file_tables import print_layers
    from memtrain_cl.export.hostile import printable
    from memtrain_cl.export.mncc import write_mncc
    from memtrain_cl.export.motifcl import write_motifcl
    from memtrain_cl.export.npz import write_npz
    from memtrain_cl.export.packed import write_engine

    if to is Target.MOTIFCL:
        written = f"{len(write_motifcl(out, file.layers, force=force))} files"
    else:
        writers: dict[Target, Callable[[], None]] = {
            Target.ENGINE: lambda: write_engine(out, file.layers, file.tensors, file.model),
            Target.MNCC: lambda: write_mncc(out, file.layers),
            Target.NPZ: lambda: write_npz(out, file.layers),
        }
        writers[to]()
        written = f"{out.stat().st_size:,} bytes"
    left_out = f" (left out: {LEFT_OUT[to]}, ordinary tensors: {len(file.tensors)})" if to in LEFT_OUT else ""
    print_layers(file.layers, f"{to.value}: {written} in {printable(str(out))}{left_out}")


def _write_gguf(out: Path, file: EngineFile, to: Target) -> None:
    from memtrain_cl.cli.file_tables import print_gguf
    from memtrain_cl.export.gguf import KINDS, write_gguf
    from memtrain_cl.export.hostile import printable

    kind = next(kind for kind in KINDS if to.value == f"gguf:{kind}")
    report = write_gguf(out, file, kind)
    for warning in report.warnings:
        typer.echo(f"memtrain-cl: {printable(warning)}", err=True)
    print_gguf(report, f"{to.value}: {report.bytes:,} bytes in {printable(str(out))} (left out: counters, v, s_base)")
