"""Reading GGUF files, version 3, by a reader of our own, because it has to name the fault that it finds.

Little-endian: "GGUF"; uint32 version; uint64 number of tensors; uint64 number of keys; the keys, each a string, uint32
type and a value; the tensors' entries, each a string name, uint32 number of dims, uint64 dims (the fastest first),
uint32 type, uint64 offset; zeros up to a multiple of the alignment (``general.alignment``, 32 where it is not given);
the tensors in the order of their entries, each followed by zeros up to the next multiple. A string is uint64 length and
UTF-8. Value types: 0..7 uint8, int8, uint16, int16, uint32, int32, float32, bool; 8 string; 9 array (uint32 type,
uint64 count, values); 10..12 uint64, int64, float64.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from typing import Any

import numpy as np

from memtrain_cl.export.gguf_blocks import BLOCK, TERNARY, decode_ternary
from memtrain_cl.export.hostile import corrupt, element_count, open_regular, read_array, read_exactly

MAGIC = b"GGUF"
VERSION = 3
ALIGNMENT = 32
#: Keys and entries together; the largest vocabularies take some tens of millions of bytes.
MAX_HEADER = 2**28
#: Bytes of a key and of a tensor's name; dims.
MAX_KEY, MAX_NAME, MAX_DIMS = 65_535, 64, 4
_STRING, _ARRAY, _BOOL, _UINT32 = 8, 9, 7, 4
_SCALARS = {
    **dict(enumerate(map(np.dtype, ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "u1")))),
    **dict(enumerate(map(np.dtype, ("<u8", "<i8", "<f8")), start=10)),
}
#: The fewest bytes of a key with its value, of a tensor's entry, of a string.
_LEAST_KEY, _LEAST_ENTRY, _LEAST_STRING = 14, 24, 8

#: Ternary blocks decoded at a time.
_STEP = 4096

#: A key's value: a scalar, a list of strings, or a one-dimensional array.
Value = int | float | bool | str | list[str] | np.ndarray


def gguf_package() -> Any:
    """The package gguf; ValueError that says how to install it when there is none."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError("expected the package gguf, got none: pip install 'memtrain-cl[gguf]'") from error
    return gguf


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies. type: its name in ggml, such as "F16". shape: row-major. start: of its bytes in the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class TernaryTensor:
    """codes: t in {-1, 0, +1}, int8 [out, in]. block_scale: float32 [out, in/256]."""

    codes: np.ndarray
    block_scale: np.ndarray

    @property
    def scale(self) -> np.ndarray:
        """The row scales, float32 [out]. ValueError where blocks of a row differ, as in files of other makers."""
        first = self.block_scale[:, :1]
        if not first.size or not (self.block_scale == first).all():
            raise ValueError("expected one scale a row, got blocks of a row with different ones")
        return first[:, 0]


