"""Operations that follow from others in a line or two: comparisons of whole tensors, copies of views, ranges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memtrain_cl.torch_device.aten.copy import copy_, fresh_copy, resize_, resized_out, strided_like
from memtrain_cl.torch_device.aten.factories import fill, new
from memtrain_cl.torch_device.aten.views import as_strided
from memtrain_cl.torch_device.registry import aten, implements
from memtrain_cl.torch_device.tensor import OpenCLTensor, wrap


@implements(aten.equal.default)
def equal(self: OpenCLTensor, other: OpenCLTensor) -> Any:
    """Whether shapes and all elements are equal; waits for the device."""
    if self.dtype != other.dtype:
        return NotImplemented  # an error of torch's
    return self.shape == other.shape and not bool((self != other).any())


@implements(aten.allclose.default)
def allclose(
    self: OpenCLTensor, other: OpenCLTensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    """Whether all elements are close; waits for the device."""
    return bool(torch.isclose(self, other, rtol=rtol, atol=atol, equal_nan=equal_nan).all())


@implements(aten.copy.default)
def copy(self: OpenCLTensor, src: Tensor, non_blocking: bool = False) -> Any:
    """A tensor like `self` of src's values."""
    return copy_(wrap(strided_like(self.operand, self.operand.element)), src)


@implements(aten.resize_as_.default)
def resize_as_(self: OpenCLTensor, the_template: Tensor, *, memory_format: Any = None) -> Any:
    """The template's shape, in place."""
    return resize_(self, the_template.shape, memory_format=memory_format)


@implements(aten.as_strided_copy.default)
def as_strided_copy(self: OpenCLTensor, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """A copy of that view."""
    return wrap(fresh_copy(as_strided(self, size, stride, storage_offset).operand))


@implements(aten.as_strided_scatter.default)
def as_strided_scatter(
    self: OpenCLTensor, src: OpenCLTensor, size: Any, stride: Any, storage_offset: int | None = None
) -> Any:
    """A copy of `self` in which that view holds `src`; `self` contiguous and at the begin of its bytes."""
    operand = self.operand
    if not operand.contiguous or operand.offset:
        return NotImplemented
    result = wrap(fresh_copy(operand))
    copy_(as_strided(result, size, stride, storage_offset), src)
    return result


@implements(aten._efficientzerotensor.default)
def zero_tensor(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> OpenCLTensor:
    """Zeros, as gradients of what has none."""
    made = new(size, dtype, layout, device)
    fill(made.operand, 0)
    return made


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _spaced(func: Any) -> Any:
    def handler(start: Any, end: Any, steps: int, *args: Any, **options: Any) -> Any:
        """The range between two numbers, of which tensors hold one or both; waits for the device."""
        for value in (start, end):
            if isinstance(value, Tensor) and value.ndim:
                raise RuntimeError(f"{func} only supports 0-dimensional start and end tensors")
        return func(_number(start), _number(end), steps, *args, **options)

    return handler


@implements(aten.logspace.out)
def logspace(start: Any, end: Any, steps: int, base: float = 10.0, *, out: OpenCLTensor) -> OpenCLTensor:
    """base to the powers of a range."""
    powers = torch.linspace(start, end, steps, dtype=torch.float32, device=out.device)
    return resized_out(out, torch.pow(base, powers).operand)  # type: ignore[attr-defined]


for _overload in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor"):
    implements(getattr(aten.linspace, _overload))(_spaced(torch.linspace))
    implements(getattr(aten.logspace, _overload))(_spaced(torch.logspace))
