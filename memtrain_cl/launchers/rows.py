"""How the row kernels (kernels/_rows.cl) are launched: who shares a row, and how many rows each gets.

A work-group of a GPU takes one row, or several short ones, with the row in registers; a work-item of a CPU takes a
block of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from memtrain_cl.device import Device
from memtrain_cl.elements import ELEMENTS
from memtrain_cl.errors import UnsupportedDevice
from memtrain_cl.operand import Operand
from memtrain_cl.tuning import BLOCKS_PER_UNIT, SIZE_LIMIT, ceil_div, groups_share_rows

#: Elements that the row kernels take, and compute in float32.
FLOATING = tuple(name for name, element in ELEMENTS.items() if element.floating)
#: Vectors of four elements that a work-item keeps in registers.
HELD = 4
#: Work-items that share a row: few sizes, since each is a program to build. The last one leaves 128 registers an item
#: on devices of 65536, which the backward of a norm needs.
LANES = (4, 16, 64, 256, 512)
#: Items of a work-group at least, made of several short rows.
GROUP = 64
#: Items a compute unit runs at once while each accumulates column sums over many rows.
ACCUMULATING_ITEMS = 512


@dataclass(frozen=True)
class RowShape:
    """constants: what _rows.cl renders with, and HELD. parts: row blocks, one a CPU item or a GPU row of lanes."""

    constants: dict[str, int]
    global_size: tuple[int, ...]
    local_size: tuple[int, ...]
    per: int
    parts: int


def row_shape(device: Device, rows: int, n: int, *, aligned: bool, accumulating: bool = False) -> RowShape:
    """The shape for `rows` rows of n elements, both positive.

    aligned: every row begins on four elements. accumulating: each item adds up over its rows, so few take many.
    """
    if rows >= SIZE_LIMIT or n >= SIZE_LIMIT:
        raise UnsupportedDevice(f"expected fewer than 2^31 rows and columns, got {rows} rows of {n}")
    info = device.info
    if not groups_share_rows(info):
        per = ceil_div(rows, info.compute_units * BLOCKS_PER_UNIT)
        parts = ceil_div(rows, per)
        return RowShape({"GPU": 0, "LANES": 1, "SLOTS": 1, "HELD": 0, "ALIGNED": 0}, (parts,), (1,), per, parts)
    possible = [lanes for lanes in LANES if lanes <= info.max_work_group_size]
    lanes = next((lanes for lanes in possible if lanes * HELD * 4 >= n), possible[-1])
    held = HELD if lanes * HELD * 4 >= n else 0
    slots = max(1, GROUP // lanes)
    groups = ceil_div(rows, slots)
    if accumulating:
        groups = min(groups, max(1, info.compute_units * ACCUMULATING_ITEMS // (lanes * slots)))
    return RowShape(
        {"GPU": 1, "LANES": lanes, "SLOTS": slots, "HELD": held, "ALIGNED": int(aligned)},
        (groups * lanes * slots,),
        (lanes * slots,),
        ceil_div(rows, groups * slots),
        groups * slots,
    )


def aligned_rows(n: int, *operands: Operand) -> bool:
    """Whether every row of n elements of every operand begins on four elements, also in bytes of memory."""
    return n % 4 == 0 and all(operand.offset % 4 == 0 and operand.array.alignment >= 16 for operand in operands)


def require_rows(name: str, operand: Operand, shape: tuple[int, ...], elements: tuple[str, ...]) -> None:
    """ValueError or TypeError unless the operand is contiguous, of this shape and of one of these elements."""
    if operand.element not in elements:
        raise TypeError(f"expected {name} of {' or '.join(elements)}, got {operand.element}")
    if operand.shape != shape or not operand.contiguous:
        raise ValueError(f"expected {name} contiguous of shape {list(shape)}, got {operand}")
