"""What the operations by index share: torch's checks, operands changed in place, numbers as operands."""

from __future__ import annotations

from typing import Any

import torch

from memtrain_cl.operand import Operand
from memtrain_cl.torch_device.aten.copy import contiguous, copy_operand, fresh_copy, require_apart
from memtrain_cl.torch_device.aten.factories import fill
from memtrain_cl.torch_device.geometry import meta
from memtrain_cl.torch_device.tensor import OpenCLTensor, allocated

_checked: set[Any] = set()
_LIMIT = 65536


def check(func: Any, *args: Any, **options: Any) -> None:
    """torch's own errors for wrong shapes and types, asked of it once a geometry. Options are no tensors."""
    seen = [(a.operand.shape, a.operand.element) if isinstance(a, OpenCLTensor) else a for a in args]
    key = (func, *seen, *options.values())
    if key not in _checked:
        meta(func, args, options)
        if len(_checked) >= _LIMIT:
            _checked.clear()
        _checked.add(key)


def wrapped(dim: int, ndim: int) -> int:
    """A dimension counted from the front; a number counts as a vector of one."""
    return dim + max(ndim, 1) if dim < 0 else dim


def common_shape(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that all broadcast to; RuntimeError, torch's own, where there is none."""
    if all(shape == shapes[0] for shape in shapes):
        return shapes[0]
    return tuple(torch.broadcast_shapes(*shapes))


def places_of(index: OpenCLTensor) -> Operand:
    """The indices, contiguous; RuntimeError, as torch's, unless they are int64 or int32."""
    operand = index.operand
    if operand.size and operand.element not in ("int64", "int32"):
        raise RuntimeError(f"expected dtype int32 or int64 for index, got {index.dtype}")
    return contiguous(operand)


def as_vector(operand: Operand) -> Operand:
    """A number as a vector of one, anything else as it is."""
    return operand if operand.shape else operand.viewed((1,))


class InPlace:
    """A contiguous operand to change in place of `operand`: itself, or a copy that `finish` writes back."""

    def __init__(self, operand: Operand) -> None:
        require_apart(operand)
        self._operand = operand
        self.target = contiguous(operand)

    def finish(self) -> None:
        """Write a copy back."""
        if self.target is not self._operand:
            copy_operand(self.target, self._operand)


def apart(values: Operand, target: Operand) -> Operand:
    """`values`, contiguous and in other memory than `target`."""
    return fresh_copy(values) if values.buffer is target.buffer else contiguous(values)


def number(like: Operand, value: Any) -> Operand:
    """An operand of one element of like's type."""
    single = allocated(like.array.device, (1,), like.element)
    fill(single, value)
    return single
