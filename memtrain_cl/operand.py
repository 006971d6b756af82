"""What kernels of the torch device work on: a strided view of bytes on a device."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from memtrain_cl.array import DeviceArray
from memtrain_cl.device import Device
from memtrain_cl.elements import ELEMENTS
from memtrain_cl.memory import allocate


@functools.lru_cache(maxsize=16384)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements, as torch gives them: sizes of 0 count as 1."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


class Operand:
    """A tensor's data: element [i, j, ...] lies offset + i*strides[0] + j*strides[1] + ... elements into `array`.

    array: the flat bytes, shared by all views of one tensor; its buffer is None where they are none. element: a name
    in `elements.ELEMENTS`. contiguous: given where it is known. Immutable.
    """

    __slots__ = ("array", "buffer", "contiguous", "element", "offset", "shape", "size", "strides")

    def __init__(
        self,
        array: DeviceArray,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        element: str,
        contiguous: bool | None = None,
    ) -> None:
        self.array = array
        self.buffer: Any = array.buffer
        self.shape = shape
        self.strides = strides
        self.offset = offset
        self.element = element
        self.size = math.prod(shape)
        self.contiguous = _is_contiguous(shape, strides) if contiguous is None else contiguous

    @property
    def device(self) -> Device:
        """The device that holds the bytes."""
        return self.array.device

    @property
    def place(self) -> tuple[Any, np.uint64]:
        """What every kernel takes of an operand: its buffer, and its first element."""
        return self.buffer, np.uint64(self.offset)

    def viewed(self, shape: Sequence[int], strides: Sequence[int] | None = None, offset: int | None = None) -> Operand:
        """Another view of the same bytes: contiguous by default, from the same first element by default."""
        shape = tuple(shape)
        return Operand(
            self.array,
            shape,
            contiguous_strides(shape) if strides is None else tuple(strides),
            self.offset if offset is None else offset,
            self.element,
        )

    def __repr__(self) -> str:
        return f"Operand({self.element} {self.shape}, strides {self.strides}, offset {self.offset}, {self.device})"


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != expected and size != 0:
                return 0 in shape
            expected *= size
    return True


def place_of(operand: Operand | None, instead: Operand) -> tuple[Any, np.uint64]:
    """`place` of an operand that may be left out; the kernel then gets a buffer that it does not read."""
    return (instead.buffer, np.uint64(0)) if operand is None else operand.place


def empty_operand(device: Device, shape: Sequence[int], element: str) -> Operand:
    """An uninitialised contiguous operand from the device's allocator."""
    shape = tuple(shape)
    array = allocate(device, math.prod(shape) * ELEMENTS[element].itemsize)
    return Operand(array, shape, contiguous_strides(shape), 0, element, contiguous=True)
