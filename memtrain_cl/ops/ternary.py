"""Launchers of kernels/ternary.cl: the ternary weights of counter codes as int8, for the products of whole numbers.

Results are those of `memtrain_cl.reference.ternary`, byte for byte on every device.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from memtrain_cl.array import DeviceArray
from memtrain_cl.bridge import Crossing
from memtrain_cl.device import Device
from memtrain_cl.formats import check_c, state_row_bytes
from memtrain_cl.ops.launch import ready_device, require_tensor
from memtrain_cl.program import get_kernel
from memtrain_cl.tuning import BLOCKS_PER_UNIT, ceil_div, groups_share_rows

#: Columns that a work-group or an item transposes, rows that a group does, and a group's size; as the kernel says.
_GROUP_COLUMNS, _ITEM_COLUMNS, _GROUP_ROWS, _GROUP = 32, 64, 128, (32, 2)
#: The same of wide rows: columns a group, its size, and that of one that transposes nothing.
_WIDE_COLUMNS, _WIDE_GROUP, _WIDE_FLAT = 128, (32, 8), 64


def launch_ternary(
    device: Device, state: DeviceArray, t: DeviceArray, rows: int, n: int, *, C: int, packed: bool, transposed: bool
) -> Any:
    """Enqueue t int8 [rows, n], or [n, rows] where `transposed`, of a state of as many; the launch's event."""
    gpu = groups_share_rows(device.info)
    wide = gpu and n % 16 == 0 and state.alignment >= (4 if packed else 16) and t.alignment >= 16
    wide = wide and (not transposed or (rows % 16 == 0 and device.info.max_work_group_size >= math.prod(_WIDE_GROUP)))
    items = device.info.compute_units * BLOCKS_PER_UNIT
    local: tuple[int, ...] | None = None if gpu else (1, 1)
    per = 1
    if transposed and gpu:
        columns, local = (_WIDE_COLUMNS, _WIDE_GROUP) if wide else (_GROUP_COLUMNS, _GROUP)
        size = (ceil_div(n, columns) * local[0], ceil_div(rows, _GROUP_ROWS) * local[1])
    elif transposed:
        strips = ceil_div(n, _ITEM_COLUMNS)
        per = ceil_div(ceil_div(rows, ceil_div(items, strips)), 8) * 8
        size = (strips, ceil_div(rows, per))
    elif wide:
        local = (_WIDE_FLAT, 1)
        size = (ceil_div(rows * n // 16, _WIDE_FLAT) * _WIDE_FLAT, 1)
    elif gpu:
        size = (ceil_div(n, 4) * rows, 1)
    else:
        per = ceil_div(rows, items)
        size = (ceil_div(rows, per), 1)
    name = "decode_ternary_transposed" if transposed else "decode_ternary"
    kernel = get_kernel(
        device,
        "ternary",
        name,
        NAME=name,
        GPU=int(gpu),
        C=C,
        PACKED=int(packed),
        WIDE=int(wide),
        ALIGNED=int(gpu and (rows if transposed else n) % 4 == 0 and t.alignment >= 4),
    )
    return kernel(size, local, state, t, np.uint32(n), np.uint32(rows), np.uint32(per))


def decode_ternary(
    state: torch.Tensor, in_features: int, *, C: int, packed: bool, transposed: bool = False
) -> torch.Tensor:
    """t int8 [out, in], or [in, out] where `transposed`; state uint8 [out, in] or packed [out, in/4*3]."""
    C = check_c(C, packed=packed)
    require_tensor("state", state, torch.uint8, (None, state_row_bytes(in_features, packed=packed)))
    rows = state.shape[0]
    shape = (in_features, rows) if transposed else (rows, in_features)
    if rows * in_features == 0:
        return torch.empty(shape, dtype=torch.int8, device=state.device)
    device = ready_device(state)
    with Crossing(device, state) as cross:
        result, t = cross.output(shape, torch.int8)
        launch_ternary(device, cross.read(state), t, rows, in_features, C=C, packed=packed, transposed=transposed)
    return result
