"""MNCC files: counter layers as plain t and c, with scales by groups of columns and single weights kept in full.

    magic "MNCC0001"; uint32 number of layers; for each layer, little-endian:
    uint32 bytes of the name; the name (UTF-8); uint32 out, in, group, C; int32 perm[in];
    int8 t[out*in]; int8 c[out*in]; float32 scale[out*in/group]; uint32 n; int64 index[n]; float32 value[n]

t, c and scale lie in permuted columns: position j holds the original column perm[j] and belongs to group j // group.
index counts through the original [out, in], and value stands there instead:

    W[o, perm[j]] = scale[o, j // group] * t[o, j];    W.flat[index] = value

A layer with one scale a row, as the counter layers here have it, is written with group = in, the columns in order, and
no single weights. The format holds no v, no seed, no step and no ordinary tensors.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader, BufferedWriter
from typing import Any

import numpy as np

from memtrain_cl.export.atomic import atomic_path
from memtrain_cl.export.codes import code_chunks, code_tables
from memtrain_cl.export.hostile import corrupt, open_regular, read_array, read_exactly
from memtrain_cl.export.layout import is_unicode, layer_fault
from memtrain_cl.formats import C_MAX_UNPACKED, LayerState

MAGIC = b"MNCC0001"
_COUNT = struct.Struct("<I")
_SIZES = struct.Struct("<4I")
_SALIENT_BYTES = 8 + 4
#: The arrays of a layer, in the file's order.
PARTS = ("perm", "t", "c", "scale", "index", "value")

Path = str | os.PathLike[str]


@dataclass(frozen=True, eq=False)
class MnccLayer:
    """One layer as its file has it.

    t, c: int8 [out, in] in permuted columns.   perm: int32 [in].   scale: float32 [out, in/group].   index, value:
    int64 and float32 [n], the weights kept in full and where they stand in the original [out, in]; distinct.
    """

    out_features: int
    in_features: int
    group: int
    C: int
    perm: np.ndarray
    t: np.ndarray
    c: np.ndarray
    scale: np.ndarray
    index: np.ndarray
    value: np.ndarray

    @property
    def has_row_scales(self) -> bool:
        """Whether one scale a row is all there is."""
        return self.group == self.in_features and not self.index.size

    def weights(self, first: int, stop: int, *, counters: bool = False) -> np.ndarray:
        """Rows first to stop of the weights, float32 [rows, in]; counters: with what the counters hold, c/C, added to
        t. Single weights are what they are in both.
        """
        t = self.t[first:stop].astype(np.float32)
        if counters:
            t += self.c[first:stop].astype(np.float32) / np.float32(self.C)
        grouped = t.reshape(len(t), self.in_features // self.group, self.group)
        grouped *= self.scale[first:stop, :, None]
        rows = np.empty_like(t)
        rows[:, self.perm] = t
        inside = (self.index >= first * self.in_features) & (self.index < stop * self.in_features)
        rows.reshape(-1)[self.index[inside] - first * self.in_features] = self.value[inside]
        return rows


def write_mncc(path: Path, layers: Mapping[str, LayerState]) -> None:
    """Writes the layers atomically, in bounded memory; equal input gives equal bytes.

    ValueError, and no file, for values out of bounds, a layer without columns and a name that is no Unicode.
    """
    for name, layer in layers.items():
        if not is_unicode(name):
            raise ValueError(f"expected a layer name in Unicode, got {name!r}")
        fault = layer_fault(layer)
        if fault:
            raise ValueError(f"layer {name!r}: expected {fault[0]} of {fault[1]}, got {fault[2]}")
        if not 0 < layer.in_features < 2**31 or layer.out_features >= 2**32:
            sizes = [layer.out_features, layer.in_features]
            raise ValueError(f"layer {name!r}: expected below 2**32 rows and 1 to 2**31-1 columns, got {sizes}")
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        file.write(MAGIC + _COUNT.pack(len(layers)))
        for name, layer in layers.items():
            encoded = name.encode()
            file.write(_COUNT.pack(len(encoded)) + encoded)
            file.write(_SIZES.pack(layer.out_features, layer.in_features, layer.in_features, layer.C))
            file.write(np.arange(layer.in_features, dtype="<i4").data)
            _write_parts(file, layer)
            file.write(layer.scale.astype("<f4").data)
            file.write(_COUNT.pack(0))


def _write_parts(file: BufferedWriter, layer: LayerState) -> None:
    for table in code_tables(layer.C):  # all of t, then all of c
        for _, codes in code_chunks(layer.state):
            file.write(np.take(table, codes).data)


def read_mncc(path: Path) -> dict[str, MnccLayer]:
    """The layers of a file, in its order. CorruptFile for any fault, OSError when there is no file."""
    return dict(mncc_layers(path))


def mncc_layers(path: Path) -> Iterator[tuple[str, MnccLayer]]:
    """The layers one at a time, with their names; errors as read_mncc's, some of them behind the last layer."""
    file, size = open_regular(path)
    with file:
        yield from _Reader(file, size, path).layers()


