"""Cases of the products of whole numbers and of what decodes ternary weights for them (see `memtrain_cl.cases`).

What is checked stands in `memtrain_cl.verify_int8`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from memtrain_cl.case import Case
from memtrain_cl.formats import check_c, state_row_bytes

LAYER_OPS = ("counter_forward_int8", "counter_grad_input_int8", "grad_weight_int8")
_ADD_CHUNK = ("matmul_int8", "add_chunk")


def int8_case(M: int, N: int, K: int, *, extreme: bool = False, small: bool = False) -> Case:
    """int8_product of [M, K] and [N, K]; extreme: every code is the largest, with one sign."""
    return Case(
        "matmul_int8",
        "matmul_int8",
        "int8_product",
        {"M": M, "N": N, "K": K},
        {"extreme": True} if extreme else {},
        bytes_moved=M * K + N * K + 4 * M * N,
        flops=2 * M * N * K,
        small=small,
    )


def layer_case(
    op: str, tokens: int, rows: int, columns: int, packed: bool, *, chunk: int = 0, small: bool = False
) -> Case:
    """One of a layer's three products by codes. chunk: of tokens, where the gradient is summed in several."""
    C = 11 if packed else 8
    inputs, outputs, weights = 4 * tokens * columns, 4 * tokens * rows, 4 * rows * columns
    if op != "grad_weight_int8":
        check_c(C, packed=packed)
        weights = rows * state_row_bytes(columns, packed=packed) + 4 * rows
    return Case(
        "matmul_int8",
        "matmul_int8",
        op,
        {"tokens": tokens, "rows": rows, "columns": columns},
        {"C": C, "packed": packed} | ({"chunk": chunk} if chunk else {}),
        bytes_moved=inputs + outputs + weights,
        flops=2 * tokens * rows * columns,
        small=small,
        also=(_ADD_CHUNK,) if chunk else (),
    )


def ternary_case(rows: int, columns: int, C: int, packed: bool, transposed: bool, *, small: bool = False) -> Case:
    """decode_ternary of [rows, columns]."""
    return Case(
        "ternary",
        "decode_ternary_transposed" if transposed else "decode_ternary",
        "decode_ternary",
        {"rows": rows, "columns": columns},
        {"C": check_c(C, packed=packed), "packed": packed, "transposed": transposed},
        bytes_moved=rows * state_row_bytes(columns, packed=packed) + rows * columns,
        small=small,
    )


def int8_cases() -> Iterator[Case]:
    """All of them. Sizes cross tiles of 6, 64 and 128 rows, panels of 16, 32 and 64 columns, words of 4, turns of 16,
    and blocks of 64, 256 and 1024 elements of K.
    """
    edges = [(1, 1, 1), (5, 15, 3), (6, 16, 4), (7, 17, 5), (11, 31, 15), (12, 32, 16), (13, 33, 17), (65, 63, 31)]
    edges += [(63, 65, 33), (64, 64, 63), (6, 95, 65), (2, 129, 255), (3, 5, 257), (6, 64, 1023), (7, 5, 1025)]
    yield from (int8_case(*sizes) for sizes in edges)
    yield int8_case(129, 130, 132)
    yield int8_case(7, 34, 2080, extreme=True)
    yield int8_case(7, 18, 19, small=True)
    yield int8_case(3, 5, 68, extreme=True)
    for op in LAYER_OPS:
        yield from (layer_case(op, *sizes, packed=True) for sizes in ((1, 1, 4), (17, 36, 68), (130, 132, 136)))
        yield from (layer_case(op, *sizes, packed=False) for sizes in ((1, 1, 1), (65, 63, 67)))
        yield layer_case(op, 7, 18, 20, True)
        yield layer_case(op, 7, 18, 19, False)
    yield layer_case("grad_weight_int8", 37, 9, 12, True, chunk=16)
    # What kernels hand on to each other is tiny here, for a simulator that forgets what is written beyond the size of
    # memory that lay in its place before.
    yield layer_case("counter_forward_int8", 2, 3, 4, True, small=True)
    yield layer_case("grad_weight_int8", 4, 3, 2, False, chunk=2, small=True)
    for transposed in (False, True):
        for columns in (4, 28, 32, 60, 64, 68, 256):
            yield ternary_case(9, columns, 11, True, transposed)
        for columns in (1, 3, 31, 33, 64, 67):
            yield ternary_case(9, columns, 8, False, transposed)
        yield from (ternary_case(rows, 36, 11, True, transposed) for rows in (1, 7, 8, 127, 128, 132, 300))
        # Whole sixteens both ways, and of columns alone.
        yield from (ternary_case(*sizes, 11, True, transposed) for sizes in ((16, 16), (144, 272), (17, 48)))
        yield ternary_case(144, 272, 8, False, transposed)
        yield ternary_case(9, 68, 1, True, transposed)
        yield ternary_case(9, 67, 43, False, transposed)
        yield ternary_case(10, 36, 11, True, transposed, small=True)
        yield ternary_case(10, 35, 8, False, transposed, small=True)
