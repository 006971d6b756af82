"""Reductions: sums, means, products, extremes and their places, norms, moments, any and all.

Result shapes, types and the errors of bad arguments come from torch's meta functions, once a geometry. A tensor whose
reduced dimensions are not one run of memory is copied first, with those dimensions last.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from memtrain_cl.elements import ELEMENTS
from memtrain_cl.launchers.reduce import ORDERED, layout, reduce
from memtrain_cl.operand import Operand
from memtrain_cl.torch_device.aten.copy import fresh_copy
from memtrain_cl.torch_device.geometry import meta
from memtrain_cl.torch_device.registry import aten, implements
from memtrain_cl.torch_device.tensor import OpenCLTensor, allocated, element_of, wrap

#: Operations that give nothing where there are no elements.
EXTREMES = ORDERED | {"amax", "amin", "aminmax"}


class _Wish(NamedTuple):
    """What a call asks for: a kernel's operation over `dim` (None: all dimensions).

    mean: divide by the elements. correction: divide by the elements less so many, not below 0. power: of the norm.
    all_of_none: an empty list of dimensions means all.
    """

    op: str
    dim: int | Sequence[int] | None = None
    mean: bool = False
    correction: float | None = None
    power: float = 1.0
    all_of_none: bool = True


class _Case(NamedTuple):
    """One geometry of one call. order, source: dimensions and element of the copy to reduce; order is None where none
    is needed.
    """

    op: str
    dims: tuple[int, ...]
    order: tuple[int, ...] | None
    source: str
    shape: tuple[int, ...]
    element: str
    second: str | None
    divisor: float
    power: float


_cases: dict[Any, _Case] = {}


def _dims_of(wish: _Wish, rank: int) -> tuple[int, ...]:
    dim = wish.dim
    if dim is None or (wish.all_of_none and not isinstance(dim, int) and not dim):
        return tuple(range(rank))
    # A tensor of no dimensions may be reduced along its dimension 0, which it does not have.
    return tuple(sorted(d % rank for d in ([dim] if isinstance(dim, int) else dim))) if rank else ()


def _require(func: Any, wish: _Wish, x: Operand) -> None:
    """torch's errors that its meta functions do not know, or raise as another type."""
    name = func._schema.name.removeprefix("aten::")
    if wish.correction is not None and not ELEMENTS[x.element].floating:
        raise RuntimeError(f"{name}(): std and var only support floating point dtypes")
    if wish.op in EXTREMES and x.size == 0:
        dims = [wish.dim] if isinstance(wish.dim, int) else wish.dim
        if not dims:
            error = IndexError if name.startswith("arg") else RuntimeError
            raise error(f"{name}(): Expected reduction dim to be specified for input.numel() == 0.")
        for dim in dims:
            if -len(x.shape) <= dim < len(x.shape) and x.shape[dim] == 0:
                raise IndexError(f"{name}(): Expected reduction dim {dim} to have non-zero size.")


def _case_of(func: Any, wish: _Wish | None, x: Operand, args: Any, kwargs: Any) -> _Case | None:
    if wish is not None:
        _require(func, wish, x)
    if func is aten.logsumexp.default:
        # Its own meta function refuses empty runs, which have a result.
        floating = ELEMENTS[x.element].floating
        result = meta(aten.sum.dim_IntList, args, {"dtype": None if floating else torch.float32})
    else:
        result = meta(func, args, kwargs)
    if wish is None:
        return None
    first, second = result if isinstance(result, (tuple, list)) else (result, None)
    element = element_of(first.dtype)
    if element == "bool" and wish.op in ("sum", "prod"):
        return None
    rank = len(x.shape)
    dims = _dims_of(wish, rank)
    count = math.prod(x.shape[d] for d in dims)
    ordered = wish.op in ORDERED
    order = None
    source = "float32" if wish.op == "logsumexp" and not ELEMENTS[x.element].floating else x.element
    if source != x.element or layout(x.shape, x.strides, dims, ordered=ordered) is None:
        order = (*(d for d in range(rank) if d not in dims), *dims)
        dims = tuple(range(rank - len(dims), rank))
    divisor = float(count) if wish.mean else 1.0
    if wish.correction is not None:
        divisor = max(0.0, count - wish.correction)
        if divisor == 0:
            warnings.warn(
                f"{wish.op}(): degrees of freedom is <= 0. Correction should be less than the reduction factor",
                stacklevel=2,
            )
    second_element = None if second is None else element_of(second.dtype)
    return _Case(wish.op, dims, order, source, tuple(first.shape), element, second_element, divisor, wish.power)


