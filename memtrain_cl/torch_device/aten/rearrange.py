"""Elements in another order or among others: flip, roll, padding; and searches in ascending rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memtrain_cl.launchers import index as launch
from memtrain_cl.operand import Operand
from memtrain_cl.torch_device.aten.copy import cast, contiguous, copy_operand, fresh_copy
from memtrain_cl.torch_device.aten.factories import fill, fill_range
from memtrain_cl.torch_device.aten.indexing import check, number, wrapped
from memtrain_cl.torch_device.registry import aten, implements
from memtrain_cl.torch_device.tensor import OpenCLTensor, allocated, wrap


@implements(aten.flip.default)
def flip(self: OpenCLTensor, dims: Sequence[int]) -> OpenCLTensor:
    """The elements in reverse order along each of `dims`."""
    check(aten.flip.default, self, tuple(dims))
    operand = self.operand
    strides = list(operand.strides)
    offset = operand.offset
    for dim in {wrapped(dim, self.ndim) for dim in dims} if operand.size and operand.shape else ():
        offset += (operand.shape[dim] - 1) * strides[dim]
        strides[dim] = -strides[dim]
    return wrap(fresh_copy(operand.viewed(operand.shape, strides, offset)))


def _part(operand: Operand, dim: int, begin: int, end: int) -> Operand:
    shape = (*operand.shape[:dim], end - begin, *operand.shape[dim + 1 :])
    return operand.viewed(shape, operand.strides, operand.offset + begin * operand.strides[dim])


def _rolled(operand: Operand, shift: int, dim: int) -> Operand:
    size = operand.shape[dim]
    moved = shift % size
    if moved == 0:
        return fresh_copy(operand)
    out = allocated(operand.array.device, operand.shape, operand.element)
    copy_operand(_part(operand, dim, 0, size - moved), _part(out, dim, moved, size))
    copy_operand(_part(operand, dim, size - moved, size), _part(out, dim, 0, moved))
    return out


@implements(aten.roll.default)
def roll(self: OpenCLTensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> OpenCLTensor:
    """Elements moved by `shifts` along `dims`, round the end; without dims along the whole tensor, seen flat."""
    check(aten.roll.default, self, tuple(shifts), tuple(dims))
    operand = self.operand
    if operand.size == 0 or not operand.shape:
        return wrap(fresh_copy(operand))
    if not dims:
        flat = contiguous(operand).viewed((operand.size,))
        return wrap(_rolled(flat, shifts[0], 0).viewed(operand.shape))
    for shift, dim in zip(shifts, dims, strict=True):
        operand = _rolled(operand, shift, wrapped(dim, self.ndim))
    return wrap(operand)


@implements(aten.constant_pad_nd.default)
def constant_pad_nd(self: OpenCLTensor, pad: Sequence[int], value: Any = 0) -> OpenCLTensor:
    """pad: (before, after) of the last dimension, then of the one before it ...; below 0 cuts off."""
    check(aten.constant_pad_nd.default, self, tuple(pad), value)
    source = self.operand
    shape = list(source.shape)
    widths = {len(shape) - 1 - place: (pad[2 * place], pad[2 * place + 1]) for place in range(len(pad) // 2)}
    for dim, (before, after) in widths.items():
        shape[dim] += before + after
    out = allocated(source.array.device, shape, source.element)
    fill(out, value)
    target = out
    for dim, (before, after) in widths.items():
        source = _part(source, dim, max(0, -before), source.shape[dim] - max(0, -after))
        target = _part(target, dim, max(0, before), out.shape[dim] - max(0, after))
    copy_operand(source, target)
    return wrap(out)


# ---- searches ------------------------------------------------------------------------------------------------------


def _search(boundaries: OpenCLTensor, x: Operand, *, int32: bool, right: bool) -> OpenCLTensor:
    # Compared in a type that holds both, as torch promotes them.
    common = torch.promote_types(boundaries.dtype, getattr(torch, x.element))
    element = str(common).removeprefix("torch.")
    out = allocated(x.array.device, x.shape, "int32" if int32 else "int64")
    launch.search_sorted(contiguous(cast(boundaries.operand, element)), contiguous(cast(x, element)), out, right=right)
    return wrap(out)


def _side(right: bool, side: str | None) -> bool:
    if side not in (None, "left", "right"):
        raise RuntimeError(f"torch.searchsorted(): side can only be 'left' or 'right' but got {side}")
    if right and side == "left":
        raise RuntimeError(
            "torch.searchsorted(): side and right can't be set to opposites, got side of left while right was True"
        )
    return right or side == "right"


@implements(aten.searchsorted.Tensor)
def searchsorted(
    sorted_sequence: OpenCLTensor,
    self: OpenCLTensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """How many elements of the ascending rows lie before each of self: those below, with `right` those equal too."""
    if not isinstance(self, OpenCLTensor) or not isinstance(sorted_sequence, OpenCLTensor):
        return NotImplemented
    if sorter is not None:
        if sorter.dtype != torch.int64 or sorter.shape != sorted_sequence.shape:
            raise RuntimeError(
                "torch.searchsorted(): sorter must be int64 of the boundary tensor's shape "
                f"{list(sorted_sequence.shape)}, got {sorter.dtype} {list(sorter.shape)}"
            )
        sorted_sequence = sorted_sequence.gather(-1, sorter)  # type: ignore[assignment]
    rows = sorted_sequence.operand.shape
    if self.dtype != sorted_sequence.dtype:
        raise RuntimeError(
            "torch.searchsorted(): boundary tensor and input value tensor should have same dtype, but got boundary "
            f"tensor dtype {sorted_sequence.dtype} and input value tensor dtype {self.dtype}"
        )
    if not rows or (len(rows) > 1 and (self.ndim != len(rows) or rows[:-1] != tuple(self.shape[:-1]))):
        raise RuntimeError(
            "torch.searchsorted(): boundaries tensor should be 1 dimension or the first N-1 dimensions of boundaries "
            f"tensor and input value tensor must match, but we got boundaries tensor {list(rows)} and input value "
            f"tensor {list(self.shape)}"
        )
    return _search(sorted_sequence, self.operand, int32=out_int32, right=_side(right, side))


@implements(aten.searchsorted.Scalar)
def searchsorted_scalar(sorted_sequence: OpenCLTensor, self: Any, **options: Any) -> Any:
    """The same of one number in one row."""
    if sorted_sequence.ndim != 1:
        raise RuntimeError(
            "torch.searchsorted(): input value can be a scalar only when boundaries tensor dimension is 1, got "
            f"{sorted_sequence.ndim}"
        )
    single = number(sorted_sequence.operand, self).viewed(())
    return searchsorted(sorted_sequence, wrap(single), **options)


@implements(aten.bucketize.Tensor)
def bucketize(self: OpenCLTensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Any:
    """How many of the ascending boundaries lie before each of self."""
    if not isinstance(boundaries, OpenCLTensor) or not isinstance(self, OpenCLTensor):
        return NotImplemented
    if boundaries.ndim != 1:
        raise RuntimeError(f"boundaries tensor must be 1 dimension, but got dim({boundaries.ndim})")
    return _search(boundaries, self.operand, int32=out_int32, right=right)


@implements(aten.bucketize.Scalar)
def bucketize_scalar(self: Any, boundaries: OpenCLTensor, **options: Any) -> Any:
    """The same of one number."""
    return bucketize(wrap(number(boundaries.operand, self).viewed(())), boundaries, **options)


@implements(aten.repeat_interleave.Tensor)
def repeat_interleave(repeats: OpenCLTensor, *, output_size: int | None = None) -> Any:
    """int64 [sum of repeats]: each place i as often as repeats[i] says. The host waits for the sum unless given."""
    if repeats.ndim != 1:
        raise RuntimeError("repeat_interleave only accept 1D vector as repeat")
    if repeats.dtype not in (torch.int64, torch.int32):
        raise RuntimeError("repeats has to be Long or Int tensor")
    if repeats.numel() == 0:
        return wrap(allocated(repeats.operand.array.device, (0,), "int64"))
    ends = repeats.cumsum(0)
    total = int(ends[-1]) if output_size is None else output_size
    steps = allocated(repeats.operand.array.device, (total,), "int64")
    fill_range(steps, 0, 1)
    return _search(ends, steps, int32=repeats.dtype == torch.int32, right=True)  # type: ignore[arg-type]
