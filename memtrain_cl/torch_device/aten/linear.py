"""linear as one node of torch's graph, and its gradients.

torch writes linear out as transposes, views and a product, forwards and backwards, in a dozen calls that each cost the
host more than a small product costs the device. So the device takes linear over (see backend.py) wherever nobody looks
at the smaller operations: no mode that sees operations, no transform of torch.func, no forward-mode derivative.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from memtrain_cl.launchers.matmul import matmul, matrix_layout
from memtrain_cl.operand import Operand
from memtrain_cl.saved_tensors import save, saved
from memtrain_cl.torch_device.aten.copy import contiguous
from memtrain_cl.torch_device.aten.matmul import FLOATS
from memtrain_cl.torch_device.registry import aten, implements
from memtrain_cl.torch_device.tensor import OpenCLTensor, allocated, wrap


def _watched() -> bool:
    """Whether somebody would see the operations that linear is made of."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def _takes(x: Any, weight: Any, bias: Any) -> bool:
    """Whether these are a matrix, a bias a row of it, and rows, of one floating type on one device."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if not all(isinstance(tensor, OpenCLTensor) for tensor in tensors):
        return False
    first = x.operand
    return (
        first.element in FLOATS
        and all(it.operand.element == first.element and it.operand.device is first.device for it in tensors)
        and len(weight.operand.shape) == 2
        and first.shape[-1:] == weight.operand.shape[1:]
        and (bias is None or bias.operand.shape == weight.operand.shape[:1])
    )


def _matrix(operand: Operand) -> Operand:
    """[..., n] as [rows, n] with a unit stride in one of them."""
    if len(operand.shape) == 2 and matrix_layout(*operand.shape, *operand.strides) is not None:
        return operand
    width = operand.shape[-1]
    return contiguous(operand).viewed((math.prod(operand.shape[:-1]), width))


def _transposed(matrix: Operand) -> Operand:
    return matrix.viewed(matrix.shape[::-1], matrix.strides[::-1])


def _product(x: Operand, weight: Operand, bias: Operand | None) -> OpenCLTensor:
    """x [..., in] @ weight [out, in]^T + bias [out]."""
    rows, width = _matrix(x), weight.shape[0]
    out = allocated(x.device, (*x.shape[:-1], width), x.element)
    matmul(rows, _transposed(_matrix(weight)), out.viewed((rows.shape[0], width)), add=bias)
    return wrap(out)


def _composed(x: Any, weight: Any, grad: Tensor, needs: tuple[bool, bool, bool]) -> tuple[Any, Any, Any]:
    """The gradients by operations that torch sees and differentiates."""
    rows = grad.reshape(math.prod(grad.shape[:-1]), grad.shape[-1])
    of_x = grad @ weight if needs[0] else None
    of_weight = rows.t() @ x.reshape(rows.shape[0], x.shape[-1]) if needs[1] else None
    return of_x, of_weight, rows.sum(0) if needs[2] else None


class _Linear(torch.autograd.Function):
    """As torch's own formula keeps the input where the weight wants a gradient, and the weight where the input does."""

    #: To `saved_activations`: the gradient is linear in what is saved.
    saved_may_be_rounded = True

    @staticmethod
    def forward(ctx: Any, x: OpenCLTensor, weight: OpenCLTensor, bias: OpenCLTensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        save(ctx, x if of_weight else None, weight if of_x else None)
        ctx.shapes = x.operand.shape, weight.operand.shape
        return _product(x.operand, weight.operand, None if bias is None else bias.operand)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, Any, Any]:
        x, weight = saved(ctx)
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled() or _watched() or not isinstance(grad, OpenCLTensor):
            return _composed(x, weight, grad, needs)
        given, of_x, of_weight = grad.operand, None, None
        x_shape, weight_shape = ctx.shapes
        rows = _matrix(given)
        if needs[0]:
            out = allocated(given.device, x_shape, given.element)
            matmul(rows, _matrix(weight.operand), out.viewed((rows.shape[0], weight_shape[1])))
            of_x = wrap(out)
        if needs[1]:
            out = allocated(given.device, weight_shape, given.element)
            matmul(_transposed(rows), _matrix(x.operand), out)
            of_weight = wrap(out)
        return of_x, of_weight, wrap(rows).sum(0) if needs[2] else None


@implements(aten.linear.default)
def linear(input: Any, weight: Any, bias: Any = None) -> Any:  # noqa: A002
    """out [..., out] = input [..., in] @ weight [out, in]^T + bias [out], rounded once; differentiable."""
    if _watched() or not _takes(input, weight, bias):
        return aten.linear.default.decompose(input, weight, bias)
    if torch.is_grad_enabled() and (
        input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        result: Tensor = _Linear.apply(input, weight, bias)  # type: ignore[no-untyped-call]
        return result
    return _product(input.operand, weight.operand, None if bias is None else bias.operand)
