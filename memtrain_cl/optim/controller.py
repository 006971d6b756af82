"""Learning-rate schedules for layers that have no Parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from torch import nn

from memtrain_cl.formats import LR_MAX
from memtrain_cl.nn.counter import CompactCounterLinear

Layers = nn.Module | Iterable[nn.Module]
_RATES = ("lr", "lr_scale")


def _layers_of(given: Any) -> list[CompactCounterLinear]:
    """The counter layers among modules and within them, each once, in their order."""
    modules = [given] if isinstance(given, nn.Module) else list(given)
    found: dict[int, CompactCounterLinear] = {}
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"expected modules, got {type(module).__name__}")
        for child in module.modules():
            if isinstance(child, CompactCounterLinear):
                found.setdefault(id(child), child)
    if not found:
        raise ValueError("expected at least one counter layer, got none")
    return list(found.values())


class CounterController(torch.optim.Optimizer):
    """A torch Optimizer whose groups hold counter layers' lr and lr_scale; the layers read them at each update.

    layers: a model, or modules, with counter layers in them; or groups as torch's optimizers take them, mappings with
    "layers" and perhaps "lr" and "lr_scale". lr, lr_scale: of the groups that name none; None takes the layers' own, in
    a group for each pair of values. As every schedule of torch.optim.lr_scheduler writes into `param_groups`, and the
    layers look there, a schedule steps the layers; assigning `layer.lr` writes into the layer's group, too.

    `step` and `zero_grad` change nothing, since the layers update themselves in backward; call `step` before the
    schedule's all the same, which expects it. A layer follows the last controller that was made with it. state_dict
    holds the groups' values. Copies of a layer follow no controller.

    Raises ValueError for groups without counter layers, for a layer in two groups, and for rates out of 0..1e6.
    """

    def __init__(
        self,
        layers: Layers | Iterable[Mapping[str, Any]],
        *,
        lr: float | None = None,
        lr_scale: float | None = None,
    ) -> None:
        self._layers: list[list[CompactCounterLinear]] = []
        given: list[Any] = [layers] if isinstance(layers, nn.Module) else list(layers)
        groups = given if given and all(isinstance(group, Mapping) for group in given) else [{"layers": given}]
        parts = [part for group in groups for part in self._parts({"lr": lr, "lr_scale": lr_scale, **group})]
        every = [id(layer) for members, _ in parts for layer in members]
        if len(set(every)) < len(every):
            raise ValueError("expected each counter layer in one group, got one in several")
        # Tensors are what torch's base class counts and checks; a group of none is one to it all the same.
        super().__init__([{"params": [], **options} for _, options in parts], {"lr": lr, "lr_scale": lr_scale})
        self._layers = [members for members, _ in parts]
        self._adopt()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_layers": self._layers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_layers" in state:  # a copy, of the layers too; loading a state comes by here without them
            self._adopt()

    def _parts(self, group: Mapping[str, Any]) -> list[tuple[list[CompactCounterLinear], dict[str, Any]]]:
        """The group's layers and options; several where its layers have different rates of their own."""
        rest = {name: value for name, value in group.items() if name not in ("layers", "params")}
        parts: dict[tuple[Any, ...], list[CompactCounterLinear]] = {}
        for layer in _layers_of(group.get("layers", ())):
            rates = tuple(getattr(layer, name) if rest[name] is None else rest[name] for name in _RATES)
            parts.setdefault(rates, []).append(layer)
        for rates in parts:
            for name, rate in zip(_RATES, rates, strict=True):
                if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0.0 <= rate <= LR_MAX:
                    raise ValueError(f"expected {name} as a number 0..{LR_MAX:g}, got {rate!r}")
        return [(members, {**rest, **dict(zip(_RATES, rates, strict=True))}) for rates, members in parts.items()]

    def _adopt(self, first: int = 0) -> None:
        """Let the layers of the groups from `first` on follow."""
        for index in range(first, len(self._layers)):
            for layer in self._layers[index]:
                # By number: loading a state puts other dictionaries into param_groups.
                layer.follow(functools.partial(self._group, index))

    def _group(self, index: int) -> dict[str, Any]:
        return self.param_groups[index]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, of a mapping with "layers", and "lr" and "lr_scale" (those of its layers by default)."""
        if "layers" not in param_group:
            super().add_param_group(param_group)
            return
        known = {id(layer) for members in self._layers for layer in members}
        for members, options in self._parts({"lr": None, "lr_scale": None, **param_group}):
            if any(id(layer) in known for layer in members):
                raise ValueError("expected each counter layer in one group, got one in several")
            super().add_param_group({"params": [], **options})
            self._layers.append(members)
            self._adopt(len(self._layers) - 1)

    def layers(self, group: int = 0) -> list[CompactCounterLinear]:
        """The layers of a group."""
        return list(self._layers[group])

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Nothing but the closure's loss: the layers have been updated by its backward, or by one before."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: there is no gradient between steps."""
