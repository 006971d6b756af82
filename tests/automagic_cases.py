"""What tests of Automagic share: recorded gradients, the places where it works, and its published runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from memtrain_cl import reference
from memtrain_cl.optim import Automagic
from tests.adam_cases import values

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "automagic.json").read_text())
#: Rows that are rotated in each way, and vectors; a row of several chunks' ends, a number, nothing.
SHAPES: tuple[tuple[int, ...], ...] = ((5, 256), (3, 2, 40), (7, 9), (37,), (), (0, 3))


def oracle(parameters: Any, **options: Any) -> Automagic:
    """An optimizer on the reference: what it does beside the arithmetic needs no device."""
    return Automagic(parameters, **{"fused": False, "ops": reference, **options})


def parameters(dtype: torch.dtype = torch.float32, place: Any = "cpu") -> list[Any]:
    """One of each shape."""
    made = []
    for seed, shape in enumerate(SHAPES):
        start = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        made.append(torch.nn.Parameter(start.to(dtype).to(place)))
    return made


def published(case: dict[str, Any], place: Any = "cpu") -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(the first weights, the gradient of each step) of a published run."""
    n = math.prod(case["shape"])
    i = torch.arange(n, dtype=torch.float64)
    made: dict[str, Any] = {
        "cos(0.1 i)+2": lambda k: torch.cos(0.1 * i) + 2,
        "(-1)^k (cos(0.1 i)+2)": lambda k: (-1) ** k * (torch.cos(0.1 * i) + 2),
        "sin(0.7 i (k+1)+0.3)": lambda k: torch.sin(0.7 * i * (k + 1) + 0.3),
    }
    gradients = [made[case["grad"]](k).float().reshape(case["shape"]).to(place) for k in range(case["steps"])]
    return (i / n - 0.5).float().reshape(case["shape"]).to(place), gradients


def model_of(dtype: torch.dtype = torch.float32, place: Any = "cpu") -> torch.nn.Module:
    """Layers of which one is frozen."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 48), torch.nn.Tanh(), torch.nn.Linear(48, 48).requires_grad_(False), torch.nn.Linear(48, 2)
    )
    return model.to(dtype).to(place)


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    parameter = next(model.parameters())
    x = values(12, 16, seed=step).to(parameter.dtype).to(parameter.device)
    loss: torch.Tensor = (model(x) - x[:, :2]).float().square().mean()
    return loss
