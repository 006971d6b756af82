"""Launchers of kernels/hadamard.cl: rows rotated by a regular Hadamard matrix, and rotated rows in 8 bits.

Signatures, formulas and results are those of `memtrain_cl.reference.hadamard`, byte for byte on every device.

Unproven: how the shapes fare on GPUs other than NVIDIA's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from memtrain_cl.array import DeviceArray
from memtrain_cl.bridge import Crossing
from memtrain_cl.device import Device
from memtrain_cl.errors import UnsupportedDevice
from memtrain_cl.formats import check_rotation, largest_pow4_divisor, row_length
from memtrain_cl.ops.blockwise import dequantize_int8_blockwise, quantize_int8_blockwise
from memtrain_cl.ops.launch import ready_device, require_dtype, require_tensor, require_together
from memtrain_cl.ops.stochastic import FLOATING_DTYPES, name_of
from memtrain_cl.program import get_kernel
from memtrain_cl.tuning import BLOCKS_PER_UNIT, SIZE_LIMIT, ceil_div, groups_share_rows

__all__ = [
    "decode_rotated",
    "dequantize_int8_rows",
    "encode_rotated",
    "largest_pow4_divisor",
    "quantize_int8_rows",
    "regular_hadamard",
    "rotate",
]

#: Elements of a block, and of a GPU's item's part of it, of which sixteen are one.
BLOCK, PART = 256, 16
#: Work-items of a GPU that share a row: few sizes, since each is a program to build. Parts that an item holds.
LANES, HELD = (16, 64, 256), (1, 2, 4)
#: Items of a work-group at least.
GROUP = 64
#: Elements of a row that an item of a CPU keeps in local memory.
KEPT = 8192


def _kernel(device: Device, name: str, element: str, rot: int, constants: dict[str, int]) -> Any:
    ptx = int(constants["GPU"] and device.info.inline_ptx)
    return get_kernel(device, "hadamard", name, NAME=name, X=element, ROT=rot, PTX=ptx, **constants)


def launch_encode(
    device: Device,
    x: DeviceArray,
    codes: DeviceArray,
    scale: DeviceArray,
    *,
    rows: int,
    columns: int,
    rot: int,
    element: str,
) -> Any:
    """Enqueue codes [rows, columns] and scale [rows] of x, not empty, of the type `element`; the launch's event."""
    if columns >= SIZE_LIMIT:
        raise UnsupportedDevice(f"expected rows of fewer than 2^31 elements, got {columns}")
    info = device.info
    if groups_share_rows(info):
        aligned = columns % 4 == 0 and min(x.alignment, codes.alignment) >= 16
        possible = [lanes for lanes in LANES if lanes <= info.max_work_group_size]
        blocks = ceil_div(columns, BLOCK)
        choices = [(lanes, held) for lanes in possible for held in HELD if lanes * held >= blocks * PART]
        # The most items that still leave an item a part, then more parts an item.
        lanes, held = min(choices, key=lambda choice: (choice[1], choice[0])) if choices else (possible[-1], 0)
        slots = max(1, GROUP // lanes)
        constants = {"GPU": 1, "LANES": lanes, "SLOTS": slots, "HELD": held, "ALIGNED": int(aligned)}
        size, local, per = ceil_div(rows, slots) * lanes * slots, lanes * slots, 1
    else:
        held = KEPT if columns <= KEPT and 0.75 * info.local_mem_bytes >= 4 * KEPT else 0
        constants = {"GPU": 0, "LANES": 1, "SLOTS": 1, "HELD": held, "ALIGNED": 0}
        per = ceil_div(rows, info.compute_units * BLOCKS_PER_UNIT)
        size, local = ceil_div(rows, per), 1
    kernel = _kernel(device, "encode_rotated_rows", element, rot, constants)
    return kernel((size,), (local,), x, codes, scale, np.uint32(columns), np.uint64(rows), np.uint32(per))


def _launch_flat(
    device: Device, name: str, arrays: tuple[DeviceArray, ...], rows: int, columns: int, rot: int, element: str
) -> Any:
    """Enqueue a kernel over all blocks; the launch's event."""
    gpu = groups_share_rows(device.info)
    splits = ceil_div(columns, BLOCK)
    parts = rows * splits
    if gpu:
        # Scales are read one by one, wherever they lie.
        aligned = columns % 4 == 0 and min(array.alignment for array in arrays) >= 16
        constants = {"GPU": 1, "LANES": GROUP, "SLOTS": 1, "HELD": 0, "ALIGNED": int(aligned)}
        size, local, per = ceil_div(parts * PART, GROUP) * GROUP, GROUP, 1
    else:
        constants = {"GPU": 0, "LANES": 1, "SLOTS": 1, "HELD": 0, "ALIGNED": 0}
        per = ceil_div(parts, device.info.compute_units * BLOCKS_PER_UNIT)
        size, local = ceil_div(parts, per), 1
    kernel = _kernel(device, name, element, rot, constants)
    sizes = (np.uint64(columns), np.uint64(splits), np.uint64(parts), np.uint32(per))
    return kernel((size,), (local,), *arrays, *sizes)


def launch_rotate(device: Device, x: DeviceArray, y: DeviceArray, *, rot: int, element: str) -> Any:
    """Enqueue y float32 of x, not empty, of the type `element`; the launch's event."""
    return _launch_flat(device, "rotate_blocks", (x, y), 1, x.size, rot, element)


def launch_decode(
    device: Device, codes: DeviceArray, scale: DeviceArray, y: DeviceArray, *, rows: int, columns: int, rot: int
) -> Any:
    """Enqueue y float32 [rows, columns] of codes and scale; the launch's event."""
    return _launch_flat(device, "decode_rotated_rows", (codes, scale, y), rows, columns, rot, "float32")


def regular_hadamard(rot: int) -> torch.Tensor:
    """R, float32 [rot, rot] on the host; ValueError unless rot is 1, 4, 16, 64 or 256."""
    return rotate(torch.eye(check_rotation(rot)), rot)


def rotate(x: torch.Tensor, rot: int) -> torch.Tensor:
    """float32 of x's shape: each block of rot elements of x, along its last dimension, times the regular Hadamard
    matrix, which is its own inverse.

    x: float32, float16 or bfloat16, else TypeError. ValueError unless rot is 1, 4, 16, 64 or 256 and divides the last
    dimension.
    """
    require_dtype("x", x, *FLOATING_DTYPES)
    rot = check_rotation(rot, x.shape[-1] if x.ndim else 1)
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=torch.float32, device=x.device)
    device = ready_device(x)
    with Crossing(device, x) as cross:
        y, target = cross.output(tuple(x.shape))
        launch_rotate(device, cross.read(x), target, rot=rot, element=name_of(x.dtype))
    return y


