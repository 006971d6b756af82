"""Activations, a small network and its gradients, for the tests of saved_activations."""

from __future__ import annotations

import torch
from torch import nn

from memtrain_cl import saved_activations

ROWS, WIDTH = 64, 64


def activation(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that is no leaf."""
    return torch.randn(shape, dtype=dtype, requires_grad=True) * 1


def network(act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), act(), nn.Linear(WIDTH, WIDTH), act(), nn.Linear(WIDTH, 8))


def gradient(model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).cpu()


def saved_gradient(model: nn.Module, x: torch.Tensor, saver: saved_activations) -> torch.Tensor:
    with saver:
        y = model(x)
    return gradient(model, y.square().sum())
