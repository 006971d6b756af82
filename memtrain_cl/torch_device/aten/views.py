"""Views: another geometry over the same bytes, by torch's own arithmetic on meta tensors, remembered per geometry."""

from __future__ import annotations

from typing import Any

import torch

from memtrain_cl.elements import ELEMENTS
from memtrain_cl.operand import Operand, contiguous_strides
from memtrain_cl.torch_device.geometry import meta_of
from memtrain_cl.torch_device.registry import KINDS, Handler, aten, implements, is_composite
from memtrain_cl.torch_device.storages import DeviceStorage, Placed
from memtrain_cl.torch_device.tensor import OpenCLTensor, adopt, element_of, view_of
from memtrain_cl.torch_device.transfer import from_host

#: Operations that promise no alias, and whose result may be one all the same.
_UNPROMISED = {aten._unsafe_view.default, aten.lift_fresh.default, aten._reshape_alias.default}
_geometries: dict[Any, Any] = {}
_LIMIT = 65536


def _geometry(func: Any, operand: Operand, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """(shape, strides, offset from the first element) of the result, or a list of those."""
    frozen = tuple([tuple(a) if type(a) is list else a for a in args])
    key = (func, operand.shape, operand.strides, frozen, tuple(kwargs.items()) if kwargs else None)
    found = _geometries.get(key)
    if found is None:
        result = func(meta_of(operand), *args, **kwargs)
        if isinstance(result, torch.Tensor):
            element_of(result.dtype)  # complex views are none of the device's
            found = (tuple(result.shape), result.stride(), result.storage_offset())
        else:
            found = [(tuple(r.shape), r.stride(), r.storage_offset()) for r in result]
        if len(_geometries) >= _LIMIT:
            _geometries.clear()
        _geometries[key] = found
    return found


def _seen(operand: Operand, geometry: Any) -> Operand:
    shape, strides, offset = geometry
    return Operand(operand.array, shape, strides, operand.offset + offset, operand.element)


def view_operands(func: Any, tensor: OpenCLTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operand, or the list of operands, of a view of `tensor`."""
    operand = tensor.operand
    geometry = _geometry(func, operand, args, kwargs)
    return [_seen(operand, one) for one in geometry] if isinstance(geometry, list) else _seen(operand, geometry)


def _kind(func: Any) -> Handler | None:
    if torch.Tag.inplace_view in func.tags and func._schema.name.endswith("_") and func in _SEEN_AS:
        return _in_place(func)
    if func not in _UNPROMISED and (not func.is_view or is_composite(func)):
        return None

    def view(self: OpenCLTensor, *args: Any, **kwargs: Any) -> Any:
        seen = view_operands(func, self, args, kwargs)
        return [view_of(self, one) for one in seen] if isinstance(seen, list) else view_of(self, seen)

    view.on_device = True  # type: ignore[attr-defined]
    return view


#: Changes of a tensor's own geometry, and the views that compute them.
_SEEN_AS = {
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
}


def _in_place(func: Any) -> Handler:
    view = _SEEN_AS[func]

    def change(self: OpenCLTensor, *args: Any, **kwargs: Any) -> OpenCLTensor:
        return adopt(self, view_operands(view, self, args, kwargs))

    change.on_device = True  # type: ignore[attr-defined]
    return change


KINDS.append(_kind)


def _within(operand: Operand, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Operand:
    """The view, unless it reaches outside the bytes."""
    seen = Operand(operand.array, shape, strides, offset, operand.element)
    if min(strides, default=0) < 0 or offset < 0:
        raise RuntimeError(f"as_strided: expected strides and offset of at least 0, got {strides} and {offset}")
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    held = operand.array.nbytes // ELEMENTS[operand.element].itemsize
    if seen.size and last >= held:
        raise RuntimeError(
            f"setStorage: sizes {list(shape)}, strides {list(strides)}, storage offset {offset} require {last + 1} "
            f"elements and are out of bounds for storage of {held}"
        )
    return seen


@implements(aten.as_strided.default)
def as_strided(self: OpenCLTensor, size: Any, stride: Any, storage_offset: int | None = None) -> OpenCLTensor:
    """Any geometry within the tensor's bytes; the offset counts from their begin."""
    offset = self.operand.offset if storage_offset is None else storage_offset
    return view_of(self, _within(self.operand, tuple(size), tuple(stride), offset))


@implements(aten.as_strided_.default)
def as_strided_(self: OpenCLTensor, size: Any, stride: Any, storage_offset: int | None = None) -> OpenCLTensor:
    """as_strided in place."""
    offset = self.operand.offset if storage_offset is None else storage_offset
    return adopt(self, _within(self.operand, tuple(size), tuple(stride), offset))


@implements(aten.view.dtype)
def view_dtype(self: OpenCLTensor, dtype: torch.dtype) -> OpenCLTensor:
    """The same bytes as another type; torch's rules for types of another size."""
    operand = self.operand
    element = element_of(dtype)
    seen = meta_of(operand).view(dtype)
    offset = operand.offset * ELEMENTS[operand.element].itemsize // ELEMENTS[element].itemsize
    return view_of(self, Operand(operand.array, tuple(seen.shape), seen.stride(), offset, element))


@implements(aten._neg_view.default)
def neg_view(self: OpenCLTensor) -> OpenCLTensor:
    """TypeError: torch makes such views of complex tensors alone."""
    raise TypeError("the device 'opencl' holds no negated views; use neg()")


@implements(aten.set_.source_Tensor)
def set_source(self: OpenCLTensor, source: OpenCLTensor) -> OpenCLTensor:
    """Make `self` another name of source's bytes."""
    return adopt(self, source.operand)


@implements(aten.set_.source_Storage_storage_offset)
def set_storage(self: OpenCLTensor, source: Any, storage_offset: int, size: Any, stride: Any = ()) -> OpenCLTensor:
    """Make `self` a tensor of another's storage, or of one that torch.load brought. RuntimeError for other storages."""
    if source.device != self.device or not isinstance(source, (DeviceStorage, Placed)):
        raise RuntimeError(f"expected a storage of a tensor on {self.device}, got one on {source.device}")
    if isinstance(source, Placed) and source.array is None:
        source.array = from_host(source.bytes_on_host(), self.operand.array.device).operand.array
    strides = tuple(stride) or contiguous_strides(tuple(size))
    whole = Operand(source.array, self.operand.shape, self.operand.strides, 0, self.operand.element)
    return adopt(self, _within(whole, tuple(size), strides, storage_offset))


@implements(aten.set_.source_Storage)
def set_whole_storage(self: OpenCLTensor, source: Any) -> OpenCLTensor:
    """Make `self` a vector of all that a storage holds."""
    return set_storage(self, source, 0, (source.nbytes() // self.element_size(),))


@implements(aten._has_same_storage_numel.default)
def has_same_storage_numel(self: OpenCLTensor, other: OpenCLTensor) -> bool:
    """Whether both lie in as many elements of storage."""
    return self.operand.array.nbytes == other.operand.array.nbytes
