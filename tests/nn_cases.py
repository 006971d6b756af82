"""Rooms in which counter layers train: the reference, OpenCL on host tensors, and the torch device."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from memtrain_cl import ops, reference
from memtrain_cl.device import Device
from memtrain_cl.nn import CompactCounterLinear
from tests.layer_cases import IN, OUT, make

ROOMS = ("reference", "host", "opencl")


@dataclass(frozen=True)
class Room:
    """ops: the layers' backend.   place: where tensors live."""

    ops: ModuleType
    place: torch.device

    def make(self, kind: str = "packed", **options: Any) -> Any:
        """A layer as `tests.layer_cases.make` makes it; the same one in every room, given torch's seed."""
        return make(kind, ops=self.ops, **options).to(self.place)

    def tensor(self, *shape: int, seed: int = 0) -> torch.Tensor:
        """Standard normal numbers, the same in every room."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.place)


def room_of(name: str, device: Device) -> Room:
    """A room by name."""
    if name == "opencl":
        import memtrain_cl.torch_device  # noqa: F401 (registers the device)

        return Room(ops, torch.device("opencl", device.info.index))
    return Room(reference if name == "reference" else ops, torch.device("cpu"))


def twin(module: Any) -> Any:
    """A copy that goes on by itself."""
    return copy.deepcopy(module)


def bytes_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A module's whole state, on the host."""
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


def layers_of(model: torch.nn.Module) -> list[CompactCounterLinear]:
    """The counter layers of a model."""
    return [module for module in model.modules() if isinstance(module, CompactCounterLinear)]


__all__ = ["IN", "OUT", "ROOMS", "Room", "bytes_of", "layers_of", "room_of", "twin"]
