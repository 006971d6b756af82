"""Which OpenCL device is which CUDA device, and the shared memory of each pair."""

from __future__ import annotations

import functools
import logging
import threading
from typing import Any

import torch

from memtrain_cl.device import Device, get_device, inventory
from memtrain_cl.errors import OutOfMemory, UnsupportedDevice
from memtrain_cl.sharing import external
from memtrain_cl.sharing.pool import Pool
from memtrain_cl.sharing.segment import CudaSegment, call, driver, granularity

logger = logging.getLogger("memtrain_cl")

_lock = threading.Lock()


def indexed(place: torch.device) -> torch.device:
    """`place` with the index that "cuda" alone means now."""
    return place if place.index is not None else torch.device(place.type, torch.cuda.current_device())


def _pci_of_cuda(ordinal: int) -> tuple[int, ...]:
    cu = driver()
    kinds = cu.CUdevice_attribute
    return tuple(
        int(call(cu.cuDeviceGetAttribute, kind, call(cu.cuDeviceGet, ordinal)))
        for kind in (
            kinds.CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID,
            kinds.CU_DEVICE_ATTRIBUTE_PCI_BUS_ID,
            kinds.CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID,
        )
    )


def _pci_of_opencl(handle: Any) -> tuple[int, ...] | None:
    if "cl_nv_device_attribute_query" not in handle.extensions.split():
        return None
    # A slot is a device and, in three bits, its function.
    return handle.pci_domain_id_nv, handle.pci_bus_id_nv, handle.pci_slot_id_nv >> 3


def _same(handle: Any, uuid: bytes, pci: tuple[int, ...]) -> bool:
    other = external.device_uuid(handle)
    return other == uuid if other is not None else _pci_of_opencl(handle) == pci


@functools.cache
def _search(ordinal: int) -> int | str:
    """The index in `devices()` of the OpenCL device that is CUDA device `ordinal` and takes its memory, or why none is.

    Told by UUID or PCI address, never by name.
    """
    if torch.version.hip is not None:
        return "memory of torch's HIP devices is not shared with OpenCL"
    torch.cuda.init()
    try:
        cu = driver()
    except UnsupportedDevice as error:
        return str(error)
    uuid = bytes(call(cu.cuDeviceGetUuid, call(cu.cuDeviceGet, ordinal)).bytes)
    pci = _pci_of_cuda(ordinal)
    for info, handle in inventory():
        if info.type == "gpu" and _same(handle, uuid, pci):
            if external.EXTENSION in handle.extensions.split():
                return info.index
            return f"the OpenCL driver of cuda:{ordinal}, {info.label}, lacks {external.EXTENSION}"
    return f"no OpenCL device is the hardware of cuda:{ordinal}; is NVIDIA's OpenCL driver installed?"


@functools.cache
def _warn_once(ordinal: int, reason: str) -> None:
    logger.warning("tensors on cuda:%d travel to OpenCL through the host: %s", ordinal, reason)


def partner(place: torch.device) -> Device | None:
    """The OpenCL device that works on the CUDA memory of `place` in place; None, with a warning once, without one."""
    ordinal = indexed(place).index
    found = _search(ordinal)
    if isinstance(found, str):
        _warn_once(ordinal, found)
        return None
    return get_device(found)


def shared_pool(place: torch.device) -> Pool:
    """The shared memory of a CUDA device. UnsupportedDevice, saying what is missing, where there can be none."""
    place = indexed(place)
    found = _search(place.index)
    if isinstance(found, str):
        raise UnsupportedDevice(found)
    device = get_device(found)
    with _lock:
        pool: Pool | None = device.kept.get("sharing")
        if pool is None:

            def make(nbytes: int) -> CudaSegment:
                try:
                    return CudaSegment(device, place, nbytes)
                except OutOfMemory:
                    torch.cuda.empty_cache()
                    return CudaSegment(device, place, nbytes)

            pool = device.kept["sharing"] = Pool(
                make,
                granule=granularity(place.index),
                step=max(512, device.handle.mem_base_addr_align // 8),
                # OpenCL's side has always ended when a visit ends.
                settle=lambda: torch.cuda.synchronize(place),
                place=place,
            )
        return pool
