"""The home of CUDA tensors: kernels work on shared memory in place, and on a copy there of what lies elsewhere.

No byte passes through the host. torch's current stream is waited for when a visit begins, and the OpenCL queue when it
ends, so that either side finds the other's work done, whatever its streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from memtrain_cl.array import DeviceArray
from memtrain_cl.device import Device
from memtrain_cl.elements import ELEMENTS
from memtrain_cl.homes import Lodging, pooled
from memtrain_cl.sharing import external
from memtrain_cl.sharing.pool import Pool, Segment


class Stream(Protocol):
    """What is asked of torch's current stream."""

    def synchronize(self) -> None: ...


def _bits(dtype: torch.dtype) -> np.dtype[np.generic]:
    element = ELEMENTS.get(str(dtype).removeprefix("torch."))
    if element is None:
        raise TypeError(f"expected a CUDA tensor of a type of {sorted(ELEMENTS)}, got {dtype}")
    return element.bits


class CudaHome:
    """CUDA tensors for one visit to the OpenCL device that is the same hardware."""

    def __init__(self, device: Device, pool: Pool, stream: Stream) -> None:
        self._device = device
        self._pool = pool
        self._stream = stream
        self._acquired: dict[int, Any] = {}
        stream.synchronize()

    def _array(self, tensor: torch.Tensor, segment: Segment, offset: int) -> DeviceArray:
        buffer = segment.buffer
        if id(segment) not in self._acquired:
            external.acquire(self._device, [buffer])
            self._acquired[id(segment)] = buffer
        array = DeviceArray(self._device, buffer, tensor.shape, _bits(tensor.dtype), owner=tensor)
        if offset:
            array.buffer = buffer.get_sub_region(offset, array.nbytes)
        return array

    def _shared(self, tensor: torch.Tensor) -> DeviceArray | None:
        """The array over a tensor's own memory; None where kernels cannot be given that."""
        found = self._pool.find(tensor) if tensor.is_contiguous() else None
        if found is None or found[1] % self._pool.step:
            return None
        return self._array(tensor, *found)

    def lodge(self, tensor: torch.Tensor) -> Lodging:
        if tensor.device != self._pool.place:
            raise ValueError(f"expected a tensor on {self._pool.place}, got one on {tensor.device}")
        bits = _bits(tensor.dtype)
        if not tensor.numel():
            return Lodging(tensor, DeviceArray(self._device, None, tensor.shape, bits))
        array = self._shared(tensor)
        if array is not None:
            return Lodging(tensor, array)
        copy = self._pool.empty(tensor.shape, tensor.dtype)
        copy.copy_(tensor.detach())
        self._stream.synchronize()
        return Lodging(copy, self._fresh_array(copy), copied=True)

    def _fresh_array(self, tensor: torch.Tensor) -> DeviceArray:
        found = self._pool.find(tensor)
        if found is None:
            return DeviceArray(self._device, None, tensor.shape, _bits(tensor.dtype))
        return self._array(tensor, *found)

    def fresh(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, Lodging]:
        tensor = self._pool.empty(shape, dtype)
        return tensor, Lodging(tensor, self._fresh_array(tensor))

    def scratch(self, shape: Sequence[int], dtype: Any) -> DeviceArray:
        return pooled(self._device, shape, np.dtype(dtype))

    def settle(self, written: list[Lodging]) -> None:
        self._end()

    def abandon(self) -> None:
        self._end()

    def _end(self) -> None:
        try:
            external.release(self._device, list(self._acquired.values()))
        finally:
            self._acquired.clear()
            self._device.synchronize()
