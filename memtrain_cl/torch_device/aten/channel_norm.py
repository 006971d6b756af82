"""Group norm and batch norm, and their backwards.

A batch norm reaches the device as `native_batch_norm`; its running statistics change in place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from memtrain_cl.launchers import channel_norm as launch
from memtrain_cl.launchers.channel_norm import Planes
from memtrain_cl.launchers.norm import column_sums
from memtrain_cl.operand import Operand, empty_operand
from memtrain_cl.torch_device.aten.copy import cast, contiguous
from memtrain_cl.torch_device.aten.factories import fill
from memtrain_cl.torch_device.aten.indexing import InPlace, check
from memtrain_cl.torch_device.aten.norm import floating, one_element, vector
from memtrain_cl.torch_device.registry import aten, implements
from memtrain_cl.torch_device.tensor import OpenCLTensor, allocated, wrap


def _viewed(operand: Operand, planes: Planes) -> Operand:
    return contiguous(operand).viewed(planes.shape)


def _numbers(tensor: OpenCLTensor) -> Operand:
    """Statistics as a contiguous float32 vector."""
    return cast(contiguous(tensor.operand), "float32").viewed((tensor.operand.size,))


def _gradients(
    grad_out: OpenCLTensor,
    input: OpenCLTensor,  # noqa: A002 (torch's name)
    planes: Planes,
    mean: Operand,
    rstd: Operand,
    weight: OpenCLTensor | None,
    wants: Sequence[bool],
    *,
    of_statistics: bool,
) -> tuple[Tensor | None, ...]:
    """Gradients of input, weight and bias; of_statistics: mean and rstd depend on input."""
    x = input.operand
    element = (input if weight is None else weight).operand.element
    columns = [allocated(x.device, (planes.channels,), element) if wanted else None for wanted in wants[1:]]
    grad_x = allocated(x.device, x.shape, x.element) if wants[0] else None
    if x.size == 0:
        for column in columns:
            if column is not None:
                fill(column, 0.0)
    else:
        grad, values = _viewed(grad_out.operand, planes), _viewed(x, planes)
        sums = None
        if of_statistics or any(wants[1:]):
            sums = launch.backward_sums(grad, values, planes, mean, rstd)
        if grad_x is not None:
            inner = sums if of_statistics else None
            launch.backward(grad, values, planes, mean, rstd, vector(weight), inner, grad_x.viewed(planes.shape))
        if sums is not None and any(wants[1:]):
            column_sums(sums, columns[0], columns[1])
    return tuple(None if grad is None else wrap(grad) for grad in (grad_x, *columns))


@implements(aten.native_group_norm.default)
def native_group_norm(
    input: OpenCLTensor,  # noqa: A002
    weight: OpenCLTensor | None,
    bias: OpenCLTensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> Any:
    """(x - mean)*rstd*weight + bias by groups of an image's channels, mean, rstd; the last two float32 [N, group]."""
    if not floating(input, weight, bias):
        return NotImplemented
    check(aten.native_group_norm.default, input, weight, bias, N, C, HxW, group, eps)
    x = input.operand
    out = allocated(x.device, x.shape, x.element)
    mean, rstd = (allocated(x.device, (N, group), "float32") for _ in range(2))
    if x.size:
        planes = Planes(N, C, HxW, group)
        values, numbers = _viewed(x, planes), (mean.viewed((mean.size,)), rstd.viewed((rstd.size,)))
        launch.moments(values, planes, *numbers, eps=eps)
        launch.normalize(values, planes, *numbers, vector(weight), vector(bias), out.viewed(planes.shape))
    elif mean.size:
        fill(mean, 0.0)
        fill(rstd, math.nan)
    return wrap(out), wrap(mean), wrap(rstd)


