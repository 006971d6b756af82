"""A layer's ternary weights beside its codes, int8 or float16 [out, in], which products read instead of decoding.

The update writes into them what it changes; `refresh_cache_` writes all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from memtrain_cl.array import DeviceArray
from memtrain_cl.bridge import Crossing
from memtrain_cl.device import Device
from memtrain_cl.formats import check_c, state_row_bytes
from memtrain_cl.launchers.decoded import cache_element
from memtrain_cl.ops.launch import ready_device, require_tensor, require_together
from memtrain_cl.ops.ternary import launch_ternary
from memtrain_cl.program import get_kernel
from memtrain_cl.tuning import ceil_div, groups_share_rows

#: The element types of a cache.
CACHE_TYPES = (torch.int8, torch.float16)


def require_cache(cache: Any, out: int, in_features: int) -> None:
    """TypeError or ValueError unless this is a layer's cache: int8 or float16 [out, in]."""
    if isinstance(cache, torch.Tensor) and cache.dtype not in CACHE_TYPES:
        raise TypeError(f"expected cache of dtype torch.int8 or torch.float16, got {cache.dtype}")
    require_tensor("cache", cache, getattr(cache, "dtype", torch.int8), (out, in_features))


def launch_refresh(device: Device, cache: DeviceArray, state: DeviceArray, *, C: int, packed: bool) -> Any:
    """Enqueue a `refresh_cache_` of a layer that has weights; nothing waits. The launch's event."""
    out, n = cache.shape
    if cache_element(cache) == "int8":
        return launch_ternary(device, state, cache, out, n, C=C, packed=packed, transposed=False)
    gpu = groups_share_rows(device.info)
    groups = ceil_div(n, 4)
    per = 1 if gpu else groups
    kernel = get_kernel(device, "codec", "decode_half", GPU=int(gpu), WORDS=0, C=C, PACKED=int(packed))
    return kernel((ceil_div(groups, per) * out,), None, state, cache, np.uint32(n), np.uint32(per))


def refresh_cache_(cache: torch.Tensor, state: torch.Tensor, *, C: int, packed: bool) -> None:
    """Write t of every code into cache int8 or float16 [out, in]; state uint8 [out, in] or packed [out, in/4*3]."""
    C = check_c(C, packed=packed)
    require_cache(cache, *(cache.shape if isinstance(cache, torch.Tensor) and cache.ndim == 2 else (0, 0)))
    out, n = cache.shape
    require_tensor("state", state, torch.uint8, (out, state_row_bytes(n, packed=packed)))
    require_together(cache=cache, state=state)
    if out * n == 0:
        return
    device = ready_device(state)
    with Crossing(device, state) as cross:
        launch_refresh(device, cross.update(cache), cross.read(state), C=C, packed=packed)
