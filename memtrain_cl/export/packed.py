"""The engine file (``.safetensors``): counter layers as their packed bytes, beside a model's ordinary tensors.

    <layer>.state   U8  [out, in/4*3]   four 6-bit codes in three bytes, equal to the live packed state byte for byte
    <layer>.scale   F32 [out]
    <layer>.v       F32 [out]           zeros for a CompactCounterLinear
    <layer>.s_base  F32 [out]           optional
    <name>          ordinary tensors under their own names and dtypes
    metadata        one key, see memtrain_cl.export.layout

A layer read from it continues its training bit for bit, given the same gradients. NumPy is enough to read and write;
the functions that take a module import torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import memtrain_cl
from memtrain_cl.export.container import (
    CODE_OF,
    DTYPES,
    Container,
    RawTensor,
    Tensor,
    code_and_shape,
    tensor_bytes,
    tensor_from_bytes,
    write_container,
)
from memtrain_cl.export.hostile import corrupt, strict_json
from memtrain_cl.export.layout import KEY, KINDS, build_metadata, is_unicode, layer_fault, parse_metadata, tensor_name
from memtrain_cl.formats import LayerState

if TYPE_CHECKING:
    import torch
    from torch import nn

    from memtrain_cl.nn import CompactCounterLinear


@dataclass(frozen=True, eq=False)
class EngineFile:
    """A whole engine file in memory. tensors: the ordinary ones, a RawTensor where NumPy lacks the dtype."""

    layers: Mapping[str, LayerState]
    tensors: Mapping[str, Tensor]
    model: Mapping[str, Any]
    created_by: str


def layer_tensors(name: str, layer: LayerState) -> dict[str, np.ndarray]:
    """The arrays that stand for a layer in the file, by tensor name. ValueError when kind and arrays disagree."""
    has_moments = KINDS.get(layer.kind, True)
    if has_moments != (layer.v is not None) or (layer.s_base is not None and not has_moments):
        raise ValueError(
            f"layer {name!r}: expected v and s_base only with row moments, got kind {layer.kind} with other arrays"
        )
    v = np.zeros_like(layer.scale) if layer.v is None else layer.v
    arrays = {"state": layer.state, "scale": layer.scale, "v": v}
    if layer.s_base is not None:
        arrays["s_base"] = layer.s_base
    return {tensor_name(name, suffix): array for suffix, array in arrays.items()}


def write_engine(
    path: str | os.PathLike[str],
    layers: Mapping[str, LayerState],
    tensors: Mapping[str, Tensor],
    model: Mapping[str, Any],
) -> None:
    """Writes an engine file atomically; equal input gives equal bytes, and no copy of the tensors is made.

    ValueError (and no file) when a scale is not finite and positive, a v not finite and >= 0, a code not below 3(2C-1),
    two tensors share a name, or hyper or model are no JSON. TypeError for a tensor dtype that the container lacks.
    """
    everything: dict[str, Tensor] = {}
    for name, layer in layers.items():
        fault = layer_fault(layer)
        if fault:
            suffix, expected, got = fault
            raise ValueError(f"tensor {tensor_name(name, suffix)!r}: expected {expected}, got {got}")
        for tensor, array in layer_tensors(name, layer).items():
            _add(everything, tensor, array)
    for name, ordinary in tensors.items():
        _add(everything, name, ordinary)
    header, sums = {}, {}
    for name, content in everything.items():
        try:
            header[name] = code_and_shape(content)
        except TypeError as fault_of_type:
            raise TypeError(f"tensor {name!r}: {fault_of_type}") from None
        sums[name] = hashlib.sha256(tensor_bytes(content).data).hexdigest()
    write_container(path, everything, build_metadata(layers, model, memtrain_cl.__version__, sums, header), KEY)


def _add(everything: dict[str, Tensor], name: str, array: Tensor) -> None:
    if name == "__metadata__" or not is_unicode(name):
        raise ValueError(f"expected a tensor name in Unicode other than '__metadata__', got {name!r}")
    if name in everything:
        raise ValueError(f"expected distinct tensor names, got {name!r} twice")
    everything[name] = array


class EngineReader:
    """An opened engine file whose header and metadata are checked; tensors are read, and checked, one at a time.

    mapped: as in `Container`; arrays are views of the file.   checked: compare each tensor's SHA-256, and a layer's
    values with their bounds. Without that a mapped tensor is not touched before it is used.
    """

    def __init__(self, path: str | os.PathLike[str], *, mapped: bool = False, checked: bool = True) -> None:
        self.path = path
        self.checked = checked
        self.container = Container(path, mapped=mapped)
        try:
            header = {name: (entry.code, entry.shape) for name, entry in self.container.entries.items()}
            text = self.container.metadata.get(KEY)
            if text is None:
                raise corrupt(
                    path, "__metadata__", f"the key {KEY!r} of an engine file", sorted(self.container.metadata)
                )
            self.metadata = parse_metadata(strict_json(text, path, KEY), header, path)
        except BaseException:
            self.container.close()
            raise
        of_layers = {
            tensor_name(name, suffix) for name, facts in self.metadata.layers.items() for suffix in facts.shapes
        }
        self.ordinary = tuple(sorted(self.container.entries.keys() - of_layers))

    def __enter__(self) -> EngineReader:
        return self

    def __exit__(self, *fault: object) -> None:
        self.container.close()

    def tensor(self, name: str) -> Tensor:
        """One tensor by its name in the file. CorruptFile when its SHA-256 is not the stored one."""
        data = self.container.bytes_of(name)
        found = hashlib.sha256(data.data).hexdigest() if self.checked else self.metadata.sha256[name]
        if found != self.metadata.sha256[name]:
            raise corrupt(self.path, f"sha256 of tensor {name}", str(self.metadata.sha256[name]), found)
        entry = self.container.entries[name]
        return tensor_from_bytes(entry.code, entry.shape, data)

    def layer(self, name: str) -> LayerState:
        """One layer. CorruptFile when a code, scale, v or s_base is out of bounds."""
        facts = self.metadata.layers[name]
        arrays: dict[str, Any] = dict.fromkeys(facts.shapes)
        for suffix in facts.shapes:
            tensor = tensor_name(name, suffix)
            if tensor in self.container.entries:
                arrays[suffix] = self.tensor(tensor)
        if not KINDS[facts.kind]:
            if arrays["v"].any():
                raise corrupt(
                    self.path, f"tensor {tensor_name(name, 'v')}", f"zeros in a {facts.kind}", arrays["v"].max()
                )
            arrays["v"] = None
        layer = LayerState(
            facts.in_features,
            facts.out_features,
            facts.C,
            **arrays,
            hyper=facts.hyper,
            seed=facts.seed,
            step=facts.step,
            kind=facts.kind,
            clock=facts.clock,
        )
        fault = layer_fault(layer) if self.checked else None
        if fault:
            suffix, expected, got = fault
            raise corrupt(self.path, f"tensor {tensor_name(name, suffix)}", expected, got)
        return layer


def read_engine(path: str | os.PathLike[str], *, mapped: bool = False) -> EngineFile:
    """The whole file, every size, sum and value checked. CorruptFile for any fault, OSError when there is no file.

    mapped: arrays are views of the file, as `Container` describes them.
    """
    with EngineReader(path, mapped=mapped) as reader:
        layers = {name: reader.layer(name) for name in reader.metadata.layers}
        tensors = {name: reader.tensor(name) for name in reader.ordinary}
        return EngineFile(layers, tensors, reader.metadata.model, reader.metadata.created_by)


def pack_module(module: nn.Module, model: Mapping[str, Any]) -> EngineFile:
    """A torch module as an engine file holds it: its counter layers packed, in copies, and the rest of its state_dict
    as ordinary tensors over the memory of those on the CPU.

    model: JSON values that say how to build the module again. ValueError for a layer that does not pack (C > 11,
    in_features not a multiple of 4) and for state that is no dense tensor.
    """
    from memtrain_cl.nn import layer_state

    layers, rest = _split(module)
    return EngineFile(
        {name: layer_state(layer) for name, layer in layers.items()},
        {name: to_tensor(name, value) for name, value in rest.items()},
        model,
        memtrain_cl.__version__,
    )


def export_model(module: nn.Module, path: str | os.PathLike[str], model: Mapping[str, Any]) -> None:
    """Writes a torch module as `pack_module` makes it. Errors as in pack_module and write_engine."""
    packed = pack_module(module, model)
    write_engine(path, packed.layers, packed.tensors, packed.model)


def load_into(module: nn.Module, engine: EngineFile) -> None:
    """Loads layers and ordinary tensors into a module of the same names, shapes, dtypes, kinds and C.

    The layers take the file's options too (lr ...). ValueError naming the first difference: nothing has changed then.
    """
    import torch

    from memtrain_cl.nn import load_layer_state

    layers, rest = _split(module)
    _same_names("layer", layers, engine.layers)
    _same_names("tensor", rest, engine.tensors)
    for name, layer in layers.items():
        stored = engine.layers[name]
        ours = (type(layer).__name__, layer.out_features, layer.in_features, layer.C)
        theirs = (stored.kind, stored.out_features, stored.in_features, stored.C)
        if ours != theirs:
            raise ValueError(f"layer {name!r}: expected (kind, out, in, C) = {ours}, got {theirs} in the file")
        _check_options(name, layer, stored)
    values = {}
    for name, tensor in engine.tensors.items():
        target = rest[name]
        values[name] = to_torch(tensor)
        ours_and_theirs = [f"{value.dtype} {list(value.shape)}" for value in (target, values[name])]
        if ours_and_theirs[0] != ours_and_theirs[1]:
            raise ValueError(f"tensor {name!r}: expected {ours_and_theirs[0]}, got {ours_and_theirs[1]} in the file")
    for name, layer in layers.items():
        load_layer_state(layer, engine.layers[name])
    with torch.no_grad():
        for name, value in values.items():
            rest[name].copy_(value)


def _check_options(name: str, layer: CompactCounterLinear, stored: LayerState) -> None:
    """ValueError when the layer's constructor would not take the file's options: load_layer_state only assigns."""
    import torch

    unknown = sorted(stored.hyper.keys() - layer.hyper().keys())
    if unknown:
        raise ValueError(f"layer {name!r}: expected options of {sorted(layer.hyper())}, got {unknown} in the file")
    with torch.random.fork_rng(devices=[]):  # A layer draws its seed and its first state; nobody asked for this one.
        try:
            type(layer)(4, 1, ops=layer.ops, **{"C": layer.C, **stored.hyper})
        except ValueError as fault:
            raise ValueError(f"layer {name!r}: {fault} in the file") from None


def verify_export(module: nn.Module, path: str | os.PathLike[str]) -> list[str]:
    """Names of what differs between a file and the live module, byte for byte: tensors, and "<layer>.seed", ".step",
    ".C", ".hyper", ".clock".

    A name that one side lacks is a difference. Empty: equal. The file's tensors are read one at a time.
    """
    from memtrain_cl.nn import layer_state

    layers, rest = _split(module)
    different: list[str] = []
    with EngineReader(path) as reader:
        stored = reader.metadata.layers
        for name in sorted(layers.keys() | stored.keys()):
            if name in layers and name in stored:
                different += _layer_differences(name, layer_state(layers[name]), reader.layer(name))
            else:
                different.append(name)
        for name in sorted(rest.keys() | set(reader.ordinary)):
            on_both = name in rest and name in reader.ordinary
            if not on_both or not _equal(to_tensor(name, rest[name]), reader.tensor(name)):
                different.append(name)
    return different


def _layer_differences(name: str, live: LayerState, stored: LayerState) -> list[str]:
    names = [
        tensor_name(name, field)
        for field in ("kind", "in_features", "out_features", "C", "hyper", "seed", "step", "clock")
        if getattr(live, field) != getattr(stored, field)
    ]
    ours, theirs = layer_tensors(name, live), layer_tensors(name, stored)
    names += [t for t in {**ours, **theirs} if t not in ours or t not in theirs or not _equal(ours[t], theirs[t])]
    return names


def _equal(ours: Tensor, theirs: Tensor) -> bool:
    # Bytes, not values: NaN equals itself here, and -0.0 is not 0.0.
    return code_and_shape(ours) == code_and_shape(theirs) and np.array_equal(tensor_bytes(ours), tensor_bytes(theirs))


def _same_names(what: str, ours: Mapping[str, object], theirs: Mapping[str, object]) -> None:
    for name in sorted(ours.keys() ^ theirs.keys()):
        where = "the module" if name in ours else "the file"
        raise ValueError(f"expected the same {what}s in module and file, got {what} {name!r} in {where} only")


def _split(module: nn.Module) -> tuple[dict[str, CompactCounterLinear], dict[str, torch.Tensor]]:
    """(counter layers by name, the other entries of state_dict). A layer reached under two names counts under both."""
    from memtrain_cl.nn import CompactCounterLinear

    layers = {
        name: child
        for name, child in module.named_modules(remove_duplicate=False)
        if isinstance(child, CompactCounterLinear)
    }
    prefixes = tuple(tensor_name(name, "") for name in layers)
    rest = {name: value for name, value in module.state_dict().items() if not name.startswith(prefixes)}
    return layers, rest


def to_tensor(name: str, value: object) -> Tensor:
    """A view of a state_dict entry's memory where it is contiguous and on the CPU; ValueError unless a dense tensor."""
    import torch

    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized or value.is_meta:
        raise ValueError(f"tensor {name!r}: expected a dense tensor, got {type(value).__name__}")
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in CODE_OF:
        raise TypeError(f"tensor {name!r}: expected a dtype of {', '.join(sorted(CODE_OF))}, got {dtype}")
    flat = value.detach().cpu().resolve_conj().contiguous().reshape(-1)
    return tensor_from_bytes(CODE_OF[dtype], tuple(value.shape), flat.view(torch.uint8).numpy())


def to_torch(tensor: Tensor) -> torch.Tensor:
    """A torch tensor over a tensor's memory."""
    import torch

    if not isinstance(tensor, RawTensor):
        return torch.from_numpy(tensor)
    return torch.from_numpy(tensor.data).view(getattr(torch, DTYPES[tensor.dtype][0])).reshape(tensor.shape)
