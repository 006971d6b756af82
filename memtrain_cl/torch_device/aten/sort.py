"""Sorting: sort, topk, kthvalue; argsort and msort come to these."""

from __future__ import annotations

from typing import Any

from memtrain_cl.launchers.reduce import layout
from memtrain_cl.launchers.sort import sort as launch_sort
from memtrain_cl.operand import Operand
from memtrain_cl.torch_device.aten.copy import fresh_copy
from memtrain_cl.torch_device.geometry import meta
from memtrain_cl.torch_device.registry import aten, implements
from memtrain_cl.torch_device.tensor import OpenCLTensor, allocated, wrap

#: Calls whose arguments torch's meta function found right.
_checked: set[Any] = set()


def axis_of(dim: int, rank: int) -> int:
    """`dim` from 0 on, of a tensor that counts as having one dimension at least; torch's IndexError outside of it."""
    rank = max(rank, 1)
    if not -rank <= dim < rank:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but got {dim})")
    return dim % rank


def _sorted(func: Any, self: OpenCLTensor, args: tuple[Any, ...], dim: int, taken: int | None, descending: bool) -> Any:
    """The first `taken` (None: all) along `dim`, and their places."""
    x = self.operand
    axis = axis_of(dim, len(x.shape))
    key = (func, x.shape, x.element, args)
    if key not in _checked:
        meta(func, (self, *args))
        if len(_checked) > 8192:
            _checked.clear()
        _checked.add(key)
    shape = x.shape
    if not shape:
        x = x.viewed((1,))
    if layout(x.shape, x.strides, (axis,), ordered=True) is None:
        x = fresh_copy(x)
    found = x.shape if taken is None else (*x.shape[:axis], taken, *x.shape[axis + 1 :])
    values, places = (allocated(x.array.device, found, element) for element in (x.element, "int64"))
    launch_sort(x, axis, values, places, descending=descending)
    if not shape:
        return wrap(values.viewed(())), wrap(places.viewed(()))
    return wrap(values), wrap(places)


@implements(aten.sort.default)
def sort(self: OpenCLTensor, dim: int = -1, descending: bool = False) -> Any:
    """Values in order along `dim`, and where they stood; stable."""
    return _sorted(aten.sort.default, self, (dim, descending), dim, None, descending)


@implements(aten.sort.stable)
def sort_stable(self: OpenCLTensor, *, stable: bool | None, dim: int = -1, descending: bool = False) -> Any:
    """As `sort`."""
    return sort(self, dim, descending)


@implements(aten.topk.default)
def topk(self: OpenCLTensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:  # noqa: A002 (torch's name)
    """The k largest, or smallest, in order; of equals those that come first."""
    if not self.operand.shape and k == 0:
        return NotImplemented
    return _sorted(aten.topk.default, self, (k, dim, largest, sorted), dim, k, largest)


@implements(aten.kthvalue.default)
def kthvalue(self: OpenCLTensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """The k-th smallest (from 1), and where it stands."""
    values, places = _sorted(aten.kthvalue.default, self, (k, dim, keepdim), dim, k, False)
    if self.operand.shape:
        axis = axis_of(dim, len(self.operand.shape))
        values, places = (_last(tensor.operand, axis, keepdim) for tensor in (values, places))
    return values, places


def _last(x: Operand, axis: int, keepdim: bool) -> OpenCLTensor:
    shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    last = fresh_copy(x.viewed(shape, x.strides, x.offset + (x.shape[axis] - 1) * x.strides[axis]))
    return wrap(last if keepdim else last.viewed(shape[:axis] + shape[axis + 1 :]))
