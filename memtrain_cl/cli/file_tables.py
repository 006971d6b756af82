"""The tables of `memtrain-cl inspect` and `export`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memtrain_cl.export.hostile import printable, shorten
from memtrain_cl.export.summary import FileSummary, LayerSummary
from memtrain_cl.formats import LayerState


def _console() -> Console:
    # Away from a terminal rich assumes 80 columns and would cut names; a pipe takes any width.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 1000)


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="left" if index == 0 else "right", overflow="fold")
    return table


def print_layers(layers: Mapping[str, LayerState], sentence: str) -> None:
    """The exported layers with the C that their files do not hold, and a closing sentence."""
    console = _console()
    table = _table("layer", "out", "in", "C (not in the files)")
    for name, layer in layers.items():
        table.add_row(Text(printable(name)), str(layer.out_features), str(layer.in_features), str(layer.C))
    console.print(table)
    console.print(Text(sentence))


def print_summary(summary: FileSummary) -> None:
    """What a file holds: a line, the counter layers, all tensors."""
    console = _console()
    made = f", written by memtrain_cl {printable(summary.created_by)}" if summary.created_by else ""
    console.print(Text(f"{printable(summary.file)}: {summary.format}, {summary.bytes:,} bytes{made}"))
    if summary.model:
        console.print(Text("model: " + ", ".join(f"{printable(k)} {shorten(v)}" for k, v in summary.model.items())))
    counters = summary.counters
    if counters:
        table = _table("counter layer", "kind", "out", "in", "C", "step", "bytes", "bits a weight", "-1", "0", "+1")
        rows = [*summary.layers, counters] if len(summary.layers) > 1 else summary.layers
        for layer in rows:
            table.add_row(*(Text(cell) for cell in _layer_cells(layer)))
        console.print(table, "", sep="\n")
    table = _table("tensor", "dtype", "shape", "bytes")
    for tensor in summary.tensors:
        table.add_row(Text(printable(tensor.name)), tensor.dtype, Text(str(list(tensor.shape))), f"{tensor.bytes:,}")
    console.print(table)
    if counters and counters.minus is None and summary.format.startswith("MotifCL"):
        console.print(Text("The file does not say C: pass --C for the shares of -1, 0 and +1."))


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
