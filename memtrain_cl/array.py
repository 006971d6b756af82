"""DeviceArray: the one type that carries data on an OpenCL device, thin over a pyopencl buffer.

Contiguous, row-major, of a NumPy dtype. It speaks the array-API DLPack protocol (see dlpack.py): consumers of CPU
memory get the very same bytes where the device shares the host's memory, others get the ``cl_mem`` handle.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from memtrain_cl import dlpack
from memtrain_cl.device import Device, get_device, opened_devices
from memtrain_cl.errors import UnsupportedDevice
from memtrain_cl.runtimes import import_pyopencl


class DeviceArray:
    """Data on a device.

    buffer: the pyopencl buffer, None when the array holds no element (OpenCL has no empty buffers).
    owner: whatever must stay alive as long as the buffer (the host memory that it wraps).
    readonly: an import that may not be written; kernels that write refuse it.
    alignment: a power of two that divides the address of the first element, for kernels that load wide.
    """

    def __init__(
        self,
        device: Device,
        buffer: Any,
        shape: Sequence[int],
        dtype: npt.DTypeLike,
        *,
        owner: Any = None,
        shares_host: bool = False,
        readonly: bool = False,
        alignment: int = 128,
    ) -> None:
        self.device = device
        self.buffer = buffer
        self.shape = tuple(map(int, shape))
        self.dtype = dtype if isinstance(dtype, np.dtype) else np.dtype(dtype)
        self.owner = owner
        self.shares_host = shares_host
        self.readonly = readonly
        self.alignment = alignment

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.size * self.dtype.itemsize

    def rows(self, count: int) -> DeviceArray:
        """The first `count` rows, over the same memory."""
        shape = (count, *self.shape[1:])
        return DeviceArray(
            self.device,
            self.buffer if math.prod(shape) else None,
            shape,
            self.dtype,
            owner=self,
            shares_host=self.shares_host,
            readonly=self.readonly,
            alignment=self.alignment,
        )

    def numpy(self) -> np.ndarray:
        """A NumPy copy of the data; waits for the kernels before it."""
        result = np.empty(self.shape, self.dtype)
        if self.buffer is not None:
            self.device.check_process()
            import_pyopencl().enqueue_copy(self.device.queue, result, self.buffer, is_blocking=True)
        return result

    def map_host(self, *, write: bool = False) -> np.ndarray:
        """The data as a NumPy array over the shared memory itself; waits for the kernels before it.

        The memory counts as the host's until the array is gone: launch no kernel that writes to it before. Raises
        BufferError where the device does not share the host's memory, and for `write` on a read-only array.
        """
        if not self.shares_host:
            raise BufferError(
                f"{self.device.info.name} does not share the host's memory; use .numpy() or .to_torch() for a copy"
            )
        if write and self.readonly:
            raise BufferError("expected an array that may be written, got a read-only one")
        if self.buffer is None:
            return np.empty(self.shape, self.dtype)
        cl = import_pyopencl()
        flags = cl.map_flags.READ | (cl.map_flags.WRITE if write else 0)
        self.device.check_process()
        mapped, _ = cl.enqueue_map_buffer(
            self.device.queue, self.buffer, flags, 0, self.shape, self.dtype, is_blocking=True
        )
        # pyopencl's mapping keeps the buffer, but not the host memory that a buffer may lie over.
        return np.asarray(dlpack.Held(mapped.ctypes.data, self.shape, self.dtype, not write, (mapped, self)))

    def copy(self) -> DeviceArray:
        """The same data in memory of its own on the same device."""
        result = empty(self.device, self.shape, self.dtype)
        if self.buffer is not None:
            self.device.check_process()
            import_pyopencl().enqueue_copy(
                self.device.queue, result.buffer, self.buffer, src_offset=0, dst_offset=0, byte_count=self.nbytes
            )
        return result

    def to_torch(self) -> Any:
        """A torch CPU tensor: over the same memory where it is shared, else a copy."""
        import torch

        return torch.from_numpy(self.map_host(write=True) if self.shares_host and not self.readonly else self.numpy())

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.device_of(self)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        return dlpack.export(self, stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)

    def __repr__(self) -> str:
        return f"DeviceArray({self.shape}, {self.dtype}, {self.device.info.name})"


def check_allocation(device: Device, nbytes: int) -> None:
    """UnsupportedDevice when one buffer of `nbytes` is more than the device gives."""
    if nbytes > device.info.max_alloc_bytes:
        raise UnsupportedDevice(
            f"a buffer of {nbytes} bytes was asked for, but {device.info.name} gives at most "
            f"{device.info.max_alloc_bytes} at once"
        )


def empty(device: Device, shape: Sequence[int], dtype: npt.DTypeLike) -> DeviceArray:
    """An uninitialised array on the device."""
    array = DeviceArray(device, None, shape, dtype, shares_host=device.info.unified_memory)
    if array.nbytes:
        check_allocation(device, array.nbytes)
        cl = import_pyopencl()
        # Memory that the host can map without a copy where the two share it.
        flags = cl.mem_flags.READ_WRITE | (cl.mem_flags.ALLOC_HOST_PTR if device.info.unified_memory else 0)
        array.buffer = cl.Buffer(device.context, flags, array.nbytes)
        if "alive" in device.kept:  # see verify.py
            device.kept["alive"].append(array.buffer)
    return array


def from_numpy(device: Device, values: np.ndarray) -> DeviceArray:
    """A device copy of `values`."""
    array = empty(device, values.shape, values.dtype)
    if array.buffer is not None:
        device.check_process()
        import_pyopencl().enqueue_copy(device.queue, array.buffer, np.ascontiguousarray(values), is_blocking=True)
    return array


class _Borrowed:
    """Memory of others under a buffer. It is given back only when no kernel can still touch it: OpenCL keeps a buffer
    until the kernels that use it have ended, but knows nothing of who owns the bytes.
    """

    def __init__(self, device: Device, *owners: Any) -> None:
        self._device = device
        self._owners = owners

    def __del__(self) -> None:
        with contextlib.suppress(UnsupportedDevice):  # a forked child has no kernels to wait for
            self._device.synchronize()


def _alignment(address: int) -> int:
    return min(address & -address, 128) if address else 128


def wrap_host(device: Device, values: np.ndarray, *, owner: Any = None) -> DeviceArray:
    """An array over `values`' own memory (zero-copy); only for devices that share the host's memory.

    `values` must be contiguous; the array is read-only where `values` is.
    """
    if not device.info.unified_memory:
        raise BufferError(f"{device.info.name} does not share the host's memory")
    if not values.flags.c_contiguous:
        raise BufferError(f"expected contiguous memory, got strides {values.strides} for shape {values.shape}")
    readonly = not values.flags.writeable
    array = DeviceArray(
        device,
        None,
        values.shape,
        values.dtype,
        owner=_Borrowed(device, owner, values),
        shares_host=True,
        readonly=readonly,
        alignment=_alignment(values.ctypes.data),
    )
    if array.nbytes:
        check_allocation(device, array.nbytes)
        device.check_process()
        cl = import_pyopencl()
        access = cl.mem_flags.READ_ONLY if readonly else cl.mem_flags.READ_WRITE
        array.buffer = cl.Buffer(device.context, access | cl.mem_flags.USE_HOST_PTR, hostbuf=values)
    return array


def from_dlpack(source: Any, device: str | int | Device | None = None, *, copy: bool | None = None) -> DeviceArray:
    """An array over the memory of any object that speaks DLPack, on `device` (default: the source's own if it is one of
    the opened devices, else the current one).

    copy: None shares the memory where source and device can and copies from the host to a device of its own memory;
    False raises BufferError instead of copying; True always copies. What its producer calls read-only, or does not call
    writable because its DLPack is older than version 1, is read-only here. BufferError: memory that is neither the
    host's nor of the device's context, strides of other than a contiguous array (unless copy=True from the host), a
    byte offset that the device cannot address.
    """
    place = (dlpack.OPENCL, source.device.info.index) if isinstance(source, DeviceArray) else source.__dlpack_device__()
    if place[0] == dlpack.OPENCL:
        shared = _from_opencl(source, place, device)
        return shared.copy() if copy else shared
    if place[0] not in dlpack.HOST_KINDS:
        raise BufferError(f"expected memory of the host or of an OpenCL context, got DLPack device type {place[0]}")
    target = get_device(device)
    values = np.from_dlpack(source)
    if copy:
        return from_numpy(target, values)
    if not values.flags.c_contiguous:
        raise BufferError(
            f"expected contiguous memory, got strides {values.strides} for shape {values.shape}; copy=True takes a copy"
        )
    if target.info.unified_memory:
        return wrap_host(target, values, owner=source)
    if copy is None:
        return from_numpy(target, values)
    raise BufferError(f"{target.info.name} does not share the host's memory, so copy=False is impossible")


def _from_opencl(source: Any, place: tuple[int, int], selector: str | int | Device | None) -> DeviceArray:
    opened = dlpack.open_opencl(source, place)
    if selector is not None:
        homes = [get_device(selector)]
    else:
        homes = [source.device] if isinstance(source, DeviceArray) else opened_devices()
    nbytes = math.prod(opened.shape) * opened.dtype.itemsize
    if nbytes == 0:
        return empty(homes[0] if homes else get_device(), opened.shape, opened.dtype)
    cl = import_pyopencl()
    buffer = cl.Buffer.from_int_ptr(opened.handle, retain=True)
    home = next((device for device in homes if device.context == buffer.context), None)
    if home is None:
        raise BufferError(f"expected memory of the context of {' or '.join(map(str, homes)) or 'an opened device'}")
    if opened.byte_offset + nbytes > buffer.size:
        raise BufferError(f"expected {opened.byte_offset} + {nbytes} bytes, got a buffer of {buffer.size}")
    alignment = 128
    if buffer.flags & cl.mem_flags.USE_HOST_PTR:
        alignment = _alignment(buffer.get_host_array((1,), np.uint8).ctypes.data + opened.byte_offset)
    if opened.byte_offset:
        # Not every driver refuses what clCreateSubBuffer must refuse.
        step = max(1, home.handle.mem_base_addr_align // 8)
        if opened.byte_offset % step:
            raise BufferError(
                f"expected a byte offset divisible by {step} on {home.info.name}, got {opened.byte_offset}"
            )
        alignment = min(alignment, _alignment(opened.byte_offset))
        try:
            buffer = buffer.get_sub_region(opened.byte_offset, nbytes)
        except cl.Error as error:
            raise BufferError(f"no part of the capsule's memory can be taken: {error}") from error
    reachable = cl.mem_flags.USE_HOST_PTR | cl.mem_flags.ALLOC_HOST_PTR
    return DeviceArray(
        home,
        buffer,
        opened.shape,
        opened.dtype,
        owner=_Borrowed(home, opened.owner),
        shares_host=home.info.unified_memory and bool(buffer.flags & reachable),
        readonly=opened.readonly or bool(buffer.flags & cl.mem_flags.READ_ONLY),
        alignment=alignment,
    )
