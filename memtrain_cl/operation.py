"""An operation of torch's as a check: on the device against the CPU.

Floating results are compared with float64's, everything else byte for byte. An operation that ran on the host in place
of the device is an error here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memtrain_cl.case import Case
from memtrain_cl.comparison import Comparison, compare_close, compare_exact, generator
from memtrain_cl.device import get_device

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Operation:
    """make: CPU tensors for a case. run: the operation on tensors of either place. reference: in run's place on the
    CPU, where the operation is the device's own.
    """

    make: Callable[[Case, torch.Generator], Tensors]
    run: Callable[..., Any]
    reference: Callable[..., Any] | None = None

    def __call__(self, case: Case) -> Comparison:
        from memtrain_cl.torch_device import require_registered
        from memtrain_cl.torch_device.fallback import strict

        require_registered()
        place = torch.device("opencl", get_device().info.index)
        inputs = self.make(case, generator(case))
        with strict():
            results = listed(self.run(case, *[tensor.to(place) for tensor in inputs]))
        exact = case.tolerance == 0
        truth = self.reference or self.run
        wide = [t.double() if t.is_floating_point() and not exact else t for t in inputs]
        total = Comparison()
        for got, want in zip(results, listed(truth(case, *wide)), strict=True):
            host = got.cpu()
            floating = want.is_floating_point() and not exact
            total += compare_close(host, want, case.tolerance) if floating else compare_exact(host, want.to(host.dtype))
        return total


def listed(results: Any) -> list[torch.Tensor]:
    """The tensors that an operation gave, one or several."""
    return list(results) if isinstance(results, (tuple, list)) else [results]


def sizes(case: Case, *names: str) -> tuple[int, ...]:
    """Sizes of a case by name."""
    return tuple(case.shape[name] for name in names)


def type_of(case: Case) -> torch.dtype:
    """The type of a case's numbers."""
    dtype: torch.dtype = getattr(torch, case.options.get("element", "float32"))
    return dtype


def numbers(*shapes: tuple[str, ...]) -> Callable[[Case, torch.Generator], Tensors]:
    """Normal numbers of these shapes, each given by the names of its sizes; small whole ones for whole types."""

    def make(case: Case, chance: torch.Generator) -> Tensors:
        made = [torch.randn(sizes(case, *names), generator=chance) for names in shapes]
        scale = 1 if type_of(case).is_floating_point else 100
        return tuple((tensor * scale).to(type_of(case)) for tensor in made)

    return make
