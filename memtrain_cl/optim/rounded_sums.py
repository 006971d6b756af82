"""Gradients of 16 bits that are added up over backward passes without losing what is small, by stochastic rounding."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from memtrain_cl.optim.fused_backward import FreedGradient

_SHORT = (torch.bfloat16, torch.float16)


class RoundedSums:
    """Hooks that add a gradient to the one that is there, in float32, and round the sum stochastically.

    seed_of(group, index, parameter, times): of the `times`-th addition to a parameter's gradient since `forget`; a
    method of the optimizer, with which the hooks come to an end.
    """

    def __init__(self, ops: ModuleType, seed_of: Callable[[int, int, torch.Tensor, int], int]) -> None:
        self._ops = ops
        # Weakly, since hooks live as long as parameters do.
        self._seed_of = weakref.WeakMethod(seed_of)
        self._times: Any = WeakTensorKeyDictionary()
        self._handles: list[Any] = []

    def attach(self, places: Iterable[tuple[int, int, torch.Tensor]]) -> None:
        """Watch over those of these parameters, (group, index, parameter) each, whose gradients have 16 bits."""
        for group, index, parameter in places:
            if parameter.requires_grad and parameter.dtype in _SHORT:
                self._handles.append(parameter.register_hook(self._adding(group, index, parameter)))

    def release(self) -> None:
        """Leave the parameters alone from now on."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forget(self) -> None:
        """The sums have been used."""
        self._times.clear()

    def _adding(self, group: int, index: int, parameter: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor | None]:
        reference = TensorWeakRef(parameter)

        def hook(grad: torch.Tensor) -> torch.Tensor | None:
            own = reference()
            held = None if own is None else own.grad
            seed_of = self._seed_of()
            if seed_of is None or own is None or held is None or isinstance(held, FreedGradient):
                return None
            if held.dtype not in _SHORT or grad.layout is not torch.strided or grad.requires_grad:
                return None
            times = self._times.get(own, 0) + 1
            self._times[own] = times
            with torch.no_grad():
                self._ops.add_rounded_(held, grad, seed_of(group, index, own, times))
            # The sum takes the gradient's place, so that torch has nothing to add it to.
            own.grad = None
            summed: torch.Tensor = held
            return summed

        return hook
