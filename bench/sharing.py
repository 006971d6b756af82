"""What a visit to the device costs by where the tensors live: a counter update, from the call until torch may read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

import memtrain_cl.torch_device  # noqa: F401 (registers the device)
from bench.counter import RULE, SEED, layer
from bench.harness import Bench, Row, host_time
from memtrain_cl import ops
from memtrain_cl.bridge import Crossing
from memtrain_cl.cases import update_case
from memtrain_cl.device import get_device
from memtrain_cl.sharing import share
from memtrain_cl.sharing.cuda import partner

Tensors = dict[str, torch.Tensor]


def _moved(tensors: Tensors, place: torch.device, *, shared: bool = False) -> Tensors:
    there = {name: tensor.to(place) for name, tensor in tensors.items()}
    return {name: share(tensor) for name, tensor in there.items()} if shared else there


def places(bench: Bench) -> dict[str, Callable[[Tensors], Tensors]]:
    """The places that tensors can live in here, by name, and what moves them there."""
    index = bench.device.info.index
    found: dict[str, Callable[[Tensors], Tensors]] = {
        "host": partial(_moved, place=torch.device("cpu")),
        "opencl": partial(_moved, place=torch.device("opencl", index)),
    }
    for place in (torch.device("cuda", ordinal) for ordinal in range(torch.cuda.device_count())):
        device = partner(place)
        if device is not None and device.info.index == index:
            found["cuda"] = partial(_moved, place=place)
            found["cuda, shared"] = partial(_moved, place=place, shared=True)
    return found


def _finish(tensor: torch.Tensor) -> None:
    """Wait until torch could read what a visit has written."""
    if tensor.device.type == "opencl":
        get_device(tensor.device.index).synchronize()
    elif tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)


def _update(tensors: Tensors) -> None:
    ops.counter_update_(
        tensors["state"], tensors["scale"], tensors["v"], tensors["grad_w"], tensors["totals"], RULE, seed=SEED
    )
    _finish(tensors["state"])


def bench_place(bench: Bench, name: str, move: Callable[[Tensors], Tensors], rows: int, columns: int) -> None:
    """One update of a layer whose tensors live in one place."""
    expected = layer(rows, columns)
    found = move({key: value.clone() for key, value in expected.items()})
    for tensors in (expected, found):
        _update(tensors)
    wrong = sum(int((found[key].cpu() != expected[key]).sum()) for key in ("state", "scale", "v", "totals"))
    us = host_time(lambda turn: _update(found), bench.repeats)
    case = update_case(rows, columns)
    error = f"{wrong} numbers differ from the host's"
    bench.add(Row("sharing", f"update {rows}x{columns}, tensors on {name}", us, case.bytes_moved, error=error))


def bench_visit(bench: Bench, name: str, move: Callable[[Tensors], Tensors]) -> None:
    """A visit that launches nothing: what ordering the two sides costs."""
    small = move(layer(4, 64))["scale"]
    device = get_device(bench.device.info.index)

    def visit(turn: int) -> None:
        with Crossing(device, small) as cross:
            cross.update(small)

    visit(0)
    bench.add(Row("sharing", f"an empty visit, tensors on {name}", host_time(visit, 500), error="not a kernel"))


def run(bench: Bench) -> None:
    """Every place that there is."""
    for name, move in places(bench).items():
        for size in [(4096, 4096), (64, 256)] if bench.events else [(1024, 1024), (64, 256)]:
            bench_place(bench, name, move, *size)
        bench_visit(bench, name, move)
