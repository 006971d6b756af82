"""Where a model's memory goes: the bytes of its counter layers, part by part, and of the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from memtrain_cl.nn.counter import CompactCounterLinear

#: Parts of a layer, in the order of the report. counts: the totals behind the read-outs, and the decimation clock.
PARTS = ("state", "scale", "v", "s_base", "counts", "cache", "accumulation")


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a model. layers: of each counter layer by name, part by part.   totals: of the parts over all layers,
    then "counter_layers", "parameters" and "buffers" (of other modules), and "model", the sum of those three.
    """

    layers: Mapping[str, Mapping[str, int]]
    totals: Mapping[str, int]

    def __str__(self) -> str:
        return "\n".join(f"{name:<15}{size:>16,} bytes" for name, size in self.totals.items() if size)


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


def memory_report(model: nn.Module) -> MemoryReport:
    """The bytes of a model's counter layers, parameters and buffers, each tensor once."""
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
    return MemoryReport(layers, totals)
