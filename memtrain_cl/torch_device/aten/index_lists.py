"""Indexing with tensors and masks: x[i, :, mask] and its assignment; nonzero, masked_select, masked_scatter.

A mask is a list of places, so the host waits for their count. A tensor of n indexed dimensions is seen as one of
[outer, size, inner] with the indexed dimensions joined to `size`, and the lists of indices are joined likewise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memtrain_cl.launchers import index as launch
from memtrain_cl.launchers.index_mask import coordinates, positions
from memtrain_cl.launchers.index_plan import join_index
from memtrain_cl.operand import Operand
from memtrain_cl.torch_device.aten.copy import contiguous, fresh_copy, require_apart
from memtrain_cl.torch_device.aten.factories import fill
from memtrain_cl.torch_device.aten.indexing import InPlace, apart, common_shape
from memtrain_cl.torch_device.registry import aten, implements
from memtrain_cl.torch_device.tensor import OpenCLTensor, allocated, wrap


@dataclass
class _Entry:
    """One index and the dimensions begin .. end that it takes. mask: it came from one, so no place occurs twice."""

    begin: int
    end: int
    places: Operand
    mask: bool


@dataclass
class _Place:
    """Where indices lead. seen: the indexed operand, indexed dimensions together. split: outer, size, inner of it.

    index: int64 or int32 [n]. shape: of the result. distinct: no place occurs twice.
    """

    seen: Operand
    split: tuple[int, int, int]
    index: Operand
    shape: tuple[int, ...]
    distinct: bool


def _entries(self: OpenCLTensor, indices: Sequence[Any]) -> list[_Entry] | None:
    """The indices as lists of places; None for what only the host does: numbers of type bool as masks."""
    shape = self.operand.shape
    entries = []
    dim = 0
    for number, index in enumerate(indices):
        if index is None:
            dim += 1
            continue
        mask = index.dtype in (torch.bool, torch.uint8)
        if not mask and index.dtype not in (torch.int64, torch.int32):
            raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
        if mask and index.ndim == 0:
            return None
        end = dim + (index.ndim if mask else 1)
        if end > len(shape):
            raise IndexError(f"too many indices for tensor of dimension {len(shape)}")
        if mask and tuple(index.shape) != shape[dim:end]:
            raise IndexError(
                f"The shape of the mask {list(index.shape)} at index {number} does not match the shape of the indexed "
                f"tensor {list(shape)} at index {dim}"
            )
        home = index if isinstance(index, OpenCLTensor) else index.to(self.device)
        places = positions(contiguous(home.operand)) if mask else home.operand
        entries.append(_Entry(dim, end, places, mask))
        dim = end
    if dim > len(shape):
        raise IndexError(f"too many indices for tensor of dimension {len(shape)}")
    return entries


def _broadcast(operand: Operand, shape: tuple[int, ...]) -> Operand:
    """An operand expanded to `shape`, which it broadcasts to."""
    if operand.shape == shape:
        return operand
    missing = len(shape) - len(operand.shape)
    strides = [0 if size == 1 else stride for size, stride in zip(operand.shape, operand.strides, strict=True)]
    return operand.viewed(shape, (*[0] * missing, *strides))


def _joined(entries: list[_Entry], shape: tuple[int, ...], count: tuple[int, ...]) -> Operand:
    """The entries, each broadcast to `count`, as one list of places in their dimensions together."""
    lists = [
        (contiguous(_broadcast(entry.places, count)), math.prod(shape[entry.begin : entry.end])) for entry in entries
    ]
    flat = [(places.viewed((places.size,)), size) for places, size in lists]
    return flat[0][0] if len(flat) == 1 else join_index(flat)


def _place(self: OpenCLTensor, indices: Sequence[Any]) -> _Place | None:
    """Where `indices` lead in self; None for what only the host does."""
    entries = _entries(self, indices)
    if not entries:
        return None
    operand = self.operand
    shape = operand.shape
    try:
        count = common_shape(*[entry.places.shape for entry in entries])
    except RuntimeError as error:
        shapes = ", ".join(str(list(entry.places.shape)) for entry in entries)
        raise IndexError(
            f"shape mismatch: indexing tensors could not be broadcast together with shapes {shapes}"
        ) from error
    begin, end = entries[0].begin, entries[-1].end
    together = all(one.end == other.begin for one, other in itertools.pairwise(entries))
    if not together:
        # Indexed dimensions that lie apart come first, in the result too.
        indexed = [dim for entry in entries for dim in range(entry.begin, entry.end)]
        order = indexed + [dim for dim in range(len(shape)) if dim not in indexed]
        operand = operand.viewed([shape[d] for d in order], [operand.strides[d] for d in order])
        begin, end = 0, len(indexed)
    before, middle, after = operand.shape[:begin], operand.shape[begin:end], operand.shape[end:]
    split = (math.prod(before), math.prod(middle), math.prod(after))
    return _Place(
        operand,
        split,
        _joined(entries, shape, count),
        (*before, *count, *after),
        len(entries) == 1 and entries[0].mask,
    )


@implements(aten.index.Tensor, aten._unsafe_index.Tensor)
def index_tensor(self: OpenCLTensor, indices: Sequence[Any]) -> Any:
    """self[indices]: None takes a whole dimension, a mask the places where it is True."""
    place = _place(self, indices)
    if place is None:
        return NotImplemented
    out = allocated(self.operand.array.device, place.shape, self.operand.element)
    if out.size:
        launch.select(contiguous(place.seen).viewed(place.split), 1, place.index, out, wrap=True)
    return wrap(out)


def _index_put(self: OpenCLTensor, indices: Sequence[Any], values: Any, accumulate: bool) -> Any:
    if values.dtype != self.dtype:
        raise RuntimeError(
            f"Index put requires the source and destination dtypes match, got {self.dtype} for the destination and "
            f"{values.dtype} for the source."
        )
    values = values if isinstance(values, OpenCLTensor) else values.to(self.device)
    given = [index for index in indices if index is not None]
    if not accumulate and values.numel() == 1 and len(given) == 1 and given[0].dtype == torch.bool and given[0].ndim:
        return _fill_mask(self, indices, values)
    require_apart(self.operand)
    place = _place(self, indices)
    if place is None:
        return NotImplemented
    whole = InPlace(place.seen)
    target = whole.target.viewed(place.split)
    source = values.operand
    if source.size != 1:
        while len(source.shape) > len(place.shape) and source.shape[0] == 1:
            source = source.viewed(source.shape[1:], source.strides[1:])
        try:
            fits = common_shape(source.shape, place.shape) == place.shape
        except RuntimeError:
            fits = False
        if not fits:
            raise RuntimeError(
                f"shape mismatch: value tensor of shape {list(source.shape)} cannot be broadcast to indexing result of "
                f"shape {list(place.shape)}"
            )
        source = _broadcast(source, place.shape)
    source = apart(source, target)
    if accumulate:
        launch.add(target, 1, place.index, source, wrap=True)
    else:
        launch.put(target, 1, place.index, source, wrap=True, distinct=place.distinct)
    whole.finish()
    return self


def _fill_mask(self: OpenCLTensor, indices: Sequence[Any], value: OpenCLTensor) -> OpenCLTensor:
    """One value where a mask is True needs no list of places, and nobody has to wait."""
    dim = next(number for number, index in enumerate(indices) if index is not None)
    mask = indices[dim]
    end = dim + mask.ndim
    if tuple(mask.shape) != self.operand.shape[dim:end]:
        raise IndexError(
            f"The shape of the mask {list(mask.shape)} at index {dim} does not match the shape of the indexed tensor "
            f"{list(self.shape)} at index {dim}"
        )
    mask = mask if isinstance(mask, OpenCLTensor) else mask.to(self.device)
    seen = mask.reshape((*mask.shape, *[1] * (self.ndim - end)))
    self.masked_fill_(seen, value.reshape(()))
    return self


@implements(aten.index_put_.default)
def index_put_(self: OpenCLTensor, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """self[indices] = values, or += values in the order of the indices; of equal indices the last counts."""
    return _index_put(self, indices, values, accumulate)


@implements(aten._index_put_impl_.default)
def index_put_impl_(
    self: OpenCLTensor, indices: Sequence[Any], values: Any, accumulate: bool = False, unsafe: bool = False
) -> Any:
    """The same, as derivatives call it."""
    return _index_put(self, indices, values, accumulate)


@implements(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(self: OpenCLTensor, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """index_put_ on a copy."""
    return _index_put(wrap(fresh_copy(self.operand)), indices, values, accumulate)


@implements(aten.nonzero.default)
def nonzero(self: OpenCLTensor) -> OpenCLTensor:
    """int64 [count, dimensions]: coordinates of the elements that are not zero, in their order. The host waits."""
    found = positions(contiguous(self.operand))
    return wrap(found.viewed((found.size, 1)) if self.ndim == 1 else coordinates(found, self.operand.shape))


def _masked(self: OpenCLTensor, mask: Any) -> tuple[Operand, Operand]:
    """self, contiguous, and the places where the mask is True, both broadcast."""
    if mask.dtype not in (torch.bool, torch.uint8):
        raise RuntimeError(f"expected BoolTensor or ByteTensor for mask, got {mask.dtype}")
    shape = common_shape(self.operand.shape, tuple(mask.shape))
    seen = mask if isinstance(mask, OpenCLTensor) else mask.to(self.device)
    return _broadcast(self.operand, shape), positions(contiguous(_broadcast(seen.operand, shape)))


@implements(aten.masked_select.default)
def masked_select(self: OpenCLTensor, mask: OpenCLTensor) -> OpenCLTensor:
    """The elements where the mask is True, in their order. The host waits for their count."""
    seen, places = _masked(self, mask)
    out = allocated(seen.array.device, (places.size,), seen.element)
    if out.size:
        flat = contiguous(seen)
        launch.select(flat.viewed((flat.size,)), 0, places, out)
    return wrap(out)


@implements(aten.masked_scatter_backward.default)
def masked_scatter_backward(grad_output: OpenCLTensor, mask: Any, sizes: Sequence[int]) -> OpenCLTensor:
    """The gradient of masked_scatter's source: grad_output where the mask is True, then zeros."""
    grad, places = _masked(grad_output, mask)
    out = allocated(grad.array.device, tuple(sizes), grad.element)
    fill(out, 0)
    if places.size:
        flat = contiguous(grad)
        launch.select(flat.viewed((flat.size,)), 0, places, out.viewed((places.size,)))
    return wrap(out)


