"""Launchers of kernels/proxy.cl: the row moments of rms_mode "proxy"."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from memtrain_cl.array import DeviceArray
from memtrain_cl.bridge import Crossing
from memtrain_cl.device import Device
from memtrain_cl.formats import LANES
from memtrain_cl.homes import pooled
from memtrain_cl.ops.launch import ready_device, require_tensor, require_together
from memtrain_cl.program import get_kernel
from memtrain_cl.tuning import (
    BLOCKS_PER_UNIT,
    LARGEST_GROUP,
    ceil_div,
    groups_share_rows,
    power_of_two_at_least,
)

#: Lanes of a CPU's item at least: a cache line's worth and more, so that items do not read each other's lines.
_LEAST_LANES = 64
#: Columns of a vector.
_WIDTH = 8


def launch_proxy_moments(
    device: Device,
    grad_out: DeviceArray,
    x: DeviceArray,
    g_sq: DeviceArray,
    *,
    gate: DeviceArray | None = None,
) -> Any:
    """Enqueue g_sq [out, 1] of grad_out [M, out] and x [M, in], both with elements; nothing waits. The launch's event.

    gate: a layer's clock, by which nothing happens in a step that does not fire.
    """
    lanes = pooled(device, (LANES,), np.dtype(np.float32))
    (tokens, out), count, units = grad_out.shape, x.size, device.info.compute_units
    # A buffer must be named where there is no gate.
    closing = (lanes if gate is None else gate, np.uint32(gate is not None))
    if groups_share_rows(device.info):
        size = 1 << (min(LARGEST_GROUP, device.info.max_work_group_size).bit_length() - 1)
        constants, local = {"GPU": 1, "WG_SIZE": size, "LANES": 0}, (size,)
        lane_items, column_items, per = LANES // 8 * size, ceil_div(out, size // 32) * size, 1
    else:
        own = max(_LEAST_LANES, LANES // power_of_two_at_least(units))
        constants, local = {"GPU": 0, "WG_SIZE": 0, "LANES": own}, (1,)
        per = ceil_div(ceil_div(out, _WIDTH), units * BLOCKS_PER_UNIT)
        lane_items, column_items = LANES // own, ceil_div(ceil_div(out, _WIDTH), per)
    kernel = get_kernel(device, "proxy", "square_lanes", **constants)
    kernel((lane_items,), local, x, lanes, *closing, np.uint64(count))
    kernel = get_kernel(device, "proxy", "proxy_moments", **constants)
    sizes = (np.uint32(value) for value in (out, tokens, per))
    return kernel((column_items,), local, grad_out, lanes, g_sq, *closing, np.float32(count), *sizes)


def proxy_moments(grad_out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """g_sq float32 [out, 1] of a layer's grad_out float32 [M, out] and x float32 [M, in]:

    S(grad_out[:, o]^2) * (S(x^2) / numel(x)), which estimates mean_j grad_w[o, j]^2; S sums in the one order.
    """
    require_tensor("x", x, torch.float32, (None, None))
    require_tensor("grad_out", grad_out, torch.float32, (x.shape[0], None))
    require_together(grad_out=grad_out, x=x)
    out = grad_out.shape[1]
    if x.numel() == 0 or out == 0:
        return torch.zeros((out, 1), device=x.device)
    device = ready_device(x)
    with Crossing(device, x) as cross:
        result, g_sq = cross.output((out, 1))
        launch_proxy_moments(device, cross.read(grad_out), cross.read(x), g_sq)
    return result
