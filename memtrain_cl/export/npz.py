"""NumPy's ``.npz`` of counter layers, for who wants to look: ``numpy.load`` opens it.

    <layer>.codes   uint8 [out, in]     (t+1)*(2C-1) + (c + C-1), one a byte
    <layer>.C       int64               the carry radix
    <layer>.scale   float32 [out]
    <layer>.v       float32 [out]       in layers with row moments
    <layer>.s_base  float32 [out]       optional, beside v

(In a model that is itself a layer the names have no ``<layer>.``.) The format holds no seed, no step, no options and
no ordinary tensors.
"""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from memtrain_cl.export.archive import StoredArchive
from memtrain_cl.export.atomic import atomic_path
from memtrain_cl.export.codes import first_above, pack_codes, unpack_codes
from memtrain_cl.export.hostile import corrupt, element_count, read_array
from memtrain_cl.export.layout import is_unicode, layer_fault, row_fault, rows_of, tensor_name
from memtrain_cl.export.per_layer import seeds
from memtrain_cl.formats import LayerState, check_c, code_count

SUFFIX = ".npy"
_DTYPES: dict[str, np.dtype[Any]] = {
    "codes": np.dtype("u1"),
    "C": np.dtype("<i8"),
    **dict.fromkeys(("scale", "v", "s_base"), np.dtype("<f4")),
}
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}

Path = str | os.PathLike[str]


def write_npz(path: Path, layers: Mapping[str, LayerState]) -> None:
    """Writes the layers atomically, one unpacked at a time; equal input gives equal bytes.

    ValueError, and no file, for values out of bounds and for names that a zip archive cannot hold.
    """
    for name, layer in layers.items():
        fault = layer_fault(layer)
        if fault:
            raise ValueError(f"tensor {tensor_name(name, fault[0])!r}: expected {fault[1]}, got {fault[2]}")
        if "\0" in name or not is_unicode(name) or len(name.encode()) > 2**15:
            raise ValueError(
                f"expected a layer name in Unicode without zeros that fits a zip archive, got {name[:80]!r}"
            )
    with atomic_path(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, layer in layers.items():
            for suffix, array in _arrays(layer).items():
                # A fixed date, and room for sizes beyond 2 GiB.
                member = zipfile.ZipInfo(tensor_name(name, suffix) + SUFFIX)
                with archive.open(member, "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, array, allow_pickle=False)


def _arrays(layer: LayerState) -> dict[str, np.ndarray]:
    codes = unpack_codes(layer.state).reshape(layer.out_features, layer.in_features)
    return {"codes": codes, "C": np.array(layer.C, dtype=np.int64), **rows_of(layer)}


def read_npz(path: Path, *, seed: int = 0) -> dict[str, LayerState]:
    """The layers of a file; one without v is a CompactCounterLinear's. Each has its own seed out of `seed`, and step 0.

    CorruptFile for any fault, and for members that are compressed; OSError when there is no file. Nothing is unpickled,
    and an array is allocated when its header agrees with the archive's directory.
    """
    with StoredArchive(path) as archive:
        arrays: dict[str, dict[str, np.ndarray]] = {}
        for member in archive.sizes:
            name = member.removesuffix(SUFFIX)
            layer, _, suffix = name.rpartition(".")
            if not member.endswith(SUFFIX) or suffix not in _DTYPES:
                raise corrupt(path, f"member {member}", f"<layer>. and one of {', '.join(_DTYPES)}, {SUFFIX}", member)
            arrays.setdefault(layer, {})[suffix] = _read(archive, member, _DTYPES[suffix], path)
    of_layer = seeds(arrays, seed)
    return {layer: _layer(layer, parts, of_layer[layer], path) for layer, parts in arrays.items()}


def _read(archive: StoredArchive, member: str, dtype: np.dtype[Any], path: Path) -> np.ndarray:
    where = f"member {member}"
    with archive.member(member) as file:
        try:
            with warnings.catch_warnings():  # of NumPy and of the parser, about what a header should rather say
                warnings.simplefilter("ignore")
                version = np.lib.format.read_magic(file)
                shape, in_columns, found = _HEADERS[version](file)
        except (OSError, zipfile.BadZipFile):
            raise
        except Exception as fault:  # a header is read by Python's own parser and tokenizer
            raise corrupt(path, where, "an array as NumPy writes it", str(fault)) from fault
        count = element_count(shape)
        if count is None:
            raise corrupt(path, f"{where}: shape", "sizes that an array can have", shape)
        if found.newbyteorder("<") != dtype:
            raise corrupt(path, f"{where}: dtype", str(dtype), found)
        left = archive.sizes[member] - file.tell()
        if count * dtype.itemsize != left:
            raise corrupt(path, f"{where}: shape", f"{left} bytes of elements", shape)
        data = read_array(file, left, path, where).view(found)
        file.read(1)  # the end, where the archive compares checksums
    return data.astype(dtype.newbyteorder("="), copy=False).reshape(shape, order="F" if in_columns else "C")


def _layer(layer: str, parts: dict[str, np.ndarray], seed: int, path: Path) -> LayerState:
    def member(suffix: str) -> str:
        return f"member {tensor_name(layer, suffix)}{SUFFIX}"

    missing = [suffix for suffix in ("codes", "C", "scale") if suffix not in parts]
    if missing or ("s_base" in parts and "v" not in parts):
        raise corrupt(path, member(missing[0] if missing else "v"), "a member of the layer", "none")
    codes, radix = parts["codes"], parts["C"]
    if codes.ndim != 2 or codes.shape[1] % 4:
        raise corrupt(path, f"{member('codes')}: shape", "[out, in], columns in fours", codes.shape)
    try:
        C = check_c(radix.item() if radix.shape == () else radix.shape, packed=True)
    except ValueError as fault:
        raise corrupt(path, member("C"), "an integer in 1..11", str(fault)) from None
    for suffix in ("scale", "v", "s_base"):
        row = parts.get(suffix)
        if row is not None and row.shape != codes.shape[:1]:
            raise corrupt(path, f"{member(suffix)}: shape", f"[{codes.shape[0]}]", row.shape)
        fault_of_row = None if row is None else row_fault(suffix, row)
        if fault_of_row:
            raise corrupt(path, member(suffix), *fault_of_row)
    bad = first_above(codes, code_count(C) - 1)
    if bad:
        raise corrupt(path, member("codes"), f"codes below {code_count(C)} (C = {C})", f"{bad[1]} at {bad[0]}")
    out_features, in_features = codes.shape
    v, s_base = parts.get("v"), parts.get("s_base")
    kind = "CompactCounterLinear" if v is None else "PackedRMSCounterLinear"
    packed = pack_codes(codes)
    return LayerState(in_features, out_features, C, packed, parts["scale"], v, s_base, hyper={}, seed=seed, kind=kind)
