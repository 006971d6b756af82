"""Work-group parameters for a device, from its capabilities and the problem's shape.

Row kernels have two shapes (kernels/counter.cl). A device whose groups run in lock step gets a work-group a row; a CPU,
or a device whose groups are too small for that, gets a work-item a block of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from memtrain_cl.device import DeviceInfo

#: Below this many items a work-group does not hide a row's latency, and the item-a-row shape is better.
SMALLEST_GROUP = 64
#: Items that share a row at most: with four lanes each they hold the 1024 lanes of a sum once.
LARGEST_GROUP = 256
#: Groups of four weights that an item keeps in registers between the sums and the ticks of a row.
HELD_LIMIT = 8
#: Row blocks a compute unit gets on a CPU, so that uneven progress evens out.
BLOCKS_PER_UNIT = 8


def groups_share_rows(info: DeviceInfo) -> bool:
    """Whether kernels take their GPU shape on this device."""
    return info.type != "cpu" and info.max_work_group_size >= SMALLEST_GROUP


def ceil_div(value: int, divisor: int) -> int:
    """value / divisor, rounded up."""
    return -(-value // divisor)


def power_of_two_at_least(value: int) -> int:
    """The smallest power of two >= value (1 for values below 1)."""
    return 1 << max(0, value - 1).bit_length()


@dataclass(frozen=True)
class RowShape:
    """How a row kernel runs: its template constants, its launch sizes, and rows per work-item (1 on GPUs)."""

    gpu: int
    wg_size: int
    held: int
    even: int
    global_size: tuple[int, ...]
    local_size: tuple[int, ...]
    per: int


def row_shape(info: DeviceInfo, rows: int, columns: int) -> RowShape:
    """The shape for `rows` rows of `columns` elements."""
    if not groups_share_rows(info):
        per = max(1, ceil_div(rows, info.compute_units * BLOCKS_PER_UNIT))
        return RowShape(0, 1, 1, 0, (ceil_div(rows, per),), (1,), per)
    groups = ceil_div(columns, 4)
    limit = 1 << (min(LARGEST_GROUP, info.max_work_group_size).bit_length() - 1)
    wg_size = min(limit, max(32, power_of_two_at_least(groups)))
    slots = max(1, min(LARGEST_GROUP // wg_size, power_of_two_at_least(ceil_div(groups, wg_size))))
    # A multiple of the slots, so that a group's slot is known when the kernel is compiled.
    held = max(slots, min(HELD_LIMIT, slots * ceil_div(ceil_div(groups, wg_size), slots)))
    even = groups == wg_size * held
    return RowShape(1, wg_size, held, int(even), (rows * wg_size,), (wg_size,), 1)


def flat_shape(info: DeviceInfo, units: int) -> tuple[tuple[int, ...], int]:
    """(global size, units per work-item) of an elementwise kernel over `units` units."""
    if groups_share_rows(info):
        return (units,), 1
    per = max(1, ceil_div(units, info.compute_units * BLOCKS_PER_UNIT))
    return (ceil_div(units, per),), per


@dataclass(frozen=True)
class MatmulShape:
    """How a product runs: tile sizes, launch sizes, and rows of the result per work-item (CPU shape)."""

    gpu: int
    tile: int
    tile_m: int
    tile_k: int
    global_size: tuple[int, int]
    local_size: tuple[int, int]
    per: int


def matmul_shape(info: DeviceInfo, M: int, N: int) -> MatmulShape:
    """The shape for a result [M, N]."""
    if info.type != "cpu" and info.max_work_group_size >= 256:
        # Large tiles reuse more; small results need more groups than large tiles would give. Both operands' tiles,
        # 16 deep with a pad of 4, wait in local memory.
        tiles = ceil_div(M, 128) * ceil_div(N, 128)
        enough = tiles >= 2 * info.compute_units
        tile = 128 if enough and info.local_mem_bytes >= 2 * 16 * (128 + 4) * 4 else 64
        grid = (ceil_div(N, tile) * 16, ceil_div(M, tile) * 16)
        return MatmulShape(1, tile, 1, 16, grid, (16, 16), 1)
    panels = ceil_div(N, 16)
    # Enough items for an even end, each with enough rows to pay for decoding its panel.
    parts = max(1, min(ceil_div(M, 96), ceil_div(info.compute_units * BLOCKS_PER_UNIT, panels)))
    per = ceil_div(ceil_div(M, parts), 6) * 6
    # The panel of 16 float columns must fit beside what a driver keeps of the local memory for itself.
    tile_k = 256 if info.local_mem_bytes >= 2 * 256 * 16 * 4 else 128
    return MatmulShape(0, 1, 6, tile_k, (panels, ceil_div(M, per)), (1, 1), per)
