"""One rank of the data-parallel tests: `python -m tests.distributed_child RANK SIZE FOLDER` plays every scenario.

Each writes what its rank ends with into FOLDER/<scenario>-<rank>.pt, or the error that it met.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import memtrain_cl.torch_device  # noqa: F401 (registers the device, also where the package is not installed)
from memtrain_cl import ops, reference
from memtrain_cl.device import get_device, use_device
from tests.layer_cases import IN, OUT, make

STEPS = 20
SCENARIOS: dict[str, Callable[[int, int], dict[str, Any]]] = {}


def scenario(play: Callable[[int, int], dict[str, Any]]) -> Callable[[int, int], dict[str, Any]]:
    SCENARIOS[play.__name__] = play
    return play


class Model(nn.Module):
    """Counter layers between parameters of torch's."""

    def __init__(self, backend: Any = reference, **options: Any) -> None:
        super().__init__()
        self.first = make(ops=backend, **options)
        self.norm = nn.LayerNorm(OUT)
        self.second = make("rms", OUT, 4, ops=backend, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(torch.tanh(self.norm(self.first(x))))
        return y


def data(rank: int, step: int, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, IN, generator=torch.Generator().manual_seed(1000 * rank + step))


def train(model: Any, rank: int, steps: int = STEPS) -> dict[str, Any]:
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01) if parameters else None
    for step in range(steps):
        model(data(rank, step)).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return dict(model.state_dict())


def counters(**options: Any) -> Any:
    """Layers without any Parameter, the same on every rank."""
    torch.manual_seed(7)
    return nn.Sequential(make(ops=reference, **options), nn.Tanh(), make("rms", OUT, 4, ops=reference, **options))


@scenario
def plain(rank: int, size: int) -> dict[str, Any]:
    return train(counters(), rank)


@scenario
def wrapped(rank: int, size: int) -> dict[str, Any]:
    torch.manual_seed(rank)  # DistributedDataParallel copies the first rank's buffers, the layers its seeds
    return train(DistributedDataParallel(Model()), rank)


