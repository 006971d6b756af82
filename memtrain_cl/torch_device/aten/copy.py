"""Copies: within a device, between devices and the host, with conversion and broadcasting; clone, contiguous, cat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memtrain_cl.bridge import host_view
from memtrain_cl.elements import ELEMENTS
from memtrain_cl.launchers.elementwise import Formula, launch
from memtrain_cl.operand import Operand, contiguous_strides
from memtrain_cl.runtimes import import_pyopencl
from memtrain_cl.torch_device.geometry import meta, meta_of
from memtrain_cl.torch_device.registry import aten, implements
from memtrain_cl.torch_device.tensor import (
    OpenCLTensor,
    adopt,
    allocated,
    dtype_of,
    element_of,
    opened,
    same_device,
    wrap,
)
from memtrain_cl.torch_device.transfer import download, from_host, host_copy, write_back

_COPIES = {c: Formula("y0 = x0;", (c,), (c,)) for c in ("float", "int", "long")}
#: To whole numbers from floats, as C converts; NaN and what lies outside is as undefined as in torch.
_TO_WHOLE = {c: Formula(f"y0 = ({c})x0;", ("float",), (c,)) for c in ("int", "long")}
_TO_BOOL = {c: Formula("y0 = x0 != 0;", (c,), ("int",)) for c in ("float", "int", "long")}


def compute_type(element: str) -> str:
    """The C type in which kernels compute with an element."""
    return "float" if ELEMENTS[element].floating else "long" if element == "int64" else "int"


def _formula(source: str, target: str) -> Formula:
    of = compute_type(source)
    if target == "bool":
        return _TO_BOOL[of]
    if ELEMENTS[source].floating and not ELEMENTS[target].floating:
        return _TO_WHOLE[compute_type(target)]
    # From whole numbers to floats the store converts; between whole numbers the wider one carries the bits.
    return _COPIES["float" if ELEMENTS[source].floating else of if ELEMENTS[target].floating else compute_type(target)]


def overlaps(one: Operand, other: Operand) -> bool:
    """Whether two operands may share elements in different places."""
    if one.buffer is not other.buffer or one.size == 0 or other.size == 0:
        return False
    return (one.offset, one.strides, one.shape) != (other.offset, other.strides, other.shape) or (
        one.element != other.element
    )


def require_apart(operand: Operand) -> None:
    """RuntimeError, torch's own, for a target whose elements share memory."""
    if operand.contiguous:
        return
    if any(size > 1 and stride == 0 for size, stride in zip(operand.shape, operand.strides, strict=True)):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )


_SPOKEN = {
    "float32": "Float",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int64": "Long",
    "int32": "Int",
    "int16": "Short",
    "int8": "Char",
    "uint8": "Byte",
    "bool": "Bool",
}


def require_castable(result: str, target: str) -> None:
    """RuntimeError, torch's own, unless a result of one element may be written into a target of another."""
    if target != result and not torch.can_cast(dtype_of(result), dtype_of(target)):
        raise RuntimeError(f"result type {_SPOKEN[result]} can't be cast to the desired output type {_SPOKEN[target]}")


def misfit(target: Sequence[int], result: Sequence[int]) -> RuntimeError:
    """torch's own error for an in-place operation whose result is of another shape."""
    return RuntimeError(f"output with shape {list(target)} doesn't match the broadcast shape {list(result)}")


def copy_operand(source: Operand, target: Operand) -> None:
    """target = source, broadcast and converted, on one device."""
    if target.size == 0:
        return
    require_apart(target)
    if overlaps(source, target):
        source = fresh_copy(source)
    if (
        source.contiguous
        and target.contiguous
        and source.shape == target.shape
        and source.element == target.element
        and (source.buffer is not target.buffer or source.offset != target.offset)
    ):
        size = ELEMENTS[target.element].itemsize
        import_pyopencl().enqueue_copy(
            target.array.device.queue,
            target.buffer,
            source.buffer,
            src_offset=source.offset * size,
            dst_offset=target.offset * size,
            byte_count=target.size * size,
        )
        return
    launch(_formula(source.element, target.element), (target,), (source,))


def fresh_copy(operand: Operand, element: str | None = None) -> Operand:
    """A contiguous copy in memory of its own."""
    target = allocated(operand.array.device, operand.shape, element or operand.element)
    copy_operand(operand, target)
    return target


