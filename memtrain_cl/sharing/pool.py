"""Cut shared memory into tensors: a piece (segment) is never smaller than 2 MiB, most parameters are.

A tensor's storage keeps its `Block` alive. When the storage is gone the block's bytes come back, whichever thread let
go of it, and are used again once nothing that was queued before can still touch them.
"""

from __future__ import annotations

import bisect
import collections
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memtrain_cl.errors import OutOfMemory
from memtrain_cl.operand import contiguous_strides


class Segment(Protocol):
    """A piece of shared memory. address: what torch sees; buffer: what OpenCL sees."""

    address: int
    nbytes: int
    buffer: Any

    def tensor(self, block: Block) -> torch.Tensor:
        """uint8 [block.nbytes] over the block, which lives as long as the tensor's storage."""

    def free(self) -> None:
        """Give the memory back; nothing uses it any more."""


@dataclass(frozen=True, eq=False)
class Extent:
    """nbytes bytes of a segment from `offset` on."""

    segment: Segment
    offset: int
    nbytes: int


class Block:
    """An extent that a tensor's storage holds. torch's CUDA builds read `__cuda_array_interface__`."""

    def __init__(self, extent: Extent, nbytes: int) -> None:
        self.extent = extent
        self.nbytes = nbytes
        self.address = extent.segment.address + extent.offset
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
        }


@dataclass(frozen=True)
class SharedStatistics:
    """Bytes of shared memory. allocated: held by tensors, or not yet taken back. reserved: of all segments."""

    allocated: int
    reserved: int
    segments: int


class Pool:
    """The shared memory of one device.

    make: a new segment of so many bytes.   granule: segments are multiples of it.   step: every block begins at a
    multiple of it, so that OpenCL can take it as a part of a buffer.   settle: waits until nothing that was queued
    touches memory that has come back.
    """

    def __init__(
        self,
        make: Callable[[int], Segment],
        *,
        granule: int,
        step: int,
        settle: Callable[[], None],
        place: torch.device,
    ) -> None:
        self.step = step
        self.place = place
        self._make = make
        self._granule = granule
        self._settle = settle
        self._lock = threading.Lock()
        #: The free extents of each segment as (offset, nbytes), by offset, no two of them adjacent.
        self._free: dict[Segment, list[tuple[int, int]]] = {}
        self._living: dict[int, Extent] = {}
        # Blocks die at any point of any thread, inside `allocate` too: no lock may be needed for that.
        self._returned: collections.deque[Extent] = collections.deque()

    def empty(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> torch.Tensor:
        """An uninitialised tensor in shared memory: contiguous, or of these strides (elements may not overlap).

        OutOfMemory where there is no room.
        """
        if not math.prod(shape):
            return torch.empty(tuple(shape), dtype=dtype, device=self.place)
        if strides is None:
            span = math.prod(shape)
        else:
            span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        block = self.allocate(span * dtype.itemsize)
        storage = block.extent.segment.tensor(block).untyped_storage()
        # Not a view of the bytes: autograd treats views otherwise.
        tensor = torch.empty(0, dtype=dtype, device=self.place)
        strides = contiguous_strides(shape) if strides is None else tuple(strides)
        return tensor.set_(storage, 0, tuple(shape), strides)

    def allocate(self, nbytes: int) -> Block:
        """A block of `nbytes` > 0; OutOfMemory where there is no room, after what is free has been given back."""
        size = -(-nbytes // self.step) * self.step
        with self._lock:
            extent = self._take(size)
            if extent is None and self._returned:
                self._take_back()
                extent = self._take(size)
            if extent is None:
                extent = self._grow(size)
            block = Block(extent, nbytes)
            self._living[block.address] = extent
        weakref.finalize(block, self._died, block.address, extent).atexit = False
        return block

    def _died(self, address: int, extent: Extent) -> None:
        del self._living[address]
        self._returned.append(extent)

    def find(self, tensor: torch.Tensor) -> tuple[Segment, int] | None:
        """The segment that holds a tensor and the byte in it where the tensor's first element lies; None elsewhere."""
        extent = self._living.get(tensor.untyped_storage().data_ptr())
        if extent is None:
            return None
        return extent.segment, extent.offset + int(tensor.storage_offset()) * tensor.element_size()

    def _take(self, size: int) -> Extent | None:
        """The smallest free extent that holds `size`, cut to it."""
        best: tuple[int, Segment, int] | None = None
        for segment, extents in self._free.items():
            for index, (_, nbytes) in enumerate(extents):
                if nbytes >= size and (best is None or nbytes < best[0]):
                    best = nbytes, segment, index
        if best is None:
            return None
        _, segment, index = best
        offset, nbytes = self._free[segment][index]
        self._free[segment][index : index + 1] = [(offset + size, nbytes - size)] if nbytes > size else []
        return Extent(segment, offset, size)

    def _take_back(self) -> None:
        count = len(self._returned)
        self._settle()
        for _ in range(count):  # and not what came back meanwhile
            extent = self._returned.popleft()
            extents = self._free[extent.segment]
            start, end = extent.offset, extent.offset + extent.nbytes
            at = bisect.bisect_left(extents, (start, 0))
            below = at > 0 and sum(extents[at - 1]) == start
            above = at < len(extents) and extents[at][0] == end
            if below:
                start = extents[at - 1][0]
            if above:
                end = sum(extents[at])
            extents[at - below : at + above] = [(start, end - start)]

    def _grow(self, size: int) -> Extent:
        nbytes = -(-size // self._granule) * self._granule
        try:
            segment = self._make(nbytes)
        except OutOfMemory:
            self._give_back()
            segment = self._make(nbytes)
        self._free[segment] = [(size, nbytes - size)] if nbytes > size else []
        return Extent(segment, 0, size)

    def _give_back(self) -> None:
        self._take_back()
        whole = [segment for segment, extents in self._free.items() if extents == [(0, segment.nbytes)]]
        for segment in whole:
            del self._free[segment]
            segment.free()

    def release(self) -> None:
        """Give the segments that no tensor holds a part of back to the driver."""
        with self._lock:
            self._give_back()

    def statistics(self) -> SharedStatistics:
        """What is held now."""
        with self._lock:
            reserved = sum(segment.nbytes for segment in self._free)
            free = sum(nbytes for extents in self._free.values() for _, nbytes in extents)
            return SharedStatistics(reserved - free, reserved, len(self._free))
