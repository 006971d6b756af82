"""The safetensors container, seen from NumPy: tensors of every dtype, bfloat16 among them, without torch.

Layout: uint64 little-endian header length; JSON header {"__metadata__": {str: str}, name: {"dtype", "shape",
"data_offsets"}}; the tensors' bytes, back to back. The safetensors library writes it; the reader here is our own,
because it has to name the fault it finds.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from typing import Any

import numpy as np
from safetensors import SafetensorError, TensorSpec, serialize_file

from memtrain_cl.errors import CorruptFile
from memtrain_cl.export.atomic import atomic_path
from memtrain_cl.export.hostile import corrupt, element_count, open_regular, read_array, read_exactly, strict_json

#: The safetensors library's own limit of the header.
MAX_HEADER = 100_000_000

#: dtype code in the file -> (name the library and torch call it by, bytes an element).
DTYPES: dict[str, tuple[str, int]] = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "F32": ("float32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}
CODE_OF = {name: code for code, (name, _) in DTYPES.items()}
_FOREIGN = {"bfloat16"} | {name for name in CODE_OF if name.startswith("float8")}


@dataclass(frozen=True, eq=False)
class RawTensor:
    """A tensor of a dtype that NumPy lacks. dtype: its code ("BF16"). data: its bytes, uint8 [bytes], row-major."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray

    def __post_init__(self) -> None:
        count = element_count(self.shape)
        if self.dtype not in DTYPES or count is None:
            raise ValueError(f"expected a known dtype and shape, got {self.dtype!r} {self.shape}")
        if self.data.dtype != np.uint8 or self.data.shape != (count * DTYPES[self.dtype][1],):
            raise ValueError(
                f"expected the bytes of {self.dtype} {self.shape}, got {self.data.dtype} {self.data.shape}"
            )


Tensor = np.ndarray | RawTensor


