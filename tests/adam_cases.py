"""What tests of CompressedAdam share: the ways to hold moments, the places where it works, and recorded gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from memtrain_cl import reference
from memtrain_cl.device import Device
from memtrain_cl.export.optimizer import read_optimizer, save_optimizer
from memtrain_cl.optim import CompressedAdam
from tests.nn_cases import Room, room_of

#: Options of each way to hold moments. "profile" and "dense" round nothing stochastically but weights.
METHODS: dict[str, dict[str, Any]] = {
    "int8": {"compression_method": "int8", "int8_block_size": 64},
    "dynamic": {"compression_method": "int8", "int8_block_size": 64, "code": "dynamic"},
    "stochastic": {"compression_method": "int8", "int8_block_size": 64, "moment_rounding": "stochastic"},
    "profile": {"compression_method": "profile", "profile_block_size": 64},
    "dense": {"compression_method": "dense"},
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: A matrix of several ragged blocks, a vector within a block, a single number, an empty one.
SHAPES: tuple[tuple[int, ...], ...] = ((7, 30), (5,), (), (0, 3))


def through_torch(optimizer: torch.optim.Optimizer, path: Path) -> Any:
    torch.save(optimizer.state_dict(), path)
    return torch.load(path, weights_only=True)


def through_safetensors(optimizer: torch.optim.Optimizer, path: Path) -> Any:
    save_optimizer(optimizer, path)
    return read_optimizer(path)


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameters(dtype: torch.dtype = torch.float32, place: Any = "cpu") -> list[Any]:
    """One of each shape."""
    return [
        torch.nn.Parameter(values(*shape, seed=position).to(dtype).to(place)) for position, shape in enumerate(SHAPES)
    ]


def give(parameters: Sequence[torch.Tensor], step: int) -> None:
    """Each parameter's gradient of a step."""
    for position, parameter in enumerate(parameters):
        grad = values(*parameter.shape, seed=1000 * (position + 1) + step)
        parameter.grad = grad.to(parameter.dtype).to(parameter.device)


def advance(optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    """Steps first .. first+steps-1 on recorded gradients."""
    mine = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in range(first, first + steps):
        give(mine, step)
        optimizer.step()


def bits(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the parameters and their state, on the host, by name."""
    mine = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for position, parameter in enumerate(mine):
        yield f"parameter {position}", parameter.detach().cpu()
        for name, value in sorted(optimizer.state.get(parameter, {}).items()):
            yield f"{name} {position}", value.cpu() if isinstance(value, torch.Tensor) else torch.tensor(value)


def same_bits(left: torch.optim.Optimizer, right: torch.optim.Optimizer) -> bool:
    """Whether parameters and state agree to the bit."""
    ours, theirs = dict(bits(left)), dict(bits(right))
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours
    )


def rooms(device: Device) -> dict[str, Room]:
    """The reference, kernels on host tensors, and "opencl" where torch differentiates on it."""
    names = ("reference", "host", "opencl") if device.info.index == 0 else ("reference", "host")
    return {name: room_of(name, device) for name in names}


def oracle(parameters: Any, **options: Any) -> CompressedAdam:
    """An optimizer on the reference: what it does beside the arithmetic needs no device."""
    return CompressedAdam(parameters, ops=reference, **options)
