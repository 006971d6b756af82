"""MotifCL's tensor files (``.mt``): one array a file, three files a counter layer.

Little-endian: magic ``MCLTEN2\\0``; int32 dtype (0 = F32, 3 = U8); uint64 ndim; ndim x int64 dims; uint64 nbytes;
float32 quant_scale (1.0); int32 has_scales (0); int32 scale_axis (-1); int64 block_size (0); the bytes. Version 1,
``MCLTEN1\\0``, lacks the four quant fields. A layer is ``<name>_state.mt`` (uint8, out*in/4*3 bytes in one dimension),
``<name>_scale.mt`` and ``<name>_v.mt`` (float32 [out]). The files hold no C, no seed and no step.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from memtrain_cl.export.atomic import atomic_folder, atomic_path
from memtrain_cl.export.hostile import MAX_DIMS, corrupt, element_count, open_regular, read_array, read_exactly
from memtrain_cl.export.layout import layer_fault
from memtrain_cl.export.packed import layer_tensors
from memtrain_cl.export.per_layer import PerLayer, require_matches, seeds, value_for
from memtrain_cl.formats import LayerState, check_c, packed_row_bytes

MAGIC_1, MAGIC_2 = b"MCLTEN1\0", b"MCLTEN2\0"
_DTYPES: dict[int, np.dtype[Any]] = {0: np.dtype("<f4"), 3: np.dtype("u1")}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_QUANT = struct.Struct("<fiiq")
_STATE = "_state.mt"
_NO_QUANT = {"quant_scale": 1.0, "has_scales": 0, "scale_axis": -1, "block_size": 0}


def encode_mt(array: np.ndarray) -> bytes:
    """Everything of a version 2 file but the array's own bytes. TypeError unless float32 or uint8."""
    code = _CODES.get(array.dtype.newbyteorder("<"))
    if code is None:
        raise TypeError(f"expected an array of float32 or uint8, got {array.dtype}")
    dims = struct.pack(f"<{array.ndim}q", *array.shape)
    return (
        MAGIC_2
        + struct.pack("<iQ", code, array.ndim)
        + dims
        + struct.pack("<Q", array.nbytes)
        + _QUANT.pack(*_NO_QUANT.values())
    )


def _write(path: Path, array: np.ndarray) -> None:
    header = encode_mt(array)
    with open(path, "wb") as file:
        file.write(header)
        file.write(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data)


def write_mt(path: str | os.PathLike[str], array: np.ndarray) -> None:
    """Writes one array (float32 or uint8, any shape) as version 2, atomically."""
    with atomic_path(path) as temporary:
        _write(temporary, array)


def read_mt(path: str | os.PathLike[str]) -> np.ndarray:
    """The array of a version 1 or 2 file. CorruptFile for any fault, or for quantised content."""
    file, size = open_regular(path)
    with file:
        return _read(file, size, path)


def _read(file: BufferedReader, size: int, path: str | os.PathLike[str]) -> np.ndarray:
    magic = read_exactly(file, min(8, size), path, "magic")
    if magic not in (MAGIC_1, MAGIC_2):
        raise corrupt(path, "magic", f"{MAGIC_1!r} or {MAGIC_2!r}", magic)
    code, ndim = struct.unpack("<iQ", read_exactly(file, 12, path, "dtype and ndim"))
    if code not in _DTYPES:
        raise corrupt(path, "dtype", "0 (F32) or 3 (U8)", code)
    if ndim > MAX_DIMS:
        raise corrupt(path, "ndim", f"at most {MAX_DIMS}", ndim)
    shape = struct.unpack(f"<{ndim}q", read_exactly(file, 8 * ndim, path, "dims"))
    count = element_count(shape)
    if count is None:
        raise corrupt(path, "dims", "sizes that an array can have", shape)
    (nbytes,) = struct.unpack("<Q", read_exactly(file, 8, path, "nbytes"))
    if nbytes != count * _DTYPES[code].itemsize:
        raise corrupt(path, "nbytes", f"{count * _DTYPES[code].itemsize} for dims {list(shape)}", nbytes)
    if magic == MAGIC_2:
        quant = _QUANT.unpack(read_exactly(file, _QUANT.size, path, "quant fields"))
        for (field, plain), found in zip(_NO_QUANT.items(), quant, strict=True):
            if found != plain:
                raise corrupt(path, field, f"{plain} (an unquantised tensor)", found)
    if size - file.tell() != nbytes:
        raise corrupt(path, "nbytes", f"{size - file.tell()} (what follows the header)", nbytes)
    data = read_array(file, nbytes, path, "payload").view(_DTYPES[code])
    return data.astype(_DTYPES[code].newbyteorder("="), copy=False).reshape(shape)


