"""The tables of `memtrain-cl inspect`, `export` and `import`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from memtrain_cl.cli.tables import console, table
from memtrain_cl.export.gguf import GgufReport
from memtrain_cl.export.hostile import printable, shorten
from memtrain_cl.export.layout import tensor_name
from memtrain_cl.export.mncc_import import MnccNote
from memtrain_cl.export.packed import EngineFile
from memtrain_cl.export.summary import FileSummary, LayerSummary
from memtrain_cl.formats import LayerState


def print_layers(layers: Mapping[str, LayerState], sentence: str) -> None:
    """The exported layers, and a closing sentence."""
    out = console()
    grid = table("layer", "out", "in", "C")
    for name, layer in layers.items():
        grid.add_row(Text(printable(name)), str(layer.out_features), str(layer.in_features), str(layer.C))
    out.print(grid)
    out.print(Text(sentence))


def print_gguf(report: GgufReport, sentence: str) -> None:
    """The tensors of a GGUF file by type, what float16 made of the row scales, and a closing sentence."""
    out = console()
    grid = table("type", "tensors", "bytes")
    for kind in dict.fromkeys(tensor.type for tensor in report.tensors):
        sizes = [tensor.bytes for tensor in report.tensors if tensor.type == kind]
        grid.add_row(kind, str(len(sizes)), f"{sum(sizes):,}")
    out.print(grid)
    out.print(Text(f"largest relative error of a row scale in float16: {report.scale_error:.2g}"))
    out.print(Text(sentence))


#: What became of a layer, by the form of its note.
_FORMS = {
    "counters": "codes and scales as they were",
    "dense": "dense weights, counters left out",
    "row scales": "other weights, one scale a row",
}


def print_imported(engine: EngineFile, notes: Sequence[MnccNote], sentence: str) -> None:
    """The imported layers, for MNCC what became of each and how far its weights are off, and a closing sentence."""
    out = console()
    more = ("what became of it", "relative error (Frobenius)", "largest error") if notes else ()
    grid = table("layer", "out", "in", "C", *more)
    told = {note.layer: note for note in notes}
    for name in told or engine.layers:
        layer = engine.layers.get(name)
        if layer is None:
            rows, columns = engine.tensors[tensor_name(name, "weight")].shape
            cells = [printable(name), str(rows), str(columns), "-"]
        else:
            cells = [printable(name), str(layer.out_features), str(layer.in_features), str(layer.C)]
        if notes:
            note = told[name]
            cells += [_FORMS[note.form], f"{note.relative:.3g}", f"{note.largest:.3g}"]
        grid.add_row(*map(Text, cells))
    out.print(grid)
    out.print(Text(f"{sentence} (layers: {len(engine.layers)}, ordinary tensors: {len(engine.tensors)})"))


def print_summary(summary: FileSummary) -> None:
    """What a file holds: a line, the counter layers, all tensors."""
    out = console()
    made = f", written by memtrain_cl {printable(summary.created_by)}" if summary.created_by else ""
    out.print(Text(f"{printable(summary.file)}: {summary.format}, {summary.bytes:,} bytes{made}"))
    if summary.model:
        out.print(Text("model: " + ", ".join(f"{printable(k)} {shorten(v)}" for k, v in summary.model.items())))
    counters = summary.counters
    if counters:
        grid = table("counter layer", "kind", "out", "in", "C", "step", "bytes", "bits a weight", "-1", "0", "+1")
        rows = [*summary.layers, counters] if len(summary.layers) > 1 else summary.layers
        for layer in rows:
            grid.add_row(*(Text(cell) for cell in _layer_cells(layer)))
        out.print(grid, "", sep="\n")
    grid = table("tensor", "dtype", "shape", "bytes")
    for tensor in summary.tensors:
        grid.add_row(Text(printable(tensor.name)), tensor.dtype, Text(str(list(tensor.shape))), f"{tensor.bytes:,}")
    out.print(grid)
    if summary.hint:
        out.print(Text(summary.hint))


def _layer_cells(layer: LayerSummary) -> list[str]:
    def cell(value: Any, form: str = "") -> str:
        return "-" if value is None else format(value, form)

    return [
        printable(layer.name),
        cell(layer.kind),
        cell(layer.out_features),
        cell(layer.in_features),
        cell(layer.C),
        cell(layer.step),
        cell(layer.bytes, ","),
        cell(layer.bits_per_weight, ".3f"),
        *(cell(share, ".1%") for share in (layer.minus, layer.zero, layer.plus)),
    ]
