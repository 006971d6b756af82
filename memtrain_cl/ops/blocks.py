"""How kernels over blocks of consecutive elements are launched, and the map that their codes may need on the device.

A work-group of a GPU takes one block, or several short ones, with the block in registers; a work-item of a CPU takes
some blocks in a row.

Unproven: how the shapes fare on GPUs other than NVIDIA's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrain_cl.array import DeviceArray, from_numpy
from memtrain_cl.code_maps import dynamic_map, dynamic_midpoints
from memtrain_cl.device import Device, DeviceInfo
from memtrain_cl.errors import UnsupportedDevice
from memtrain_cl.tuning import BLOCKS_PER_UNIT, SIZE_LIMIT, ceil_div, groups_share_rows, power_of_two_at_least

#: Work-items that share a block: few sizes, since each is a program to build.
LANES = (4, 16, 64, 256)
#: The same where 32 items exchange numbers without local memory, and the vectors that an item keeps at most: two where
#: its block then needs no barrier.
WARP_LANES = ((4, 2), (16, 2), (32, 2), (64, 4), (128, 4), (256, 4))
#: Vectors of four elements that an item keeps in registers: few for most blocks, twice as many for one size more.
HELD = 2
#: Items of a work-group at least, made of several short blocks.
GROUP = 64
#: The same there, of blocks that need no barrier.
WARP_GROUP = 128
#: Groups that a compute unit of a GPU gets where each has to read a map before its first block.
GROUPS_PER_UNIT = 16
#: Elements of a block that an item of a CPU keeps between reading and writing it.
KEPT = 2048


@dataclass(frozen=True)
class BlockShape:
    """constants: those of kernels/_rows.cl, PTX (kernels/_exact.cl), and HELD (CPU: elements of a block that are kept).
    per: turns of a group, or blocks of a CPU's item.
    """

    constants: dict[str, int]
    global_size: tuple[int, ...]
    local_size: tuple[int, ...]
    per: int


def block_shape(
    device: Device, blocks: int, block_size: int, *, aligned: bool, mapped: bool, whole: bool = False
) -> BlockShape:
    """The shape for `blocks` blocks of block_size elements, both positive.

    aligned: every block begins on four elements and ends so. mapped: codes are places in a map. whole: an item of a GPU
    takes one vector of its block and no more, of at most 256 elements.
    """
    if block_size >= SIZE_LIMIT:
        raise UnsupportedDevice(f"expected blocks of fewer than 2^31 elements, got {block_size}")
    info = device.info
    if not groups_share_rows(info):
        per = ceil_div(blocks, info.compute_units * BLOCKS_PER_UNIT)
        # Two float32 an element wait in local memory, of which a driver may want a part for itself.
        held = KEPT if block_size <= KEPT and 0.75 * info.local_mem_bytes >= 2 * 4 * KEPT else 0
        constants = {"GPU": 0, "PTX": 0, "LANES": 1, "SLOTS": 1, "HELD": held, "ALIGNED": 0}
        return BlockShape(constants, (ceil_div(blocks, per),), (1,), per)
    units = ceil_div(block_size, 4)
    warps = info.inline_ptx and info.max_work_group_size >= WARP_LANES[-1][0]
    lanes, held = _warp_lanes(units) if warps and not whole else _lanes(info, units, 1 if whole else HELD)
    slots = max(1, (WARP_GROUP if warps and lanes <= 32 else GROUP) // lanes)
    groups = ceil_div(blocks, slots)
    if mapped and not warps:
        groups = min(groups, info.compute_units * GROUPS_PER_UNIT)
    return BlockShape(
        {"GPU": 1, "PTX": int(warps), "LANES": lanes, "SLOTS": slots, "HELD": held, "ALIGNED": int(aligned)},
        (groups * lanes * slots,),
        (lanes * slots,),
        ceil_div(blocks, groups * slots),
    )


def _lanes(info: DeviceInfo, units: int, each: int) -> tuple[int, int]:
    """(items that share a block of `units` vectors, vectors that each keeps, 0 where they would be too many)."""
    possible = [lanes for lanes in LANES if lanes <= info.max_work_group_size]
    lanes = next((lanes for lanes in possible if lanes * each >= units), possible[-1])
    return lanes, next((held for held in (HELD, 2 * HELD) if lanes * held >= units), 0)


def _warp_lanes(units: int) -> tuple[int, int]:
    """The same where 32 items exchange numbers without local memory."""
    for lanes, most in WARP_LANES:
        if lanes * most >= units:
            return lanes, power_of_two_at_least(ceil_div(units, lanes))
    return WARP_LANES[-1][0], 0


def map_of(device: Device, *signed: bool) -> DeviceArray:
    """The signed (True) or unsigned dynamic map and its midpoints, float32 [512], on the device; several end to end."""
    name = f"dynamic map, signed {signed}"
    if name not in device.kept:
        device.kept[name] = from_numpy(device, np.concatenate([_chart(each) for each in signed]))
    found: DeviceArray = device.kept[name]
    return found


def _chart(signed: bool) -> np.ndarray:
    return np.concatenate([dynamic_map(signed), dynamic_midpoints(signed), np.zeros(1, np.float32)])
