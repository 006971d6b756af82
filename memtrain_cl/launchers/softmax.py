"""Launchers of kernels/softmax.cl: softmax and logarithmic softmax along any dimension, and their backwards.

Operands are contiguous and of one shape; the elements float32, float16 or bfloat16, computed in float32.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from memtrain_cl.device import Device
from memtrain_cl.errors import UnsupportedDevice
from memtrain_cl.launchers.rows import FLOATING, aligned_rows, require_rows, row_shape
from memtrain_cl.operand import Operand
from memtrain_cl.program import Kernel, get_kernel
from memtrain_cl.tuning import SIZE_LIMIT, ceil_div

#: Columns of a work-group in the kernels that walk a dimension with others inside it.
COLUMN_GROUP = 64


@dataclass(frozen=True)
class _Plan:
    kernel: Kernel
    global_size: tuple[int, ...]
    local_size: tuple[int, ...]
    sizes: tuple[np.generic, ...]


@functools.lru_cache(maxsize=4096)
def _plan(
    device: Device, name: str, log: bool, elements: tuple[str, str, str], outer: int, n: int, inner: int, aligned: bool
) -> _Plan:
    X, Y, Z = elements
    name = name if inner == 1 else f"{name}_columns"
    kinds = {"NAME": name, "LOG": int(log), "X": X, "Y": Y, "Z": Z}
    if inner == 1:
        shape = row_shape(device, outer, n, aligned=aligned)
        kernel = get_kernel(device, "softmax", name, **shape.constants, **kinds)
        sizes: tuple[np.generic, ...] = (np.uint32(n), np.uint32(outer), np.uint32(shape.per))
        return _Plan(kernel, shape.global_size, shape.local_size, sizes)
    if n >= SIZE_LIMIT:
        raise UnsupportedDevice(f"expected fewer than 2^31 elements along a dimension, got {n}")
    columns = outer * inner
    # Whatever the row kernels of the file would take.
    shape = row_shape(device, 1, 1, aligned=False)
    kernel = get_kernel(device, "softmax", name, **shape.constants, **kinds)
    sizes = (np.uint32(n), np.uint64(inner), np.uint64(columns))
    return _Plan(kernel, (ceil_div(columns, COLUMN_GROUP) * COLUMN_GROUP,), (COLUMN_GROUP,), sizes)


def _planned(name: str, log: bool, dim: int, x: Operand, y: Operand, z: Operand) -> _Plan:
    shape = x.shape
    axis = dim % len(shape) if shape else 0
    n = shape[axis] if shape else 1
    inner = math.prod(shape[axis + 1 :])
    aligned = inner == 1 and aligned_rows(n, x, y, z)
    return _plan(x.device, name, log, (x.element, y.element, z.element), x.size // n // inner, n, inner, aligned)


def softmax(x: Operand, out: Operand, dim: int, *, log: bool, safe: bool = False) -> Any:
    """out = exp(x - max) / sum(exp(x - max)) along `dim`, or its logarithm; the launch's event, None where x is empty.

    out may be of another floating element. safe: rows of -inf alone give zeros instead of NaN (not for logarithms).
    """
    require_rows("x", x, x.shape, FLOATING)
    require_rows("out", out, x.shape, FLOATING)
    if x.size == 0:
        return None
    plan = _planned("softmax", log, dim, x, x, out)
    return plan.kernel(
        plan.global_size, plan.local_size, *x.place, *out.place, *plan.sizes, np.uint32(safe and not log)
    )


def softmax_backward(grad_y: Operand, y: Operand, grad_x: Operand, dim: int, *, log: bool) -> Any:
    """grad_x = y*(grad_y - sum(grad_y*y)) along `dim`, or grad_y - exp(y)*sum(grad_y) for the logarithmic one.

    y is the result of the forward. The launch's event, None where y is empty.
    """
    require_rows("y", y, y.shape, FLOATING)
    require_rows("grad_y", grad_y, y.shape, FLOATING)
    require_rows("grad_x", grad_x, y.shape, FLOATING)
    if y.size == 0:
        return None
    plan = _planned("softmax_backward", log, dim, grad_y, y, grad_x)
    return plan.kernel(
        plan.global_size,
        plan.local_size,
        *grad_y.place,
        *y.place,
        *grad_x.place,
        *plan.sizes,
    )
