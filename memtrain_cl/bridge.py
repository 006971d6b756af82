"""torch tensors on the host to DeviceArrays and back.

Where device and host share memory, a kernel reads and writes the tensor's own bytes (a buffer over the tensor's memory,
mapped and unmapped around host access); elsewhere the bytes travel through pinned buffers. A `Crossing` is one such
visit:

    with Crossing(device) as cross:
        a = cross.read(x)                 # kernels read it
        s = cross.update(state)           # kernels read and write it in place
        y, b = cross.output((m, n))       # a fresh float32 tensor, written by kernels
        kernel(..., a, s, b)
    # here y and state hold the results

A tensor that stays on the device between visits (a layer's state) is announced by `keep_resident`: on a device with
memory of its own it is then uploaded only when its host copy has changed, and downloaded only when somebody reads it
(`refresh_host`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from memtrain_cl import staging
from memtrain_cl.array import DeviceArray, empty, wrap_host
from memtrain_cl.device import Device
from memtrain_cl.runtimes import import_pyopencl

#: torch dtypes that cross by their bits, because NumPy has no such type.
_BITS = {torch.bfloat16: torch.int16}


@dataclass
class _Resident:
    """A tensor's copy on a device: `version` is the host tensor's at the last exchange; `stale`: the host is behind."""

    array: DeviceArray | None = None
    version: int = -1
    stale: bool = False


_residents: Any = WeakTensorKeyDictionary()


def keep_resident(tensor: torch.Tensor) -> None:
    """Announce that `tensor` should stay on the device between visits. Costs nothing where memory is shared."""
    if tensor not in _residents:
        _residents[tensor] = _Resident()


def refresh_host(tensor: torch.Tensor) -> None:
    """Make the host bytes of a resident tensor current (waits for the device when they were behind)."""
    resident = _residents.get(tensor)
    if resident is not None and resident.stale:
        staging.download(resident.array.device, resident.array.buffer, host_view(tensor))
        resident.stale = False
        resident.version = tensor._version


def host_view(tensor: torch.Tensor) -> Any:
    """A CPU tensor's memory as a NumPy array, without a copy. TypeError for tensors elsewhere."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise TypeError(f"expected a dense CPU tensor, got one of layout {tensor.layout} on {tensor.device}")
    bits = _BITS.get(tensor.dtype)
    plain = tensor.detach()
    return (plain.view(bits) if bits else plain).resolve_neg().numpy()


class Crossing:
    """One visit of host tensors to a device, by one thread; see the module's text."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._written: list[tuple[torch.Tensor, DeviceArray]] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._held: list[Any] = []

    def __enter__(self) -> Crossing:
        return self

    def _resident(self, tensor: torch.Tensor) -> _Resident | None:
        return None if self.device.info.unified_memory else _residents.get(tensor)

    def _arrive(self, tensor: torch.Tensor) -> DeviceArray:
        """A contiguous tensor's array on the device, holding its bytes."""
        values = host_view(tensor)
        if self.device.info.unified_memory:
            return wrap_host(self.device, values, owner=tensor)
        array = empty(self.device, values.shape, values.dtype)
        if array.buffer is not None:
            staging.upload(self.device, values, array.buffer)
        return array

    def _arrive_resident(self, tensor: torch.Tensor, resident: _Resident) -> DeviceArray:
        if resident.array is not None and resident.array.device.queue != self.device.queue:
            refresh_host(tensor)
            resident.array = None
        if resident.array is None or resident.version != tensor._version:
            if resident.stale:
                raise RuntimeError(
                    "a tensor that lives on the device was written through an old reference; "
                    "read it from its layer again before writing to it"
                )
            resident.array = self._arrive(tensor)
            resident.version = tensor._version
        return resident.array

    def read(self, tensor: torch.Tensor) -> DeviceArray:
        """The values for kernels that only read them. Strided, offset and expanded tensors arrive contiguous."""
        resident = self._resident(tensor)
        if resident is not None and tensor.is_contiguous():
            return self._arrive_resident(tensor, resident)
        contiguous = tensor.detach().contiguous()
        array = self._arrive(contiguous)
        self._held.append((contiguous, array))
        return array

    def update(self, tensor: torch.Tensor) -> DeviceArray:
        """The tensor for kernels that change it in place; the host sees the change when the visit ends."""
        resident = self._resident(tensor)
        if resident is not None and tensor.is_contiguous():
            array = self._arrive_resident(tensor, resident)
            resident.stale = True
            return array
        contiguous = tensor.detach().contiguous()
        array = self._arrive(contiguous)
        if array.readonly:
            raise ValueError("expected a tensor that may be written, got read-only memory")
        if contiguous.data_ptr() != tensor.data_ptr():
            self._copies.append((tensor, contiguous))
        self._written.append((contiguous, array))
        return array

    def output(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, DeviceArray]:
        """A fresh tensor that kernels fill, and its array."""
        tensor = torch.empty(tuple(shape), dtype=dtype)
        values = host_view(tensor)
        shared = self.device.info.unified_memory
        array = (
            wrap_host(self.device, values, owner=tensor) if shared else empty(self.device, values.shape, values.dtype)
        )
        self._written.append((tensor, array))
        return tensor, array

    def scratch(self, shape: Sequence[int], dtype: Any) -> DeviceArray:
        """Device memory for the visit alone (`dtype` as NumPy names it)."""
        array = empty(self.device, shape, dtype)
        self._held.append(array)
        return array

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._bring_home()
            else:
                # Kernels already queued use memory that is about to be freed.
                self.device.synchronize()
        finally:
            self._written.clear()
            self._held.clear()

    def _bring_home(self) -> None:
        written = [(tensor, array) for tensor, array in self._written if array.buffer is not None]
        if self.device.info.unified_memory:
            cl = import_pyopencl()
            flags = cl.map_flags.READ
            for _, array in written:
                mapped, _event = cl.enqueue_map_buffer(
                    self.device.queue, array.buffer, flags, 0, array.shape, array.dtype, is_blocking=True
                )
                mapped.base.release(self.device.queue)
            if not written:
                self.device.queue.finish()
        else:
            for tensor, array in written:
                staging.download(self.device, array.buffer, host_view(tensor))
        for tensor, contiguous in self._copies:
            with torch.no_grad():
                tensor.copy_(contiguous)
