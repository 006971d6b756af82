"""Options of parameter groups, checked when a group is made: what the optimizers of this package share of it."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from typing import Any

import torch

from memtrain_cl.nn.options import is_whole

Checks = Mapping[str, Callable[[str, Any], Any]]
#: Keys of a group that are no options of ours: torch's own, schedulers', and names for logs.
FOREIGN = (
    "params",
    "param_names",
    "initial_lr",
    "max_lr",
    "min_lr",
    "max_momentum",
    "base_momentum",
    "swa_lr",
    "name",
)


def between(lowest: float, highest: float) -> Callable[[str, Any], Any]:
    """A check for numbers; a learning rate may be one in a tensor."""

    def check(name: str, value: Any) -> Any:
        number = value
        if isinstance(value, torch.Tensor) and value.numel() == 1 and name == "lr":
            number = value.item()
        fits = isinstance(number, numbers.Real) and not isinstance(number, bool) and lowest <= float(number) <= highest
        if not fits:
            raise ValueError(f"expected {name} as a number {lowest:g}..{highest:g}, got {value!r}")
        return value

    return check


def whole_between(lowest: int, highest: int) -> Callable[[str, Any], int]:
    """A check for integers."""

    def check(name: str, value: Any) -> int:
        if not is_whole(value) or not lowest <= value <= highest:
            raise ValueError(f"expected {name} as an integer in {lowest}..{highest}, got {value!r}")
        return int(value)

    return check


def betas(name: str, value: Any) -> tuple[float, float]:
    """A check for the decays of two moments."""
    pair = tuple(value) if isinstance(value, list | tuple) else ()
    if len(pair) != 2 or not all(isinstance(beta, numbers.Real) and 0.0 <= float(beta) < 1.0 for beta in pair):
        raise ValueError(f"expected {name} as two numbers in [0, 1), got {value!r}")
    return pair


def checked(group: Mapping[str, Any], checks: Checks) -> dict[str, Any]:
    """A group with its options checked; ValueError for an unknown one and for one out of range."""
    unknown = sorted(set(group) - set(checks) - set(FOREIGN))
    if unknown:
        raise ValueError(f"expected options of {', '.join(checks)} in a parameter group, got {', '.join(unknown)}")
    return {name: checks[name](name, value) if name in checks else value for name, value in group.items()}


def require_same_groups(current: list[dict[str, Any]], saved: Any) -> None:
    """ValueError unless saved groups have as many parameters as these."""
    if not all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in saved):
        raise ValueError("expected parameter groups with their parameters' numbers, got others")
    sizes = [len(group["params"]) for group in current]
    if [len(group["params"]) for group in saved] != sizes:
        raise ValueError(f"expected groups of {sizes} parameters, got {[len(group['params']) for group in saved]}")