@scenario
def wrapped_on_opencl(rank: int, size: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    return train(DistributedDataParallel(Model(ops, tile_rows=5)), rank)


@scenario
def wrapped_apart(rank: int, size: int) -> dict[str, Any]:
    """Layers that keep their state on the device, whose buffers the wrapper broadcasts from the host."""
    torch.manual_seed(rank)
    with use_device(get_device().with_capabilities(unified_memory=False)):
        return train(DistributedDataParallel(Model(ops)), rank, 5)


@scenario
def on_the_device(rank: int, size: int) -> dict[str, Any]:
    """Tensors of the torch device, whose means travel by way of the host."""
    layers = counters()
    for layer in (layers[0], layers[2]):
        layer.ops = ops
    layers.to("opencl")
    for step in range(5):
        layers(data(rank, step).to("opencl")).square().mean().backward()
    return {name: value.cpu() for name, value in layers.state_dict().items()}


@scenario
def options(rank: int, size: int) -> dict[str, Any]:
    model = nn.Sequential(
        counters(scale_rebase="lazy", pulse_mode="ternary")[0],
        nn.Tanh(),
        make("rms", OUT, 4, ops=reference, rms_mode="proxy", act_save_bits=3, tile_rows=3),
    )
    return train(model, rank)


@scenario
def accumulated(rank: int, size: int) -> dict[str, Any]:
    torch.manual_seed(3)
    model = DistributedDataParallel(Model(accumulate=4, rms_mode="proxy"))
    averaged: list[tuple[int, tuple[int, ...]]] = []
    reduce = dist.all_reduce
    for part in range(4):

        def noted(tensor: torch.Tensor, *args: Any, part: int = part, **kwargs: Any) -> Any:
            averaged.append((part, tuple(tensor.shape)))
            return reduce(tensor, *args, **kwargs)

        with model.no_sync() if part < 3 else contextlib.nullcontext(), patch.object(dist, "all_reduce", noted):
            model(data(rank, part)).square().mean().backward()
    return {**train(model, rank), "averaged": averaged}


@scenario
def mean(rank: int, size: int) -> dict[str, Any]:
    torch.manual_seed(5)
    layer = make(ops=reference)
    expected = copy.deepcopy(layer)
    expected.average_gradients = False
    for step in range(3):
        gradients = []
        for other in range(size):
            x = data(other, step)
            grad_out = torch.randn(6, OUT, generator=torch.Generator().manual_seed(99 + other))
            gradients.append(reference.grad_weight(grad_out, x))
            if other == rank:
                layer(x).backward(grad_out)
        expected.apply_update_from_grad_w(sum(gradients[1:], gradients[0]) / size)
    return {**layer.state_dict(), "expected": expected.state_dict()}


@scenario
def given(rank: int, size: int) -> dict[str, Any]:
    torch.manual_seed(5)
    layer = make(ops=reference)
    gradient = torch.full((OUT, IN), float(rank))
    layer.apply_update_from_grad_w(gradient)
    return {**layer.state_dict(), "untouched": bool((gradient == rank).all())}


@scenario
def one_rank_not_finite(rank: int, size: int) -> dict[str, Any]:
    torch.manual_seed(5)
    layer = make(ops=reference)
    grad_out = torch.ones(6, OUT)
    if rank == 1:
        grad_out[2, 3] = float("nan")
    layer(data(rank, 0)).backward(grad_out)
    return {**layer.state_dict(), "skipped": layer.skipped_updates}


@scenario
def one_rank_without_tokens(rank: int, size: int) -> dict[str, Any]:
    layers = counters()
    layers(data(rank, 0, rows=0 if rank == 1 else 5)).sum().backward()
    return dict(layers.state_dict())


@scenario
def used_twice(rank: int, size: int) -> dict[str, Any]:
    torch.manual_seed(5)
    layer = make(in_features=IN, out_features=IN, reuse=True, ops=reference)
    return train(nn.Sequential(layer, nn.Tanh(), layer), rank, 5)


@scenario
def checkpointed(rank: int, size: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    model = Model()
    inner = model.forward
    model.forward = lambda x: checkpoint(inner, x, use_reentrant=False)  # type: ignore[method-assign]
    return train(DistributedDataParallel(model), rank, 5)


@scenario
def resumed(rank: int, size: int) -> dict[str, Any]:
    layers, twin = counters(), counters()
    train(layers, rank, 3)
    twin.load_state_dict(layers.state_dict())
    for each in (layers, twin):
        for step in range(3, 6):
            each(data(rank, step)).square().mean().backward()
    return {**layers.state_dict(), "expected": twin.state_dict()}


@scenario
def a_group_of_all(rank: int, size: int) -> dict[str, Any]:
    layers = counters()
    group = dist.new_group(list(range(size)))
    for layer in (layers[0], layers[2]):
        layer.process_group = group
    copied = copy.deepcopy(layers)
    return {**train(layers, rank, 3), "group": copied[0].process_group is None}


@scenario
def left_to_themselves(rank: int, size: int) -> dict[str, Any]:
    layers = counters()
    for layer in (layers[0], layers[2]):
        layer.average_gradients = False
    return train(layers, rank, 3)


@scenario
def different_layers(rank: int, size: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    layer = make(ops=reference)
    before = copy.deepcopy(layer.state_dict())
    try:
        layer(data(rank, 0)).sum().backward()
    except RuntimeError as error:
        return {"error": str(error), "before": before, "after": layer.state_dict()}
    return {}


@scenario
def impossible(rank: int, size: int) -> dict[str, Any]:
    try:
        make(update_from_io=True, ops=reference)
    except RuntimeError as error:
        return {"error": str(error)}
    return {}


def main() -> None:
    """Play every scenario."""
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    for name, play in SCENARIOS.items():
        try:
            result = play(rank, size)
        except Exception:
            result = {"traceback": traceback.format_exc()}
            print(result["traceback"], file=sys.stderr)
            torch.save(result, folder / f"{name}-{rank}.pt")
            raise
        torch.save(result, folder / f"{name}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
