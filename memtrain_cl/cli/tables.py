"""How the commands print tables: plain columns, whole names in a pipe, no markup read out of names."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text


def console() -> Console:
    """The console of stdout."""
    # Away from a terminal rich assumes 80 columns and would cut names; a pipe takes any width.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 1000)


def table(*columns: str, left: int = 1) -> Table:
    """A table of these columns, the first `left` of them aligned to the left, the others to the right."""
    result = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        result.add_column(Text(column), justify="left" if index < left else "right", overflow="fold")
    return result
