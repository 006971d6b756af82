"""An MNCC file's layers as those of an engine file: bit for bit where they have a scale a row, else as dense weights,
or, when asked, as counter layers that come as near as a scale a row can.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memtrain_cl.export.codes import join_codes, pack_codes
from memtrain_cl.export.container import Tensor
from memtrain_cl.export.layout import tensor_name
from memtrain_cl.export.mncc import MnccLayer, read_mncc
from memtrain_cl.export.packed import EngineFile
from memtrain_cl.export.per_layer import seeds
from memtrain_cl.formats import C_MAX_PACKED, LayerState

#: Weights that are looked at at a time.
_PIECE = 2**20
#: The least scale of a row, that of the update rule.
_SCALE_MIN = 1e-5


@dataclass(frozen=True)
class MnccNote:
    """How a layer came over. form: "counters" (the same codes and scales), "dense" (the same weights, without their
    counters) or "row scales" (other weights). relative: ||W - W'|| / ||W||, Frobenius.   largest: max |W - W'|.
    """

    layer: str
    form: str
    relative: float = 0.0
    largest: float = 0.0


def import_mncc(
    path: str | os.PathLike[str], *, row_scales: bool = False, seed: int = 0
) -> tuple[EngineFile, list[MnccNote]]:
    """The layers as an engine file's, and how each came over.

    A layer with a scale a row, C <= 11 and columns in fours keeps its codes and scales to the bit (v is 0, and each
    layer has a seed of its own out of `seed`). Another becomes the tensor ``<layer>.weight``, float32 [out, in]; with
    `row_scales` a counter layer of C <= 11 instead, whose rows are the nearest that one scale and -1, 0, 1 can give
    (to ||W||), its counters taken from what is then missing of W with its counters. ValueError where that needs columns
    in fours and has none; else as `read_mncc`.
    """
    layers: dict[str, LayerState] = {}
    tensors: dict[str, Tensor] = {}
    notes = []
    read = read_mncc(path)
    of_layer = seeds(read, seed)
    for name, layer in read.items():
        packs = layer.in_features % 4 == 0
        if layer.has_row_scales and packs and layer.C <= C_MAX_PACKED:
            layers[name] = _same(layer, of_layer[name])
            notes.append(MnccNote(name, "counters"))
        elif row_scales:
            if not packs:
                raise ValueError(
                    f"layer {name!r}: expected columns in fours for a counter layer, got {layer.in_features}"
                )
            layers[name], note = _nearest(name, layer, of_layer[name])
            notes.append(note)
        else:
            tensors[tensor_name(name, "weight")] = _dense(layer)
            notes.append(MnccNote(name, "dense"))
    return EngineFile(layers, tensors, {}, ""), notes


def _pieces(layer: MnccLayer) -> Iterator[tuple[int, int]]:
    step = max(1, _PIECE // layer.in_features)
    for first in range(0, layer.out_features, step):
        yield first, min(first + step, layer.out_features)


def _dense(layer: MnccLayer) -> np.ndarray:
    weights = np.empty((layer.out_features, layer.in_features), dtype=np.float32)
    for first, stop in _pieces(layer):
        weights[first:stop] = layer.weights(first, stop)
    return weights


def _state(layer: MnccLayer, C: int, codes: np.ndarray, scale: np.ndarray, seed: int) -> LayerState:
    packed = pack_codes(codes)
    return LayerState(
        layer.in_features, layer.out_features, C, packed, scale, np.zeros_like(scale), None, hyper={}, seed=seed
    )


def _same(layer: MnccLayer, seed: int) -> LayerState:
    codes = np.empty((layer.out_features, layer.in_features), dtype=np.uint8)
    for first, stop in _pieces(layer):
        codes[first:stop, layer.perm] = join_codes(layer.t[first:stop], layer.c[first:stop], layer.C)
    return _state(layer, layer.C, codes, layer.scale[:, 0].copy(), seed)


def _nearest(name: str, layer: MnccLayer, seed: int) -> tuple[LayerState, MnccNote]:
    C = min(layer.C, C_MAX_PACKED)
    codes = np.empty((layer.out_features, layer.in_features), dtype=np.uint8)
    scale = np.empty(layer.out_features, dtype=np.float32)
    whole = missed = largest = 0.0
    for first, stop in _pieces(layer):
        wanted = layer.weights(first, stop)
        t, rows = nearest_ternary(wanted)
        latent = layer.weights(first, stop, counters=True)
        c = np.clip(np.rint((latent / rows[:, None] - t) * np.float32(C)), 1 - C, C - 1).astype(np.int8)
        codes[first:stop], scale[first:stop] = join_codes(t, c, C), rows
        difference = np.abs(wanted - rows[:, None].astype(np.float64) * t)
        whole += float(np.square(wanted, dtype=np.float64).sum())
        missed += float(np.square(difference).sum())
        largest = max(largest, float(difference.max(initial=0.0)))
    note = MnccNote(name, "row scales", math.sqrt(missed / whole) if whole else 0.0, largest)
    return _state(layer, C, codes, scale, seed), note


def nearest_ternary(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """t int8 [rows, in] and scale float32 [rows] >= 1e-5 for which ||W - scale*t|| is smallest in each row; W float32.

    With the k largest |w| of a row as +-1 and their sum S the best scale is s = max(S/k, 1e-5), by which ||W||^2 falls
    by s*(2S - k s): the best k is where that is greatest, and none where it is nowhere positive.
    """
    magnitude = np.abs(weights)
    falling = -np.sort(-magnitude, axis=1)
    sums = np.cumsum(falling, axis=1, dtype=np.float64)
    k = np.arange(1, weights.shape[1] + 1)
    scales = np.maximum(sums / k, _SCALE_MIN)
    gains = scales * (2 * sums - k * scales)
    best = np.argmax(gains, axis=1)[:, None]
    scale, least, gain = (np.take_along_axis(values, best, 1) for values in (scales, falling, gains))
    t = np.where((magnitude >= least) & (gain > 0), np.sign(weights), 0).astype(np.int8)
    return t, scale[:, 0].astype(np.float32)
