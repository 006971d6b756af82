"""Bytes between tensors on the host and on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from memtrain_cl import staging
from memtrain_cl.bridge import host_view
from memtrain_cl.device import Device
from memtrain_cl.elements import ELEMENTS
from memtrain_cl.faults import raise_pending
from memtrain_cl.operand import Operand
from memtrain_cl.runtimes import import_pyopencl
from memtrain_cl.torch_device.tensor import OpenCLTensor, allocated, element_of, opened, wrap


def upload(operand: Operand, values: np.ndarray[Any, Any]) -> None:
    """Fill a contiguous operand from contiguous host memory of its type; returns once `values` may change."""
    if operand.size == 0:
        return
    device = operand.array.device
    start = operand.offset * ELEMENTS[operand.element].itemsize
    if device.info.unified_memory:
        import_pyopencl().enqueue_copy(
            device.queue, operand.buffer, values.reshape(-1), dst_offset=start, is_blocking=True
        )
    else:
        staging.upload(device, values, operand.buffer, start)


def download(operand: Operand, values: np.ndarray[Any, Any]) -> None:
    """Fill contiguous host memory from a contiguous operand of its type, after the kernels before.

    Raises what those found wrong in their data (see faults.py).
    """
    if operand.size == 0:
        return
    device = operand.array.device
    start = operand.offset * ELEMENTS[operand.element].itemsize
    if device.info.unified_memory or values.nbytes <= 4096:
        # A blocking copy of the driver's is the shortest way for few bytes.
        import_pyopencl().enqueue_copy(
            device.queue, values.reshape(-1), operand.buffer, src_offset=start, is_blocking=True
        )
    else:
        staging.download(device, operand.buffer, values, start)
    raise_pending(device)


def from_host(host: torch.Tensor, device: Device | torch.device | None) -> OpenCLTensor:
    """A device tensor of a CPU tensor's values; dense strides are kept."""
    home = device if isinstance(device, Device) else opened(device)
    host = host.detach().resolve_conj().resolve_neg()
    element = element_of(host.dtype)
    operand = allocated(home, host.shape, element)
    if not host.is_contiguous():
        dense = torch.empty_like(host)  # keeps the order of the dimensions where they are dense
        operand = Operand(operand.array, operand.shape, tuple(dense.stride()), 0, element)
        dense.copy_(host)
        flat = dense.as_strided((dense.numel(),), (1,))
    else:
        flat = host.reshape(-1)
    upload(operand.viewed((host.numel(),)), host_view(flat))
    return wrap(operand)


def host_copy(tensor: OpenCLTensor) -> torch.Tensor:
    """A CPU tensor of the same values, shape and (where they are dense) strides; waits for the device."""
    from memtrain_cl.torch_device.aten.copy import dense_operand

    operand = dense_operand(tensor.operand)
    host = torch.empty_strided(operand.shape, operand.strides, dtype=tensor.dtype)
    flat = host.as_strided((operand.size,), (1,))
    download(operand.viewed((operand.size,)), host_view(flat))
    return host


def host_alias(tensor: OpenCLTensor, maps: dict[int, np.ndarray[Any, Any]]) -> torch.Tensor:
    """A CPU tensor over the same bytes, where host and device share memory; waits for the device. `maps` collects the
    mappings, one a buffer; launch no kernel on them before they are dropped.
    """
    operand = tensor.operand
    if operand.size == 0:
        return torch.empty_strided(operand.shape, operand.strides, dtype=tensor.dtype)
    key = operand.buffer.int_ptr
    if key not in maps:
        maps[key] = operand.array.map_host(write=not operand.array.readonly)
    return torch.from_numpy(maps[key]).view(tensor.dtype).as_strided(operand.shape, operand.strides, operand.offset)


def write_back(tensor: OpenCLTensor, host: torch.Tensor) -> None:
    """Set a device tensor to a CPU tensor's values, in place."""
    from memtrain_cl.torch_device.aten.copy import copy_operand

    operand = tensor.operand
    if operand.contiguous:
        upload(operand, host_view(host.contiguous()))
    else:
        copy_operand(from_host(host, operand.array.device).operand, operand)
