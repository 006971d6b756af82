"""Layers with every option of the counter update, for the tests of its modes."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from memtrain_cl import reference
from memtrain_cl.formats import CounterRule
from tests.test_counter_update import random_layer, rule_of

ROWS = 7
#: Two sets of options that have everything between them, and of which the table of cases has built the programs.
PACKED: dict[str, Any] = {"C": 11, "packed": True, "mode": "proxy_lazy_ternary"}
BYTES: dict[str, Any] = {"C": 8, "packed": False, "mode": "lagged_lazy_clip"}


@dataclass
class Whole:
    """All that a step of a layer changes, and its rule."""

    rule: CounterRule
    n: int
    tensors: dict[str, torch.Tensor]

    def copy(self, place: str | torch.device = "cpu") -> Whole:
        return Whole(self.rule, self.n, {name: it.clone().to(place) for name, it in self.tensors.items()})

    def step(self, room: ModuleType, grad_w: torch.Tensor, seed: int = 7, **more: Any) -> Whole:
        """An update from a given gradient."""
        room.counter_update_(
            **{name: self.tensors[name] for name in ("state", "scale", "v", "totals", "s_base", "clock", "cache")},
            grad_w=grad_w,
            rule=self.rule,
            seed=seed,
            **more,
        )
        return self

    def backward(self, room: ModuleType, x: torch.Tensor, grad_out: torch.Tensor, seed: int = 7, **more: Any) -> Any:
        """A whole backward; grad_x."""
        return room.counter_backward_(
            x,
            grad_out,
            **{name: self.tensors[name] for name in ("state", "scale", "v", "totals", "s_base", "clock", "cache")},
            rule=self.rule,
            seed=seed,
            **more,
        )

    def codes(self) -> torch.Tensor:
        state = self.tensors["state"].cpu()
        return reference.unpack_codes(state, self.n) if self.rule.packed else state


def whole(options: dict[str, Any], n: int, rows: int = ROWS, period: int = 1, cache: str = "", **more: Any) -> Whole:
    """A layer of random codes, whose clock fires."""
    rule = rule_of(**options, **more)
    layer = random_layer(rows, n, rule)
    kind = getattr(torch, cache or ("int8" if rule.packed else "float16"))
    tensors = {
        "state": layer.state,
        "scale": layer.scale,
        "v": layer.v,
        "totals": layer.totals,
        "s_base": layer.scale * (0.7 + 0.6 * torch.rand(rows, 1)),
        "clock": torch.tensor([period, 0, 1, 0]),
        "cache": torch.empty(rows, n, dtype=kind),
    }
    reference.refresh_cache_(tensors["cache"], layer.state, C=rule.C, packed=rule.packed)
    return Whole(rule, n, tensors)


def assert_equal(got: Whole, want: Whole) -> None:
    for name, tensor in want.tensors.items():
        assert torch.equal(got.tensors[name].cpu(), tensor), name


def moments(rows: int = ROWS) -> torch.Tensor:
    return torch.rand(rows, 1) + 0.1


def extras(layer: Whole, rows: int = ROWS) -> dict[str, Any]:
    return {"g_sq": moments(rows)} if layer.rule.rms_mode == "proxy" else {}


def whole_numbers(*shape: int) -> torch.Tensor:
    """Small enough for products to be exact, so that they are the same in every order."""
    return torch.randint(-3, 4, shape).to(torch.float32)
