"""`memtrain-cl import`: other programs' files of counter layers become an engine file."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memtrain_cl.cli.files import require_new
from memtrain_cl.cli.per_layer import per_layer

if TYPE_CHECKING:
    from memtrain_cl.export.mncc_import import MnccNote
    from memtrain_cl.export.packed import EngineFile


class Source(StrEnum):
    """Kinds of files that import reads."""

    CHECKPOINT = "checkpoint"
    MOTIFCL = "motifcl"
    MNCC = "mncc"
    NPZ = "npz"


def import_(
    file: Annotated[Path, typer.Argument(help="The file; for motifcl the folder of its tensors.")],
    source: Annotated[Source, typer.Option("--from", help="What it is.")],
    out: Annotated[Path, typer.Option("--out", help="Engine file (.safetensors) to write.")],
    C: Annotated[
        list[str] | None,
        typer.Option("--C", metavar="N|PATTERN=N", help="C of the layers (checkpoint, motifcl); repeatable."),
    ] = None,
    in_features: Annotated[
        list[str] | None,
        typer.Option(metavar="N|PATTERN=N", help="Columns of layers, where their states may mean two (checkpoint)."),
    ] = None,
    row_scales: Annotated[
        bool,
        typer.Option(
            "--row-scales",
            help="Make counter layers of those with groups or single weights, too (mncc); tells the error.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Rules the rounding of layers whose file holds no seed.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Make an engine file of other programs' counter layers.

    --C and --in-features take one number for all layers, or numbers for those whose names a pattern matches
    ("*.down_proj=704"); the last that matches counts.
    """
    from memtrain_cl.cli.file_tables import print_imported
    from memtrain_cl.export.hostile import printable
    from memtrain_cl.export.packed import write_engine

    for option, given, takers in (
        ("--C", C, (Source.CHECKPOINT, Source.MOTIFCL)),
        ("--in-features", in_features, (Source.CHECKPOINT,)),
        ("--row-scales", row_scales, (Source.MNCC,)),
    ):
        if given and source not in takers:
            raise ValueError(f"expected {option} only beside --from {' or '.join(takers)}, got --from {source.value}")
    require_new(out, force=force)
    engine, notes = _read(file, source, C, in_features, row_scales, seed)
    if not engine.layers and not engine.tensors:
        raise ValueError(f"expected layers in {printable(str(file))}, got a file without any")
    write_engine(out, engine.layers, engine.tensors, engine.model)
    print_imported(engine, notes, f"engine: {out.stat().st_size:,} bytes in {printable(str(out))}")


def _read(
    file: Path,
    source: Source,
    C: list[str] | None,
    in_features: list[str] | None,
    row_scales: bool,
    seed: int,
) -> tuple[EngineFile, list[MnccNote]]:
    from memtrain_cl.export.mncc_import import import_mncc
    from memtrain_cl.export.motifcl import read_motifcl_folder
    from memtrain_cl.export.npz import read_npz
    from memtrain_cl.export.packed import EngineFile

    radix = per_layer("--C", C)
    if source is Source.MNCC:
        return import_mncc(file, row_scales=row_scales, seed=seed)
    if source is Source.CHECKPOINT:
        from memtrain_cl.export.checkpoint import read_checkpoint

        return read_checkpoint(file, C=radix, in_features=per_layer("--in-features", in_features), seed=seed), []
    layers = read_npz(file, seed=seed) if source is Source.NPZ else read_motifcl_folder(file, radix, seed=seed)
    return EngineFile(layers, {}, {}, ""), []
