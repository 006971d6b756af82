"""Random kernels against the same numbers from torch's integers and float64 on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from memtrain_cl.case import Case
from memtrain_cl.launchers import random as random_ops
from memtrain_cl.operation import Operation, Tensors, numbers

STREAM, SECOND = 0xC0FFEE11, 0x9E3779B9


def _hash(x: torch.Tensor) -> torch.Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def _bits(n: int, stream: int = STREAM) -> torch.Tensor:
    place = torch.arange(n)
    return _hash(stream ^ _hash(place ^ _hash(place >> 32)))


def _uniform(n: int) -> torch.Tensor:
    return (_bits(n) & 0xFFFFFF).double() * 2.0**-24


def _open(n: int) -> torch.Tensor:
    return ((_bits(n) & 0xFFFFFF) | 1).double() * 2.0**-24


def _normal(n: int) -> torch.Tensor:
    even = n + n % 2
    radius, angle = (-2 * _open(even)[::2].log()).sqrt(), 2 * math.pi * _uniform(even)[1::2]
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1).reshape(-1)[:n]


def _log(u: torch.Tensor) -> torch.Tensor:
    return -u.log()


def _integers(n: int) -> torch.Tensor:
    high, low = _bits(n).tolist(), _bits(n, STREAM ^ SECOND).tolist()
    return torch.tensor([((a << 32 | b) * 1000 >> 64) - 3 for a, b in zip(high, low, strict=True)])


def _fill(launch: Callable[..., Any], *arguments: Any, dtype: torch.dtype = torch.float32) -> Callable[..., Any]:
    def run(case: Case, place: torch.Tensor) -> torch.Tensor:
        made = torch.empty(case.shape["n"], dtype=dtype, device=place.device)
        launch(made.operand, STREAM, *arguments)  # type: ignore[attr-defined]
        return made

    return run


def _random(run: Callable[..., Any], reference: Callable[[int], torch.Tensor]) -> Operation:
    nothing = numbers(())
    return Operation(nothing, run, lambda case, place: reference(case.shape["n"]))


def _probabilities(case: Case, chance: torch.Generator) -> Tensors:
    return (torch.rand(case.shape["n"], generator=chance),)


def _each(case: Case, p: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(p)
    random_ops.bernoulli_each(p.operand, made.operand, STREAM)  # type: ignore[attr-defined]
    return made


def _dropout(case: Case, x: torch.Tensor) -> Tensors:
    made, mask = torch.empty_like(x), torch.empty(x.shape, dtype=torch.bool, device=x.device)
    random_ops.dropout(x.operand, made.operand, mask.operand, STREAM, 0.25)  # type: ignore[attr-defined]
    return made, mask


def _dropped(case: Case, x: torch.Tensor) -> Tensors:
    mask = _uniform(len(x)) < 0.75
    return torch.where(mask, x * torch.tensor(1 / 0.75), torch.zeros(())), mask


def _dropout_backward(case: Case, grad: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.native_dropout_backward(grad, grad > 0, 1.25)  # type: ignore[no-any-return]


_DRAWS, _CATEGORIES = 3, 7


def _weights(case: Case, chance: torch.Generator) -> Tensors:
    return (torch.rand(case.shape["n"] // _CATEGORIES, _CATEGORIES, generator=chance),)


def _draw(case: Case, p: torch.Tensor) -> torch.Tensor:
    from memtrain_cl.faults import raise_pending

    made = torch.empty(len(p), _DRAWS, dtype=torch.int64, device=p.device)
    random_ops.require_weights(p.operand)  # type: ignore[attr-defined]
    random_ops.draw(p.operand, made.operand, STREAM)  # type: ignore[attr-defined]
    raise_pending(p.operand.array.device)  # type: ignore[attr-defined]
    return made


def _drawn(case: Case, p: torch.Tensor) -> torch.Tensor:
    waits = _log(_open(len(p) * _DRAWS * _CATEGORIES)).view(len(p), _DRAWS, _CATEGORIES)
    return (p.double()[:, None] / waits).argmax(2)


CHECKS: dict[str, Operation] = {
    "uniform": _random(_fill(random_ops.uniform), lambda n: _uniform(n).float()),
    "normal": _random(_fill(random_ops.normal), _normal),
    "exponential": _random(_fill(random_ops.exponential), lambda n: _log(_open(n))),
    "bernoulli": _random(_fill(random_ops.bernoulli, 0.25), lambda n: (_uniform(n) < 0.25).float()),
    "integers": _random(_fill(random_ops.integers, -3, 997, dtype=torch.int64), _integers),
    "hashed": _random(_fill(random_ops.permutation, dtype=torch.int64), lambda n: _bits(n).argsort()),
    "bernoulli_each": Operation(_probabilities, _each, lambda case, p: (_uniform(len(p)) < p).float()),
    "dropout": Operation(numbers(("n",)), _dropout, _dropped),
    "dropout_backward": Operation(
        numbers(("n",)), _dropout_backward, lambda case, grad: torch.where(grad > 0, grad * 1.25, torch.zeros(()))
    ),
    "draw": Operation(_weights, _draw, _drawn),
}
