"""Writing through a view: scatters into a window of a copy, and the backwards of views, which are windows of zeros."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memtrain_cl.torch_device.aten.copy import copy_, fresh_copy
from memtrain_cl.torch_device.aten.factories import fill
from memtrain_cl.torch_device.aten.views import view_operands
from memtrain_cl.torch_device.registry import aten, implements
from memtrain_cl.torch_device.tensor import OpenCLTensor, allocated, wrap


def _scatter(view: Any) -> Any:
    def handler(self: OpenCLTensor, src: OpenCLTensor, *args: Any, **kwargs: Any) -> OpenCLTensor:
        """A copy of `self` in which the view holds `src`."""
        result = wrap(fresh_copy(self.operand))
        window = wrap(view_operands(view, result, args, kwargs))
        if src.shape != window.shape:
            raise RuntimeError(f"expected src to have a size equal to {list(window.shape)}, got {list(src.shape)}")
        copy_(window, src)
        return result

    return handler


implements(aten.slice_scatter.default)(_scatter(aten.slice.Tensor))
implements(aten.select_scatter.default)(_scatter(aten.select.int))
implements(aten.diagonal_scatter.default)(_scatter(aten.diagonal.default))


def _backward(view: Any) -> Any:
    def handler(grad_output: OpenCLTensor, input_sizes: Sequence[int], *args: Any) -> OpenCLTensor:
        """Zeros of `input_sizes` in which the view holds `grad_output`."""
        operand = grad_output.operand
        whole = allocated(operand.array.device, tuple(input_sizes), operand.element)
        if whole.size != operand.size:
            fill(whole, 0)
        copy_(wrap(view_operands(view, wrap(whole), args, {})), grad_output)
        return wrap(whole)

    return handler


implements(aten.slice_backward.default)(_backward(aten.slice.Tensor))
implements(aten.select_backward.default)(_backward(aten.select.int))
implements(aten.diagonal_backward.default)(_backward(aten.diagonal.default))
