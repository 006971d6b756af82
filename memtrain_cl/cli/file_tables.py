"""The tables of `memtrain-cl inspect` and `export`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from memtrain_cl.cli.tables import console, table
from memtrain_cl.export.hostile import printable, shorten
from memtrain_cl.export.summary import FileSummary, LayerSummary
from memtrain_cl.formats import LayerState


def print_layers(layers: Mapping[str, LayerState], sentence: str) -> None:
    """The exported layers with the C that their files do not hold, and a closing sentence."""
    out = console()
    grid = table("layer", "out", "in", "C (not in the files)")
    for name, layer in layers.items():
        grid.add_row(Text(printable(name)), str(layer.out_features), str(layer.in_features), str(layer.C))
    out.print(grid)
    out.print(Text(sentence))


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
    if counters and counters.minus is None and summary.format.startswith("MotifCL"):
        out.print(Text("The file does not say C: pass --C for the shares of -1, 0 and +1."))


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
