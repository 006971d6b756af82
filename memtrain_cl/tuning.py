"""Work-group parameters for a device, from its capabilities and the problem's shape.

Row kernels have two shapes (kernels/counter.cl). A device whose groups run in lock step gets a work-group a row; a CPU,
or a device whose groups are too small for that, gets a work-item a block of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from memtrain_cl.device import DeviceInfo

#: Element counts of one matrix that kernels index by 32 bits within a row, and rows by 32 bits: rows and columns stay
#: below this.
SIZE_LIMIT = 1 << 31
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
    return spreads_wide(info, SMALLEST_GROUP)


def _short_loops(info: DeviceInfo) -> bool:
    """Whether work is spread over many items of short loops; a CPU's items have few and long ones, where it can."""
    return info.type != "cpu" or info.short_loops


def spreads_wide(info: DeviceInfo, group: int) -> bool:
    """Whether kernels whose work-groups have so many items take their GPU shape on this device."""
    return _short_loops(info) and info.max_work_group_size >= group


def ceil_div(value: int, divisor: int) -> int:
    """value / divisor, rounded up."""
    return -(-value // divisor)


def power_of_two_at_least(value: int) -> int:
    """The smallest power of two >= value (1 for values below 1)."""
    return 1 << max(0, value - 1).bit_length()


@dataclass(frozen=True)
class RowShape:
    """How a row kernel runs: its template constants, its launch sizes, and rows per work-item (1 on GPUs).

    form, pitch: rows whose gradient the kernel forms itself at a time, and their distance (0, 0: it is given).
    """

    gpu: int
    wg_size: int
    held: int
    even: int
    global_size: tuple[int, ...]
    local_size: tuple[int, ...]
    per: int
    form: int = 0
    pitch: int = 0


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


#: Rows that an item or a group of a from-IO update forms at most, and vectors of four sums that a GPU's item holds.
_FORM_CPU, _FORM_GPU, _FORM_HELD = 6, 8, 32
#: The share of a CPU's local memory that formed rows may take.
_FORM_SHARE = 0.75


def from_io_shape(info: DeviceInfo, rows: int, columns: int) -> RowShape | None:
    """The shape of an update that forms the gradient itself; None where a row is too long for the device to hold."""
    if not groups_share_rows(info):
        pitch = ceil_div(columns, 16) * 16
        form = min(_FORM_CPU, int(_FORM_SHARE * info.local_mem_bytes) // (4 * pitch))
        if form == 0:
            return None
        per = ceil_div(ceil_div(rows, info.compute_units * BLOCKS_PER_UNIT), form) * form
        return RowShape(0, 1, 1, 0, (ceil_div(rows, per),), (1,), per, form, pitch)
    shape = row_shape(info, rows, columns)
    groups = ceil_div(columns, 4)
    need = ceil_div(groups, shape.wg_size)
    slots = max(1, min(LARGEST_GROUP // shape.wg_size, power_of_two_at_least(need)))
    held = ceil_div(need, slots) * slots
    if held > _FORM_HELD:
        return None
    form = max(1, min(_FORM_GPU, _FORM_HELD // held))
    even = int(groups == shape.wg_size * held)
    grid = (ceil_div(rows, form) * shape.wg_size,)
    return replace(shape, held=held, even=even, global_size=grid, form=form)


def flat_shape(info: DeviceInfo, units: int) -> tuple[tuple[int, ...], int]:
    """(global size, units per work-item) of an elementwise kernel over `units` units."""
    if groups_share_rows(info):
        return (units,), 1
    per = max(1, ceil_div(units, info.compute_units * BLOCKS_PER_UNIT))
    return (ceil_div(units, per),), per


@dataclass(frozen=True)
class MatmulShape:
    """How a product runs (kernels/matmul.cl): its template constants, its launch sizes, and what an item takes.

    per, columns: rows and columns of the result an item (CPU shape).   k_per: the part of K that a split sums.
    cores: the instruction of tensor cores, else "".   warps (down and across), stages, band: as kernels/_core_copies.cl
    says, of a work-group on tensor cores.
    """

    gpu: int
    global_size: tuple[int, int, int]
    local_size: tuple[int, int, int]
    k_per: int
    splits: int
    tile: int = 0
    side: int = 0
    width: int = 0
    tile_k: int = 0
    tile_n: int = 0
    tile_rows: int = 0
    held_rows: int = 0
    per: int = 1
    columns: int = 1
    cores: str = ""
    warps: tuple[int, int] = (0, 0)
    stages: int = 0
    band: int = 0

    @property
    def panel(self) -> int:
        """Columns of a panel of the right operand (CPU shape)."""
        return _PANELS[self.width]

    @property
    def block(self) -> int:
        """Elements of the tiles of tile_rows by tile_k elements of the left operand, as _matmul_cpu.cl lays them."""
        return self.tile_rows // TILE_M * (self.tile_k * TILE_M + ceil_div(TILE_M, 4) * 4 - TILE_M)

    @property
    def constants(self) -> dict[str, Any]:
        """The template's constants, and what `program.get_kernel` takes beside them."""
        return {
            **({"PTX_TARGET": WGMMA_TARGET} if self.cores == "wgmma" else {}),
            "CORES": self.cores,
            "GPU": self.gpu,
            "TILE": self.tile,
            "SIDE": self.side,
            "WIDTH": self.width,
            "TILE_K": self.tile_k,
            "TILE_N": self.tile_n,
            "TILE_ROWS": self.tile_rows,
            "HELD_ROWS": self.held_rows,
            "WARPS_M": self.warps[0],
            "WARPS_N": self.warps[1],
            "STAGES": self.stages,
            "BAND": self.band,
        }


#: Rows of a register tile of the CPU shape (kernels/_matmul_cpu.cl).
TILE_M = 6
#: Columns of a panel by the width of its vectors.
_PANELS = {16: 64, 8: 16}
#: The CPU shape packs operands of as many elements whose rows lie as far apart, where so many blocks read them.
_PACKED_SIZE, _PACKED_LEAD, _PACKED_USES = 1 << 20, 1 << 10, 4
#: Depth of the GPU shape's tiles.
GPU_TILE_K = 16
#: What NVIDIA's assembler calls the target of the instruction "wgmma".
WGMMA_TARGET = "sm_90a"
#: Splits of K at most, and elements of K that a split has at least.
MOST_SPLITS, LEAST_SPLIT = 16, 256
#: (tile, side): cycles of one turn of TILE_K for each group that shares a compute unit, and the least that a turn takes
#: (the wait for memory). From the H200: eight by eight sums an item reach two thirds of the peak.
_GPU_TURNS = {(128, 16): (3150, 3150), (64, 8): (800, 1700)}


def matmul_shape(
    info: DeviceInfo, M: int, N: int, K: int = 1, batch: int = 1, *, decodes: bool = False, may_split: bool = False
) -> MatmulShape:
    """The shape for `batch` results [M, N] summed over K.

    decodes: the right operand is a counter weight.   may_split: K may be split, which takes a second kernel.
    """
    most = max(1, min(MOST_SPLITS, K // LEAST_SPLIT)) if may_split else 1
    if spreads_wide(info, 256):
        return _gpu_matmul_shape(info, M, N, K, batch, decodes, most)
    return _cpu_matmul_shape(info, M, N, K, batch, decodes, most)


def _gpu_matmul_shape(info: DeviceInfo, M: int, N: int, K: int, batch: int, decodes: bool, most: int) -> MatmulShape:
    # Both operands' tiles, with a pad of 4, wait in local memory.
    fits = info.local_mem_bytes >= 2 * GPU_TILE_K * (128 + 4) * 4
    if decodes:
        # Large tiles reuse more; small results need more groups than large tiles would give.
        enough = ceil_div(M, 128) * ceil_div(N, 128) >= 2 * info.compute_units
        tile, side, splits = (128, 16, 1) if enough and fits else (64, 16, 1)
    else:
        choices = [
            (tile, side, splits) for tile, side in _GPU_TURNS if tile == 64 or fits for splits in range(1, most + 1)
        ]
        tile, side, splits = min(choices, key=lambda choice: _gpu_cost(info, M, N, K, batch, *choice))
    k_per, splits = split_of(K, splits, GPU_TILE_K)
    grid = (ceil_div(N, tile) * side, ceil_div(M, tile) * side, batch * splits)
    return MatmulShape(1, grid, (side, side, 1), k_per, splits, tile=tile, side=side, tile_k=GPU_TILE_K)


def split_of(K: int, splits: int, multiple: int) -> tuple[int, int]:
    """(elements of K that a split takes, how many splits that makes)."""
    k_per = max(1, ceil_div(ceil_div(K, splits), multiple)) * multiple
    return k_per, max(1, ceil_div(K, k_per))


def _gpu_cost(info: DeviceInfo, M: int, N: int, K: int, batch: int, tile: int, side: int, splits: int) -> float:
    """Cycles, roughly: the groups of the busiest compute unit, and the kernel that sums the splits."""
    groups = ceil_div(M, tile) * ceil_div(N, tile) * batch * splits
    shared, least = _GPU_TURNS[tile, side]
    turns = ceil_div(ceil_div(K, splits), GPU_TILE_K)
    cost = float(max(ceil_div(groups, info.compute_units) * shared, least) * turns)
    if splits > 1:
        cost += 7000 + (splits + 1) * 4 * batch * M * N / (16 * info.compute_units)
    return cost


def _cpu_matmul_shape(info: DeviceInfo, M: int, N: int, K: int, batch: int, decodes: bool, most: int) -> MatmulShape:
    # What an item keeps in local memory (panels, tiles, and sums unless it decodes) should fill a good part of a
    # second-level cache, and leave a driver what it takes of the local memory for itself.
    large = info.local_mem_bytes >= 250_000
    if decodes:
        tile_k, tile_n, tile_rows, held = (256, 128, 48, 0) if large else (128, 16, 12, 0)
    else:
        tile_k, tile_n, tile_rows, held = (96, 192, 48, 192) if large else (64, 32, 12, 24)
    width = 16 if large and info.native_vector_width >= 16 else 8
    panel = _PANELS[width]
    per, columns = min(
        (
            (per, columns)
            for columns in range(panel, min(tile_n, ceil_div(N, panel) * panel) + 1, panel)
            for per in _row_blocks(M, held, tile_rows)
        ),
        key=lambda choice: _cpu_cost(info, M, N, batch, decodes, *choice),
    )
    items = ceil_div(M, per) * ceil_div(N, columns) * batch
    few = items < info.compute_units
    k_per, splits = split_of(K, min(most, ceil_div(2 * info.compute_units, items)) if few else 1, 1)
    grid = (ceil_div(N, columns), ceil_div(M, per), batch * splits)
    return MatmulShape(
        0,
        grid,
        (1, 1, 1),
        k_per,
        splits,
        width=width,
        tile_k=tile_k,
        tile_n=tile_n,
        tile_rows=tile_rows,
        held_rows=held,
        per=per,
        columns=columns,
    )


def packs(shape: MatmulShape, M: int, N: int, K: int, left_lead: int, right_lead: int) -> tuple[bool, bool]:
    """Whether to pack the left and the right operand before the product; the leads are their strides beside 1."""
    if shape.gpu or shape.splits > 1:
        return False, False
    left = M * K >= _PACKED_SIZE and left_lead >= _PACKED_LEAD and shape.per % shape.tile_rows == 0
    right = N * K >= _PACKED_SIZE and right_lead >= _PACKED_LEAD
    return (
        left and ceil_div(N, shape.columns) >= _PACKED_USES,
        right and ceil_div(M, shape.per) >= _PACKED_USES,
    )


def _row_blocks(M: int, held: int, tile_rows: int) -> list[int]:
    """Sizes of blocks of rows worth a look: from the largest that are allowed, a quarter smaller again and again."""
    least = ceil_div(M, held) if held else 1
    # Many blocks end on whole blocks of tiles, so that these can be packed.
    multiple = tile_rows if M >= 4 * held > 0 else TILE_M
    numbers = [min(ceil_div(least * factor, 4), ceil_div(M, multiple)) for factor in (4, 5, 6, 8, 12, 16, 24, 32, 64)]
    return [ceil_div(ceil_div(M, number), multiple) * multiple for number in numbers]


def _cpu_cost(info: DeviceInfo, M: int, N: int, batch: int, decodes: bool, per: int, columns: int) -> float:
    """Sums of the busiest compute unit, and what filling tiles and panels costs beside them (decoding costs more)."""
    items = ceil_div(M, per) * ceil_div(N, columns) * batch
    # An item more, since the last ones end unevenly. Filling counts as it does from a third-level cache.
    turns = ceil_div(items, info.compute_units) + 1
    return turns * (per * columns + 20.0 * per + (50.0 if decodes else 20.0) * columns)


@dataclass(frozen=True)
class MatvecShape:
    """How kernels/matvec.cl runs. lanes: items a row (GPU shape).   per: rows or columns an item (CPU shape)."""

    gpu: int
    lanes: int
    global_size: tuple[int, int, int]
    local_size: tuple[int, int, int]
    per: int
    k_per: int
    splits: int


#: Splits of K at most, which one item sums; columns whose sums a CPU item keeps in local memory.
MOST_PARTS, HELD_COLUMNS = 64, 1024


def matvec_shape(info: DeviceInfo, rows: bool, M: int, K: int, batch: int) -> MatvecShape:
    """The shape for `batch` products of a matrix [M, K] with a vector; rows: K is the matrix's unit stride."""
    if spreads_wide(info, 256):
        # Enough groups to keep memory busy, and enough elements for each.
        lanes = min(256, max(8, power_of_two_at_least(ceil_div(K, 16)))) if rows else 8
        groups = ceil_div(M, 256 // lanes)
        wanted, least = 4 * info.compute_units, 2048 if rows else 64
        k_per, splits = split_of(K, max(1, min(MOST_PARTS, ceil_div(wanted, groups * batch), K // least)), 1)
        local = (256, 1, 1) if rows else (32, 8, 1)
        return MatvecShape(1, lanes, (groups * local[0], local[1], batch * splits), local, 1, k_per, splits)
    wanted = 4 * info.compute_units
    if rows:
        blocks = min(M, ceil_div(wanted, batch))
        per, least = ceil_div(M, blocks), 1 << 14
    else:
        per, least = min(HELD_COLUMNS, max(256, ceil_div(M, wanted))), 256
    items = ceil_div(M, per)
    splits = max(1, min(MOST_PARTS, ceil_div(wanted, items * batch), K // least))
    k_per, splits = split_of(K, splits, 4)
    return MatvecShape(0, 1, (items, 1, batch * splits), (1, 1, 1), per, k_per, splits)