def code_and_shape(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    """("F32", shape) of a tensor; TypeError when the container has no such dtype."""
    if isinstance(tensor, RawTensor):
        return tensor.dtype, tensor.shape
    code = CODE_OF.get(tensor.dtype.name)
    if code is None:
        raise TypeError(f"expected a dtype of {', '.join(sorted(CODE_OF))}, got {tensor.dtype}")
    return code, tensor.shape


def tensor_bytes(tensor: Tensor) -> np.ndarray:
    """The little-endian row-major bytes, uint8 [bytes]: a view where the tensor is already laid out so."""
    if isinstance(tensor, RawTensor):
        return np.ascontiguousarray(tensor.data)
    # reshape after the copy: ascontiguousarray turns a scalar into one dimension, and the bytes of both are the same.
    return np.ascontiguousarray(tensor, dtype=tensor.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)


def tensor_from_bytes(code: str, shape: tuple[int, ...], data: np.ndarray) -> Tensor:
    """The tensor over ``data`` (no copy on a little-endian machine)."""
    name, _ = DTYPES[code]
    if name in _FOREIGN:
        return RawTensor(code, shape, data)
    dtype = np.dtype(name)
    return data.view(dtype.newbyteorder("<")).astype(dtype, copy=False).reshape(shape)


def write_container(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: str, key: str) -> None:
    """Writes the file atomically, without a copy of the tensors; equal input gives equal bytes.

    The metadata is the one entry ``key``: the library writes several in an order of chance. It is JSON; ValueError, and
    no file, for JSON that readers refuse (see `strict_json`). OSError when the disk refuses.
    """
    try:
        strict_json(metadata, path, key)
    except CorruptFile as fault:
        raise ValueError(str(fault)) from None
    # Named, to be alive while the library reads their addresses.
    held = {name: tensor_bytes(tensor) for name, tensor in tensors.items()}
    specs = {}
    for name, data in held.items():
        code, shape = code_and_shape(tensors[name])
        specs[name] = TensorSpec(dtype=DTYPES[code][0], shape=shape, data_ptr=data.ctypes.data, data_len=data.nbytes)
    with atomic_path(path) as temporary:
        try:
            serialize_file(specs, temporary, metadata={key: metadata})
        except SafetensorError as fault:
            raise OSError(f"{os.fspath(path)}: {fault}") from fault


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: offsets are absolute, in bytes."""

    code: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Container:
    """An opened safetensors file whose header has been checked: ``entries`` by name in file order, and ``metadata``.

    Every size is compared with the file's length, tensors lie back to back and fill the file. CorruptFile otherwise.

    mapped: tensors are views of the file, whose pages are read when they are touched; what is written into such an
    array stays in this process. The arrays outlive the container, and a file that is replaced meanwhile (as every
    writer here does it). One that another program shortens in place ends this process by SIGBUS.
    """

    def __init__(self, path: str | os.PathLike[str], *, mapped: bool = False) -> None:
        self.path = path
        self._file: BufferedReader
        self._file, self.size = open_regular(path)
        try:
            self.entries, self.metadata = self._read_header()
            # A private copy of what is written to: PyTorch takes no array that is read-only.
            self._map = mmap.mmap(self._file.fileno(), self.size, access=mmap.ACCESS_COPY) if mapped else None
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def close(self) -> None:
        self._map = None  # unmapped with the last array over it
        self._file.close()

    def bytes_of(self, name: str) -> np.ndarray:
        """A tensor's bytes, uint8 [bytes]: a view of a mapped file where it is aligned, else memory of their own."""
        entry = self.entries[name]
        if self._map is not None and entry.nbytes and entry.start % DTYPES[entry.code][1] == 0:
            return np.frombuffer(self._map, np.uint8, entry.nbytes, entry.start)
        self._file.seek(entry.start)
        return read_array(self._file, entry.nbytes, self.path, f"tensor {name}")

    def _read_header(self) -> tuple[dict[str, Entry], dict[str, str]]:
        if self.size < 8:
            raise corrupt(self.path, "size", "at least 8 bytes", self.size)
        length = int.from_bytes(read_exactly(self._file, 8, self.path, "header length"), "little")
        limit = min(self.size - 8, MAX_HEADER)
        if length > limit:
            raise corrupt(self.path, "header length", f"at most {limit} (the file has {self.size} bytes)", length)
        header = strict_json(read_exactly(self._file, length, self.path, "header"), self.path, "header")
        if not isinstance(header, dict):
            raise corrupt(self.path, "header", "a JSON object", header)
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise corrupt(self.path, "__metadata__", "an object of strings", metadata)
        data_start = 8 + length
        entries = {name: self._entry(name, fields, data_start) for name, fields in header.items()}
        entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
        at = data_start
        for name, entry in entries.items():
            if entry.start != at:
                raise corrupt(
                    self.path, f"tensor {name}: data_offsets", f"a start of {at - data_start}", entry.start - data_start
                )
            at = entry.stop
        if at != self.size:
            raise corrupt(self.path, "size", f"{at} bytes (header and tensors)", self.size)
        return entries, metadata

    def _entry(self, name: str, fields: Any, data_start: int) -> Entry:
        where = f"tensor {name}"
        if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
            raise corrupt(self.path, where, "an object of dtype, shape, data_offsets", fields)
        code, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
        if not isinstance(code, str) or code not in DTYPES:
            raise corrupt(self.path, f"{where}: dtype", f"one of {', '.join(DTYPES)}", code)
        count = element_count(shape) if isinstance(shape, list) else None
        if count is None:
            raise corrupt(self.path, f"{where}: shape", "a list of sizes that an array can have", shape)
        if not isinstance(offsets, list) or len(offsets) != 2 or any(type(o) is not int for o in offsets):
            raise corrupt(self.path, f"{where}: data_offsets", "two integers", offsets)
        start, stop = offsets
        if not 0 <= start <= stop <= self.size - data_start:
            raise corrupt(
                self.path, f"{where}: data_offsets", f"offsets within {self.size - data_start} bytes", offsets
            )
        expected = count * DTYPES[code][1]
        if stop - start != expected:
            raise corrupt(self.path, f"{where}: data_offsets", f"{expected} bytes for {code} {shape}", stop - start)
        return Entry(code, tuple(shape), data_start + start, data_start + stop)
