"""A model's linears become counter layers that begin with their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn

from memtrain_cl.formats import C_DEFAULT
from memtrain_cl.nn.counter import CompactCounterLinear, PackedRMSCounterLinear, RMSCounterLinear

Kind = str | type[CompactCounterLinear]

#: The published names of the kinds.
KINDS: dict[str, type[CompactCounterLinear]] = {
    "counter": CompactCounterLinear,
    "counter_rms": RMSCounterLinear,
    "counter_packed": PackedRMSCounterLinear,
}


def _class_of(kind: Kind) -> type[CompactCounterLinear]:
    if isinstance(kind, type) and issubclass(kind, CompactCounterLinear):
        return kind
    if isinstance(kind, str) and kind in KINDS:
        return KINDS[kind]
    raise ValueError(f"expected kind as a counter layer's class or one of {', '.join(KINDS)}, got {kind!r}")


class CounterLinearWithBias(nn.Module):
    """A counter layer and a bias that an optimizer trains: y = counter(x) + bias.

    counter: the layer.   bias: its first values [out]; becomes a Parameter of their type.
    """

    def __init__(self, counter: CompactCounterLinear, bias: torch.Tensor) -> None:
        super().__init__()
        if tuple(bias.shape) != (counter.out_features,):
            raise ValueError(f"expected a bias {[counter.out_features]}, got {list(bias.shape)}")
        self.counter = counter
        self.bias = nn.Parameter(bias.detach().clone())

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, kind: Kind = "counter_rms", **options: Any) -> Self:
        """From a torch.nn.Linear with a bias; options as in `from_dense` of the layer."""
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"expected a torch.nn.Linear, got {type(linear).__name__}")
        if linear.bias is None:
            raise ValueError("expected a linear with bias, got one without; the counter layer's from_linear takes it")
        counter = _class_of(kind).from_dense(linear.weight, **options)
        return cls(counter, linear.bias).train(linear.training)

    @property
    def in_features(self) -> int:
        """Those of the counter layer."""
        return self.counter.in_features

    @property
    def out_features(self) -> int:
        """Those of the counter layer."""
        return self.counter.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y [..., out] of x [..., in], in x's type."""
        y: torch.Tensor = self.counter(x)
        return y + self.bias.to(y.dtype)


@dataclass
class SwapReport:
    """What `swap_linears_to_counter` did. swapped, skipped: names of linears; coeffs: weights that are counters now."""

    swapped: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    coeffs: int = 0

    def __str__(self) -> str:
        return f"{len(self.swapped)} linears became counters of {self.coeffs:,} weights; {len(self.skipped)} were left"


def _skips(skip: str | Iterable[str] | Callable[[str], bool] | None) -> Callable[[str], bool]:
    if skip is None:
        return lambda _: False
    if isinstance(skip, str):
        return lambda name: skip in name
    if callable(skip):
        return skip
    parts = tuple(skip)
    return lambda name: any(part in name for part in parts)


def swap_linears_to_counter(
    model: nn.Module,
    *,
    kind: Kind = "counter_rms",
    skip: str | Iterable[str] | Callable[[str], bool] | None = None,
    C: int = C_DEFAULT,
    threshold_ratio: float = 0.7,
    keep_bias: bool = True,
    **options: Any,
) -> SwapReport:
    """Put a counter layer in the place of every torch.nn.Linear of `model`, in place.

    kind: "counter", "counter_rms", "counter_packed", or a class.   skip: linears to leave alone, by a part of their
    name, several parts, or a function of the name.   threshold_ratio: see `weight_to_counter_state`.   keep_bias: a
    linear with a bias becomes a `CounterLinearWithBias`; False drops the bias.   options: the layers'.

    A linear that stands in several places becomes one layer there (which wants reuse=True or accumulate). Left alone,
    and named as skipped, are also subclasses of Linear, whose owners reach into them (attention's out_proj), and
    linears whose weight belongs to another module too (a head tied to its embedding). ValueError, with nothing
    changed, for a linear that the layers do not take, and when the model is itself a linear.
    """
    if isinstance(model, nn.Linear):
        raise ValueError("expected a model with linears in it, got a linear; from_linear makes a layer of it")
    cls, left_alone = _class_of(kind), _skips(skip)
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    report, made = SwapReport(), {}
    places = [
        (parent, child_name, child, f"{name}.{child_name}" if name else child_name)
        for name, parent in model.named_modules()
        for child_name, child in parent._modules.items()
        if isinstance(child, nn.Linear)
    ]
    for _, _, linear, name in places:
        if type(linear) is not nn.Linear or left_alone(name) or owners[id(linear.weight)] > 1:
            report.skipped.append(name)
            continue
        report.swapped.append(name)
        if linear not in made:
            made[linear] = _counter_of(cls, linear, name, keep_bias, C=C, threshold_ratio=threshold_ratio, **options)
            report.coeffs += linear.weight.numel()
    for parent, child_name, linear, name in places:
        if name in report.swapped:
            setattr(parent, child_name, made[linear])
    return report


def _counter_of(
    cls: type[CompactCounterLinear], linear: nn.Linear, name: str, keep_bias: bool, **options: Any
) -> nn.Module:
    try:
        layer = cls.from_dense(linear.weight, **options)
    except ValueError as fault:
        raise ValueError(f"{name}: {fault}") from None
    layer.train(linear.training)
    return layer if linear.bias is None or not keep_bias else CounterLinearWithBias(layer, linear.bias)
