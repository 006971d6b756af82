"""Softmax and logarithmic softmax along any dimension, and their backwards."""

from __future__ import annotations

from typing import Any

import torch
from torch._prims_common import canonicalize_dim

from memtrain_cl.elements import ELEMENTS
from memtrain_cl.launchers import softmax as launch
from memtrain_cl.torch_device.aten.copy import contiguous
from memtrain_cl.torch_device.registry import aten, implements
from memtrain_cl.torch_device.tensor import OpenCLTensor, allocated, element_of, wrap


def _forward(log: bool, self: OpenCLTensor, dim: int, half_to_float: bool) -> Any:
    element = self.operand.element
    if not ELEMENTS[element].floating or (half_to_float and element != "float16"):
        return NotImplemented
    dim = canonicalize_dim(self.dim(), dim)
    x = contiguous(self.operand)
    out = allocated(x.device, x.shape, "float32" if half_to_float else element)
    launch.softmax(x, out, dim, log=log)
    return wrap(out)


@implements(aten._softmax.default)
def softmax(self: OpenCLTensor, dim: int, half_to_float: bool) -> Any:
    """exp(x - max) / sum(exp(x - max))."""
    return _forward(False, self, dim, half_to_float)


@implements(aten._log_softmax.default)
def log_softmax(self: OpenCLTensor, dim: int, half_to_float: bool) -> Any:
    """x - max - log(sum(exp(x - max)))."""
    return _forward(True, self, dim, half_to_float)


@implements(aten._safe_softmax.default)
def safe_softmax(self: OpenCLTensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Softmax whose rows of -inf alone are zeros."""
    target = self.operand.element if dtype is None else element_of(dtype)
    if not ELEMENTS[self.operand.element].floating or not ELEMENTS[target].floating:
        return NotImplemented
    dim = canonicalize_dim(self.dim(), dim)
    x = contiguous(self.operand)
    out = allocated(x.device, x.shape, target)
    launch.softmax(x, out, dim, log=False, safe=True)
    return wrap(out)


def _backward(log: bool, grad_output: OpenCLTensor, output: OpenCLTensor, dim: int, input_dtype: torch.dtype) -> Any:
    if not ELEMENTS[grad_output.operand.element].floating or not input_dtype.is_floating_point:
        return NotImplemented
    if grad_output.operand.shape != output.operand.shape:
        return NotImplemented
    dim = canonicalize_dim(output.dim(), dim)
    y = contiguous(output.operand)
    grad_x = allocated(y.device, y.shape, element_of(input_dtype))
    launch.softmax_backward(contiguous(grad_output.operand), y, grad_x, dim, log=log)
    return wrap(grad_x)


@implements(aten._softmax_backward_data.default)
def softmax_backward_data(grad_output: OpenCLTensor, output: OpenCLTensor, dim: int, input_dtype: torch.dtype) -> Any:
    """y*(grad - sum(grad*y))."""
    return _backward(False, grad_output, output, dim, input_dtype)


@implements(aten._log_softmax_backward_data.default)
def log_softmax_backward_data(
    grad_output: OpenCLTensor, output: OpenCLTensor, dim: int, input_dtype: torch.dtype
) -> Any:
    """grad - exp(y)*sum(grad)."""
    return _backward(True, grad_output, output, dim, input_dtype)
