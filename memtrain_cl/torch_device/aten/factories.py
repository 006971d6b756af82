"""New tensors: empty and its kin, fills, ranges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memtrain_cl.launchers.elementwise import Formula, launch
from memtrain_cl.operand import Operand
from memtrain_cl.torch_device.aten.copy import compute_type, copy_operand, require_apart, resize_, strided_like
from memtrain_cl.torch_device.registry import aten, implements
from memtrain_cl.torch_device.tensor import (
    OpenCLTensor,
    allocated,
    element_of,
    opened,
    wrap,
)

_FILL = {c: Formula("y0 = s0;", (), (c,), (c,)) for c in ("float", "int", "long")}
#: Position i lies in the inner dimension of a contiguous vector.
_RANGE = {
    "float": Formula("y0 = s0 + (float)i * s1;", (), ("float",), ("float", "float")),
    "long": Formula("y0 = s0 + (long)i * s1;", (), ("long",), ("long", "long")),
}


def fill(operand: Operand, value: float) -> None:
    """Every element = value."""
    require_apart(operand)
    compute = compute_type(operand.element)
    if operand.element == "bool":
        value = value != 0
    launch(_FILL[compute], (operand,), (), float(value) if compute == "float" else int(value))


def _require_sizes(size: Sequence[int]) -> None:
    if min(size, default=0) < 0:
        raise RuntimeError(f"Trying to create tensor with negative dimension {min(size)}: {list(size)}")


def _strided(target: torch.device | None, layout: Any) -> None:
    if layout not in (None, torch.strided):
        raise TypeError(f"expected a dense tensor on the device 'opencl', got layout {layout} on {target}")


def new(
    size: Sequence[int], dtype: torch.dtype | None, layout: Any, device: torch.device | None, memory_format: Any = None
) -> OpenCLTensor:
    """An uninitialised tensor as torch.empty makes it; TypeError for what the device does not hold."""
    _strided(device, layout)
    _require_sizes(size)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype == torch.float64 and torch.get_default_dtype() == torch.float64:
        raise TypeError("the device 'opencl' holds no float64; set torch.set_default_dtype(torch.float32)")
    operand = allocated(opened(device), size, element_of(dtype))
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        strides = torch.empty(tuple(size), device="meta", memory_format=memory_format).stride()
        operand = Operand(operand.array, operand.shape, tuple(strides), 0, operand.element)
    return wrap(operand)


@implements(aten.empty.memory_format)
def empty_memory_format(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: Any = None,
) -> OpenCLTensor:
    """An uninitialised tensor."""
    return new(size, dtype, layout, device, memory_format)


@implements(aten.empty_strided.default)
def empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> OpenCLTensor:
    """An uninitialised tensor of these strides."""
    _strided(device, layout)
    _require_sizes(size)
    shape, strides = tuple(size), tuple(stride)
    span = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    element = element_of(torch.get_default_dtype() if dtype is None else dtype)
    return wrap(Operand(allocated(opened(device), (span,), element).array, shape, strides, 0, element))


def _like(
    self: OpenCLTensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: Any = None,
) -> Any:
    """A tensor of self's shape, on the device named or on self's; a CPU tensor where that is asked for."""
    dtype = self.dtype if dtype is None else dtype
    if device is not None and device.type != "opencl":
        return torch.empty_like(torch.empty_strided(self.shape, self.stride(), dtype=dtype), device=device)
    _strided(device, layout)
    if device is not None and device != self.device:
        return new(self.shape, dtype, None, device)
    return wrap(strided_like(self.operand, element_of(dtype), memory_format))


def _sized(
    self: OpenCLTensor,
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Any:
    """A tensor of self's type, on the device named or on self's; a CPU tensor where that is asked for."""
    dtype = self.dtype if dtype is None else dtype
    if device is not None and device.type != "opencl":
        return torch.empty(tuple(size), dtype=dtype, device=device)
    return new(size, dtype, layout, self.device if device is None else device)


def _filled(tensor: Any, value: Any) -> Any:
    if isinstance(tensor, OpenCLTensor):
        fill(tensor.operand, value)
        return tensor
    return tensor.fill_(value)


implements(aten.empty_like.default)(_like)
implements(aten.zeros_like.default)(lambda self, **options: _filled(_like(self, **options), 0))
implements(aten.ones_like.default)(lambda self, **options: _filled(_like(self, **options), 1))
implements(aten.full_like.default)(lambda self, fill_value, **options: _filled(_like(self, **options), fill_value))
implements(aten.new_empty.default)(_sized)
implements(aten.new_zeros.default)(lambda self, size, **options: _filled(_sized(self, size, **options), 0))
implements(aten.new_ones.default)(lambda self, size, **options: _filled(_sized(self, size, **options), 1))
implements(aten.new_full.default)(
    lambda self, size, fill_value, **options: _filled(_sized(self, size, **options), fill_value)
)


@implements(aten.new_empty_strided.default)
def new_empty_strided(
    self: OpenCLTensor, size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, **options: Any
) -> Any:
    """An uninitialised tensor of self's type and device, of these strides."""
    device = options.get("device") or self.device
    if device.type != "opencl":
        return torch.empty_strided(tuple(size), tuple(stride), dtype=dtype or self.dtype, device=device)
    return empty_strided(size, stride, dtype=dtype or self.dtype, device=device)