def write_motifcl(
    out_dir: str | os.PathLike[str], layers: Mapping[str, LayerState], *, force: bool = False
) -> list[str]:
    """Writes three files a layer into ``out_dir``, all or none; returns their names. A layer without second moments
    gets v = 0.

    ValueError for values out of bounds, a layer without rows or a name that is no file name; FileExistsError when
    ``out_dir`` holds anything, unless ``force`` (files of the same names are then replaced, others stay).
    """
    files: dict[str, np.ndarray] = {}
    for name, layer in layers.items():
        if any(c in name for c in '/\\:*?"<>|') or not name.isprintable():
            raise ValueError(f"expected a layer name that can begin a file name, got {name!r}")
        fault = layer_fault(layer)
        if fault:
            raise ValueError(f"layer {name!r}: expected {fault[0]} of {fault[1]}, got {fault[2]}")
        if not layer.out_features:
            raise ValueError(f"layer {name!r}: expected rows, by which alone the files tell its columns, got none")
        arrays = layer_tensors("", layer)
        for suffix, array in (("state", arrays["state"].reshape(-1)), ("scale", arrays["scale"]), ("v", arrays["v"])):
            files[f"{name}_{suffix}.mt"] = array
    with atomic_folder(out_dir, force=force) as folder:
        for file_name, array in files.items():
            _write(folder / file_name, array)
    return list(files)


def layer_names(folder: Path) -> list[str]:
    """The layers whose states stand in a folder, sorted."""
    return sorted(path.name.removesuffix(_STATE) for path in folder.iterdir() if path.name.endswith(_STATE))


def read_motifcl_folder(folder: Path, C: PerLayer | None, *, seed: int = 0) -> dict[str, LayerState]:
    """Every layer of a folder, by name: each file ``<name>_state.mt`` is one's. Other files are left alone.

    C: for all layers, or by pattern of their names (see `per_layer`); ValueError where it is said of none, of another
    range, or by a pattern of no layer. Each layer gets a seed of its own out of `seed`. Errors as in read_motifcl, and
    CorruptFile for rows without a state.
    """
    names = layer_names(folder)
    require_matches(C, names, "C")
    for path in sorted(folder.iterdir()):
        layer = re.sub(r"_(scale|v)\.mt$", "", path.name)
        if layer != path.name and layer not in names:
            raise corrupt(path, "layer", f"{layer}{_STATE} beside it", "none")
    of_layer = seeds(names, seed)
    layers = {}
    for name in names:
        radix = value_for(name, C)
        if radix is None:
            raise ValueError(f"layer {name!r}: expected C, which the files do not say")
        layers[name] = read_motifcl(folder, name, radix, seed=of_layer[name])
    return layers


def read_motifcl(folder: str | os.PathLike[str], name: str, C: int, *, seed: int = 0) -> LayerState:
    """The layer ``name``: out comes from scale, in from the state's size, C from the caller; step is 0.

    The state may be one-dimensional or [out, in/4, 3]. CorruptFile when the three files disagree or a value is out of
    bounds, such as a code too large for C.
    """
    C = check_c(C, packed=True)
    paths = {suffix: Path(folder) / f"{name}_{suffix}.mt" for suffix in ("state", "scale", "v")}
    state, scale, v = (read_mt(path) for path in paths.values())
    for suffix, row in (("scale", scale), ("v", v)):
        if row.dtype != np.float32 or row.ndim != 1 or row.size != scale.size:
            raise corrupt(paths[suffix], "dims", f"F32 [{scale.size}]", f"{row.dtype} {list(row.shape)}")
    out_features = scale.size
    row_bytes, rest = divmod(state.size, out_features) if out_features else (0, state.size)
    in_features = row_bytes // 3 * 4
    flat = (out_features * row_bytes,)
    shapes = (flat, (out_features, row_bytes // 3, 3))
    if state.dtype != np.uint8 or rest or row_bytes % 3 or state.shape not in shapes:
        raise corrupt(
            paths["state"], "dims", f"U8 [out*in/4*3] or [out, in/4, 3], out = {out_features}", list(state.shape)
        )
    state = state.reshape(out_features, packed_row_bytes(in_features))
    layer = LayerState(in_features, out_features, C, state, scale, v, None, seed=seed)
    fault = layer_fault(layer)
    if fault:
        raise corrupt(paths[fault[0]], "payload", fault[1], fault[2])
    return layer
