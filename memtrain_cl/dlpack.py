"""The DLPack protocol of DeviceArray: capsules made from device memory, and capsules of others opened.

Where the device shares the host's memory, an array answers as CPU memory (kDLCPU) and a consumer gets the very bytes;
elsewhere, and for consumers that ask for it, the capsule carries the ``cl_mem`` handle (kDLOpenCL). NumPy makes every
capsule here: its deleters are C, so they run once, on any thread, with an exception in flight, for capsules that nobody
consumes, and while the interpreter shuts down, none of which a deleter written in Python survives. Only the device is
rewritten afterwards.

A kDLOpenCL capsule has no stream to order work by: all kernels have ended when it is handed out, and must have when one
is taken.
"""

from __future__ import annotations

import ctypes
import math
import sys
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from memtrain_cl.device import Device

CPU = 1
OPENCL = 4
#: Kinds of memory that the host reads like its own: kDLCPU, kDLCUDAHost, kDLROCMHost.
HOST_KINDS = (CPU, 3, 11)
#: The newest version that this file reads and writes.
VERSION = (1, 0)

_READ_ONLY = 1
_IS_COPIED = 2
_LEGACY = b"dltensor"
_VERSIONED = b"dltensor_versioned"
_USED = {_LEGACY: b"used_dltensor", _VERSIONED: b"used_dltensor_versioned"}
_KINDS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("index", ctypes.c_int32)]


class _Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_LAYOUTS: dict[bytes, type[_Managed] | type[_ManagedVersioned]] = {_LEGACY: _Managed, _VERSIONED: _ManagedVersioned}

_api = ctypes.pythonapi
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", _api))


class Exportable(Protocol):
    """What this room asks of an array (DeviceArray, which imports this room)."""

    device: Device
    buffer: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    shares_host: bool
    readonly: bool

    def map_host(self, *, write: bool = False) -> np.ndarray: ...

    def numpy(self) -> np.ndarray: ...

    def copy(self) -> Exportable: ...


class Held:
    """Memory that NumPy may show as an array (``np.asarray``) and that keeps `owners` alive as long as the array."""

    def __init__(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], readonly: bool, owners: tuple[Any, ...]
    ) -> None:
        self.owners = owners
        self.__array_interface__ = {
            "version": 3,
            "data": (address, readonly),
            "shape": shape,
            "typestr": dtype.str,
            "descr": dtype.descr,
        }


def _structure(capsule: Any) -> tuple[bytes, Any]:
    """(name, struct) of a capsule that nobody has consumed."""
    for name, layout in _LAYOUTS.items():
        if _is_valid(capsule, name):
            return name, layout.from_address(_get_pointer(capsule, name))
    raise BufferError(f"expected an unconsumed DLPack capsule, got {capsule!r}")


def device_of(array: Exportable) -> tuple[int, int]:
    """(kDLCPU, 0) where the array lies in host memory, else (kDLOpenCL, index of the device)."""
    return (CPU, 0) if array.shares_host else (OPENCL, array.device.info.index)


def export(
    array: Exportable,
    *,
    stream: Any = None,
    max_version: tuple[int, int] | None = None,
    dl_device: tuple[int, int] | None = None,
    copy: bool | None = None,
) -> Any:
    """A capsule of the array, versioned when `max_version` admits it, else legacy.

    dl_device: (1, 0) for host memory, (4, index) for the ``cl_mem`` handle; None takes `device_of`. copy: True always
    copies, False never, None only to reach the host from a device of its own memory, which torch and NumPy must ask for
    by ``copy=True``. BufferError for what cannot be: a stream, another device, a read-only array without the version
    that can say so.
    """
    if stream is not None:
        raise BufferError(f"expected stream=None, since OpenCL has no stream that DLPack can name, got {stream!r}")
    wanted = device_of(array) if dl_device is None else tuple(dl_device)
    if wanted == (CPU, 0) or (dl_device is None and _asked_by_torch()):
        return _export_host(array, max_version, copy)
    index = array.device.info.index
    if wanted != (OPENCL, index):
        raise BufferError(f"expected dl_device (1, 0) for the host or (4, {index}) for the array's own, got {wanted}")
    if copy:
        array = array.copy()
    array.device.synchronize()
    handle = 0 if array.buffer is None else array.buffer.int_ptr
    values = np.asarray(Held(handle, array.shape, array.dtype, array.readonly, (array,)))
    capsule = values.__dlpack__(max_version=max_version)
    tensor = _structure(capsule)[1].tensor
    tensor.data = handle or None
    tensor.device = _Device(OPENCL, index)
    return _mark_copied(capsule) if copy else capsule


