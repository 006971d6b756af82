"""Environment of the child processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path


def on_path(folder: Path) -> str:
    """A PYTHONPATH that begins with `folder` and keeps the rest, where the packages of this run may lie."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