def _enter(func: Any, wish: Callable[..., _Wish | None]) -> None:
    """Enter `func` as the reduction that `wish` makes of its element type and its arguments behind the tensor."""

    @implements(func)
    def handler(self: OpenCLTensor, *args: Any, **kwargs: Any) -> Any:
        x = self.operand
        key = (
            func,
            x.shape,
            x.strides,
            x.element,
            *[tuple(a) if type(a) is list else a for a in args],
            *kwargs.items(),
        )
        case = _cases.get(key)
        if case is None:
            case = _case_of(func, wish(x.element, *args, **kwargs), x, (self, *args), kwargs)
            if case is None:
                return NotImplemented
            if len(_cases) > 8192:
                _cases.clear()
            _cases[key] = case
        op, dims, order, source, shape, element, second_element, divisor, power = case
        if order is not None:
            x = fresh_copy(x.viewed([x.shape[d] for d in order], [x.strides[d] for d in order]), source)
        device = x.array.device
        out = allocated(device, shape, element)
        second = allocated(device, shape, second_element) if second_element is not None else None
        reduce(op, x, dims, out, second, divisor=divisor, power=power)
        return wrap(out) if second is None else (wrap(out), wrap(second))


def _over(op: str, *, mean: bool = False, all_of_none: bool = True) -> Callable[..., _Wish]:
    """Of overloads (dim, keepdim, *, dtype), of which each may be missing."""

    def wish(element: str, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> _Wish:
        return _Wish(op, dim, mean=mean, all_of_none=all_of_none)

    return wish


for _func, _op in (
    (aten.sum.default, "sum"),
    (aten.sum.dim_IntList, "sum"),
    (aten.prod.default, "prod"),
    (aten.prod.dim_int, "prod"),
    (aten.amax.default, "amax"),
    (aten.amin.default, "amin"),
    (aten.max.default, "amax"),
    (aten.min.default, "amin"),
    (aten.max.dim, "max"),
    (aten.min.dim, "min"),
    (aten.aminmax.default, "aminmax"),
    (aten.argmax.default, "argmax"),
    (aten.argmin.default, "argmin"),
    (aten.count_nonzero.default, "count"),
    (aten.count_nonzero.dim_IntList, "count"),
    (aten.logsumexp.default, "logsumexp"),
):
    _enter(_func, _over(_op))
for _func in (aten.mean.default, aten.mean.dim):
    _enter(_func, _over("sum", mean=True))
for _packet in ("any", "all"):
    for _overload in ("default", "dim", "dims"):
        _enter(getattr(getattr(aten, _packet), _overload), _over(_packet, all_of_none=False))


def _nansum(element: str, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> _Wish | None:
    if not ELEMENTS[element].floating:
        return _Wish("sum", dim)
    # Where the result is whole, torch makes whole numbers of NaNs first.
    return _Wish("nansum", dim) if dtype is None or dtype.is_floating_point else None


def _moments(op: str) -> Callable[..., _Wish]:
    def wish(element: str, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> _Wish:
        return _Wish(op, dim, correction=1.0 if correction is None else float(correction))

    return wish


def _norm_wish(power: float | None, dim: Any) -> _Wish:
    power = 2.0 if power is None else float(power)
    named = {0.0: "norm0", 1.0: "norm1", 2.0: "norm2", math.inf: "normmax", -math.inf: "normmin"}
    op = named.get(power, "normp")
    return _Wish(op, dim, power=power if op == "normp" else 1.0)


def _vector_norm(element: str, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> _Wish:  # noqa: A002 (torch's name)
    return _norm_wish(ord, dim)


def _norm(element: str, p: float | None = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> _Wish:
    return _norm_wish(p, dim)


_enter(aten.nansum.default, _nansum)
for _packet in ("var", "std", "var_mean", "std_mean"):
    _enter(getattr(aten, _packet).correction, _moments(_packet))
_enter(aten.linalg_vector_norm.default, _vector_norm)
for _func in (
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dtype,
    aten.norm.ScalarOpt_dim,
    aten.norm.ScalarOpt_dim_dtype,
):
    _enter(_func, _norm)
