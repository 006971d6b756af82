"""What every launcher does first: open a device of exact arithmetic, and check the shapes of what it was given."""

from __future__ import annotations

from typing import Any

import torch

from memtrain_cl import bridge
from memtrain_cl.device import Device, get_device
from memtrain_cl.errors import UnsupportedDevice
from memtrain_cl.formats import state_row_bytes
from memtrain_cl.probe import require_exact
from memtrain_cl.tuning import SIZE_LIMIT


def ready_device(tensor: torch.Tensor | None = None) -> Device:
    """The device for kernels on `tensor` (None: the current one), opened and trusted; UnsupportedDevice otherwise."""
    device = get_device() if tensor is None else bridge.device_for(tensor)
    device.check_process()
    require_exact(device)
    return device


def require_dtype(name: str, tensor: Any, *dtypes: torch.dtype) -> None:
    """TypeError unless `tensor` is one that crosses, of one of these dtypes."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected {name} as a torch tensor, got {type(tensor).__name__}")
    if not bridge.is_known(tensor):
        raise TypeError(f"expected {name} on {bridge.PLACES}, got a tensor on {tensor.device}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"expected {name} of dtype {' or '.join(map(str, dtypes))}, got {tensor.dtype}")


def require_tensor(name: str, tensor: Any, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    """TypeError or ValueError unless `tensor` is one that crosses, of this dtype and shape (None: any size)."""
    require_dtype(name, tensor, dtype)
    matches = tensor.ndim == len(shape) and all(
        want is None or size == want for size, want in zip(tensor.shape, shape, strict=True)
    )
    if not matches:
        wanted = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
        raise ValueError(f"expected {name} of shape {wanted}, got {list(tensor.shape)}")
    if any(size >= SIZE_LIMIT for size in tensor.shape):
        raise UnsupportedDevice(f"expected sizes below 2^31 in {name}, got {list(tensor.shape)}")


def require_together(**tensors: torch.Tensor | None) -> None:
    """ValueError unless all tensors live on one device (None: a tensor that is left out)."""
    place = None
    for tensor in tensors.values():
        if tensor is not None:
            if place is not None and tensor.device != place:
                where = ", ".join(f"{name} on {it.device}" for name, it in tensors.items() if it is not None)
                raise ValueError(f"expected tensors on one device, got {where}")
            place = tensor.device


def require_seed(name: str, seed: Any) -> None:
    """ValueError unless `seed` is an integer of 32 bits."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 32:
        raise ValueError(f"expected {name} in 0..2^32-1, got {seed!r}")


def require_layer(state: torch.Tensor, scale: torch.Tensor, in_features: int, *, packed: bool) -> tuple[int, int]:
    """(out, in) of a counter layer's state and scale; the errors of `require_tensor`."""
    require_tensor("state", state, torch.uint8, (None, state_row_bytes(in_features, packed=packed)))
    require_tensor("scale", scale, torch.float32, (state.shape[0], 1))
    require_together(state=state, scale=scale)
    return state.shape[0], in_features
