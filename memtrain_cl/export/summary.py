"""What is told about a file, as plain data: `memtrain_cl.export.inspection` makes it of each format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memtrain_cl.export.codes import ternary_counts
from memtrain_cl.formats import LayerState


@dataclass(frozen=True)
class TensorSummary:
    """One tensor of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class LayerSummary:
    """One layer of ternary weights. bytes: all that stands for it. minus, zero, plus: shares of the visible weights.

    None is what the file does not say: C, and with it the shares, of a bare MotifCL state; in_features of a checkpoint
    whose states may mean two; C, seed and step of GGUF. weights is 0 where in_features is not known.
    """

    name: str
    kind: str | None
    out_features: int | None
    in_features: int | None
    C: int | None
    seed: int | None
    step: int | None
    weights: int
    bytes: int
    bits_per_weight: float | None
    minus: float | None
    zero: float | None
    plus: float | None
    hyper: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FileSummary:
    """A whole file, or a folder of MotifCL tensors. format: its kind and version, such as "engine 1".

    hint: what to say for a fuller answer, or "".
    """

    file: str
    format: str
    bytes: int
    created_by: str | None
    model: Mapping[str, Any]
    layers: list[LayerSummary]
    tensors: list[TensorSummary]
    hint: str = ""

    @property
    def counters(self) -> LayerSummary | None:
        """All layers taken together (None when there are none)."""
        if not self.layers:
            return None
        unsaid = any(layer.in_features is None and not layer.weights and layer.bytes for layer in self.layers)
        weights = 0 if unsaid else sum(layer.weights for layer in self.layers)
        nbytes = sum(layer.bytes for layer in self.layers)
        radices, steps = ({getattr(layer, name) for layer in self.layers} for name in ("C", "step"))
        known = weights > 0 and all(layer.minus is not None or not layer.weights for layer in self.layers)
        minus, zero, plus = (
            sum((getattr(layer, name) or 0.0) * layer.weights for layer in self.layers) / weights if known else None
            for name in ("minus", "zero", "plus")
        )
        return summarize_layer(
            "all",
            weights=weights,
            nbytes=nbytes,
            shares=(minus, zero, plus),
            C=radices.pop() if len(radices) == 1 else None,
            step=steps.pop() if len(steps) == 1 else None,
        )


Shares = tuple[float | None, float | None, float | None]
UNKNOWN: Shares = (None, None, None)


def summarize_layer(
    name: str,
    *,
    weights: int,
    nbytes: int,
    shares: Shares,
    kind: str | None = None,
    sizes: tuple[int | None, int | None] = (None, None),
    C: int | None = None,
    seed: int | None = None,
    step: int | None = None,
    hyper: Mapping[str, Any] | None = None,
) -> LayerSummary:
    """A summary out of what is known. sizes: (out_features, in_features)."""
    bits = 8 * nbytes / weights if weights else None
    return LayerSummary(name, kind, *sizes, C, seed, step, weights, nbytes, bits, *shares, hyper or {})


def summarize_state(name: str, layer: LayerState, nbytes: int, *, placed: bool) -> LayerSummary:
    """A counter layer's. nbytes: of its tensors in the file. placed: whether the file says its seed and step."""
    return summarize_layer(
        name,
        weights=layer.out_features * layer.in_features,
        nbytes=nbytes,
        shares=shares_of_state(layer.state, layer.C),
        kind=layer.kind,
        sizes=(layer.out_features, layer.in_features),
        C=layer.C,
        seed=layer.seed if placed else None,
        step=layer.step if placed else None,
        hyper=layer.hyper,
    )


def shares_of_state(state: np.ndarray, C: int) -> Shares:
    """Shares of -1, 0, +1 in a packed state; None of an empty one."""
    return _shares(ternary_counts(state, C))


def shares_of_signs(t: np.ndarray) -> Shares:
    """Shares of -1, 0, +1 in int8 t; None where there are none."""
    return _shares(tuple(int(np.count_nonzero(t == value)) for value in (-1, 0, 1)))


def _shares(counts: tuple[int, ...]) -> Shares:
    total = sum(counts)
    if not total:
        return UNKNOWN
    minus, zero, plus = (count / total for count in counts)
    return minus, zero, plus


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts blocks.2 before blocks.10: a run of digits counts by its length first."""
    return [(len(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]