def contiguous(operand: Operand) -> Operand:
    """The operand itself where it is contiguous, else a contiguous copy."""
    return operand if operand.contiguous else fresh_copy(operand)


def cast(operand: Operand, element: str) -> Operand:
    """The operand itself where it has this type, else a contiguous copy that has."""
    return operand if operand.element == element else fresh_copy(operand, element)


def is_dense(operand: Operand) -> bool:
    """Whether the elements fill one stretch of memory, in any order of the dimensions."""
    if operand.contiguous:
        return True
    expected = 1
    for size, stride in sorted(zip(operand.shape, operand.strides, strict=True), key=lambda pair: pair[1]):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def dense_operand(operand: Operand) -> Operand:
    """The operand itself where its elements fill one stretch of memory, else a contiguous copy."""
    return operand if is_dense(operand) else fresh_copy(operand)


def like_strides(operand: Operand, memory_format: Any = None) -> tuple[int, ...]:
    """Strides of a result like `operand`, by torch's memory formats: preserved, contiguous or channels last."""
    if memory_format in (None, torch.preserve_format) and operand.contiguous:
        return contiguous_strides(operand.shape)
    if memory_format is torch.contiguous_format:
        return contiguous_strides(operand.shape)
    kwargs = {} if memory_format is None else {"memory_format": memory_format}
    return tuple(torch.empty_like(meta_of(operand), **kwargs).stride())


def strided_like(operand: Operand, element: str, memory_format: Any = None) -> Operand:
    """An uninitialised operand of operand's shape, with strides as torch's empty_like gives them."""
    target = allocated(operand.array.device, operand.shape, element)
    return Operand(target.array, target.shape, like_strides(operand, memory_format), 0, element)


