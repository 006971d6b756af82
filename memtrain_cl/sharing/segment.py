"""A piece of memory that CUDA makes and both sides map.

cuMemCreate -> a file descriptor of it -> OpenCL's buffer; the same memory at an address of CUDA's. Freed once, in the
order OpenCL's buffer, mapping, address, memory. The descriptor belongs to OpenCL from the import on, which closes it.
"""

from __future__ import annotations

import contextlib
import importlib
from types import ModuleType
from typing import Any

import torch

from memtrain_cl.device import Device
from memtrain_cl.errors import MemtrainError, OutOfMemory, UnsupportedDevice
from memtrain_cl.sharing.external import import_fd
from memtrain_cl.sharing.pool import Block


def driver() -> ModuleType:
    """The CUDA driver's functions; UnsupportedDevice, with the mending command, where the package is missing."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise UnsupportedDevice(
            f"CUDA's driver functions do not load ({error}); install them with: pip install cuda-bindings"
        ) from error


def call(function: Any, *arguments: Any) -> Any:
    """The result of a driver function; OutOfMemory or MemtrainError with its name where it fails."""
    status, *values = function(*arguments)
    if status.name != "CUDA_SUCCESS":
        kind = OutOfMemory if status.name == "CUDA_ERROR_OUT_OF_MEMORY" else MemtrainError
        raise kind(f"{function.__name__} failed with {status.name}")
    return values[0] if values else None


def _properties(ordinal: int) -> Any:
    cu = driver()
    properties = cu.CUmemAllocationProp()
    properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    properties.requestedHandleTypes = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return properties


def granularity(ordinal: int) -> int:
    """Bytes that the size of a segment is a multiple of."""
    cu = driver()
    least = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(call(cu.cuMemGetAllocationGranularity, _properties(ordinal), least))


class CudaSegment:
    """`nbytes` bytes, a multiple of the granularity, on CUDA device `place` and its OpenCL partner `device`."""

    def __init__(self, device: Device, place: torch.device, nbytes: int) -> None:
        cu = driver()
        ordinal = place.index
        self.nbytes = nbytes
        self._place = place
        # What is left undone by an error is undone in the order of `free`.
        with torch.cuda.device(place), contextlib.ExitStack() as steps:
            memory = call(cu.cuMemCreate, nbytes, _properties(ordinal), 0)
            steps.callback(call, cu.cuMemRelease, memory)
            address = call(cu.cuMemAddressReserve, nbytes, 0, 0, 0)
            steps.callback(call, cu.cuMemAddressFree, address, nbytes)
            call(cu.cuMemMap, address, nbytes, 0, memory, 0)
            steps.callback(call, cu.cuMemUnmap, address, nbytes)
            access = cu.CUmemAccessDesc()
            access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = ordinal
            access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            call(cu.cuMemSetAccess, address, nbytes, [access], 1)
            kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            fd = int(call(cu.cuMemExportToShareableHandle, memory, kind, 0))
            self.buffer = import_fd(device, fd, nbytes)
            steps.callback(self.buffer.release)
            self.address = int(address)
            self._steps = steps.pop_all()

    def tensor(self, block: Block) -> torch.Tensor:
        """uint8 [block.nbytes] over the block, which lives as long as the tensor's storage."""
        return torch.as_tensor(block, device=self._place)

    def free(self) -> None:
        """Give the memory back; nothing uses it any more."""
        with torch.cuda.device(self._place):
            self._steps.close()
