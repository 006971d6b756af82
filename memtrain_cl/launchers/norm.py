"""Launchers of kernels/norm.cl: layer norm and root-mean-square norm over the rows of [rows, n], and their backwards.

x, y and their gradients are of one element, float32, float16 or bfloat16; weight and bias of one element, which may be
another; mean and rstd float32, one a row. Everything is contiguous, of any shape, and computed in float32. Gradients of
weight and bias are summed in a fixed order, without atomics.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from memtrain_cl.device import Device
from memtrain_cl.launchers.rows import FLOATING, RowShape, aligned_rows, require_rows, row_shape
from memtrain_cl.operand import Operand, empty_operand, place_of
from memtrain_cl.program import Kernel, get_kernel
from memtrain_cl.tuning import ceil_div


@dataclass(frozen=True)
class _Plan:
    kernel: Kernel
    shape: RowShape
    sizes: tuple[np.uint32, np.uint32, np.uint32]


@functools.lru_cache(maxsize=4096)
def _plan(
    device: Device, name: str, rms: bool, elements: tuple[str, str, str], rows: int, n: int, aligned: bool, parts: bool
) -> _Plan:
    X, W, B = elements
    shape = row_shape(device, rows, n, aligned=aligned, accumulating=parts)
    constants = {**shape.constants, "NAME": name, "RMS": int(rms), "X": X, "W": W, "B": B, "PARTS": int(parts)}
    return _Plan(
        get_kernel(device, "norm", name, **constants),
        shape,
        (np.uint32(n), np.uint32(rows), np.uint32(shape.per)),
    )


def _require(name: str, operand: Operand | None, size: int, element: str) -> None:
    if operand is not None and not (operand.element == element and operand.size == size and operand.contiguous):
        raise ValueError(f"expected {name} contiguous, {size} elements of {element}, got {operand}")


def _rows(x: Operand, n: int) -> int:
    if x.element not in FLOATING:
        raise TypeError(f"expected x of {' or '.join(FLOATING)}, got {x.element}")
    _require("x", x, x.size, x.element)
    return x.size // n if n else 0


def norm(
    x: Operand,
    weight: Operand | None,
    bias: Operand | None,
    y: Operand,
    mean: Operand | None,
    rstd: Operand,
    *,
    n: int,
    eps: float,
) -> Any:
    """y = (x - mean)*rstd*weight + bias with the mean and rstd = 1/sqrt(variance + eps) of each row, n elements of x.

    mean None: the root-mean-square norm, rstd = 1/sqrt(mean of squares + eps). weight, bias: n elements or None. The
    launch's event, None where x is empty.
    """
    rows = _rows(x, n)
    if x.size == 0:
        return None
    columns = [operand for operand in (weight, bias) if operand is not None]
    _require("y", y, rows * n, x.element)
    _require("mean", mean, rows, "float32")
    _require("rstd", rstd, rows, "float32")
    for operand in columns:
        _require("weight or bias", operand, n, columns[0].element)
    aligned = aligned_rows(n, x, y, *columns)
    elements = (x.element, weight.element if weight else "", bias.element if bias else "")
    plan = _plan(x.device, "norm_forward", mean is None, elements, rows, n, aligned, False)
    return plan.kernel(
        plan.shape.global_size,
        plan.shape.local_size,
        *x.place,
        *place_of(weight, x),
        *place_of(bias, x),
        *y.place,
        *place_of(mean, rstd),
        *rstd.place,
        *plan.sizes,
        np.float32(eps),
    )


def norm_backward(
    grad_y: Operand,
    x: Operand,
    mean: Operand | None,
    rstd: Operand,
    weight: Operand | None,
    grad_x: Operand,
    grad_weight: Operand | None,
    grad_bias: Operand | None,
    *,
    n: int,
) -> Any:
    """Gradients of `norm` by x, weight and bias; the last launch's event, None where x is empty.

        grad_x = rstd*(gw - mean(gw) - xhat*mean(gw*xhat)),   gw = grad_y*weight,   xhat = (x - mean)*rstd
        grad_weight = sum over rows of grad_y*xhat,   grad_bias = sum over rows of grad_y

    mean None: the root-mean-square norm, without mean(gw) and without a bias. grad_weight, grad_bias: None where not
    wanted; of weight's element.
    """
    if mean is None and grad_bias is not None:
        raise ValueError("expected no gradient of a bias from the root-mean-square norm, which has none")
    rows = _rows(x, n)
    if x.size == 0:
        return None
    _require("grad_y", grad_y, rows * n, x.element)
    _require("grad_x", grad_x, rows * n, x.element)
    _require("mean", mean, rows, "float32")
    _require("rstd", rstd, rows, "float32")
    columns = [operand for operand in (weight, grad_weight, grad_bias) if operand is not None]
    for operand in columns:
        _require("weight or its gradient or the bias's", operand, n, columns[0].element)
    wanted = grad_weight or grad_bias
    aligned = aligned_rows(n, x, grad_y, grad_x, *((weight,) if weight else ()))
    elements = (x.element, weight.element if weight else "", "")
    plan = _plan(x.device, "norm_backward", mean is None, elements, rows, n, aligned, wanted is not None)
    lines = 1 if mean is None else 2
    parts = empty_operand(x.device, (plan.shape.parts, lines, n), "float32") if wanted else rstd
    event = plan.kernel(
        plan.shape.global_size,
        plan.shape.local_size,
        *grad_y.place,
        *x.place,
        *place_of(mean, rstd),
        *rstd.place,
        *place_of(weight, x),
        *grad_x.place,
        parts,
        *plan.sizes,
    )
    return column_sums(parts, grad_weight, grad_bias) if wanted else event


def column_sums(parts: Operand, first: Operand | None, second: Operand | None) -> Any:
    """first [n] = sum over i of parts[i, 0], second [n] = that of parts[i, 1], parts float32 [count, 1 or 2, n].

    In a fixed order. None: not wanted. first and second are of one floating element, contiguous. The launch's event.
    """
    wanted = first or second
    if wanted is None:
        return None
    count, lines, n = parts.shape
    require_rows("parts", parts, parts.shape, ("float32",))
    _require("first", first, n, wanted.element)
    _require("second", second, n, wanted.element)
    columns = 2 * n if second is not None else n
    kernel, gpu = _sums_kernel(parts.device, wanted.element)
    begins = first or empty_operand(parts.device, (n,), wanted.element)
    return kernel(
        (ceil_div(columns, 16) * 16, 16) if gpu else (ceil_div(columns, 8),),
        (16, 16) if gpu else (1,),
        *parts.place,
        *begins.place,
        *place_of(second, begins),
        np.uint32(n),
        np.uint64(lines * n),
        np.uint64(columns),
        np.uint32(count),
    )


@functools.lru_cache(maxsize=256)
def _sums_kernel(device: Device, element: str) -> tuple[Kernel, bool]:
    shape = row_shape(device, 1, 1, aligned=False)
    kernel = get_kernel(device, "column_sums", "column_sums", **shape.constants, TARGET=element)
    return kernel, bool(shape.constants["GPU"])
