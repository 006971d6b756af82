"""Parameter groups of Automagic: checked options, and a learning rate that lives on the device and shows here."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from memtrain_cl.adam_rule import EPS_MIN
from memtrain_cl.automagic_rule import RATE_MIN, AutomagicStep, clamp_history
from memtrain_cl.formats import LR_MAX
from memtrain_cl.optim.base import placed
from memtrain_cl.optim.group_options import betas, between, whole_between


def _only_beta2(name: str, value: Any) -> tuple[float, float]:
    pair = betas(name, value)
    if pair[0] != 0:
        raise ValueError(f"expected betas (0.0, beta2), got {value!r}: Automagic has no first moment")
    return pair


def _rate(name: str, value: Any) -> float:
    return float(between(0.0, LR_MAX)(name, value))


def _history(name: str, value: Any) -> int:
    return clamp_history(value)


CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "lr": _rate,
    "min_lr": between(RATE_MIN, LR_MAX),
    "max_lr": between(RATE_MIN, LR_MAX),
    "betas": _only_beta2,
    "eps": between(EPS_MIN, LR_MAX),
    "clip_threshold": between(EPS_MIN, LR_MAX),
    "weight_decay": between(0.0, LR_MAX),
    "polarity_history": _history,
    "seed": whole_between(0, 0xFFFFFFFF),
}


def middle_rate(rates: list[float]) -> float:
    """The geometric median: of an even number, the geometric mean of the two in the middle."""
    low, high = statistics.median_low(rates), statistics.median_high(rates)
    return low if low == high else (low * high) ** 0.5


class RateGroup(dict[str, Any]):
    """A parameter group whose "lr" is the learning rate in use, a float, fetched from the device when somebody looks.

    rate: float32 [1], where the parameters are; None before their first step.   tally: float32 [parameters, 2], their
    votes.   written: what stands in "lr" was written since, and becomes the rate when `ready` is called next.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.rate: torch.Tensor | None = None
        self.tally: torch.Tensor | None = None
        self.written = True
        # The host's number is older than the device's.
        self._behind = False

    def ready(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(rate, tally) for a step of parameters on `device`. Nothing waits."""
        count = len(self["params"])
        if self.rate is None or self.rate.device != device:
            self.rate = placed(torch.full((1,), float(self["lr"]), dtype=torch.float32, device=device))
        elif self.written:
            self.rate.fill_(float(self["lr"]))
        if self.tally is None or self.tally.device != device or self.tally.shape[0] != count:
            self.tally = placed(torch.zeros(count, 2, dtype=torch.float32, device=device))
        self.written, self._behind = False, True
        return self.rate, self.tally

    def moved(self) -> None:
        """The rate has changed on the device. A number that was written meanwhile waits for the next step."""
        self._behind = not self.written

    def _catch_up(self) -> None:
        if self._behind and self.rate is not None:
            self._behind = False
            super().__setitem__("lr", float(self.rate.item()))

    def __getitem__(self, key: str) -> Any:
        if key == "lr":
            self._catch_up()
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "lr":
            value = float(value)
            self.written, self._behind = True, False
        super().__setitem__(key, value)

    def __iter__(self) -> Iterator[str]:
        # With an __iter__ of its own a dict is copied through keys() and [], not behind their backs.
        return super().__iter__()

    def get(self, key: str, default: Any = None) -> Any:
        """As a dict's."""
        if key == "lr":
            self._catch_up()
        return super().get(key, default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """As a dict's."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *others: Any, **more: Any) -> None:
        """As a dict's."""
        for key, value in dict(*others, **more).items():
            self[key] = value

    def items(self) -> Any:
        """As a dict's."""
        self._catch_up()
        return super().items()

    def values(self) -> Any:
        """As a dict's."""
        self._catch_up()
        return super().values()

    def copy(self) -> dict[str, Any]:
        """A plain dict of what is in it now."""
        return dict(self.items())

    def __repr__(self) -> str:
        return repr(self.copy())


def rule_of(group: Mapping[str, Any], state: Mapping[str, Any]) -> AutomagicStep:
    """The constants of a tensor's next step; ValueError for one that was written into the group out of its range."""
    return AutomagicStep(
        beta2=float(_only_beta2("betas", group["betas"])[1]),
        eps=float(group["eps"]),
        clip=float(group["clip_threshold"]),
        weight_decay=float(group["weight_decay"]),
        step=state["step"] + 1,
        history=state["history"],
        entered=state["entered"],
    )


def bounds_of(group: Mapping[str, Any]) -> tuple[float, float]:
    """(min_lr, max_lr); ValueError unless the first is at most the second."""
    low, high = (float(CHECKS[name](name, group[name])) for name in ("min_lr", "max_lr"))
    if low > high:
        raise ValueError(f"expected min_lr <= max_lr, got {low!r} and {high!r}")
    return low, high
