"""Cases of kernels/stochastic.cl: rows in few bits, there and back (see `memtrain_cl.cases`). Imports no torch.

What is checked stands in `memtrain_cl.verify_stochastic`. Each set of template constants is a program to build, so that
sizes vary more than options.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from memtrain_cl.case import Case
from memtrain_cl.elements import ELEMENTS
from memtrain_cl.formats import check_bits

#: Kernels of rows that lie as columns do, and of few rows, beside the one that a case is about.
_SCALE = ("stochastic", "absmax_scale")


def quantize_case(
    rows: int,
    columns: int,
    *,
    dim: int = 1,
    element: str = "float32",
    small: bool = False,
    **options: Any,
) -> Case:
    """quantize_int8 of [rows, columns]. options: half_even, transposed, multiplied, index_base."""
    count = rows * columns
    kernel = "quantize_rows" if dim == 1 else "scaled_transposed" if options.get("transposed") else "scaled_columns"
    also = () if dim == 1 else (("stochastic", "absmax_columns"), _SCALE)
    chosen = {"dim": dim} | ({"element": element} if element != "float32" else {})
    return Case(
        "stochastic",
        kernel,
        "quantize_int8",
        {"rows": rows, "columns": columns},
        chosen | options,
        bytes_moved=count * (ELEMENTS[element].itemsize + 1) + 4 * (rows if dim == 1 else columns),
        flops=20 * count,
        small=small,
        also=also,
    )


def save_case(op: str, rows: int, columns: int, bits: int, *, element: str = "float32", small: bool = False) -> Case:
    """save_rows or restore_rows of [rows, columns]."""
    count = rows * columns
    codes = (count + 1) // 2 if check_bits(bits) <= 4 else count * (1 if bits <= 8 else 2)
    pairs = "pack_int4" if op == "save_rows" else "unpack_int4"
    return Case(
        "stochastic",
        "quantize_rows" if op == "save_rows" else "dequantize_rows",
        op,
        {"rows": rows, "columns": columns},
        {"bits": bits} | ({"element": element} if element != "float32" else {}),
        bytes_moved=count * ELEMENTS[element].itemsize + codes + 2 * rows,
        flops=(20 if op == "save_rows" else 1) * count,
        small=small,
        also=(("stochastic", pairs),) if bits <= 4 and columns % 2 else (),
    )


def _in_parts(case: Case) -> Case:
    """The same where rows are so few that each is cut into parts."""
    return replace(case, kernel="absmax_rows", also=(_SCALE, ("stochastic", "scaled_rows")))


def codes_case(op: str, sizes: tuple[int, int, int], bits: int, *, small: bool = False) -> Case:
    """quantize_codes or dequantize_codes of [outer, length, inner] along its second dimension."""
    outer, length, inner = sizes
    count = outer * length * inner
    forth = op == "quantize_codes"
    ways = "rows" if inner == 1 else "columns"
    kernel = f"dequantize_{ways}" if not forth else "quantize_rows" if inner == 1 else "scaled_columns"
    return Case(
        "stochastic",
        kernel,
        op,
        {"outer": outer, "length": length, "inner": inner},
        {"bits": bits},
        bytes_moved=count * (5 if check_bits(bits) <= 8 else 6) + 4 * outer * inner,
        flops=(20 if forth else 1) * count,
        small=small,
        also=(("stochastic", "absmax_columns"), _SCALE) if forth and inner > 1 else (),
    )


def nibbles_case(op: str, n: int, *, small: bool = False) -> Case:
    """pack_int4 or unpack_int4 of n codes."""
    return Case("stochastic", op, op, {"n": n}, bytes_moved=n + (n + 1) // 2, small=small)


def stochastic_cases() -> Iterator[Case]:
    """All of them."""
    yield quantize_case(9, 12, small=True)
    yield quantize_case(3, 13, half_even=True, multiplied=True, small=True)
    yield from (quantize_case(9, columns) for columns in (1, 2, 3, 5, 7, 8, 9, 16, 64))
    yield from (quantize_case(11, columns) for columns in (68, 252, 256))
    yield quantize_case(9, 1029, half_even=True, multiplied=True)
    yield from (quantize_case(3, columns) for columns in (8192, 8196))
    yield quantize_case(11, 67, element="bfloat16")
    yield quantize_case(11, 67, element="float16")
    yield _in_parts(quantize_case(1, 40000))
    # The index passes 2^32 inside a row, between rows, and lies beyond.
    yield from (quantize_case(9, 68, index_base=(1 << 32) - base) for base in (100, 136))
    yield quantize_case(9, 68, index_base=(5 << 32) + 12)
    yield quantize_case(11, 67, element="bfloat16", index_base=(1 << 32) - 103)

    yield quantize_case(20, 12, dim=0, small=True)
    yield quantize_case(21, 13, dim=0, half_even=True, multiplied=True, small=True)
    yield from (quantize_case(300, columns, dim=0) for columns in (4, 132, 1028))
    yield from (quantize_case(65, columns, dim=0, half_even=True, multiplied=True) for columns in (2, 7, 1029))
    yield from (quantize_case(20, 12, dim=0, index_base=(1 << 32) - base) for base in (100, 108))
    yield quantize_case(20, 8, dim=0, transposed=True, small=True)
    yield quantize_case(21, 13, dim=0, transposed=True, half_even=True, multiplied=True, small=True)
    yield from (quantize_case(rows, 129, dim=0, transposed=True) for rows in (64, 128, 132, 300))
    # A GPU's group takes several tiles of these.
    yield from (quantize_case(rows, 260, dim=0, transposed=True) for rows in (1101, 1104))
    sizes = ((1, 33), (63, 2), (129, 131))
    yield from (quantize_case(*both, dim=0, transposed=True, half_even=True, multiplied=True) for both in sizes)
    yield quantize_case(64, 129, dim=0, transposed=True, index_base=(1 << 32) - 203)

    for op in ("quantize_codes", "dequantize_codes"):
        yield codes_case(op, (5, 12, 1), 12, small=True)
        yield codes_case(op, (3, 6, 5), 12, small=True)
        yield from (codes_case(op, (3, 40, inner), 12) for inner in (1, 3, 129))
        yield codes_case(op, (70, 3, 2), 15)
    for op in ("save_rows", "restore_rows"):
        yield save_case(op, 5, 12, 4, small=True)
        yield save_case(op, 5, 7, 4, small=True)
        yield from (save_case(op, 37, columns, 4) for columns in (2, 6, 10, 62, 64))
        yield from (save_case(op, 37, columns, bits) for columns, bits in ((67, 3), (12, 8), (20, 9)))
        yield save_case(op, 11, 68, 2, element="bfloat16")
    yield _in_parts(save_case("save_rows", 1, 40000, 4))
    for op in ("pack_int4", "unpack_int4"):
        yield from (nibbles_case(op, n, small=n < 20) for n in (1, 2, 7, 8, 9, 17, 4099))