@dataclass(frozen=True)
class _Reader:
    file: BufferedReader
    size: int
    path: Path

    def layers(self) -> Iterator[tuple[str, MnccLayer]]:
        magic = read_exactly(self.file, min(len(MAGIC), self.size), self.path, "magic")
        if magic != MAGIC:
            raise corrupt(self.path, "magic", repr(MAGIC), magic)
        names: set[str] = set()
        for place in range(self.count("number of layers", place=None)):
            name = self.name(place)
            if name in names:
                raise corrupt(self.path, f"name of layer {place}", "distinct names", f"{name} twice")
            names.add(name)
            yield name, self.layer(name)
        if self.left:
            raise corrupt(self.path, "size", f"{self.size - self.left} bytes, the end of the last layer", self.size)

    @property
    def left(self) -> int:
        return self.size - self.file.tell()

    def count(self, field: str, place: int | None) -> int:
        where = field if place is None else f"{field} of layer {place}"
        return int(_COUNT.unpack(read_exactly(self.file, _COUNT.size, self.path, where))[0])

    def name(self, place: int) -> str:
        length = self.count("name", place)
        if length > self.left:
            raise corrupt(self.path, f"name of layer {place}", f"at most {self.left} bytes", length)
        data = read_exactly(self.file, length, self.path, f"name of layer {place}")
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise corrupt(self.path, f"name of layer {place}", "UTF-8", data) from None

    def array(self, where: str, dtype: str, *shape: int) -> np.ndarray:
        count = int(np.prod(shape, dtype=object))
        data = read_array(self.file, count * np.dtype(dtype).itemsize, self.path, where)
        return data.view(dtype).astype(np.dtype(dtype).newbyteorder("="), copy=False).reshape(shape)

    def layer(self, name: str) -> MnccLayer:
        where = f"layer {name}"
        rows, columns, group, C = _SIZES.unpack(read_exactly(self.file, _SIZES.size, self.path, f"{where}: sizes"))
        if not 1 <= C <= C_MAX_UNPACKED:
            raise corrupt(self.path, f"{where}: C", f"an integer in 1..{C_MAX_UNPACKED}", C)
        if not 1 <= columns < 2**31:
            raise corrupt(self.path, f"{where}: in", "1 to 2**31-1 columns", columns)
        if group < 1 or columns % group:
            raise corrupt(self.path, f"{where}: group", f"a divisor of the {columns} columns", group)
        needed = 4 * columns + 2 * rows * columns + 4 * rows * (columns // group) + _COUNT.size
        if needed > self.left:
            raise corrupt(self.path, f"{where}: sizes", f"at most {self.left} bytes", f"[{rows}, {columns}], {needed}")
        perm = self.array(f"{where}: perm", "<i4", columns)
        if not np.array_equal(np.sort(perm), np.arange(columns)):
            raise corrupt(self.path, f"{where}: perm", f"each of the {columns} columns once", perm[:8].tolist())
        t = self.array(f"{where}: t", "i1", rows, columns)
        self.within(t, 1, f"{where}: t")
        c = self.array(f"{where}: c", "i1", rows, columns)
        self.within(c, C - 1, f"{where}: c")
        scale = self.array(f"{where}: scale", "<f4", rows, columns // group)
        self.all_of(np.isfinite(scale) & (scale > 0), scale, f"{where}: scale", "finite values > 0")
        index, value = self.salient(f"{where}: single weights", rows * columns)
        return MnccLayer(rows, columns, group, C, perm, t, c, scale, index, value)

    def salient(self, where: str, weights: int) -> tuple[np.ndarray, np.ndarray]:
        count = int(_COUNT.unpack(read_exactly(self.file, _COUNT.size, self.path, where))[0])
        limit = min(weights, self.left // _SALIENT_BYTES)
        if count > limit:
            raise corrupt(self.path, where, f"at most {limit}", count)
        index = self.array(f"{where}: index", "<i8", count)
        self.all_of((index >= 0) & (index < weights), index, f"{where}: index", f"0 to {weights - 1}")
        if len(np.unique(index)) != count:
            raise corrupt(self.path, f"{where}: index", "distinct places", "one of them twice")
        value = self.array(f"{where}: value", "<f4", count)
        self.all_of(np.isfinite(value), value, f"{where}: value", "finite values")
        return index, value

    def within(self, values: np.ndarray, most: int, where: str) -> None:
        # Extremes first: they need no memory of the values' size.
        if values.size and (values.min() < -most or values.max() > most):
            self.all_of((values >= -most) & (values <= most), values, where, f"-{most} to {most}")

    def all_of(self, good: np.ndarray, values: np.ndarray, where: str, expected: str) -> None:
        if not good.all():
            at = int(np.argmin(good))
            got: Any = values.reshape(-1)[at]
            raise corrupt(self.path, where, expected, f"{got} at {at}")
