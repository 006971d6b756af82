"""Rows and elements by index along a dimension: embedding, index_select, gather, scatter, and their kin.

Indexing with lists of tensors and masks (x[i, :, mask]) is in index_lists.py. Indices that torch's CPU operations
refuse are refused here too, but when the device is next waited for.
"""

from __future__ import annotations

from typing import Any

import torch

from memtrain_cl.launchers import index as launch
from memtrain_cl.operand import Operand
from memtrain_cl.torch_device.aten.copy import contiguous, copy_operand, fresh_copy
from memtrain_cl.torch_device.aten.factories import fill
from memtrain_cl.torch_device.aten.indexing import InPlace, apart, as_vector, check, number, places_of, wrapped
from memtrain_cl.torch_device.registry import aten, implements
from memtrain_cl.torch_device.tensor import OpenCLTensor, allocated, wrap

# ---- rows along a dimension ----------------------------------------------------------------------------------------


@implements(aten.embedding.default)
def embedding(
    weight: OpenCLTensor,
    indices: OpenCLTensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> OpenCLTensor:
    """weight[indices]: [rows, width] and [...] -> [..., width]."""
    check(aten.embedding.default, weight, indices)
    x = contiguous(weight.operand)
    index = places_of(indices)
    out = allocated(x.array.device, (*index.shape, x.shape[1]), x.element)
    launch.select(x, 0, index, out)
    return wrap(out)


@implements(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    grad_output: OpenCLTensor, indices: OpenCLTensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Any:
    """grad_weight[r] = the sum of grad_output[..., :] over the places where indices = r, in their order."""
    if scale_grad_by_freq:
        return NotImplemented
    grad = contiguous(grad_output.operand)
    index = places_of(indices)
    if grad.shape[:-1] != index.shape:
        raise RuntimeError(
            f"expected indices of grad_output's leading sizes {list(grad.shape[:-1])}, got {list(index.shape)}"
        )
    out = allocated(grad.array.device, (num_weights, grad.shape[-1]), grad.element)
    fill(out, 0)
    launch.add(out, 0, index, grad, skipped=padding_idx if padding_idx >= 0 else None)
    return wrap(out)


@implements(aten.index_select.default)
def index_select(self: OpenCLTensor, dim: int, index: OpenCLTensor) -> OpenCLTensor:
    """self[..., index, ...] along `dim`."""
    check(aten.index_select.default, self, dim, index)
    x = contiguous(self.operand)
    axis = wrapped(dim, len(x.shape))
    shape = (*x.shape[:axis], index.operand.size, *x.shape[axis + 1 :]) if x.shape else ()
    out = allocated(x.array.device, shape, x.element)
    launch.select(x, axis, places_of(index), out)
    return wrap(out)


def _index_add(self: OpenCLTensor, dim: int, index: OpenCLTensor, source: OpenCLTensor, alpha: Any) -> OpenCLTensor:
    check(aten.index_add.default, self, dim, index, source)
    whole = InPlace(self.operand)
    axis = wrapped(dim, self.ndim)
    launch.add(whole.target, axis, places_of(index), apart(source.operand, whole.target), scale=alpha)
    whole.finish()
    return self


@implements(aten.index_add_.default)
def index_add_(
    self: OpenCLTensor, dim: int, index: OpenCLTensor, source: OpenCLTensor, *, alpha: Any = 1
) -> OpenCLTensor:
    """self[..., index[k], ...] += alpha * source[..., k, ...], in ascending k."""
    return _index_add(self, dim, index, source, alpha)


@implements(aten.index_add.default)
def index_add(self: OpenCLTensor, dim: int, index: OpenCLTensor, source: OpenCLTensor, *, alpha: Any = 1) -> Any:
    """index_add_ on a copy."""
    return _index_add(wrap(fresh_copy(self.operand)), dim, index, source, alpha)


def _index_copy(self: OpenCLTensor, dim: int, index: OpenCLTensor, source: OpenCLTensor) -> OpenCLTensor:
    check(aten.index_copy.default, self, dim, index, source)
    whole = InPlace(self.operand)
    launch.put(whole.target, wrapped(dim, self.ndim), places_of(index), apart(source.operand, whole.target))
    whole.finish()
    return self


@implements(aten.index_copy_.default)
def index_copy_(self: OpenCLTensor, dim: int, index: OpenCLTensor, source: OpenCLTensor) -> OpenCLTensor:
    """self[..., index[k], ...] = source[..., k, ...]; of equal indices the last counts."""
    return _index_copy(self, dim, index, source)


@implements(aten.index_copy.default)
def index_copy(self: OpenCLTensor, dim: int, index: OpenCLTensor, source: OpenCLTensor) -> Any:
    """index_copy_ on a copy."""
    return _index_copy(wrap(fresh_copy(self.operand)), dim, index, source)


def _index_fill(self: OpenCLTensor, dim: int, index: OpenCLTensor, value: Operand) -> OpenCLTensor:
    whole = InPlace(self.operand)
    launch.put(whole.target, wrapped(dim, self.ndim), places_of(index), value, wrap=True)
    whole.finish()
    return self


def _fill_value(self: OpenCLTensor, value: Any) -> Operand:
    if not isinstance(value, OpenCLTensor):
        return number(self.operand, value.item() if isinstance(value, torch.Tensor) else value)
    single = allocated(self.operand.array.device, (), self.operand.element)
    copy_operand(value.operand, single)
    return single


@implements(aten.index_fill_.int_Scalar, aten.index_fill_.int_Tensor)
def index_fill_(self: OpenCLTensor, dim: int, index: OpenCLTensor, value: Any) -> OpenCLTensor:
    """self[..., index, ...] = value; indices below 0 count from the end."""
    func = aten.index_fill.int_Tensor if isinstance(value, torch.Tensor) else aten.index_fill.int_Scalar
    check(func, self, dim, index, torch.empty((), device="meta") if isinstance(value, torch.Tensor) else value)
    return _index_fill(self, dim, index, _fill_value(self, value))


@implements(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(self: OpenCLTensor, dim: int, index: OpenCLTensor, value: Any) -> Any:
    """index_fill_ on a copy."""
    return index_fill_(wrap(fresh_copy(self.operand)), dim, index, value)


# ---- elements along a dimension ------------------------------------------------------------------------------------


def _narrowed(operand: Operand, axis: int, index: Operand) -> Operand:
    """The part of an operand that an index of smaller sizes reaches: index's sizes but at `axis`."""
    shape = (*index.shape[:axis], operand.shape[axis], *index.shape[axis + 1 :])
    return operand if shape == operand.shape else operand.viewed(shape, operand.strides)


@implements(aten.gather.default)
def gather(self: OpenCLTensor, dim: int, index: OpenCLTensor, *, sparse_grad: bool = False) -> OpenCLTensor:
    """out[..., k, ...] = self[..., index[..., k, ...], ...] along `dim`."""
    check(aten.gather.default, self, dim, index)
    places = places_of(index)
    out = allocated(places.array.device, places.shape, self.operand.element)
    if out.size:
        axis = wrapped(dim, self.ndim)
        seen = as_vector(places)
        launch.gather(contiguous(_narrowed(as_vector(self.operand), axis, seen)), axis, seen, out)
    return wrap(out)


def _scatter(self: OpenCLTensor, dim: int, index: OpenCLTensor, src: Any, reduce: str) -> OpenCLTensor:
    if index.operand.size == 0:
        return self
    places = as_vector(places_of(index))
    axis = wrapped(dim, self.ndim)
    part = InPlace(_narrowed(as_vector(self.operand), axis, places))
    if isinstance(src, OpenCLTensor):
        values = as_vector(src.operand)
        values = values if values.shape == places.shape else values.viewed(places.shape, values.strides)
        values = apart(values, part.target)
    else:
        values = number(self.operand, src)
    launch.scatter(part.target, axis, places, values, reduce=reduce)
    part.finish()
    return self


#: torch's names of reductions and the kernel's; "mean" is not among them.
_REDUCTIONS = dict(
    zip(
        ("sum", "add", "prod", "multiply", "amax", "amin"),
        ("add", "add", "multiply", "multiply", "amax", "amin"),
        strict=True,
    )
)


def _enter_scatter(in_place: Any, functional: Any, kernel: str | None = None) -> None:
    """Handlers of one form of scatter and of its in-place twin; without `kernel` the call names the reduction."""

    def change(self: OpenCLTensor, dim: int, index: OpenCLTensor, src: Any, *args: Any, **options: Any) -> Any:
        check(functional, self, dim, index, src, *args, **options)
        reduce = kernel or _REDUCTIONS.get(args[0] if args else options["reduce"])
        if reduce is None or not options.get("include_self", True):
            return NotImplemented
        return _scatter(self, dim, index, src, reduce)

    def make(self: OpenCLTensor, dim: int, index: OpenCLTensor, src: Any, *args: Any, **options: Any) -> Any:
        return change(wrap(fresh_copy(self.operand)), dim, index, src, *args, **options)

    implements(in_place)(change)
    implements(functional)(make)


# self[..., index[..., k, ...], ...] = src[..., k, ...], or combined with it, in ascending k.
_enter_scatter(aten.scatter_.src, aten.scatter.src, "copy")
_enter_scatter(aten.scatter_.value, aten.scatter.value, "copy")
_enter_scatter(aten.scatter_add_.default, aten.scatter_add.default, "add")
_enter_scatter(aten.scatter_.reduce, aten.scatter.reduce)
_enter_scatter(aten.scatter_.value_reduce, aten.scatter.value_reduce)
_enter_scatter(aten.scatter_reduce_.two, aten.scatter_reduce.two)


@implements(aten.take.default)
def take(self: OpenCLTensor, index: OpenCLTensor) -> OpenCLTensor:
    """The elements of self, seen flat, at `index`; indices below 0 count from the end."""
    check(aten.take.default, self, index)
    x = contiguous(self.operand)
    places = places_of(index)
    out = allocated(x.array.device, places.shape, x.element)
    launch.select(x.viewed((x.size,)), 0, places, out, wrap=True)
    return wrap(out)


@implements(aten.put_.default)
def put_(self: OpenCLTensor, index: OpenCLTensor, source: OpenCLTensor, accumulate: bool = False) -> OpenCLTensor:
    """self, seen flat, at `index` = source, or += source; indices below 0 count from the end."""
    check(aten.put.default, self, index, source, accumulate)
    whole = InPlace(self.operand)
    flat = whole.target.viewed((whole.target.size,))
    values = apart(source.operand, flat)
    places = places_of(index)
    if accumulate:
        launch.add(flat, 0, places, values, wrap=True)
    else:
        launch.put(flat, 0, places, values, wrap=True)
    whole.finish()
    return self


@implements(aten.put.default)
def put(self: OpenCLTensor, index: OpenCLTensor, source: OpenCLTensor, accumulate: bool = False) -> Any:
    """put_ on a copy."""
    return put_(wrap(fresh_copy(self.operand)), index, source, accumulate)
