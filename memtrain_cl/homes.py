"""Where the tensors of a visit live, and how kernels reach their memory there.

A visit (`memtrain_cl.bridge.Crossing`) deals with tensors of one place. What differs from place to place is a `Home`:
host memory (in bridge.py), memory of the torch device "opencl" (here), CUDA memory (`memtrain_cl.sharing`). Other
devices of torch, HIP's and Level Zero's among them, travel through the host until somebody with the hardware writes
their home: `bridge.home_of` is where it plugs in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from memtrain_cl.array import DeviceArray
from memtrain_cl.device import Device
from memtrain_cl.elements import ELEMENTS
from memtrain_cl.memory import allocate
from memtrain_cl.operand import Operand


@dataclass(slots=True)
class Lodging:
    """A tensor's place in a visit. memory: the tensor itself, or (`copied`) what holds its values; array: its bytes."""

    memory: torch.Tensor
    array: DeviceArray
    copied: bool = False


class Home(Protocol):
    """One visit's tensors of one place; made when the visit begins."""

    def lodge(self, tensor: torch.Tensor) -> Lodging:
        """`tensor`'s values, contiguous, where kernels that are launched from now on find them."""

    def fresh(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, Lodging]:
        """An uninitialised tensor of this place, and what kernels fill."""

    def scratch(self, shape: Sequence[int], dtype: Any) -> DeviceArray:
        """Device memory for the visit alone."""

    def settle(self, written: list[Lodging]) -> None:
        """Make what kernels wrote visible to torch; the visit has ended well."""

    def abandon(self) -> None:
        """Let kernels that were queued come to an end; the visit has failed."""


def pooled(device: Device, shape: Sequence[int], dtype: Any) -> DeviceArray:
    """An uninitialised array from the device's allocator."""
    array = DeviceArray(device, None, shape, dtype)
    if array.nbytes:
        array.owner = allocate(device, array.nbytes)
        array.buffer = array.owner.buffer
    return array


def array_of(operand: Operand) -> DeviceArray:
    """The array of an operand that is contiguous from the start of its memory."""
    memory = operand.array
    return DeviceArray(
        memory.device,
        operand.buffer if operand.size else None,
        operand.shape,
        ELEMENTS[operand.element].bits,
        owner=memory,
        shares_host=memory.shares_host,
        readonly=memory.readonly,
        alignment=memory.alignment,
    )


def operand_of(tensor: torch.Tensor) -> Operand | None:
    """What a tensor of the torch device "opencl" carries; None for every other tensor."""
    operand: Operand | None = getattr(tensor, "operand", None)
    return operand


class OpenCLHome:
    """Tensors of the torch device "opencl". Nothing waits: torch's kernels run on the same in-order queue."""

    def __init__(self, device: Device, place: torch.device) -> None:
        self._device = device
        self._place = place

    def _array(self, tensor: torch.Tensor) -> DeviceArray:
        operand = operand_of(tensor)
        if operand is None or operand.device.queue is not self._device.queue:
            raise ValueError(f"expected a tensor on {self._place}, got one on {tensor.device}")
        return array_of(operand)

    def lodge(self, tensor: torch.Tensor) -> Lodging:
        operand = operand_of(tensor)
        if operand is None or (operand.contiguous and operand.offset == 0):
            return Lodging(tensor, self._array(tensor))
        # These kernels count elements from the start of the buffer.
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        return Lodging(copy, self._array(copy), copied=True)

    def fresh(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, Lodging]:
        tensor = torch.empty(shape, dtype=dtype, device=self._place)
        return tensor, Lodging(tensor, self._array(tensor))

    def scratch(self, shape: Sequence[int], dtype: Any) -> DeviceArray:
        return pooled(self._device, shape, np.dtype(dtype))

    def settle(self, written: list[Lodging]) -> None:
        pass

    def abandon(self) -> None:
        pass
