"""OpenCL calls that pyopencl lacks: memory of other APIs (cl_khr_external_memory_opaque_fd), and a device's UUID."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from typing import Any

from memtrain_cl.device import Device
from memtrain_cl.errors import MemtrainError, OutOfMemory
from memtrain_cl.runtimes import import_pyopencl

EXTENSION = "cl_khr_external_memory_opaque_fd"

_OPAQUE_FD = 0x2060
_READ_WRITE = 1 << 0
_DEVICE_UUID = 0x106A
_UUID_BYTES = 16
_NO_MEMORY = (-4, -5, -6)  # allocation failure, out of resources, out of host memory

_Enqueue = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_uint32,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
)


@functools.cache
def _library() -> ctypes.CDLL:
    """The loader that pyopencl is linked to: a symbol is looked for in a library and in what it depends on."""
    library = ctypes.CDLL(import_pyopencl()._cl.__file__)
    library.clCreateBufferWithProperties.restype = ctypes.c_void_p
    library.clCreateBufferWithProperties.argtypes = [
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_uint64),
        ctypes.c_uint64,
        ctypes.c_size_t,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_int32),
    ]
    library.clGetExtensionFunctionAddressForPlatform.restype = ctypes.c_void_p
    library.clGetExtensionFunctionAddressForPlatform.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    library.clGetDeviceInfo.restype = ctypes.c_int32
    library.clGetDeviceInfo.argtypes = [
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_size_t,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ]
    return library


@functools.cache
def _enqueue(platform: int, name: str) -> Any:
    address = _library().clGetExtensionFunctionAddressForPlatform(platform, name.encode())
    if not address:
        raise MemtrainError(f"the OpenCL driver offers {EXTENSION} and lacks its function {name}")
    return _Enqueue(address)


def import_fd(device: Device, fd: int, nbytes: int) -> Any:
    """A pyopencl buffer over the memory behind `fd`, which belongs to OpenCL then; it is closed on failure."""
    properties = (ctypes.c_uint64 * 3)(_OPAQUE_FD, fd, 0)
    status = ctypes.c_int32(0)
    handle = _library().clCreateBufferWithProperties(
        device.context.int_ptr, properties, _READ_WRITE, nbytes, None, ctypes.byref(status)
    )
    if status.value or not handle:
        os.close(fd)
        kind = OutOfMemory if status.value in _NO_MEMORY else MemtrainError
        raise kind(f"{device.info.name} did not take {nbytes} bytes of CUDA's memory: OpenCL error {status.value}")
    return import_pyopencl().Buffer.from_int_ptr(handle, retain=False)


def _hand_over(device: Device, name: str, buffers: Sequence[Any]) -> None:
    if buffers:
        handles = (ctypes.c_void_p * len(buffers))(*(buffer.int_ptr for buffer in buffers))
        function = _enqueue(device.handle.platform.int_ptr, name)
        status = function(device.queue.int_ptr, len(buffers), handles, 0, None, None)
        if status:
            raise MemtrainError(f"{name} failed on {device.info.name} with OpenCL error {status}")


def acquire(device: Device, buffers: Sequence[Any]) -> None:
    """Give shared memory to the kernels that are launched from now on."""
    _hand_over(device, "clEnqueueAcquireExternalMemObjectsKHR", buffers)


def release(device: Device, buffers: Sequence[Any]) -> None:
    """Give shared memory back to CUDA after the kernels launched so far."""
    _hand_over(device, "clEnqueueReleaseExternalMemObjectsKHR", buffers)


def device_uuid(handle: Any) -> bytes | None:
    """The UUID of a pyopencl device, None where its driver gives none."""
    if "cl_khr_device_uuid" not in handle.extensions.split():
        return None
    value = (ctypes.c_uint8 * _UUID_BYTES)()
    failed = _library().clGetDeviceInfo(handle.int_ptr, _DEVICE_UUID, _UUID_BYTES, value, None)
    return None if failed else bytes(value)
