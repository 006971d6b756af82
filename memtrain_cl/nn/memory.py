"""Where a model's memory goes: its counter layers, part by part, its other tensors, and its optimizer's state.

Beside those, measured in a step: what its forward keeps for backward, and the most that was alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memtrain_cl.meter import metered
from memtrain_cl.nn.counter import CompactCounterLinear

#: Parts of a layer, in the order of the report. counts: the totals behind the read-outs, and the decimation clock.
PARTS = ("state", "scale", "v", "s_base", "counts", "cache", "accumulation")

#: Pools of a step's memory, in the order of the report.
POOLS = ("weights and state", "gradients", "optimizer", "activations", "rest")


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

    pools: of a step that was measured, by `POOLS`, and "peak"; empty where none was.
    """

    layers: Mapping[str, Mapping[str, int]]
    totals: Mapping[str, int]
    optimizer: Mapping[str, ParameterState] = field(default_factory=dict)
    pools: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        width = max(20, *(len(name) + 2 for name in (*self.totals, *self.pools)))
        sizes = [*((name, size) for name, size in self.totals.items() if size), *self.pools.items()]
        return "\n".join(f"{name:<{width}}{size:>16,} bytes" for name, size in sizes)


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
    # Accelerate's stands around the one that knows.
    owner = optimizer if hasattr(optimizer, "method_of") else getattr(optimizer, "optimizer", optimizer)
    method_of = getattr(owner, "method_of", lambda parameter: None)
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


def gradient_bytes(model: nn.Module) -> int:
    """Bytes of the gradients that a model's parameters have now."""
    return sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None)


def _measure(model: nn.Module, loss_of: Callable[[], torch.Tensor], held: int, state: int) -> dict[str, int]:
    """The pools of a step. held: bytes of weights and their state; state: of the optimizer's."""
    place = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    before = gradient_bytes(model)
    with metered(place) as meter:
        at_first = meter.now()
        loss = loss_of()
        activations = meter.now() - at_first
        loss.backward()
        peak = meter.peak()
    # The host's meter saw what the step made; what was there before comes on top.
    peak += held + state + before if place.type == "cpu" else 0
    sizes = (held, gradient_bytes(model), state, activations)
    return {**dict(zip(POOLS, (*sizes, max(0, peak - sum(sizes))), strict=True)), "peak": peak}


def memory_report(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    loss_of: Callable[[], torch.Tensor] | None = None,
) -> MemoryReport:
    """The bytes of a model's counter layers, parameters and buffers, each tensor once, and of its optimizer's state.

    loss_of: a forward, which gives a loss. It is called, and the loss's backward (so that parameters get gradients and
    counter layers their update; `optimizer.step()` is left to do), and the report's `pools` say what was alive:
    "activations" are the bytes that the forward left, "peak" the most that lived, "rest" what of that is in no other
    pool (what backward works on, and on "opencl" and CUDA all else on the device). Pools need not be full at the same
    time, so "peak" may be less than their sum, and "rest" 0. A first step builds kernels and tables: measure a later
    one.
    """
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
    states = {} if optimizer is None else optimizer_memory(model, optimizer)
    state = sum(one.nbytes for one in states.values())
    if optimizer is not None:
        totals["optimizer"] = state
        for method in sorted({one.method for one in states.values() if one.method is not None}):
            totals[f"optimizer {method}"] = sum(one.nbytes for one in states.values() if one.method == method)
    pools = {} if loss_of is None else _measure(model, loss_of, totals["model"], state)
    return MemoryReport(layers, totals, states, pools)
