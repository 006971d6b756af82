"""linear and its gradients as one operation each.

torch writes linear out as transposes, views and a product, forwards and backwards, in a dozen calls that each cost the
host more than a small product costs the device. A kernel of the device's own (see backend.py) makes torch take its
derivative, `linear_backward`, instead.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memtrain_cl.launchers.matmul import matmul, matrix_layout
from memtrain_cl.operand import Operand
from memtrain_cl.torch_device.aten.copy import contiguous
from memtrain_cl.torch_device.aten.matmul import FLOATS
from memtrain_cl.torch_device.registry import aten, implements
from memtrain_cl.torch_device.tensor import OpenCLTensor, allocated, wrap


def _operands(*tensors: Any) -> list[Operand] | None:
    """The operands of tensors of one floating type on one device, else None."""
    if not all(isinstance(tensor, OpenCLTensor) for tensor in tensors):
        return None
    operands = [tensor.operand for tensor in tensors]
    first = operands[0]
    alike = all(it.element == first.element and it.device is first.device for it in operands)
    return operands if alike and first.element in FLOATS else None


def _matrix(operand: Operand) -> Operand:
    """[..., n] as [rows, n] with a unit stride in one of them."""
    if len(operand.shape) == 2 and matrix_layout(*operand.shape, *operand.strides) is not None:
        return operand
    width = operand.shape[-1]
    return contiguous(operand).viewed((math.prod(operand.shape[:-1]), width))


def _transposed(matrix: Operand) -> Operand:
    return matrix.viewed(matrix.shape[::-1], matrix.strides[::-1])


@implements(aten.linear.default)
def linear(input: OpenCLTensor, weight: OpenCLTensor, bias: OpenCLTensor | None = None) -> Any:  # noqa: A002
    """out [..., out] = input [..., in] @ weight [out, in]^T + bias [out], rounded once."""
    found = _operands(input, weight) if bias is None else _operands(input, weight, bias)
    if found is not None:
        x, w, *rest = found
        fits = len(w.shape) == 2 and x.shape[-1:] == w.shape[1:] and all(add.shape == w.shape[:1] for add in rest)
        if fits:
            rows, laid = _matrix(x), _matrix(w)
            out = allocated(x.device, (*x.shape[:-1], w.shape[0]), x.element)
            result = out.viewed((rows.shape[0], w.shape[0]))
            matmul(rows, _transposed(laid), result, add=rest[0] if rest else None)
            return wrap(out)
    # Of other types and shapes: written out, down to what the operations in it say.
    return aten.linear.default.decompose(input, weight, bias)


@implements(aten.linear_backward.default)
def linear_backward(
    self: OpenCLTensor, grad_output: OpenCLTensor, weight: OpenCLTensor, output_mask: list[bool]
) -> tuple[Any, Any, Any]:
    """(grad_input, grad_weight, grad_bias), each None where the mask says so.

    grad_input [..., in] = grad_output [..., out] @ weight, grad_weight [out, in] = grad_output^T @ self, and grad_bias
    the sum of grad_output's rows.
    """
    for_input, for_weight, for_bias = output_mask
    grad_bias = grad_output.reshape(-1, weight.shape[0]).sum(0) if for_bias else None
    found = _operands(self, grad_output, weight)
    if found is None:
        rows, grad = self.reshape(-1, weight.shape[1]), grad_output.reshape(-1, weight.shape[0])
        grad_input = torch.mm(grad, weight).view(self.shape) if for_input else None
        return grad_input, torch.mm(grad.t(), rows) if for_weight else None, grad_bias
    x, g, w = found
    into, of_weight = None, None
    grad_rows = _matrix(g)
    if for_input:
        made = allocated(x.device, x.shape, x.element)
        matmul(grad_rows, _matrix(w), made.viewed((grad_rows.shape[0], w.shape[1])))
        into = wrap(made)
    if for_weight:
        made = allocated(x.device, w.shape, x.element)
        matmul(_transposed(grad_rows), _matrix(x), made)
        of_weight = wrap(made)
    return into, of_weight, grad_bias
