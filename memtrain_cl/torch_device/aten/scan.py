"""Running sums, products and extremes."""

from __future__ import annotations

from typing import Any

import torch

from memtrain_cl.launchers.reduce import layout
from memtrain_cl.launchers.scan import WITH_PLACES, scan
from memtrain_cl.torch_device.aten.copy import fresh_copy
from memtrain_cl.torch_device.aten.sort import axis_of
from memtrain_cl.torch_device.geometry import meta
from memtrain_cl.torch_device.registry import aten, implements
from memtrain_cl.torch_device.tensor import OpenCLTensor, allocated, element_of, wrap

#: Element of the result, the dimension from 0 on, and whether a copy is scanned, of each geometry met.
_cases: dict[Any, tuple[str, int, bool]] = {}


def _scanned(func: Any, op: str, self: OpenCLTensor, dim: int, **kwargs: Any) -> Any:
    x = self.operand
    shape = x.shape
    if not shape:
        x = x.viewed((1,))
    key = (func, x.shape, x.strides, x.element, dim, *kwargs.values())
    case = _cases.get(key)
    if case is None:
        axis = axis_of(dim, len(shape))
        result = meta(func, (self, dim), kwargs)
        element = element_of((result[0] if op in WITH_PLACES else result).dtype)
        if len(_cases) > 8192:
            _cases.clear()
        case = _cases[key] = element, axis, layout(x.shape, x.strides, (axis,), ordered=True) is None
    element, axis, copied = case
    if element == "bool" and op not in WITH_PLACES:
        return NotImplemented
    if copied:
        x = fresh_copy(x)
    out = allocated(x.array.device, shape, element)
    places = allocated(x.array.device, shape, "int64") if op in WITH_PLACES else None
    scan(op, x, axis, out, places)
    return wrap(out) if places is None else (wrap(out), wrap(places))


@implements(aten.cumsum.default)
def cumsum(self: OpenCLTensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """out[k] = x[0] + ... + x[k] along `dim`."""
    return _scanned(aten.cumsum.default, "cumsum", self, dim, dtype=dtype)


@implements(aten.cumprod.default)
def cumprod(self: OpenCLTensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """out[k] = x[0] * ... * x[k] along `dim`."""
    return _scanned(aten.cumprod.default, "cumprod", self, dim, dtype=dtype)


@implements(aten.cummax.default)
def cummax(self: OpenCLTensor, dim: int) -> Any:
    """The largest of x[0] ... x[k] along `dim`, and where it stands: the last place of equals."""
    return _scanned(aten.cummax.default, "cummax", self, dim)


@implements(aten.cummin.default)
def cummin(self: OpenCLTensor, dim: int) -> Any:
    """The smallest of x[0] ... x[k] along `dim`, and where it stands: the last place of equals."""
    return _scanned(aten.cummin.default, "cummin", self, dim)
