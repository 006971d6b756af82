"""Negative log-likelihood, of vectors and of images; the other losses are torch's decompositions (see derive.py)."""

from __future__ import annotations

import math
from typing import Any

from memtrain_cl.elements import ELEMENTS
from memtrain_cl.launchers import loss as launch
from memtrain_cl.operand import Operand
from memtrain_cl.torch_device.aten.copy import contiguous
from memtrain_cl.torch_device.aten.factories import fill
from memtrain_cl.torch_device.aten.indexing import check
from memtrain_cl.torch_device.aten.norm import floating, vector
from memtrain_cl.torch_device.registry import aten, implements
from memtrain_cl.torch_device.tensor import OpenCLTensor, allocated, wrap

_NONE, _MEAN, _SUM = 0, 1, 2


def _planes(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(images, classes, space) of [classes], [images, classes] or [images, classes, height, width]."""
    if len(shape) == 1:
        return 1, shape[0], 1
    return shape[0], shape[1], math.prod(shape[2:])


def _supported(self: OpenCLTensor, target: OpenCLTensor, weight: OpenCLTensor | None) -> bool:
    """int64 targets; the rest of torch's checks are in its meta functions."""
    return floating(self, weight) and target.operand.element == "int64" and ELEMENTS[self.operand.element].floating


def _targets(target: OpenCLTensor, planes: tuple[int, int, int]) -> Operand:
    return contiguous(target.operand).viewed((planes[0], planes[2]))


@implements(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(
    self: OpenCLTensor, target: OpenCLTensor, weight: OpenCLTensor | None, reduction: int, ignore_index: int
) -> Any:
    """-weight[t]*x[t] of each target, or their sum or mean, and the sum of weights: 0 where nothing is summed."""
    if not _supported(self, target, weight):
        return NotImplemented
    check(_function(self, "forward"), self, target, weight, reduction, ignore_index)
    x = self.operand
    planes = _planes(x.shape)
    values, targets = contiguous(x).viewed(planes), _targets(target, planes)
    total = allocated(x.device, (), x.element)
    if reduction == _NONE:
        loss = allocated(x.device, target.operand.shape, x.element)
        fill(total, 0.0)
        launch.nll_each(values, targets, vector(weight), loss.viewed(targets.shape), ignore=ignore_index)
        return wrap(loss), wrap(total)
    loss = allocated(x.device, (), x.element)
    if targets.size == 0:
        fill(loss, math.nan if reduction == _MEAN else 0.0)
        fill(total, 0.0)
    else:
        launch.nll(values, targets, vector(weight), loss, total, ignore=ignore_index, mean=reduction == _MEAN)
    return wrap(loss), wrap(total)


@implements(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    grad_output: OpenCLTensor,
    self: OpenCLTensor,
    target: OpenCLTensor,
    weight: OpenCLTensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: OpenCLTensor,
) -> Any:
    """-weight[t]*grad (/ total_weight for the mean) at each target, 0 elsewhere."""
    if not _supported(self, target, weight) or grad_output.operand.element != self.operand.element:
        return NotImplemented
    check(_function(self, "backward"), grad_output, self, target, weight, reduction, ignore_index, total_weight)
    x = self.operand
    planes = _planes(x.shape)
    targets = _targets(target, planes)
    grad = contiguous(grad_output.operand)
    grad_x = allocated(x.device, x.shape, x.element)
    fill(grad_x, 0.0)
    launch.nll_backward(
        grad.viewed(targets.shape if reduction == _NONE else ()),
        targets,
        vector(weight),
        contiguous(total_weight.operand) if reduction == _MEAN else None,
        grad_x.viewed(planes),
        ignore=ignore_index,
    )
    return wrap(grad_x)


def _function(self: OpenCLTensor, direction: str) -> Any:
    name = f"nll_loss{'2d' if len(self.operand.shape) == 4 else ''}_{direction}"
    return getattr(aten, name).default