@implements(aten.fill_.Scalar)
def fill_scalar(self: OpenCLTensor, value: Any) -> OpenCLTensor:
    """Every element = value."""
    fill(self.operand, value)
    return self


@implements(aten.fill_.Tensor)
def fill_tensor(self: OpenCLTensor, value: Tensor) -> OpenCLTensor:
    """Every element = the one of `value`."""
    if value.ndim:
        raise RuntimeError(f"fill_ only supports 0-dimension value tensor but got tensor with {value.ndim} dimensions.")
    if isinstance(value, OpenCLTensor):
        copy_operand(value.operand, self.operand)
    else:
        fill(self.operand, value.item())
    return self


@implements(aten.fill.Scalar, aten.fill.Tensor)
def filled(self: OpenCLTensor, value: Any) -> Any:
    """A tensor like `self`, of one value."""
    made = wrap(strided_like(self.operand, self.operand.element))
    return fill_tensor(made, value) if isinstance(value, Tensor) else fill_scalar(made, value)


@implements(aten.zero_.default)
def zero_(self: OpenCLTensor) -> OpenCLTensor:
    """Every element = 0."""
    fill(self.operand, 0)
    return self


def fill_range(target: Operand, start: Any, step: Any) -> None:
    """target[i] = start + i*step for a contiguous vector."""
    whole = all(isinstance(value, int) for value in (start, step))
    launch(_RANGE["long" if whole else "float"], (target,), (), start, step)


def _range_length(start: Any, end: Any, step: Any) -> int:
    if step == 0:
        raise RuntimeError("step must be nonzero")
    if (step > 0) != (end >= start) and end != start:
        raise RuntimeError("upper bound and lower bound inconsistent with step sign")
    if all(isinstance(value, int) for value in (start, end, step)):
        return int(-(-(end - start) // step))
    length: int = math.ceil((end - start) / step)
    return length


def arange(start: Any, end: Any, step: Any, dtype: torch.dtype | None, device: torch.device | None) -> OpenCLTensor:
    """start, start + step, ... below end; whole numbers give int64."""
    if dtype is None:
        whole = all(isinstance(value, int) for value in (start, end, step))
        dtype = torch.int64 if whole else torch.get_default_dtype()
    made = new((_range_length(start, end, step),), dtype, None, device)
    fill_range(made.operand, start, step)
    return made


@implements(aten.arange.start_out)
def arange_start_out(start: Any, end: Any, step: Any = 1, *, out: OpenCLTensor) -> OpenCLTensor:
    """arange into `out`."""
    length = _range_length(start, end, step)
    if out.numel() != length:
        resize_(out, (length,))
    made = arange(start, end, step, out.dtype, out.device)
    copy_operand(made.operand, out.operand)
    return out


@implements(aten.arange.default)
def arange_end(end: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None) -> Any:
    """0, 1, ... below end."""
    _strided(device, layout)
    return arange(0, end, 1, dtype, device)


@implements(aten.arange.start)
def arange_start(
    start: Any, end: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Any:
    """start, start + 1, ... below end."""
    _strided(device, layout)
    return arange(start, end, 1, dtype, device)


@implements(aten.arange.start_step)
def arange_start_step(
    start: Any,
    end: Any,
    step: Any = 1,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Any:
    """start, start + step, ... below end."""
    _strided(device, layout)
    return arange(start, end, step, dtype, device)


@implements(aten.eye.m_out)
def eye_m_out(n: int, m: int, *, out: OpenCLTensor) -> OpenCLTensor:
    """Ones on the diagonal of [n, m], zeros elsewhere."""
    resize_(out, (n, m))
    fill(out.operand, 0)
    operand = out.operand
    fill(operand.viewed((min(n, m),), (operand.strides[0] + operand.strides[1],)), 1)
    return out


@implements(aten.eye.out)
def eye_out(n: int, *, out: OpenCLTensor) -> OpenCLTensor:
    """The identity [n, n]."""
    return eye_m_out(n, n, out=out)


def _triangle(upper: bool) -> Any:
    keep = ">=" if upper else "<="
    bodies = {c: Formula(f"y0 = x1 - x2 {keep} s0 ? x0 : 0;", (c, "long", "long"), (c,), ("long",)) for c in _FILL}

    def handler(self: OpenCLTensor, diagonal: int = 0) -> OpenCLTensor:
        operand = self.operand
        if len(operand.shape) < 2:
            raise RuntimeError(f"tri{'u' if upper else 'l'}: input tensor must have at least 2 dimensions")
        target = allocated(operand.array.device, operand.shape, operand.element)
        rows, columns = operand.shape[-2:]
        steps = allocated(operand.array.device, (max(rows, columns),), "int64")
        fill_range(steps, 0, 1)
        column, row = steps.viewed((columns,)), steps.viewed((rows, 1), (1, 1))
        launch(bodies[compute_type(operand.element)], (target,), (operand, column, row), diagonal)
        return wrap(target)

    return handler


implements(aten.tril.default)(_triangle(False))
implements(aten.triu.default)(_triangle(True))
