"""``torch.load(file, map_location="opencl")``: storages on their way from a file to the device.

torch moves a storage to the map_location first and makes tensors of it then. A storage of torch's cannot hold device
memory of Python's making, so one that was moved keeps its bytes on the host, names the device as its own, and is
uploaded when the first tensor is set to it; tensors of one storage share their bytes on the device as when saved.
"""

from __future__ import annotations

from typing import Any

import torch

_torch_to: Any = torch.UntypedStorage.to


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
    torch.UntypedStorage.to = _to  # type: ignore[method-assign]
