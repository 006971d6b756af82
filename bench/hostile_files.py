"""Files of every format damaged at random, more of them than the suite tries: refused in a sentence, or loaded as they
declare. What loads of an engine file or an optimizer's is what was written.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from bench import hostile_gguf
from tests.damaged_files import KINDS, corrupted, judge, whole

EXAMPLES = 500


def sweep(kind: str, examples: int = EXAMPLES) -> dict[str, Any]:
    """How many corruptions of a format were tried, and how many loaded; the first finding, "" without one."""
    loaded: list[bool] = []

    @settings(max_examples=examples, deadline=None, database=None)
    @given(st.data())
    def try_one(data: st.DataObject) -> None:
        loaded.append(judge(kind, corrupted(whole(kind), data.draw)))

    try:
        try_one()
    except AssertionError as fault:
        return {"tried": len(loaded), "loaded": sum(loaded), "finding": str(fault) or repr(fault)}
    return {"tried": len(loaded), "loaded": sum(loaded), "finding": ""}


def run(examples: int = EXAMPLES) -> dict[str, Any]:
    """Every format, GGUF by a sweep of its own; ok where none finds anything."""
    rows: dict[str, dict[str, Any]] = {kind: sweep(kind, examples) for kind in KINDS}
    for kind, row in rows.items():
        print(
            f"files {kind}: {row['loaded']} of {row['tried']} loaded, {row['finding'] or 'nothing wrong'}", flush=True
        )
    gguf = hostile_gguf.sweep(examples)
    return {**rows, "GGUF": gguf, "ok": gguf["ok"] and not any(row["finding"] for row in rows.values())}
