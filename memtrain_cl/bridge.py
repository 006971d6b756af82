"""torch tensors to DeviceArrays and back.

Tensors of the torch device "opencl" and CUDA tensors in shared memory are used where they are. As to host tensors:
where device and host share memory, a kernel reads and writes the tensor's own bytes (a buffer over the tensor's memory,
mapped and unmapped around host access); elsewhere the bytes travel through pinned buffers. A `Crossing` is one visit:

    with Crossing(device, x) as cross:    # of tensors that live where x does
        a = cross.read(x)                 # kernels read it
        s = cross.update(state)           # kernels read and write it in place
        y, b = cross.output((m, n))       # a fresh float32 tensor there, written by kernels
        kernel(..., a, s, b)
    # here y and state hold the results

A host tensor that stays on the device between visits (a layer's state) is announced by `keep_resident`: on a device
with memory of its own it is then uploaded only when its host copy has changed, and downloaded only when somebody reads
it (`refresh_host`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.utils.weak import WeakTensorKeyDictionary

from memtrain_cl import staging
from memtrain_cl.array import DeviceArray, empty, wrap_host
from memtrain_cl.device import Device, get_device
from memtrain_cl.homes import Home, Lodging, OpenCLHome, operand_of
from memtrain_cl.runtimes import import_pyopencl
from memtrain_cl.sharing.cuda import partner, shared_pool
from memtrain_cl.sharing.home import CudaHome

#: torch dtypes that cross by their bits, because NumPy has no such type.
_BITS = {torch.bfloat16: torch.int16}


@dataclass
class _Resident:
    """A tensor's copy on a device: `version` is the host tensor's at the last exchange; `stale`: the host is behind."""

    array: DeviceArray | None = None
    version: int = -1
    stale: bool = False


@dataclass
class _Guest:
    """A tensor in a visit, and where the visit keeps it."""

    tensor: torch.Tensor
    lodging: Lodging
    resident: _Resident | None = None
    written: bool = False


_residents: Any = WeakTensorKeyDictionary()


def keep_resident(tensor: torch.Tensor) -> None:
    """Announce that `tensor` should stay on the device between visits. Costs nothing where memory is shared."""
    # What was made in inference mode has no version to tell when it changed; it travels each time.
    if tensor.device.type == "cpu" and tensor not in _residents and not tensor.is_inference():
        _residents[tensor] = _Resident()


def refresh_host(tensor: torch.Tensor) -> None:
    """Make the host bytes of a resident tensor current (waits for the device when they were behind)."""
    resident = _residents.get(tensor)
    if resident is not None and resident.stale:
        _require_unwritten(tensor, resident)
        staging.download(resident.array.device, resident.array.buffer, host_view(tensor))
        resident.stale = False
        resident.version = tensor._version


def _require_unwritten(tensor: torch.Tensor, resident: _Resident) -> None:
    """RuntimeError, once, when the host's copy was written while the device's was newer; the device's counts then."""
    if resident.stale and resident.version != tensor._version:
        resident.version = tensor._version
        raise RuntimeError(
            "a tensor that lives on the device was written through an old reference, and that is undone; "
            "read it from its layer again before writing to it"
        )


def host_view(tensor: torch.Tensor) -> Any:
    """A CPU tensor's memory as a NumPy array, without a copy. TypeError for tensors elsewhere."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise TypeError(f"expected a dense CPU tensor, got one of layout {tensor.layout} on {tensor.device}")
    bits = _BITS.get(tensor.dtype)
    plain = tensor.detach()
    return (plain.view(bits) if bits else plain).numpy()


class _HostHome:
    """Host tensors: their own memory where the device shares it, staged copies elsewhere."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def arrive(self, tensor: torch.Tensor) -> DeviceArray:
        """A contiguous tensor's array on the device, holding its bytes."""
        values = host_view(tensor)
        if self._device.info.unified_memory:
            return wrap_host(self._device, values, owner=tensor)
        array = empty(self._device, values.shape, values.dtype)
        if array.buffer is not None:
            staging.upload(self._device, values, array.buffer)
        return array

    def lodge(self, tensor: torch.Tensor) -> Lodging:
        refresh_host(tensor)  # another device may hold newer bytes
        contiguous = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return Lodging(contiguous, self.arrive(contiguous), copied=contiguous.data_ptr() != tensor.data_ptr())

    def fresh(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, Lodging]:
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        values = host_view(tensor)
        if self._device.info.unified_memory:
            return tensor, Lodging(tensor, wrap_host(self._device, values, owner=tensor))
        return tensor, Lodging(tensor, empty(self._device, values.shape, values.dtype))

    def scratch(self, shape: Sequence[int], dtype: Any) -> DeviceArray:
        return empty(self._device, shape, dtype)

    def settle(self, written: list[Lodging]) -> None:
        for lodging in written:
            self._fetch(lodging.array, lodging.memory)
        if self._device.info.unified_memory and not written:
            self._device.synchronize()

    def abandon(self) -> None:
        # Kernels already queued use memory that is about to be freed.
        self._device.synchronize()

    def _fetch(self, array: DeviceArray, tensor: torch.Tensor) -> None:
        if self._device.info.unified_memory:
            flags = import_pyopencl().map_flags.READ
            mapped, _event = import_pyopencl().enqueue_map_buffer(
                self._device.queue, array.buffer, flags, 0, array.shape, array.dtype, is_blocking=True
            )
            mapped.base.release(self._device.queue)
        else:
            staging.download(self._device, array.buffer, host_view(tensor))


