"""Launchers of kernels/index.cl that find what is not zero. The host waits for the count."""

from __future__ import annotations

import numpy as np

from memtrain_cl.array import DeviceArray
from memtrain_cl.device import Device
from memtrain_cl.launchers.index_build import MASK_PER_ITEM, group_size, index_kernel
from memtrain_cl.memory import allocate
from memtrain_cl.operand import Operand, empty_operand
from memtrain_cl.runtimes import import_pyopencl
from memtrain_cl.tuning import BLOCKS_PER_UNIT, ceil_div, groups_share_rows

#: Least elements that a CPU's work-item looks at.
LEAST_CHUNK = 4096


def _fetch_count(device: Device, total: DeviceArray) -> int:
    host = np.empty(1, np.uint32)
    import_pyopencl().enqueue_copy(device.queue, host, total.buffer, is_blocking=True)
    return int(host[0])


def positions(x: Operand) -> Operand:
    """int64 [count]: the ascending flat places of the elements of contiguous x that are not zero; waits for the device.

    ValueError for 2^32 elements or more.
    """
    device, n = x.device, x.size
    if n >= 1 << 32:
        raise ValueError(f"expected fewer than 2^32 elements, got {n}")
    if n == 0:
        return empty_operand(device, (0,), "int64")
    group = group_size(device, "mask")
    if groups_share_rows(device.info):
        chunk = group * MASK_PER_ITEM
    else:
        chunk = max(LEAST_CHUNK, ceil_div(n, device.info.compute_units * BLOCKS_PER_UNIT))
    chunks = ceil_div(n, chunk)
    over = ((chunks * group,), (group,))
    counts, total = allocate(device, 4 * chunks), allocate(device, 4)
    index_kernel(device, "mask", "count_mask", element=x.element)(
        *over, *x.place, counts, np.uint64(n), np.uint64(chunk)
    )
    index_kernel(device, "mask", "scan_counts", element=x.element)((group,), (group,), counts, total, np.uint32(chunks))
    out = empty_operand(device, (_fetch_count(device, total),), "int64")
    if out.size:
        index_kernel(device, "mask", "write_positions", element=x.element)(
            *over, *x.place, counts, out, np.uint64(n), np.uint64(chunk)
        )
    return out


def coordinates(places: Operand, shape: tuple[int, ...]) -> Operand:
    """int64 [count, len(shape)]: the coordinates in `shape` of the flat places that `positions` gave."""
    count, axes = places.size, len(shape)
    out = empty_operand(places.device, (count, axes), "int64")
    stride = 1
    for axis in range(axes - 1, -1, -1):
        if count:
            index_kernel(places.device, "mask", "write_coordinate", element="bool")(
                (count,),
                None,
                places,
                out,
                np.uint64(stride),
                np.uint64(shape[axis]),
                np.uint32(axis),
                np.uint32(axes),
                np.uint32(count),
            )
        stride *= shape[axis]
    return out


__all__ = ["coordinates", "positions"]
