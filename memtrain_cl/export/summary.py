"""What `memtrain-cl inspect` tells about a file, as plain data. States are read one layer at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memtrain_cl.export.codes import first_bad_code, ternary_counts
from memtrain_cl.export.container import code_and_shape
from memtrain_cl.export.hostile import corrupt, open_regular
from memtrain_cl.export.layout import tensor_name
from memtrain_cl.export.motifcl import MAGIC_1, MAGIC_2, read_mt
from memtrain_cl.export.packed import EngineReader
from memtrain_cl.formats import check_c


@dataclass(frozen=True)
class TensorSummary:
    """One tensor of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class LayerSummary:
    """One counter layer. bytes: state, scale, v and s_base. minus, zero, plus: shares of the visible weights; None when
    there are none, or when a bare state file leaves C (and with it the other fields that are None) unsaid."""

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
    """A whole file. format: "engine 1", "MotifCL 1" or "MotifCL 2"."""

    file: str
    format: str
    bytes: int
    created_by: str | None
    model: Mapping[str, Any]
    layers: list[LayerSummary]
    tensors: list[TensorSummary]

    @property
    def counters(self) -> LayerSummary | None:
        """All layers taken together (None when there are none)."""
        if not self.layers:
            return None
        weights = sum(layer.weights for layer in self.layers)
        nbytes = sum(layer.bytes for layer in self.layers)
        radices, steps = ({getattr(layer, name) for layer in self.layers} for name in ("C", "step"))
        known = weights > 0 and all(layer.minus is not None or not layer.weights for layer in self.layers)
        minus, zero, plus = (
            sum((getattr(layer, name) or 0.0) * layer.weights for layer in self.layers) / weights if known else None
            for name in ("minus", "zero", "plus")
        )
        return LayerSummary(
            name="all",
            kind=None,
            out_features=None,
            in_features=None,
            C=radices.pop() if len(radices) == 1 else None,
            seed=None,
            step=steps.pop() if len(steps) == 1 else None,
            weights=weights,
            bytes=nbytes,
            bits_per_weight=_bits(nbytes, weights),
            minus=minus,
            zero=zero,
            plus=plus,
        )


def summarize(path: str | os.PathLike[str], C: int | None = None) -> FileSummary:
    """Reads an engine file or a MotifCL tensor, checking all of it. C: for a MotifCL state, which does not say its own.

    CorruptFile for a fault in the file, ValueError for a C out of range or out of place, OSError when there is no file.
    """
    file, size = open_regular(path)
    with file:
        magic = file.read(8)
    if magic in (MAGIC_1, MAGIC_2):
        return _summarize_mt(path, size, "MotifCL 1" if magic == MAGIC_1 else "MotifCL 2", C)
    if C is not None:
        raise ValueError("expected C only for a MotifCL state file: an engine file says its own")
    with EngineReader(path) as reader:
        entries = reader.container.entries
        names = sorted(entries, key=_natural)
        tensors = [TensorSummary(name, entries[name].code, entries[name].shape, entries[name].nbytes) for name in names]
        layers = [_summarize_layer(reader, name) for name in sorted(reader.metadata.layers, key=_natural)]
        for name in reader.ordinary:
            reader.tensor(name)  # its sum is checked; nothing of it is kept
        metadata = reader.metadata
        return FileSummary(os.fspath(path), "engine 1", size, metadata.created_by, metadata.model, layers, tensors)


def _natural(name: str) -> list[tuple[int, str]]:
    # blocks.2 before blocks.10: a run of digits counts by its length first.
    return [(len(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]


def _bits(nbytes: int, weights: int) -> float | None:
    return 8 * nbytes / weights if weights else None


def _shares(state: np.ndarray, C: int) -> tuple[float | None, float | None, float | None]:
    minus, zero, plus = ternary_counts(state, C)
    total = minus + zero + plus
    return (minus / total, zero / total, plus / total) if total else (None, None, None)


def _summarize_layer(reader: EngineReader, name: str) -> LayerSummary:
    layer = reader.layer(name)
    names = (tensor_name(name, suffix) for suffix in reader.metadata.layers[name].shapes)
    nbytes = sum(reader.container.entries[tensor].nbytes for tensor in names if tensor in reader.container.entries)
    weights = layer.out_features * layer.in_features
    minus, zero, plus = _shares(layer.state, layer.C)
    return LayerSummary(
        name=name,
        kind=layer.kind,
        out_features=layer.out_features,
        in_features=layer.in_features,
        C=layer.C,
        seed=layer.seed,
        step=layer.step,
        weights=weights,
        bytes=nbytes,
        bits_per_weight=_bits(nbytes, weights),
        minus=minus,
        zero=zero,
        plus=plus,
        hyper=layer.hyper,
    )


def _summarize_mt(path: str | os.PathLike[str], size: int, kind: str, C: int | None) -> FileSummary:
    array = read_mt(path)
    name = os.path.basename(os.fspath(path)).removesuffix(".mt")
    code, shape = code_and_shape(array)
    layers = []
    is_state = array.dtype == np.uint8 and array.size % 3 == 0
    if C is not None and not is_state:
        raise ValueError(f"expected C only for a packed state, got a file of {code} {list(shape)}")
    if is_state:
        minus = zero = plus = None
        if C is not None:
            C = check_c(C, packed=True)
            bad = first_bad_code(array, C)
            if bad:
                raise corrupt(
                    path, "payload", f"codes below {3 * (2 * C - 1)} (C = {C})", f"{bad[1]} at index {bad[0]}"
                )
            minus, zero, plus = _shares(array, C)
        weights = array.size // 3 * 4
        bits = _bits(array.nbytes, weights)
        sizes = (None, None, C, None, None, weights, array.nbytes, bits)
        layers.append(LayerSummary(name.removesuffix("_state"), None, *sizes, minus, zero, plus))
    tensors = [TensorSummary(name, code, shape, array.nbytes)]
    return FileSummary(os.fspath(path), kind, size, None, {}, layers, tensors)