def quantize_int8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes int8 of x's shape, scale float32 [rows]) of x in rows [shape[0], numel/shape[0]].

    scale = largest/127, 1 for a row of zeros; code = x/scale, rounded half to even. x: float32, float16 or bfloat16.
    """
    require_dtype("x", x, *FLOATING_DTYPES)
    return quantize_int8_blockwise(x, row_length(x.shape))


def dequantize_int8_rows(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 of codes' shape, code * scale of its row: the way back of `quantize_int8_rows`."""
    require_dtype("codes", codes, torch.int8)
    return dequantize_int8_blockwise(codes, scale, row_length(codes.shape))


def encode_rotated(x: torch.Tensor, rot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_int8_rows` of x whose rows [shape[0], numel/shape[0]] are rotated in blocks of rot, in one launch.

    ValueError unless rot is 1, 4, 16, 64 or 256 and divides the length of a row.
    """
    require_dtype("x", x, *FLOATING_DTYPES)
    columns = row_length(x.shape)
    rot = check_rotation(rot, columns)
    if rot == 1 or x.numel() == 0:
        return quantize_int8_rows(x)
    rows = x.numel() // columns
    device = ready_device(x)
    with Crossing(device, x) as cross:
        codes, codes_array = cross.output(tuple(x.shape), torch.int8)
        scale, scale_array = cross.output((rows,))
        source = cross.read(x)
        sizes = {"rows": rows, "columns": columns, "rot": rot}
        launch_encode(device, source, codes_array, scale_array, element=name_of(x.dtype), **sizes)
    return codes, scale


def decode_rotated(codes: torch.Tensor, scale: torch.Tensor, rot: int) -> torch.Tensor:
    """float32 of codes' shape, from what `encode_rotated` gave for the same rot.

    codes: int8. scale: float32, one a row. ValueError or TypeError for others.
    """
    require_dtype("codes", codes, torch.int8)
    columns = row_length(codes.shape)
    rot = check_rotation(rot, columns)
    if rot == 1 or codes.numel() == 0:
        return dequantize_int8_rows(codes, scale)
    rows = codes.numel() // columns
    require_tensor("scale", scale, torch.float32, (rows,))
    require_together(codes=codes, scale=scale)
    device = ready_device(codes)
    with Crossing(device, codes) as cross:
        y, target = cross.output(tuple(codes.shape))
        launch_decode(device, cross.read(codes), cross.read(scale), target, rows=rows, columns=columns, rot=rot)
    return y
