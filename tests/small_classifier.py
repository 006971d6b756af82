"""A model of two layers, its loss and its data, for tests of what trains any model."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.torch_home import HOME


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), y)


def examples(n: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(1)
    return torch.randn(n, 6, generator=chance), torch.randint(0, 3, (n,), generator=chance)


def on_home(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.to(HOME) for x in tensors)