@implements(aten.copy_.default)
def copy_(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """self = src, converted and broadcast, wherever the two live."""
    if not isinstance(self, OpenCLTensor):
        if not isinstance(src, OpenCLTensor):
            raise RuntimeError(f"expected a tensor on the device 'opencl', got {self.device} and {src.device}")
        return _copy_to_host(self, src)
    target = self.operand
    if isinstance(src, OpenCLTensor):
        source = src.operand
        if source.array.device.queue is not target.array.device.queue:
            source = from_host(host_copy(src), target.array.device).operand
    else:
        host = src if src.device.type == "cpu" else src.cpu()
        require_apart(target)
        if host.numel() == target.size and target.contiguous and tuple(host.shape) == target.shape:
            write_back(self, host.detach().to(self.dtype))
            return self
        source = from_host(host.detach().to(self.dtype), target.array.device).operand
    if len(source.shape) > len(target.shape) or any(
        size not in (1, wanted) for size, wanted in zip(source.shape[::-1], target.shape[::-1], strict=False)
    ):
        raise RuntimeError(
            f"The size of tensor a ({list(target.shape)}) must match the size of tensor b ({list(source.shape)})"
        )
    copy_operand(source, target)
    return self


def _copy_to_host(target: Tensor, source: OpenCLTensor) -> Tensor:
    direct = (
        target.device.type == "cpu"
        and target.dtype == source.dtype
        and target.shape == source.shape
        and target.is_contiguous()
        and source.operand.contiguous
        and not target.is_conj()
    )
    if direct:
        download(source.operand, host_view(target.detach()))
        return target
    return target.copy_(host_copy(source))


@implements(aten._copy_from.default)
def copy_from(self: Tensor, dst: Tensor, non_blocking: bool = False) -> Tensor:
    """dst = self."""
    return copy_(dst, self, non_blocking)


@implements(aten._copy_from_and_resize.default)
def copy_from_and_resize(self: Tensor, dst: Tensor) -> Tensor:
    """dst = self, resized to it."""
    dst.resize_(self.shape)
    return copy_(dst, self)


@implements(aten._to_copy.default)
def to_copy(
    self: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> Tensor:
    """A copy of another type or on another device."""
    dtype = self.dtype if dtype is None else dtype
    if isinstance(self, OpenCLTensor):
        operand = self.operand
        home = operand.array.device
        if device is None or device == self.device:
            target = strided_like(operand, element_of(dtype), memory_format)
            copy_operand(operand, target)
            return wrap(target)
        if device.type == "opencl":
            other = opened(device)
            if other.queue is home.queue:
                return to_copy(self, dtype=dtype, device=self.device, memory_format=memory_format)
            return from_host(host_copy(self).to(dtype), other)
        host = host_copy(self)
        return host.to(device=device, dtype=dtype, memory_format=memory_format or torch.preserve_format)
    if device is None or device.type != "opencl":
        raise RuntimeError(f"expected a copy from or to the device 'opencl', got {self.device} and {device}")
    element_of(dtype)
    return from_host(
        self.detach().cpu().to(dtype, memory_format=memory_format or torch.preserve_format), opened(device)
    )


@implements(aten.clone.default)
def clone(self: OpenCLTensor, *, memory_format: Any = None) -> OpenCLTensor:
    """A copy in memory of its own."""
    target = strided_like(self.operand, self.operand.element, memory_format)
    copy_operand(self.operand, target)
    return wrap(target)


@implements(aten._local_scalar_dense.default)
def local_scalar_dense(self: OpenCLTensor) -> Any:
    """The one element as a Python number; waits for the device."""
    host = torch.empty((), dtype=self.dtype)
    download(self.operand.viewed((1,)), host_view(host.reshape(1)))
    return host.item()


@implements(aten.cat.default)
def cat(tensors: Sequence[OpenCLTensor], dim: int = 0) -> OpenCLTensor:
    """Tensors end to end along `dim`; empty one-dimensional ones count as nothing, and types are promoted."""
    home = same_device(*tensors)
    key = (dim, *[(t.operand.shape, t.operand.strides, t.operand.element) for t in tensors])
    found = _cats.get(key)
    if found is None:
        result = meta(aten.cat.default, (list(tensors), dim))
        if len(_cats) > 4096:
            _cats.clear()
        found = _cats[key] = (tuple(result.shape), tuple(result.stride()), element_of(result.dtype))
    shape, strides, element = found
    target = allocated(home, shape, element)
    axis = dim + len(shape) if dim < 0 else dim
    at = 0
    for tensor in tensors:
        source = tensor.operand
        if source.shape == (0,) and len(shape) != 1:
            continue
        part = Operand(target.array, source.shape, strides, at * strides[axis], element)
        copy_operand(source, part)
        at += source.shape[axis]
    return wrap(Operand(target.array, shape, strides, 0, element))


_cats: dict[Any, Any] = {}


@implements(aten.stack.default)
def stack(tensors: Sequence[OpenCLTensor], dim: int = 0) -> OpenCLTensor:
    """Tensors of one shape along a new dimension."""
    first = tensors[0].operand.shape
    if any(t.operand.shape != first for t in tensors):
        raise RuntimeError(f"stack expects each tensor to be equal size, but got {[list(t.shape) for t in tensors]}")
    if not -len(first) - 1 <= dim <= len(first):
        raise IndexError(f"Dimension out of range (expected to be in [{-len(first) - 1}, {len(first)}], but got {dim})")
    axis = dim + len(first) + 1 if dim < 0 else dim
    seen = []
    for tensor in tensors:
        operand = tensor.operand
        shape = (*operand.shape[:axis], 1, *operand.shape[axis:])
        strides = (*operand.strides[:axis], 1, *operand.strides[axis:])
        seen.append(wrap(Operand(operand.array, shape, strides, operand.offset, operand.element)))
    return cat(seen, axis)


@implements(aten.resize_.default)
def resize_(self: OpenCLTensor, size: Sequence[int], *, memory_format: Any = None) -> OpenCLTensor:
    """Another shape in place; the bytes stay where they suffice and are copied to larger ones else."""
    shape = tuple(size)
    operand = self.operand
    itemsize = ELEMENTS[operand.element].itemsize
    seen = operand.viewed(shape)
    if seen.size * itemsize + operand.offset * itemsize <= operand.array.nbytes:
        return adopt(self, seen)
    larger = allocated(operand.array.device, shape, operand.element)
    kept = operand.array.nbytes // itemsize - operand.offset
    if kept > 0:
        copy_operand(operand.viewed((kept,)), larger.viewed((kept,)))
    return adopt(self, larger)


def resized_out(out: OpenCLTensor, result: Operand) -> OpenCLTensor:
    """Write a result into the tensor given as ``out=``, resized as torch does."""
    if out.operand.shape != result.shape:
        if out.operand.element == result.element and out.operand.size == 0:
            return adopt(out, result)
        resize_(out, result.shape)
    copy_operand(result, out.operand)
    return out


@implements(aten.is_same_size.default)
def is_same_size(self: Tensor, other: Tensor) -> bool:
    """Whether the shapes are equal."""
    return self.shape == other.shape
