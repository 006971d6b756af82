"""Where a model's memory goes: its counter layers, part by part, its other tensors, and its optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memtrain_cl.nn.counter import CompactCounterLinear

#: Parts of a layer, in the order of the report. counts: the totals behind the read-outs, and the decimation clock.
PARTS = ("state", "scale", "v", "s_base", "counts", "cache", "accumulation")


@dataclass(frozen=True)
class ParameterState:
    """What an optimizer holds of one parameter. method: how, by the optimizer's `method_of` (None where it has none).
    parts: bytes of each tensor of the state.
    """

    method: str | None
    parts: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a model. layers: of each counter layer by name, part by part.   optimizer: of the optimizer's state, by
    the parameter's name.   totals: of the parts over all layers, then "counter_layers", "parameters" and "buffers" (of
    other modules), "model", the sum of those three; with an optimizer also "optimizer", and "optimizer <method>" each.
    """

    layers: Mapping[str, Mapping[str, int]]
    totals: Mapping[str, int]
    optimizer: Mapping[str, ParameterState] = field(default_factory=dict)

    def __str__(self) -> str:
        width = max(15, *(len(name) for name in self.totals))
        return "\n".join(f"{name:<{width}}{size:>16,} bytes" for name, size in self.totals.items() if size)


def layer_memory(layer: CompactCounterLinear) -> dict[str, int]:
    """Bytes of a counter layer's parts: what it holds, and for a sum of gradients also what its options will have it
    hold once it trains.
    """
    held = {name: buffer.nbytes for name, buffer in layer._buffers.items() if buffer is not None}
    held["counts"] += held.pop("clock", 0)
    weights = layer.in_features * layer.out_features
    estimates = 4 * layer.out_features if layer.rule().rms_mode == "proxy" else 0
    sums = 4 * weights + estimates if layer.accumulate > 1 else 0
    widths = {"none": 0, "int8": 1, "fp16": 2}
    return {
        **{name: held.get(name, 0) for name in PARTS},
        "cache": weights * widths[layer.cache_mode],
        "accumulation": max(sums, layer._sum.nbytes),
    }


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a value of an optimizer's state."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(str(key), inner)


def optimizer_memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, ParameterState]:
    """The bytes of an optimizer's state, by the names of the model's parameters; those of others are numbered."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    method_of = getattr(optimizer, "method_of", lambda parameter: None)
    found: dict[str, ParameterState] = {}
    for group, options in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(options["params"]):
            parts: dict[str, int] = {}
            for name, tensor in _tensors("", dict(optimizer.state.get(parameter, {}))):
                parts[name] = parts.get(name, 0) + tensor.nbytes
            if parts:
                name = names.get(id(parameter), f"group {group}, parameter {place}")
                found[name] = ParameterState(method_of(parameter), parts)
    return found


def memory_report(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> MemoryReport:
    """The bytes of a model's counter layers, parameters and buffers, each tensor once, and of its optimizer's state."""
    layers: dict[str, dict[str, int]] = {}
    others: dict[str, dict[int, int]] = {"parameters": {}, "buffers": {}}
    for name, module in model.named_modules():
        if isinstance(module, CompactCounterLinear):
            layers[name] = layer_memory(module)
            continue
        for kind, tensors in (("parameters", module._parameters), ("buffers", module._buffers)):
            others[kind].update({id(tensor): tensor.nbytes for tensor in tensors.values() if tensor is not None})
    totals = {part: sum(layer[part] for layer in layers.values()) for part in PARTS}
    totals["counter_layers"] = sum(totals.values())
    totals.update({kind: sum(sizes.values()) for kind, sizes in others.items()})
    totals["model"] = totals["counter_layers"] + totals["parameters"] + totals["buffers"]
    if optimizer is None:
        return MemoryReport(layers, totals)
    states = optimizer_memory(model, optimizer)
    totals["optimizer"] = sum(state.nbytes for state in states.values())
    for method in sorted({state.method for state in states.values() if state.method is not None}):
        totals[f"optimizer {method}"] = sum(state.nbytes for state in states.values() if state.method == method)
    return MemoryReport(layers, totals, states)
