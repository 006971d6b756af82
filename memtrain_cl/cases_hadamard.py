"""Cases of kernels/hadamard.cl: rotations, and rotated rows in 8 bits (see `memtrain_cl.cases`). Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from memtrain_cl.case import Case
from memtrain_cl.elements import ELEMENTS

#: By operation: its kernel, and the bytes that it moves an element beside x, and a row.
_KERNELS = {
    "rotate": ("rotate_blocks", 4, 0),
    "encode_rotated": ("encode_rotated_rows", 1, 4),
    "decode_rotated": ("decode_rotated_rows", 5, 4),
}


def hadamard_case(op: str, rows: int, columns: int, rot: int, *, element: str = "float32", small: bool = False) -> Case:
    """An operation on [rows, columns] in blocks of rot."""
    kernel, beside, a_row = _KERNELS[op]
    of_x = 0 if op == "decode_rotated" else ELEMENTS[element].itemsize
    passes = (rot.bit_length() - 1) // 2
    return Case(
        "hadamard",
        kernel,
        op,
        {"rows": rows, "columns": columns},
        {"rot": rot} | ({"element": element} if element != "float32" else {}),
        bytes_moved=rows * columns * (of_x + beside) + rows * a_row,
        flops=rows * columns * (3 * passes + 1 + (0 if op == "rotate" else 2)),
        small=small,
    )


def hadamard_cases() -> Iterator[Case]:
    """All of them."""
    for op in _KERNELS:
        yield from (hadamard_case(op, *sizes, small=True) for sizes in ((3, 12, 4), (2, 48, 16), (3, 64, 64)))
        yield hadamard_case(op, 2, 256, 256, small=True)
        # One block beside several, blocks of GPUs' groups and of CPUs' items, rows that are kept and such that are not.
        yield from (hadamard_case(op, *sizes) for sizes in ((5, 4, 4), (3, 1028, 4), (1, 16, 16), (7, 2064, 16)))
        yield from (hadamard_case(op, *sizes) for sizes in ((5, 192, 64), (3, 5440, 64), (65, 64, 64)))
        yield from (hadamard_case(op, rows, columns, 256) for rows, columns in ((9, 768), (3, 4096), (2, 17_408)))
    for op in ("rotate", "encode_rotated"):
        yield from (hadamard_case(op, 6, 320, 64, element=element) for element in ("bfloat16", "float16"))
