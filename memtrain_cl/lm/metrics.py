"""metrics.jsonl: one JSON object a training step, each with `step` and `loss`; and the plot made from it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from memtrain_cl.export.atomic import atomic_path


class MetricsFile:
    """Appends rows to `path`. `keep` is the step up to which rows of an earlier session stay (0: none).

    Rows behind the checkpoint that a run resumes from are dropped, and so is a last line that a kill cut short: every
    step has one row.
    """

    def __init__(self, path: Path, keep: int = 0) -> None:
        self.kept = [row for row in read_metrics(path) if row["step"] <= keep] if keep and path.exists() else []
        with atomic_path(path) as temporary:
            temporary.write_text("".join(_line(row) for row in self.kept), encoding="utf-8")
        # A line at a time, so that a reader can follow.
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - closed in __exit__

    def add(self, step: int, loss: float, **more: Any) -> None:
        """One row; keys whose value is None are left out."""
        self._file.write(
            _line({"step": step, "loss": loss, **{key: value for key, value in more.items() if value is not None}})
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def bits_per_byte(nats: float) -> float:
    """A loss in nats a byte as bits a byte."""
    return nats / math.log(2)


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a metrics file; lines that are no row (the end of a killed run) are left out."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("loss"), (int, float)):
            rows.append(row)
    return rows


def plot_loss(rows: list[dict[str, Any]], path: Path, title: str) -> bool:
    """Writes a PNG of training and validation loss in bits per byte over steps; False, and no file, without
    matplotlib.
    """
    try:
        from matplotlib.figure import Figure  # an extra: training works without it
    except ModuleNotFoundError:
        return False
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    steps = [row["step"] for row in rows]
    losses = [bits_per_byte(row["loss"]) for row in rows]
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(steps, _smoothed(losses), color="tab:blue", label="training (smoothed)")
    checked = [row for row in rows if "val_bpb" in row]
    axes.plot(
        [row["step"] for row in checked],
        [row["val_bpb"] for row in checked],
        "o-",
        color="tab:orange",
        label="validation",
    )
    axes.set(xlabel="step", ylabel="bits per byte", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return True


def _smoothed(values: list[float]) -> list[float]:
    """Exponential mean over about 20 values, and over fewer at the start, where the loss falls fast."""
    mean, out = 0.0, []
    for index, value in enumerate(values):
        mean += max(0.05, 2 / (index + 2)) * (value - mean)
        out.append(mean)
    return out
