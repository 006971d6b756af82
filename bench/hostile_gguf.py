"""GGUF files damaged at random, more of them than the suite tries: refused by name, or loaded as they declare."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain_cl.export.gguf import write_gguf
from tests.gguf_cases import corrupted, judge, model_file, small


def sweep(examples: int = 500) -> dict[str, Any]:
    """`examples` corruptions of a file made by hand and as many of a written one: how many were tried and loaded.

    AssertionError with the corruption when one is neither refused nor loaded as declared.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        write_gguf(path, model_file(layers=1, dim=8, heads=2, hidden=8), "f16")
        wholes = {"by hand": small(), "written": path.read_bytes()}
    return {**{name: _sweep(whole, examples) for name, whole in wholes.items()}, "ok": True}


def _sweep(whole: bytes, examples: int) -> dict[str, int]:
    loaded: list[bool] = []

    @settings(max_examples=examples, deadline=None, database=None)
    @given(st.data())
    def try_one(data: st.DataObject) -> None:
        loaded.append(judge(corrupted(whole, data)))

    try_one()
    return {"tried": len(loaded), "loaded": sum(loaded)}
