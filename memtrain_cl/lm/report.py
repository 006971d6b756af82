"""What a run shows: memory as measured, the progress bar, and the table at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain_cl.lm.model import counter_layers, linear_layers

DENSE_BYTES = 12.0  # float32 weight 4, and AdamW's two float32 moments 8
_LINE_EVERY_SECONDS = 15.0  # where no bar can be drawn


@dataclass(frozen=True)
class WeightMemory:
    """Bytes that live between two steps: `weights` linear weights, `linear_bytes` for them (weights, row terms,
    optimizer state), and `total_bytes` for the whole model with its optimizer state.
    """

    weights: int
    linear_bytes: int
    total_bytes: int

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of weight and optimizer state a linear weight."""
        return self.linear_bytes / self.weights


def measure_memory(model: nn.Module, optimizer: Optimizer) -> WeightMemory:
    """Adds up the bytes of every parameter, buffer and optimizer tensor that lives now; nothing is assumed about any
    of them.
    """
    layers = linear_layers(model)
    weights = sum(_features(layer) for layer in layers)
    linear = sum(_bytes_of(layer, optimizer) for layer in layers)
    return WeightMemory(weights, linear, _bytes_of(model, optimizer))


def _features(layer: nn.Module) -> int:
    return int(layer.in_features) * int(layer.out_features)  # type: ignore[arg-type]  # nn.Module types attributes as tensors


def _bytes_of(module: nn.Module, optimizer: Optimizer) -> int:
    counters = (value for layer in counter_layers(module) for value in layer.published_state_dict().values())
    parameters = list(module.parameters())
    moments = (value for p in parameters for value in optimizer.state.get(p, {}).values() if isinstance(value, Tensor))
    return sum(t.numel() * t.element_size() for t in (*counters, *parameters, *moments))


def peak_rss() -> int | None:
    """The most memory that this process has held, in bytes; None where the system does not tell (Windows)."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def megabytes(count: int | None) -> str:
    """ "612.4 MB", or "unknown"."""
    return "unknown" if count is None else f"{count / 1e6:.1f} MB"


@dataclass(frozen=True)
class Summary:
    """The figures of a finished run, as written to summary.json. A token is a byte of text; losses are in nats a
    byte.
    """

    steps: int
    tokens: int
    train_seconds: float
    tokens_per_second: float
    val_loss: float
    val_bpb: float
    linear: str
    freeze_counters: bool
    device: str | None
    linear_weights: int
    linear_bytes: int
    bytes_per_weight: float
    dense_bytes_per_weight: float
    model_and_optimizer_bytes: int
    peak_rss_bytes: int | None
    exported_file: str
    exported_bytes: int
    export_differs: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON-able values."""
        return asdict(self)

    def table(self) -> Table:
        """The figures for people."""
        kind = f"{self.linear} (frozen)" if self.freeze_counters else self.linear
        rows: Mapping[str, str] = {
            "linear layers": f"{kind}, {self.linear_weights:,} weights" + (f" on {self.device}" if self.device else ""),
            "training": f"{self.steps} steps, {self.tokens:,} bytes of text in {self.train_seconds:.0f} s, "
            f"{self.tokens_per_second:,.0f} a second",
            "validation": f"{self.val_bpb:.4f} bits per byte",
            "weight + optimizer state": f"{self.bytes_per_weight:.3f} bytes a linear weight, measured "
            f"(dense float32 with AdamW: {self.dense_bytes_per_weight:g})",
            "whole model, with optimizer": megabytes(self.model_and_optimizer_bytes),
            "peak memory of the process": megabytes(self.peak_rss_bytes),
            "exported": f"{self.exported_file}, {megabytes(self.exported_bytes)}",
            "exported bytes = live state": "yes"
            if not self.export_differs
            else "NO: " + ", ".join(self.export_differs),
        }
        table = Table(show_header=False, title="memtrain-cl train", title_justify="left")
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for name, value in rows.items():
            table.add_row(name, value)
        return table


class ProgressView:
    """The bar on a terminal, a line every 15 seconds elsewhere, nothing when quiet. Use as a context manager."""

    def __init__(self, console: Console, total: int, done: int, *, quiet: bool) -> None:
        self._console = console
        self._total = total
        self._lines = not quiet and not console.is_terminal
        self._last_line = time.monotonic()
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s  memory {task.fields[memory]}"),
            TimeRemainingColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=total, completed=done, loss=float("nan"), rate=0.0, memory="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, step: int, loss: float, rate: float, memory: str) -> None:
        """Shows the loss (nats a byte), the rate (tokens a second) and the memory after `step`."""
        self._bar.update(self._task, completed=step, loss=loss, rate=rate, memory=memory)
        if self._lines and (step == self._total or time.monotonic() - self._last_line >= _LINE_EVERY_SECONDS):
            self._last_line = time.monotonic()
            self._console.print(
                f"step {step}/{self._total}  loss {loss:.3f}  {rate:,.0f} tokens/s  memory {memory}", soft_wrap=True
            )
