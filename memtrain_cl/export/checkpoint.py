"""PyTorch checkpoints of counter layers: a ``state_dict`` as torch.save writes it, by the published package or by ours.

    <layer>.state   uint8 [out, in], a code each, or [out, in/4*3], four 6-bit codes in three bytes
    <layer>.scale   float32 [out, 1] or [out];  <layer>.v, <layer>.s_base: the same, of layers with row moments
    <name>          ordinary dense tensors

The state_dict is the file's content or stands in it under "state_dict", "model_state_dict" or "model". Ours says seed,
step, the clock of a layer that decimates and, in its metadata, C. Nothing says in_features, and the width of a state
can mean two of them: 576 columns are 576 codes or 768 packed ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from memtrain_cl.errors import CorruptFile
from memtrain_cl.export.codes import first_above, pack_codes
from memtrain_cl.export.container import Tensor
from memtrain_cl.export.hostile import corrupt, printable
from memtrain_cl.export.layout import layer_fault, tensor_name
from memtrain_cl.export.packed import EngineFile, to_tensor
from memtrain_cl.export.per_layer import PerLayer, require_matches, seeds, value_for
from memtrain_cl.export.torch_archive import load_archive
from memtrain_cl.formats import DECIMATION_PERIODS, LayerState, check_c, code_count

if TYPE_CHECKING:
    import torch
    from torch import nn

    from memtrain_cl.nn import CompactCounterLinear

Path = str | os.PathLike[str]

#: Where a checkpoint of more than a state_dict may hold it.
KEYS = ("state_dict", "model_state_dict", "model")
#: How many times over the tensors of a file may share memory: tied layers stand there under each of their names.
_SHARED = 4
_ROWS = ("scale", "v", "s_base")
_OURS = ("seed", "step", "clock")
#: What a checkpoint of memtrain-cl train holds.
_RUN = {"format", "config", "corpus", "model", "step", "torch_rng"}
_OF_LAYERS = ("state", *_ROWS, *_OURS)


def read_checkpoint(
    path: Path,
    *,
    C: PerLayer | None = None,
    in_features: PerLayer | None = None,
    model: nn.Module | None = None,
    seed: int = 0,
) -> EngineFile:
    """Layers and ordinary tensors of a checkpoint, as an engine file holds them.

    C, in_features: for all layers, or by pattern of their names (see `per_layer`).   model: a module whose counter
    layers say C, in_features, kind and options; None where nothing is known.   seed: each layer gets one of its own out
    of it where the file has none; its step is 0 then.

    CorruptFile for a damaged file and for codes that C does not have; ValueError where C is said nowhere or twice
    differently, a pattern matches no layer, a state may mean two in_features and none is given, or the layers do not
    fit an engine file (C <= 11, columns in fours) or the model. OSError when there is no file.
    """
    file = open_checkpoint(path)
    where = printable(os.fspath(path))
    if file.run is not None:
        raise ValueError(
            f"expected a state_dict in {where}, got a checkpoint of memtrain-cl train: memtrain-cl export takes it"
        )
    if not file.layers:
        raise ValueError(f"expected counter layers in {where}, got a checkpoint without any")
    for what, wanted in (("C", C), ("in_features", in_features)):
        require_matches(wanted, file.layers, what)
    _require_memory(file)
    modules = _modules(model, file.layers)
    of_layer = seeds(file.layers, seed)
    layers = {}
    for name in file.layers:
        told = {"C": value_for(name, C), "in_features": value_for(name, in_features)}
        layers[name] = file.layer(name, **told, module=modules.get(name), seed=of_layer[name])
    return EngineFile(layers, _ordinary(file), {}, "")


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint. tensors: the state_dict.   layers: names of its counter layers.   said: what its metadata
    says of their C.   run: the step and the model's configuration of one of memtrain-cl train; None for others.
    """

    path: Path
    tensors: Mapping[str, torch.Tensor]
    layers: tuple[str, ...]
    said: Mapping[str, int]
    run: Mapping[str, Any] | None

    def parts(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors of a layer by suffix."""
        names = {suffix: tensor_name(name, suffix) for suffix in _OF_LAYERS}
        return {suffix: self.tensors[tensor] for suffix, tensor in names.items() if tensor in self.tensors}

    def layer(
        self,
        name: str,
        *,
        C: int | None = None,
        in_features: int | None = None,
        module: CompactCounterLinear | None = None,
        seed: int = 0,
    ) -> LayerState:
        """A layer, checked; arguments and errors as read_checkpoint's."""
        from memtrain_cl.nn.accumulation import PROGRESS

        if tensor_name(name, PROGRESS) in self.tensors:
            raise ValueError(f"layer {name!r}: expected a layer between updates, got one with a sum of gradients")
        return _Layer(self.path, name, self.parts(name), module).read(C, in_features, self.said.get(name), seed)


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint's state_dict, and which of its entries are layers. Errors as read_checkpoint's for the file."""
    import torch

    content = load_archive(path)
    if not isinstance(content, dict):
        raise corrupt(path, "content", "a state_dict", type(content).__name__)
    run = _run(content, path) if content.keys() >= _RUN else None
    inside = [key for key in KEYS if isinstance(content.get(key), dict)]
    if len(inside) == 1:
        content = content[inside[0]]
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise corrupt(path, f"entry {name}", "a tensor under a name", type(value).__name__)
    names = _layer_names(content, path)
    said = _said(content, path) if run is None else dict.fromkeys(names, run["C"])
    return Checkpoint(path, dict(content), names, said, run)


def _run(content: Mapping[Any, Any], path: Path) -> dict[str, Any]:
    config, step = content["config"], content["step"]
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, dict) or type(model.get("C")) is not int or type(step) is not int:
        raise corrupt(path, "config", "a model with its C, and a step", "another")
    plain = {str(key): value for key, value in model.items() if isinstance(value, bool | int | float | str)}
    return {"step": step, **plain}


def _said(content: Mapping[str, Any], path: Path) -> dict[str, int]:
    metadata = getattr(content, "_metadata", None)
    said = {}
    for name, entry in metadata.items() if isinstance(metadata, dict) else ():
        if isinstance(entry, dict) and "C" in entry:
            if type(entry["C"]) is not int:
                raise corrupt(path, f"metadata of {name}: C", "an integer", type(entry["C"]).__name__)
            said[name] = entry["C"]
    return said


def _layer_names(state: Mapping[str, torch.Tensor], path: Path) -> tuple[str, ...]:
    names = []
    for key in state:
        name, _, suffix = key.rpartition(".")
        if suffix == "state" and str(state[key].dtype) == "torch.uint8":
            if tensor_name(name, "scale") not in state:
                raise corrupt(path, f"tensor {tensor_name(name, 'scale')}", "the scale of a layer with a state", "none")
            names.append(name)
    return tuple(names)


def _modules(model: nn.Module | None, names: Iterable[str]) -> dict[str, CompactCounterLinear]:
    if model is None:
        return {}
    from memtrain_cl.nn import CompactCounterLinear

    found = {name: module for name, module in model.named_modules() if isinstance(module, CompactCounterLinear)}
    for name in sorted(found.keys() ^ set(names)):
        where = "the model" if name in found else "the file"
        raise ValueError(f"expected the same counter layers in model and file, got {name!r} in {where} only")
    return found


def _ordinary(file: Checkpoint) -> dict[str, Tensor]:
    of_layers = {tensor_name(name, suffix) for name in file.layers for suffix in _OF_LAYERS}
    return {name: to_tensor(name, value) for name, value in file.tensors.items() if name not in of_layers}


def _require_memory(file: Checkpoint) -> None:
    """CorruptFile where tensors that will be copied share their memory in the file so often that copies are large."""
    states = {tensor_name(name, "state") for name in file.layers}
    size = os.stat(file.path).st_size
    total = 0
    for name, value in file.tensors.items():
        if name in states or not value.is_contiguous():
            total += value.numel() * value.element_size()
        if total > _SHARED * size:
            raise corrupt(file.path, f"tensor {name}", f"at most {_SHARED} times the file's {size} bytes in all", total)


@dataclass(frozen=True)
class _Layer:
    path: Path
    name: str
    parts: Mapping[str, torch.Tensor]
    module: CompactCounterLinear | None

    def read(self, C: int | None, in_features: int | None, said: Any, seed: int) -> LayerState:
        state = self.state()
        rows: dict[str, Any] = {suffix: self.row(suffix, len(state)) for suffix in _ROWS}
        radix = self.agreed("C", {"the call": C, "the file": said, "the model": getattr(self.module, "C", None)})
        radix = self.packable(radix)
        packed, width = self.storage(state.shape[1], in_features)
        if not packed:
            bad = first_above(state, code_count(radix) - 1)
            if bad:
                raise self.fault("state", f"codes below {code_count(radix)} (C = {radix})", f"{bad[1]} at {bad[0]}")
            state = pack_codes(state)
        kind = (
            "CompactCounterLinear" if rows["v"] is None else "PackedRMSCounterLinear" if packed else "RMSCounterLinear"
        )
        if rows["v"] is None and (packed or rows["s_base"] is not None):
            raise self.fault("v", "the moments of a layer with a packed state or s_base", "none")
        if self.module is not None and type(self.module).__name__ != kind:
            raise ValueError(f"layer {self.name!r}: expected a {type(self.module).__name__} in the file, got a {kind}")
        layer = LayerState(
            width,
            len(state),
            radix,
            state,
            **rows,
            hyper={} if self.module is None else self.module.hyper(),
            seed=self.number("seed", seed),
            step=self.number("step", 0),
            kind=kind,
            clock=self.clock(),
        )
        fault = layer_fault(layer)
        if fault:
            raise self.fault(*fault)
        return layer

    def storage(self, columns: int, in_features: int | None) -> tuple[bool, int]:
        """Whether the state is packed, and in_features."""
        wanted = self.agreed(
            "in_features",
            {
                "the call": in_features,
                "the model": getattr(self.module, "in_features", None),
                "the state's width": columns if columns % 3 else None,
            },
            f": {columns} columns are {columns} codes or {columns // 3 * 4} packed ones",
        )
        if wanted % 4:
            raise ValueError(f"layer {self.name!r}: expected in_features in fours for an engine file, got {wanted}")
        if columns not in (wanted, wanted // 4 * 3):
            raise ValueError(
                f"layer {self.name!r}: expected in_features of {columns} or {columns // 3 * 4} for {columns} columns, "
                f"got {wanted}"
            )
        return columns != wanted, wanted

    def agreed(self, what: str, sources: Mapping[str, Any], why: str = "") -> int:
        """The one value that those who speak of it say."""
        spoken = {source: value for source, value in sources.items() if value is not None}
        if not spoken:
            raise ValueError(f"layer {self.name!r}: expected {what}, which the file does not say{why}")
        if len(set(spoken.values())) > 1:
            told = ", ".join(f"{value} by {source}" for source, value in spoken.items())
            raise ValueError(f"layer {self.name!r}: expected one {what}, got {told}")
        value: int = next(iter(spoken.values()))
        return value

    def packable(self, C: int) -> int:
        try:
            return check_c(C, packed=True)
        except ValueError as fault:
            raise ValueError(f"layer {self.name!r}: {fault}") from None

    def state(self) -> np.ndarray:
        value = self.parts.get("state")
        if value is None or value.ndim != 2:
            raise self.fault("state", "[out, columns]", self.shape("state"))
        return np.ascontiguousarray(value.detach().numpy())

    def row(self, suffix: str, rows: int) -> np.ndarray | None:
        value = self.parts.get(suffix)
        if value is None:
            return None
        if str(value.dtype) != "torch.float32" or value.shape not in ((rows, 1), (rows,)):
            raise self.fault(suffix, f"float32 [{rows}, 1]", self.shape(suffix))
        return np.ascontiguousarray(value.detach().numpy().reshape(-1))

    def number(self, suffix: str, otherwise: int) -> int:
        value = self.parts.get(suffix)
        if value is None:
            return otherwise
        if value.shape != () or str(value.dtype) != "torch.int64" or int(value) < 0:
            raise self.fault(suffix, "an int64 >= 0", self.shape(suffix))
        return int(value)

    def clock(self) -> tuple[int, int] | None:
        value = self.parts.get("clock")
        if value is None:
            return None
        numbers = value.tolist() if value.shape == (4,) and str(value.dtype) == "torch.int64" else [0, 0]
        if numbers[0] not in DECIMATION_PERIODS or numbers[1] < 0:
            raise self.fault("clock", f"int64 [4], a period of {DECIMATION_PERIODS} first", self.shape("clock"))
        return numbers[0], numbers[1]

    def shape(self, suffix: str) -> str:
        value = self.parts.get(suffix)
        return "none" if value is None else f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"

    def fault(self, suffix: str, expected: str, got: str) -> CorruptFile:
        return corrupt(self.path, f"tensor {tensor_name(self.name, suffix)}", expected, got)
