"""Files damaged at random, more of them than the suite tries: refused by name, or loaded as they declare."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain_cl.export.gguf import write_gguf
from tests import gguf_cases
from tests.damaged_files import KINDS, corrupted, judge, whole

EXAMPLES = 500


def sweep(damage: Callable[[st.DataObject], bool], examples: int = EXAMPLES) -> dict[str, Any]:
    """How many corruptions were tried, and how many loaded; the first finding, "" without one.

    damage: makes one, and says whether it loaded; AssertionError where it is neither refused nor loaded as it declares.
    """
    loaded: list[bool] = []

    @settings(max_examples=examples, deadline=None, database=None)
    @given(st.data())
    def try_one(data: st.DataObject) -> None:
        loaded.append(damage(data))

    try:
        try_one()
    except AssertionError as fault:
        return {"tried": len(loaded), "loaded": sum(loaded), "finding": str(fault) or repr(fault)}
    return {"tried": len(loaded), "loaded": sum(loaded), "finding": ""}


def _damaged(kind: str, data: st.DataObject) -> bool:
    return judge(kind, corrupted(whole(kind), data.draw))


def _damaged_gguf(file: bytes, data: st.DataObject) -> bool:
    return gguf_cases.judge(gguf_cases.corrupted(file, data))


def ways() -> dict[str, Callable[[st.DataObject], bool]]:
    """What damages a file of each format; of GGUF one made by hand and one that was written."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        write_gguf(path, gguf_cases.model_file(layers=1, dim=8, heads=2, hidden=8), "f16")
        files = {"GGUF by hand": gguf_cases.small(), "GGUF": path.read_bytes()}
    return {
        **{kind: functools.partial(_damaged, kind) for kind in KINDS},
        **{name: functools.partial(_damaged_gguf, file) for name, file in files.items()},
    }


def run(examples: int = EXAMPLES) -> dict[str, Any]:
    """Every format; ok where nothing is found."""
    rows: dict[str, dict[str, Any]] = {}
    for kind, damage in ways().items():
        rows[kind] = row = sweep(damage, examples)
        print(
            f"files {kind}: {row['loaded']} of {row['tried']} loaded, {row['finding'] or 'nothing wrong'}", flush=True
        )
    return {"examples": examples, "formats": rows, "ok": not any(row["finding"] for row in rows.values())}
