"""What `memtrain-cl inspect` tells about a file of any format here, recognised by its content and checked throughout.

Layers are read one at a time where the format allows.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from memtrain_cl.export import mncc
from memtrain_cl.export.archive import StoredArchive, is_archive
from memtrain_cl.export.codes import first_bad_code
from memtrain_cl.export.container import CODE_OF, code_and_shape
from memtrain_cl.export.gguf import read_gguf
from memtrain_cl.export.gguf_blocks import TERNARY
from memtrain_cl.export.gguf_read import MAGIC as GGUF_MAGIC
from memtrain_cl.export.hostile import corrupt, open_regular
from memtrain_cl.export.layout import rows_of, tensor_name
from memtrain_cl.export.motifcl import MAGIC_1, MAGIC_2, layer_names, read_motifcl, read_mt
from memtrain_cl.export.npz import read_npz
from memtrain_cl.export.packed import EngineReader
from memtrain_cl.export.per_layer import PerLayer, require_matches, value_for
from memtrain_cl.export.summary import (
    UNKNOWN,
    FileSummary,
    LayerSummary,
    TensorSummary,
    natural,
    shares_of_signs,
    shares_of_state,
    summarize_layer,
    summarize_state,
)
from memtrain_cl.export.torch_archive import PICKLE
from memtrain_cl.formats import C_MAX_PACKED, check_c, code_count

if TYPE_CHECKING:
    from memtrain_cl.export.checkpoint import Checkpoint

SAY_C = "The file does not say C: pass --C for the shares of -1, 0 and +1."
SAY_MORE = "Pass --C, and --in-features where a state may mean two, for the shares of -1, 0 and +1."


def summarize(
    path: str | os.PathLike[str], C: PerLayer | None = None, in_features: PerLayer | None = None
) -> FileSummary:
    """Reads an engine file, a MotifCL tensor or folder of them, MNCC, NumPy's .npz, GGUF or a PyTorch checkpoint,
    checking all of it.

    C: of MotifCL states and of checkpoints, which do not say it; in_features: of checkpoints (see `per_layer`).
    CorruptFile for a fault in the file, ValueError for a C out of range, for either out of place and for a pattern that
    matches no layer, OSError when there is no file.
    """
    path = Path(path)
    if path.is_dir() and layer_names(path):
        _only(in_features, "in_features", "a folder of MotifCL tensors")
        return _summarize_folder(path, C)
    file, size = open_regular(path)
    with file:
        head = file.read(8)
    if is_archive(head):
        with StoredArchive(path) as archive:
            is_torch = any(name.endswith(f"/{PICKLE}") for name in archive.sizes)
        if is_torch:
            return _summarize_checkpoint(path, size, C, in_features)
    _only(in_features, "in_features", "another file")
    if head in (MAGIC_1, MAGIC_2):
        return _summarize_mt(path, size, "MotifCL 1" if head == MAGIC_1 else "MotifCL 2", C)
    _only(C, "C", "a file that says its own or has none")
    if is_archive(head):
        return _summarize_npz(path, size)
    if head == mncc.MAGIC:
        return _summarize_mncc(path, size)
    if head.startswith(GGUF_MAGIC):
        return _summarize_gguf(path, size)
    return _summarize_engine(path, size)


def _only(given: object, name: str, got: str) -> None:
    allowed = {"C": "MotifCL states and PyTorch checkpoints", "in_features": "PyTorch checkpoints"}
    if given is not None:
        raise ValueError(f"expected {name} only for {allowed[name]}, got {got}")


def _summarize_engine(path: Path, size: int) -> FileSummary:
    with EngineReader(path) as reader:
        entries = reader.container.entries
        names = sorted(entries, key=natural)
        tensors = [TensorSummary(name, entries[name].code, entries[name].shape, entries[name].nbytes) for name in names]
        layers = []
        for name in sorted(reader.metadata.layers, key=natural):
            of_layer = (tensor_name(name, suffix) for suffix in reader.metadata.layers[name].shapes)
            nbytes = sum(entries[tensor].nbytes for tensor in of_layer if tensor in entries)
            layers.append(summarize_state(name, reader.layer(name), nbytes, placed=True))
        for name in reader.ordinary:
            reader.tensor(name)  # its sum is checked; nothing of it is kept
        metadata = reader.metadata
        return FileSummary(os.fspath(path), "engine 1", size, metadata.created_by, metadata.model, layers, tensors)


def _tensor(name: str, array: np.ndarray) -> TensorSummary:
    code, shape = code_and_shape(array)
    return TensorSummary(name, code, shape, array.nbytes)


def _summarize_mt(path: Path, size: int, kind: str, wanted: PerLayer | None) -> FileSummary:
    array = read_mt(path)
    name = path.name.removesuffix(".mt")
    layer = name.removesuffix("_state")
    require_matches(wanted, [layer], "C")
    C = value_for(layer, wanted)
    layers = []
    is_state = array.dtype == np.uint8 and array.size % 3 == 0
    if C is not None and not is_state:
        raise ValueError(f"expected C only for a packed state, got a file of {array.dtype} {list(array.shape)}")
    if is_state:
        shares = UNKNOWN
        if C is not None:
            C = check_c(C, packed=True)
            bad = first_bad_code(array, C)
            if bad:
                raise corrupt(path, "payload", f"codes below {code_count(C)} (C = {C})", f"{bad[1]} at index {bad[0]}")
            shares = shares_of_state(array, C)
        weights = array.size // 3 * 4
        layers.append(summarize_layer(layer, weights=weights, nbytes=array.nbytes, shares=shares, C=C))
    hint = SAY_C if is_state and C is None else ""
    return FileSummary(os.fspath(path), kind, size, None, {}, layers, [_tensor(name, array)], hint)


def _summarize_folder(folder: Path, C: PerLayer | None) -> FileSummary:
    layers, tensors, size = [], [], 0
    names = sorted(layer_names(folder), key=natural)
    require_matches(C, names, "C")
    for name in names:
        radix = value_for(name, C)
        # Every radix that packs is checked by the largest.
        layer = read_motifcl(folder, name, C_MAX_PACKED if radix is None else radix)
        arrays = {"state": layer.state.reshape(-1), **rows_of(layer)}
        tensors += [_tensor(f"{name}_{suffix}", array) for suffix, array in arrays.items()]
        size += sum((folder / f"{name}_{suffix}.mt").stat().st_size for suffix in arrays)
        layers.append(
            summarize_layer(
                name,
                weights=layer.out_features * layer.in_features,
                nbytes=sum(array.nbytes for array in arrays.values()),
                shares=UNKNOWN if radix is None else shares_of_state(layer.state, radix),
                sizes=(layer.out_features, layer.in_features),
                C=radix,
            )
        )
    hint = SAY_C if any(layer.C is None for layer in layers) else ""
    return FileSummary(os.fspath(folder), "MotifCL folder", size, None, {}, layers, tensors, hint)


def _summarize_npz(path: Path, size: int) -> FileSummary:
    layers, tensors = [], []
    for name, layer in sorted(read_npz(path).items(), key=lambda item: natural(item[0])):
        codes = TensorSummary(
            tensor_name(name, "codes"),
            "U8",
            (layer.out_features, layer.in_features),
            layer.out_features * layer.in_features,
        )
        parts = [codes, TensorSummary(tensor_name(name, "C"), "I64", (), 8)]
        parts += [_tensor(tensor_name(name, suffix), row) for suffix, row in rows_of(layer).items()]
        tensors += parts
        layers.append(summarize_state(name, layer, sum(part.bytes for part in parts), placed=False))
    return FileSummary(os.fspath(path), "NumPy archive", size, None, {}, layers, tensors)


def _summarize_mncc(path: Path, size: int) -> FileSummary:
    layers, tensors = [], []
    for name, layer in mncc.mncc_layers(path):
        parts = [_tensor(tensor_name(name, part), getattr(layer, part)) for part in mncc.PARTS]
        tensors += parts
        layers.append(
            summarize_layer(
                name,
                weights=layer.t.size,
                nbytes=sum(part.bytes for part in parts),
                shares=shares_of_signs(layer.t),
                kind="row scales" if layer.has_row_scales else f"groups of {layer.group}",
                sizes=(layer.out_features, layer.in_features),
                C=layer.C,
            )
        )
    return FileSummary(os.fspath(path), "MNCC 1", size, None, {}, layers, tensors)


def _summarize_gguf(path: Path, size: int) -> FileSummary:
    file = read_gguf(path)
    layers = []
    for name in sorted(file.tensors, key=natural):
        tensor = file.tensors[name]
        if tensor.type in TERNARY:
            signs = file.ternary(name).codes
            sizes = tensor.shape if len(tensor.shape) == 2 else (None, None)
            shares, kind = shares_of_signs(signs), tensor.type
            layers.append(
                summarize_layer(name, weights=signs.size, nbytes=tensor.nbytes, shares=shares, kind=kind, sizes=sizes)
            )
    plain = {
        key: f"{len(value)} values" if isinstance(value, list | np.ndarray) else value
        for key, value in file.metadata.items()
    }
    entries = [file.tensors[name] for name in sorted(file.tensors, key=natural)]
    tensors = [TensorSummary(entry.name, entry.type, entry.shape, entry.nbytes) for entry in entries]
    return FileSummary(os.fspath(path), "GGUF 3", size, None, plain, layers, tensors)


def _summarize_checkpoint(path: Path, size: int, C: PerLayer | None, in_features: PerLayer | None) -> FileSummary:
    from memtrain_cl.export.checkpoint import open_checkpoint

    file = open_checkpoint(path)
    for what, wanted in (("C", C), ("in_features", in_features)):
        require_matches(wanted, file.layers, what)
    layers = [
        _layer_of_checkpoint(file, name, value_for(name, C), value_for(name, in_features))
        for name in sorted(file.layers, key=natural)
    ]
    tensors = []
    for name in sorted(file.tensors, key=natural):
        tensor = file.tensors[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        nbytes = tensor.numel() * tensor.element_size()
        tensors.append(TensorSummary(name, CODE_OF.get(dtype, dtype), tuple(tensor.shape), nbytes))
    hint = SAY_MORE if any(layer.minus is None and layer.bytes for layer in layers) else ""
    kind = "PyTorch checkpoint" if file.run is None else "checkpoint of memtrain-cl train"
    return FileSummary(os.fspath(path), kind, size, None, file.run or {}, layers, tensors, hint)


def _layer_of_checkpoint(file: Checkpoint, name: str, C: int | None, in_features: int | None) -> LayerSummary:
    parts = file.parts(name)
    nbytes = sum(parts[part].numel() * parts[part].element_size() for part in parts)
    rows, columns = parts["state"].shape if parts["state"].ndim == 2 else (0, 0)
    if file.run is not None:
        in_features = columns // 3 * 4  # its layers are packed
    if (C is None and name not in file.said) or (in_features is None and columns % 3 == 0):
        step = parts.get("step")
        return summarize_layer(
            name,
            weights=0,
            nbytes=nbytes,
            shares=UNKNOWN,
            sizes=(rows, in_features),
            C=C if C is not None else file.said.get(name),
            step=None if step is None or step.numel() != 1 else int(step),
        )
    layer = file.layer(name, C=C, in_features=in_features)
    return summarize_state(name, layer, nbytes, placed="step" in parts)
