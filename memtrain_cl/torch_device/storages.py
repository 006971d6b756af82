"""Storages, as torch shows them in Python: of tensors on the device, and on their way from a file to it.

A storage of torch's cannot hold device memory of Python's making; that of a tensor on the device holds nothing. Here it
tells at least which bytes on the device it stands for, by which safetensors and others find tensors that share them.

``torch.load(file, map_location="opencl")`` moves a storage first and makes tensors of it then. One that was moved keeps
its bytes on the host, names the device as its own, and is uploaded when the first tensor is set to it; tensors of one
storage share their bytes on the device as when saved.
"""

from __future__ import annotations

from typing import Any

import torch

_torch_to: Any = torch.UntypedStorage.to


class DeviceStorage(torch.UntypedStorage):
    """The storage of a tensor on the device. array: its DeviceArray, which all views of the tensor share."""

    array: Any

    def data_ptr(self) -> int:
        """A number of the bytes' own (OpenCL's handle of the buffer), and no address; 0 where they are none."""
        return int(self.array.buffer.int_ptr) if self.array.buffer is not None else 0

    def nbytes(self) -> int:
        """Bytes on the device."""
        return int(self.array.nbytes)

    def size(self) -> int:
        """Bytes on the device."""
        return self.nbytes()

    def __len__(self) -> int:
        return self.nbytes()

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"torch cannot reach the bytes of a storage on {self.device}; copy the tensor instead")

    cpu = clone = copy_ = fill_ = resize_ = tolist = __getitem__ = __setitem__ = __iter__ = __reduce__ = _refuse


class Placed(torch.UntypedStorage):
    """Bytes on the host that are meant for a device. array: the device's, once a tensor was set to them."""

    meant_for: torch.device
    array: Any = None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where its tensors will be."""
        return self.meant_for

    def bytes_on_host(self) -> torch.Tensor:
        """The bytes as a CPU tensor, without a copy."""
        return torch.empty(0, dtype=torch.uint8).set_(self)

    def _set_from_file(self, *args: Any) -> Any:
        raise RuntimeError(
            "files of torch's format before 1.6 do not load with map_location='opencl'; load them with "
            "map_location='cpu' and move the tensors"
        )


def _to(self: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> Any:
    """torch's, and a `Placed` of the same bytes where the device is "opencl"."""
    target = torch.device(device)
    if target == self.device:
        return self
    if self.device.type == "opencl":
        raise RuntimeError(f"torch cannot reach the bytes of a storage on {self.device}; copy the tensor instead")
    if target.type != "opencl":
        return _torch_to(self, device=target, non_blocking=non_blocking)
    if self.device.type != "cpu":
        raise RuntimeError(f"expected a storage on the host to move to {target}, got one on {self.device}")
    placed: Any = self[:]
    placed.__class__ = Placed
    placed.meant_for = _current() if target.index is None else target
    return placed


def _current() -> torch.device:
    from memtrain_cl.device import current_index

    return torch.device("opencl", current_index())


def install() -> None:
    """Let storages move to the device."""
    storage: Any = torch.UntypedStorage
    storage.to = _to