def _masked_scatter(self: OpenCLTensor, mask: Any, source: OpenCLTensor) -> OpenCLTensor:
    if source.dtype != self.dtype:
        raise RuntimeError(
            f"masked_scatter: expected self and source to have same dtypes but got {self.dtype} and {source.dtype}"
        )
    seen, places = _masked(self, mask)
    if seen.shape != self.operand.shape:
        raise RuntimeError(f"expected a mask that broadcasts to {list(self.shape)}, got {list(mask.shape)}")
    if source.numel() < places.size:
        raise RuntimeError(
            f"masked_scatter: expected source to have at least {places.size} elements, as many as the mask has ones, "
            f"got {source.numel()}"
        )
    if places.size:
        whole = InPlace(self.operand)
        values = apart(source.operand, whole.target)
        flat = whole.target.viewed((whole.target.size,))
        launch.put(flat, 0, places, values.viewed((places.size,)), distinct=True)
        whole.finish()
    return self


@implements(aten.masked_scatter_.default)
def masked_scatter_(self: OpenCLTensor, mask: Any, source: OpenCLTensor) -> OpenCLTensor:
    """The elements where the mask is True become those of source, in order. The host waits for their count."""
    return _masked_scatter(self, mask, source)


@implements(aten.masked_scatter.default)
def masked_scatter(self: OpenCLTensor, mask: Any, source: OpenCLTensor) -> OpenCLTensor:
    """masked_scatter_ on a copy, broadcast with the mask."""
    shape = common_shape(self.operand.shape, tuple(mask.shape))
    return _masked_scatter(wrap(fresh_copy(_broadcast(self.operand, shape))), mask, source)