@dataclass(frozen=True, eq=False)
class GgufFile:
    """A GGUF file whose header has been checked; tensors are read when asked for. bytes: the file's length."""

    path: str | os.PathLike[str]
    bytes: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]

    def data(self, name: str) -> np.ndarray:
        """A tensor's bytes, uint8 [nbytes]."""
        tensor = self.tensors[name]
        file, _ = open_regular(self.path)
        with file:
            file.seek(tensor.start)
            return read_array(file, tensor.nbytes, self.path, f"tensor {name}")

    def ternary(self, name: str) -> TernaryTensor:
        """A tensor of a type in `TERNARY`, whose rows are all of its dims but the last. CorruptFile for a code that is
        none, ValueError for another type.
        """
        tensor = self.tensors[name]
        kind = TERNARY.get(tensor.type)
        if kind is None:
            raise ValueError(f"tensor {name!r}: expected a type of {', '.join(TERNARY)}, got {tensor.type}")
        data = self.data(name).reshape(-1, kind.block_bytes)
        codes = np.empty((len(data), BLOCK), dtype=np.int8)
        scale = np.empty(len(data), dtype=np.float32)
        for start in range(0, len(data), _STEP):
            some = slice(start, start + _STEP)
            codes[some], scale[some] = decode_ternary(kind, data[some])
            wrong = (codes[some] > 1).any(axis=1)
            if wrong.any():
                raise corrupt(self.path, f"tensor {name}", "codes 0, 1 and 2", f"3 in block {start + wrong.argmax()}")
        rows, columns = element_count(tensor.shape[:-1]) or 0, tensor.shape[-1]
        return TernaryTensor(codes.reshape(rows, columns), scale.reshape(rows, columns // BLOCK))

    def values(self, name: str) -> np.ndarray:
        """A tensor's numbers, float32 of its shape. ValueError for a type that the package gguf cannot decode."""
        tensor = self.tensors[name]
        if tensor.type in TERNARY:
            found = self.ternary(name)
            weights: np.ndarray = found.codes * np.repeat(found.block_scale, BLOCK, axis=1)
            return weights.reshape(tensor.shape)
        if not tensor.nbytes:
            return np.zeros(tensor.shape, dtype=np.float32)
        gguf = gguf_package()
        try:
            numbers: np.ndarray = gguf.quants.dequantize(self.data(name), gguf.GGMLQuantizationType[tensor.type])
        except NotImplementedError:
            raise ValueError(f"tensor {name!r}: expected a type of floating numbers, got {tensor.type}") from None
        return numbers.reshape(tensor.shape)


def read_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """The file's keys and entries; every count, type, length and offset is checked against the file's length first.

    CorruptFile for any fault, OSError when there is no file, ValueError without the package gguf.
    """
    file, size = open_regular(path)
    with file:
        return _Header(file, size, path).read()


class _Header:
    """Reads front to back; what is asked for must lie before the end of the file and of the largest header."""

    def __init__(self, file: BufferedReader, size: int, path: str | os.PathLike[str]) -> None:
        self.file, self.size, self.path = file, size, path
        self.at = 0
        self.end = min(size, MAX_HEADER)

    def read(self) -> GgufFile:
        magic = self.take(4, "magic")
        if magic != MAGIC:
            raise corrupt(self.path, "magic", repr(MAGIC), magic)
        version = self.uint(4, "version")
        if version != VERSION:
            raise corrupt(self.path, "version", f"{VERSION}, little-endian", version)
        tensor_count = self.uint(8, "tensor count")
        key_count = self.uint(8, "key count")
        self.room(key_count, _LEAST_KEY, "key count")
        self.room(tensor_count, _LEAST_ENTRY, "tensor count")
        alignment = ALIGNMENT
        metadata: dict[str, Value] = {}
        for index in range(key_count):
            key = self.string(f"key {index}", MAX_KEY)
            if not key or key in metadata:
                raise corrupt(self.path, f"key {index}", "a name of its own", key)
            kind, metadata[key] = self.value(f"key {key[:MAX_NAME]}")
            if key == "general.alignment":
                alignment = self.alignment(kind, metadata[key])
        types = {int(kind): (kind.name, *sizes) for kind, sizes in gguf_package().GGML_QUANT_SIZES.items()}
        entries: dict[str, tuple[GgufTensor, int]] = {}
        for index in range(tensor_count):
            tensor, offset = self.entry(index, types)
            if tensor.name in entries:
                raise corrupt(self.path, f"tensor {index}: name", "a name of its own", tensor.name)
            entries[tensor.name] = (tensor, offset)
        return GgufFile(self.path, self.size, metadata, self.place(entries, alignment))

    def take(self, count: int, field: str) -> bytes:
        if count > self.end - self.at:
            raise corrupt(self.path, field, f"at most {self.end - self.at} bytes there", count)
        self.at += count
        return read_exactly(self.file, count, self.path, field)

    def room(self, count: int, least: int, field: str) -> None:
        if count * least > self.end - self.at:
            raise corrupt(
                self.path, field, f"at most {(self.end - self.at) // least} in {self.end - self.at} bytes", count
            )

    def uint(self, width: int, field: str) -> int:
        return int.from_bytes(self.take(width, field), "little")

    def string(self, field: str, most: int = MAX_HEADER) -> str:
        length = self.uint(8, f"{field}: length")
        if length > most:
            raise corrupt(self.path, f"{field}: length", f"at most {most}", length)
        text = self.take(length, field)
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError:
            raise corrupt(self.path, field, "UTF-8", text) from None

    def value(self, field: str) -> tuple[int, Value]:
        kind = self.uint(4, f"{field}: type")
        if kind == _STRING:
            return kind, self.string(field)
        if kind != _ARRAY:
            number: Value = self.numbers(kind, 1, field)[0].item()
            return kind, number
        kind = self.uint(4, f"{field}: type of its values")
        count = self.uint(8, f"{field}: count")
        if kind == _STRING:
            self.room(count, _LEAST_STRING, f"{field}: count")
            return _ARRAY, [self.string(f"{field}: string {index}") for index in range(count)]
        return _ARRAY, self.numbers(kind, count, field)

    def numbers(self, kind: int, count: int, field: str) -> np.ndarray:
        dtype = _SCALARS.get(kind)
        if dtype is None:
            raise corrupt(self.path, f"{field}: type", "0..12, and no array of arrays", kind)
        self.room(count, dtype.itemsize, f"{field}: count")
        found = np.frombuffer(self.take(count * dtype.itemsize, field), dtype)
        if kind != _BOOL:
            return found.astype(dtype.newbyteorder("="))
        if (found > 1).any():
            raise corrupt(self.path, field, "0 or 1", int(found.max()))
        return found.astype(bool)

    def alignment(self, kind: int, value: Value) -> int:
        if kind != _UINT32 or not isinstance(value, int) or value < 1 or value & value - 1:
            raise corrupt(self.path, "key general.alignment", "a uint32 that is a power of two", value)
        return value

    def entry(self, index: int, types: Mapping[int, tuple[str, int, int]]) -> tuple[GgufTensor, int]:
        field = f"tensor {index}"
        name = self.string(f"{field}: name", MAX_NAME)
        field = f"tensor {name}"
        count = self.uint(4, f"{field}: number of dims")
        if count > MAX_DIMS:
            raise corrupt(self.path, f"{field}: number of dims", f"at most {MAX_DIMS}", count)
        shape = tuple(self.uint(8, f"{field}: dims") for _ in range(count))[::-1]
        elements = element_count(shape)
        if elements is None:
            raise corrupt(self.path, f"{field}: dims", "sizes that an array can have", list(shape[::-1]))
        code = self.uint(4, f"{field}: type")
        if code not in types:
            raise corrupt(self.path, f"{field}: type", f"one of {', '.join(map(str, sorted(types)))}", code)
        kind, block, block_bytes = types[code]
        columns = shape[-1] if shape else 1
        if columns % block:
            raise corrupt(self.path, f"{field}: dims", f"rows of a multiple of {block} for {kind}", columns)
        offset = self.uint(8, f"{field}: offset")
        return GgufTensor(name, kind, shape, 0, elements // block * block_bytes), offset

    def place(self, entries: Mapping[str, tuple[GgufTensor, int]], alignment: int) -> dict[str, GgufTensor]:
        """The tensors where they lie: back to back but for the padding, and up to the file's end."""

        def padded(size: int) -> int:
            return -(-size // alignment) * alignment

        start, at = padded(self.at), 0
        placed = {}
        for name, (tensor, offset) in entries.items():
            if offset != at:
                raise corrupt(self.path, f"tensor {name}: offset", f"{at} (tensors back to back)", offset)
            if start + at + tensor.nbytes > self.size:
                room = max(0, self.size - start - at)
                raise corrupt(self.path, f"tensor {name}", f"at most the {room} bytes there", tensor.nbytes)
            placed[name] = GgufTensor(name, tensor.type, tensor.shape, start + at, tensor.nbytes)
            at += padded(tensor.nbytes)
        # A file of keys alone may end before or after the padding.
        if self.size != start + at and (entries or not self.at <= self.size < start):
            raise corrupt(self.path, "size", f"{start + at} bytes (header, tensors, padding)", self.size)
        return placed
