"""The caching allocator: memory of dropped tensors is kept for the next ones, and every byte is counted.

pyopencl's MemoryPool does the keeping. A block may be handed out again while kernels that used it still run: the
device's one queue is in order, so whoever gets it comes after them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from memtrain_cl.array import DeviceArray, empty
from memtrain_cl.device import Device
from memtrain_cl.errors import OutOfMemory
from memtrain_cl.runtimes import import_pyopencl

_BYTES = np.dtype(np.uint8)


@dataclass(frozen=True)
class MemoryStatistics:
    """Bytes of one device's allocator. allocated: in living tensors. reserved: those and what is kept for reuse.

    The peaks count from the last `reset_peak`; limit is what may be reserved at most.
    """

    allocated: int
    peak_allocated: int
    reserved: int
    peak_reserved: int
    limit: int
    blocks: int
    requests: int


class Pool:
    """The allocator of one device."""

    def __init__(self, device: Device) -> None:
        cl = import_pyopencl()
        from pyopencl.tools import ImmediateAllocator, MemoryPool

        # Memory that the host can map without a copy where the two share it.
        flags = cl.mem_flags.READ_WRITE | (cl.mem_flags.ALLOC_HOST_PTR if device.info.unified_memory else 0)
        self.device = device
        self.limit = device.info.global_mem_bytes
        self._pool: Any = MemoryPool(ImmediateAllocator(device.queue, flags))
        self._allocate = self._pool.allocate
        self._peak_allocated = 0
        self._peak_reserved = 0
        self._requests = 0

    def allocate(self, nbytes: int) -> Any:
        """A buffer of at least `nbytes` > 0; it returns to the pool when the last reference to it is gone.

        OutOfMemory with the bytes asked for, held and allowed, after what is kept for reuse has been given back.
        """
        if "alive" in self.device.kept:  # see verify.py
            return empty(self.device, (nbytes,), _BYTES).buffer
        pool = self._pool
        if pool.managed_bytes + nbytes > self.limit or nbytes > self.device.info.max_alloc_bytes:
            self._make_room(nbytes)
        try:
            buffer = self._allocate(nbytes)
        except (import_pyopencl().Error, MemoryError) as error:
            raise self._refusal(nbytes) from error
        self._requests += 1
        if pool.active_bytes > self._peak_allocated:
            self._peak_allocated = pool.active_bytes
        if pool.managed_bytes > self._peak_reserved:
            self._peak_reserved = pool.managed_bytes
        return buffer

    def _make_room(self, nbytes: int) -> None:
        # What lies in a bin of this size is reused and adds nothing.
        pool = self._pool
        within = nbytes <= self.device.info.max_alloc_bytes and pool.active_bytes + nbytes <= self.limit
        if not within:
            raise self._refusal(nbytes)
        self.device.synchronize()
        pool.free_held()

    def _refusal(self, nbytes: int) -> OutOfMemory:
        info = self.device.info
        most = min(self.limit, info.max_alloc_bytes)
        return OutOfMemory(
            f"out of memory on {info.name}: {nbytes} bytes were asked for, {self._pool.active_bytes} are held by "
            f"tensors, and the limit is {self.limit} in all, {most} in one tensor"
        )

    def available(self) -> int:
        """Bytes that one more tensor may have."""
        return min(self.limit - int(self._pool.active_bytes), self.device.info.max_alloc_bytes)

    def statistics(self) -> MemoryStatistics:
        """What is held now, and the peaks."""
        pool = self._pool
        return MemoryStatistics(
            allocated=pool.active_bytes,
            peak_allocated=self._peak_allocated,
            reserved=pool.managed_bytes,
            peak_reserved=self._peak_reserved,
            limit=self.limit,
            blocks=pool.active_blocks,
            requests=self._requests,
        )

    def reset_peak(self) -> None:
        """Let the peaks begin at what is held now."""
        self._peak_allocated, self._peak_reserved = self._pool.active_bytes, self._pool.managed_bytes

    def release(self) -> None:
        """Give what is kept for reuse back to the driver, once the kernels that may still use it have ended."""
        self.device.synchronize()
        self._pool.free_held()

    def set_limit(self, limit: int) -> None:
        """Allow `limit` bytes in all; ValueError unless it is positive."""
        if not isinstance(limit, int) or limit <= 0:
            raise ValueError(f"expected a positive number of bytes as the limit, got {limit!r}")
        self.limit = limit


def pool_of(device: Device) -> Pool:
    """The device's allocator, made on first use."""
    pool: Pool | None = device.kept.get("memory")
    if pool is None:
        pool = device.kept["memory"] = Pool(device)
    return pool


def allocate(device: Device, nbytes: int) -> DeviceArray:
    """Uninitialised bytes as a flat uint8 array, from the device's allocator; OutOfMemory where there is no room."""
    buffer = pool_of(device).allocate(nbytes) if nbytes else None
    return DeviceArray(device, buffer, (nbytes,), _BYTES, shares_host=device.info.unified_memory)