class _StagedHome(_HostHome):
    """Tensors of other devices of torch, by way of the host."""

    def __init__(self, device: Device, place: torch.device) -> None:
        super().__init__(device)
        self._place = place

    def lodge(self, tensor: torch.Tensor) -> Lodging:
        if tensor.device != self._place:
            raise ValueError(f"expected a tensor on {self._place}, got one on {tensor.device}")
        lodging = super().lodge(tensor.detach().to("cpu"))
        lodging.copied = True
        return lodging

    def fresh(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, Lodging]:
        _, lodging = super().fresh(shape, dtype)
        lodging.copied = True
        return torch.empty(shape, dtype=dtype, device=self._place), lodging


#: torch's names of devices whose tensors travel through the host where nothing better is known; ROCm's is "cuda" too.
_STAGED = ("cuda", "xpu")
#: The places that tensors cross from, for messages.
PLACES = "the CPU or on a device of cuda, xpu, opencl"


def is_known(tensor: torch.Tensor) -> bool:
    """Whether a visit can deal with this tensor."""
    return tensor.device.type == "cpu" or tensor.device.type in _STAGED or operand_of(tensor) is not None


def device_for(tensor: torch.Tensor) -> Device:
    """The OpenCL device for kernels on `tensor`: the one that holds it, or the current one where none does."""
    operand = operand_of(tensor)
    if operand is not None:
        return operand.device
    return (partner(tensor.device) if tensor.device.type == "cuda" else None) or get_device()


def home_of(device: Device, tensor: torch.Tensor | None) -> Home:
    """The home of tensors that live where `tensor` does (None: on the host), for one visit to `device`.

    A way to the memory of another device of torch, through HIP or Level Zero, plugs in here, and in `device_for`.
    """
    if tensor is None or tensor.device.type == "cpu":
        return _HostHome(device)
    if operand_of(tensor) is not None:
        return OpenCLHome(device, tensor.device)
    shared_with = partner(tensor.device) if tensor.device.type == "cuda" else None
    if shared_with is not None and shared_with.queue is device.queue:
        return CudaHome(device, shared_pool(tensor.device), torch.cuda.current_stream(tensor.device))
    return _StagedHome(device, tensor.device)


class Crossing:
    """One visit of tensors to a device, by one thread; see the module's text. like: a tensor of the place that all of
    them live in, the host by default.
    """

    def __init__(self, device: Device, like: torch.Tensor | None = None) -> None:
        self.device = device
        self._home = home_of(device, like)
        # By identity: a tensor that is named twice in a visit is one array, or its copies would overwrite each other.
        self._guests: dict[int, _Guest] = {}
        self._held: list[DeviceArray] = []

    def __enter__(self) -> Crossing:
        return self

    def _arrive_resident(self, tensor: torch.Tensor, resident: _Resident) -> DeviceArray:
        if resident.array is not None and resident.array.device.queue != self.device.queue:
            refresh_host(tensor)
            resident.array = None
        _require_unwritten(tensor, resident)
        if resident.array is None or resident.version != tensor._version:
            resident.array = _HostHome(self.device).arrive(tensor)
            resident.version = tensor._version
        return resident.array

    def _guest(self, tensor: torch.Tensor) -> _Guest:
        guest = self._guests.get(id(tensor))
        if guest is None:
            resident = None if self.device.info.unified_memory or not tensor.is_cpu else _residents.get(tensor)
            if resident is not None and tensor.is_contiguous():
                guest = _Guest(tensor, Lodging(tensor, self._arrive_resident(tensor, resident)), resident)
            else:
                guest = _Guest(tensor, self._home.lodge(tensor))
            self._guests[id(tensor)] = guest
        return guest

    def read(self, tensor: torch.Tensor) -> DeviceArray:
        """The values for kernels that only read them. Strided, offset and expanded tensors arrive contiguous."""
        return self._guest(tensor).lodging.array

    def update(self, tensor: torch.Tensor) -> DeviceArray:
        """The tensor for kernels that change it in place; torch sees the change when the visit ends.

        ValueError for read-only memory and for expanded tensors, whose elements share memory.
        """
        strides = tensor.stride()
        if 0 in strides and any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, strides, strict=True)):
            raise ValueError(f"expected a tensor whose elements lie apart, got strides {strides}; clone it first")
        guest = self._guest(tensor)
        if guest.lodging.array.readonly:
            raise ValueError("expected a tensor that may be written, got read-only memory")
        guest.written = True
        if not tensor.is_inference():
            # As every in-place operation of torch does: autograd, and residents on other devices, must know.
            increment_version(tensor)
        if guest.resident is not None:
            guest.resident.stale = True
            guest.resident.version = tensor._version
        return guest.lodging.array

    def output(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, DeviceArray]:
        """A fresh tensor that kernels fill, and its array."""
        tensor, lodging = self._home.fresh(tuple(shape), dtype)
        self._guests[id(tensor)] = _Guest(tensor, lodging, written=True)
        return tensor, lodging.array

    def scratch(self, shape: Sequence[int], dtype: Any) -> DeviceArray:
        """Device memory for the visit alone (`dtype` as NumPy names it)."""
        array = self._home.scratch(shape, dtype)
        self._held.append(array)
        return array

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._bring_home()
            else:
                self._home.abandon()
        finally:
            self._guests.clear()
            self._held.clear()

    def _bring_home(self) -> None:
        written = [
            guest
            for guest in self._guests.values()
            if guest.written and guest.resident is None and guest.lodging.array.buffer is not None
        ]
        self._home.settle([guest.lodging for guest in written])
        for guest in written:
            if guest.lodging.copied:
                with torch.no_grad():
                    guest.tensor.copy_(guest.lodging.memory)
