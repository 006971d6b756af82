"""Layer norm and root-mean-square norm, and their backwards.

torch writes rms_norm out as smaller operations before a kernel could see it, so the device takes rms_norm over
(see backend.py) and hands it to `_fused_rms_norm`, whose derivative torch knows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memtrain_cl.elements import ELEMENTS
from memtrain_cl.launchers import norm as launch
from memtrain_cl.operand import Operand
from memtrain_cl.torch_device.aten.copy import contiguous
from memtrain_cl.torch_device.aten.factories import fill
from memtrain_cl.torch_device.aten.indexing import check
from memtrain_cl.torch_device.registry import aten, implements
from memtrain_cl.torch_device.tensor import OpenCLTensor, allocated, wrap

#: What a missing eps is: torch's own, of the type that the norm is computed in.
_SMALLEST = torch.finfo(torch.float32).eps


def floating(*tensors: OpenCLTensor | None) -> bool:
    """Whether all these are floating; None counts."""
    return all(tensor is None or ELEMENTS[tensor.operand.element].floating for tensor in tensors)


def one_element(*tensors: OpenCLTensor | None) -> bool:
    """Whether all these are of one element; None counts."""
    return len({tensor.operand.element for tensor in tensors if tensor is not None}) <= 1


def vector(tensor: OpenCLTensor | None) -> Operand | None:
    """A weight or bias of any shape as a contiguous vector."""
    return None if tensor is None else contiguous(tensor.operand).viewed((tensor.operand.size,))


def _split(shape: tuple[int, ...], normalized: int) -> tuple[int, int, tuple[int, ...]]:
    """(rows, elements of a row, shape of a number a row) where the last `normalized` dimensions make a row."""
    outer = shape[: len(shape) - normalized]
    return math.prod(outer), math.prod(shape[len(shape) - normalized :]), (*outer, *[1] * normalized)


@implements(aten.native_layer_norm.default)
def native_layer_norm(
    input: OpenCLTensor,  # noqa: A002 (torch's name)
    normalized_shape: Sequence[int],
    weight: OpenCLTensor | None,
    bias: OpenCLTensor | None,
    eps: float,
) -> Any:
    """(x - mean)*rstd*weight + bias, mean, rstd; the last two float32."""
    if not floating(input, weight, bias) or not one_element(weight, bias):
        return NotImplemented
    check(aten.native_layer_norm.default, input, tuple(normalized_shape), weight, bias, eps)
    x = input.operand
    _, n, per_row = _split(x.shape, len(normalized_shape))
    out = allocated(x.device, x.shape, x.element)
    mean, rstd = (allocated(x.device, per_row, "float32") for _ in range(2))
    if n == 0:
        # Of no elements: torch's answers.
        fill(mean, 0.0)
        fill(rstd, math.nan)
    launch.norm(
        contiguous(x),
        None if weight is None else contiguous(weight.operand),
        None if bias is None else contiguous(bias.operand),
        out,
        mean,
        rstd,
        n=n,
        eps=eps,
    )
    return wrap(out), wrap(mean), wrap(rstd)


def _backward(
    grad_out: OpenCLTensor,
    input: OpenCLTensor,  # noqa: A002
    normalized: int,
    mean: OpenCLTensor | None,
    rstd: OpenCLTensor,
    weight: OpenCLTensor | None,
    wants: Sequence[bool],
    like: OpenCLTensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of input, weight and bias, those that are wanted; `like`: what has the shape of weight and bias."""
    x = input.operand
    rows, n, _ = _split(x.shape, normalized)
    grad_x = allocated(x.device, x.shape, x.element)
    columns = [
        allocated(x.device, like.operand.shape, like.operand.element) if wanted and like is not None else None
        for wanted in wants[1:]
    ]
    if rows == 0:
        for column in columns:
            if column is not None:
                fill(column, 0.0)
    launch.norm_backward(
        contiguous(grad_out.operand),
        contiguous(x),
        None if mean is None else contiguous(mean.operand),
        contiguous(rstd.operand),
        None if weight is None else contiguous(weight.operand),
        grad_x,
        columns[0],
        columns[1] if len(columns) > 1 else None,
        n=n,
    )
    kept = [grad_x if wants[0] else None, *columns]
    return tuple(None if grad is None else wrap(grad) for grad in kept)


@implements(aten.native_layer_norm_backward.default)
def native_layer_norm_backward(
    grad_out: OpenCLTensor,
    input: OpenCLTensor,  # noqa: A002
    normalized_shape: Sequence[int],
    mean: OpenCLTensor,
    rstd: OpenCLTensor,
    weight: OpenCLTensor | None,
    bias: OpenCLTensor | None,
    output_mask: Sequence[bool],
) -> Any:
    """Gradients of input, weight and bias, None where output_mask says so."""
    if not floating(input, weight, bias) or not one_element(weight, bias) or not one_element(grad_out, input):
        return NotImplemented
    if mean.operand.element != "float32" or rstd.operand.element != "float32":
        return NotImplemented
    like = weight if weight is not None else bias
    return _backward(grad_out, input, len(normalized_shape), mean, rstd, weight, output_mask, like)


@implements(aten._fused_rms_norm.default)
def fused_rms_norm(
    input: OpenCLTensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: OpenCLTensor | None,
    eps: float | None,
) -> Any:
    """x*rstd*weight, and rstd float32."""
    if not floating(input, weight):
        return NotImplemented
    check(aten.rms_norm.default, input, tuple(normalized_shape), weight, eps)
    x = input.operand
    _, n, per_row = _split(x.shape, len(normalized_shape))
    out = allocated(x.device, x.shape, x.element)
    rstd = allocated(x.device, per_row, "float32")
    if n == 0:
        fill(rstd, math.nan)
    launch.norm(
        contiguous(x),
        None if weight is None else contiguous(weight.operand),
        None,
        out,
        None,
        rstd,
        n=n,
        eps=_SMALLEST if eps is None else eps,
    )
    return wrap(out), wrap(rstd)


@implements(aten._fused_rms_norm_backward.default)
def fused_rms_norm_backward(
    grad_out: OpenCLTensor,
    input: OpenCLTensor,  # noqa: A002
    normalized_shape: Sequence[int],
    rstd: OpenCLTensor,
    weight: OpenCLTensor | None,
    output_mask: Sequence[bool],
) -> Any:
    """Gradients of input and weight, None where output_mask says so."""
    if not floating(input, weight) or not one_element(grad_out, input) or rstd.operand.element != "float32":
        return NotImplemented
    return _backward(grad_out, input, len(normalized_shape), None, rstd, weight, output_mask, weight)


#: With a kernel of the device's own in torch's table, torch uses its derivative of the operation instead of writing the
#: operation out.
_FUSED = torch.library.Library("aten", "IMPL")
_FUSED.impl("_fused_rms_norm", fused_rms_norm, "PrivateUse1")


@implements(aten.rms_norm.default)
def rms_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimensions, differentiable."""
    result: Tensor = aten._fused_rms_norm.default(input, normalized_shape, weight, eps)[0]
    return result