@implements(aten.native_group_norm_backward.default)
def native_group_norm_backward(
    grad_out: OpenCLTensor,
    input: OpenCLTensor,  # noqa: A002
    mean: OpenCLTensor,
    rstd: OpenCLTensor,
    weight: OpenCLTensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> Any:
    """Gradients of input, weight and bias, None where output_mask says so."""
    if not floating(input, weight) or not one_element(grad_out, input) or grad_out.shape != input.shape:
        return NotImplemented
    planes = Planes(N, C, HxW, group)
    numbers = _numbers(mean), _numbers(rstd)
    return _gradients(grad_out, input, planes, *numbers, weight, output_mask, of_statistics=True)


def _batch_planes(x: Operand) -> Planes:
    return Planes(x.shape[0], x.shape[1], math.prod(x.shape[2:]))


def _batch_norm(
    input: OpenCLTensor,  # noqa: A002
    weight: OpenCLTensor | None,
    bias: OpenCLTensor | None,
    running_mean: OpenCLTensor | None,
    running_var: OpenCLTensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    both = running_mean is not None and running_var is not None
    if not floating(input, weight, bias, running_mean, running_var) or not one_element(running_mean, running_var):
        return NotImplemented
    if (running_mean is None) != (running_var is None) or not (training or both):
        return NotImplemented
    x = input.operand
    if len(x.shape) < 2 or x.size == 0:
        return NotImplemented
    if training:
        check(aten._native_batch_norm_legit.no_stats, input, weight, bias, True, momentum, eps)
    for name, tensor in (("weight", weight), ("bias", bias), ("running_mean", running_mean)):
        if tensor is not None and tensor.operand.shape != (x.shape[1],):
            raise RuntimeError(f"{name} should contain {x.shape[1]} elements not {tensor.operand.size}")
    planes = _batch_planes(x)
    out = allocated(x.device, x.shape, x.element)
    values = _viewed(x, planes)
    kept = planes.channels if training else 0
    mean, rstd = (allocated(x.device, (kept,), "float32") for _ in range(2))
    numbers = mean, rstd
    if training:
        running = (InPlace(running_mean.operand), InPlace(running_var.operand)) if both else ()  # type: ignore[union-attr]
        targets = tuple(change.target for change in running)
        launch.moments(values, planes, mean, rstd, eps=eps, running=targets or None, momentum=momentum)  # type: ignore[arg-type]
        for change in running:
            change.finish()
    else:
        numbers = _running_statistics(running_mean, running_var, eps)
    launch.normalize(values, planes, *numbers, vector(weight), vector(bias), out.viewed(planes.shape))
    return wrap(out), wrap(mean), wrap(rstd)


def _running_statistics(mean: Any, variance: Any, eps: float) -> tuple[Operand, Operand]:
    values = contiguous(variance.operand)
    rstd = empty_operand(values.device, values.shape, "float32")
    launch.inverse_deviation(values, rstd, eps=eps)
    return _numbers(mean), rstd


@implements(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def native_batch_norm(
    input: OpenCLTensor,  # noqa: A002
    weight: OpenCLTensor | None,
    bias: OpenCLTensor | None,
    running_mean: OpenCLTensor | None,
    running_var: OpenCLTensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """(x - mean)*rstd*weight + bias by channel, mean, rstd: of the batch in training, which moves the running ones."""
    return _batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)


@implements(aten._native_batch_norm_legit.no_stats)
def native_batch_norm_without_statistics(
    input: OpenCLTensor,  # noqa: A002
    weight: OpenCLTensor | None,
    bias: OpenCLTensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """The same without running statistics."""
    return _batch_norm(input, weight, bias, None, None, training, momentum, eps)


@implements(aten._native_batch_norm_legit_no_training.default)
def native_batch_norm_no_training(
    input: OpenCLTensor,  # noqa: A002
    weight: OpenCLTensor | None,
    bias: OpenCLTensor | None,
    running_mean: OpenCLTensor,
    running_var: OpenCLTensor,
    momentum: float,
    eps: float,
) -> Any:
    """The same by running statistics."""
    return _batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps)


@implements(aten.native_batch_norm_backward.default)
def native_batch_norm_backward(
    grad_out: OpenCLTensor,
    input: OpenCLTensor,  # noqa: A002
    weight: OpenCLTensor | None,
    running_mean: OpenCLTensor | None,
    running_var: OpenCLTensor | None,
    save_mean: OpenCLTensor | None,
    save_invstd: OpenCLTensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Any:
    """Gradients of input, weight and bias, None where output_mask says so."""
    if not floating(input, weight) or not one_element(grad_out, input) or grad_out.shape != input.shape:
        return NotImplemented
    if input.operand.size == 0:
        return NotImplemented
    if train and save_mean is not None and save_invstd is not None:
        numbers = _numbers(save_mean), _numbers(save_invstd)
    elif not train and running_mean is not None and running_var is not None:
        numbers = _running_statistics(running_mean, running_var, eps)
    else:
        return NotImplemented
    planes = _batch_planes(input.operand)
    return _gradients(grad_out, input, planes, *numbers, weight, output_mask, of_statistics=train)