def _asked_by_torch() -> bool:
    """Whether torch called `__dlpack__`. It runs into an internal assert on a kDLOpenCL capsule and says nowhere that
    it takes none, so that only its caller's name can spare the user that.
    """
    frame = sys._getframe(2).f_back  # past `export` and `DeviceArray.__dlpack__`
    return frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "torch"


def _mark_copied(capsule: Any) -> Any:
    name, managed = _structure(capsule)
    if name == _VERSIONED:
        managed.flags |= _IS_COPIED
    return capsule


def _export_host(array: Exportable, max_version: tuple[int, int] | None, copy: bool | None) -> Any:
    if array.shares_host:
        return array.map_host(write=not array.readonly).__dlpack__(max_version=max_version, copy=copy)
    if copy:
        return _mark_copied(array.numpy().__dlpack__(max_version=max_version))
    raise BufferError(
        f"{array.device.info.name} does not share the host's memory; use .to_torch() or .numpy() for a copy on the host"
    )


class _Release:
    """Calls a consumed capsule's deleter, once, when the last user is gone."""

    def __init__(self, managed: Any) -> None:
        self._address = ctypes.addressof(managed)
        self._deleter = managed.deleter

    def __del__(self) -> None:
        if self._deleter:
            self._deleter(self._address)


@dataclass(frozen=True)
class Opened:
    """A kDLOpenCL capsule that is ours now. `handle` is its ``cl_mem``, 0 for none; keep `owner` while the memory is
    used.
    """

    handle: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    byte_offset: int
    readonly: bool
    owner: Any


def _dtype(kind: _Type) -> np.dtype[Any]:
    if kind.lanes == 1 and kind.code in _KINDS and kind.bits % 8 == 0:
        try:
            return np.dtype(f"{_KINDS[kind.code]}{kind.bits // 8}")
        except TypeError:
            pass
    raise BufferError(
        f"expected a type that NumPy has, got DLPack's code {kind.code} of {kind.bits} bits in {kind.lanes} lanes; "
        "export an integer view of it"
    )


def open_opencl(exporter: Any, dl_device: tuple[int, int]) -> Opened:
    """Consume the kDLOpenCL capsule of `exporter`. BufferError, with the capsule left to its producer, when it does not
    hold what it promises or when its strides are not those of a contiguous array.
    """
    try:
        capsule = exporter.__dlpack__(max_version=VERSION, dl_device=dl_device)
    except TypeError:  # a producer from before version 1
        capsule = exporter.__dlpack__()
    name, managed = _structure(capsule)
    if name == _VERSIONED and managed.major > VERSION[0]:
        raise BufferError(f"expected a DLPack capsule of version {VERSION[0]}, got {managed.major}.{managed.minor}")
    tensor = managed.tensor
    if tensor.device.kind != OPENCL:
        raise BufferError(f"expected a capsule of device type {OPENCL} (OpenCL), got {tensor.device.kind}")
    shape = tuple(tensor.shape[: tensor.ndim])
    dtype = _dtype(tensor.dtype)
    if tensor.strides and not _contiguous(shape, tuple(tensor.strides[: tensor.ndim])):
        raise BufferError(f"expected contiguous memory, got strides {tensor.strides[: tensor.ndim]} for shape {shape}")
    readonly = name == _VERSIONED and bool(managed.flags & _READ_ONLY)
    _set_name(capsule, _USED[name])
    return Opened(tensor.data or 0, shape, dtype, tensor.byte_offset, readonly, _Release(managed))


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return math.prod(shape) == 0
        expected *= size
    return True
