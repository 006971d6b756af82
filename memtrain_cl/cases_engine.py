"""Cases of the kernels that decode a token at a time (see `memtrain_cl.cases`). Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from memtrain_cl.case import Case
from memtrain_cl.formats import packed_row_bytes

#: Largest error of an element relative to the magnitudes of what it is made of.
TOLERANCE = 2e-6


def counter_matvec_case(
    rows: int,
    columns: int,
    C: int = 11,
    *,
    norm: bool = False,
    add: bool = False,
    gated: bool = False,
    small: bool = False,
) -> Case:
    """counter_matvec of a weight [rows, columns] (gated: of twice the rows)."""
    weights = (1 + gated) * rows * columns
    return Case(
        "counter_matvec",
        "counter_matvec",
        "counter_matvec",
        {"rows": rows, "columns": columns},
        {"C": C, "norm": norm, "add": add, "gated": gated},
        bytes_moved=(1 + gated) * rows * (packed_row_bytes(columns) + 4)
        + 4 * ((1 + norm) * columns + (1 + add) * rows),
        flops=2 * weights + 4 * norm * columns + add * rows + 6 * gated * rows,
        tolerance=TOLERANCE,
        small=small,
    )


def _token_case(op: str, heads: int, head: int, start: int, tokens: int, *, small: bool = False) -> Case:
    attends = op == "token_attention"
    values = heads * head * (2 * (start + 1) + 6 if attends else 8 * tokens)
    return Case(
        "token_attention",
        op,
        op,
        {"heads": heads, "head": head, "start": start, "tokens": tokens},
        bytes_moved=4 * values + 4 * head * tokens,
        flops=heads * head * (4 * (start + 1) if attends else 0) + 6 * heads * head * tokens,
        tolerance=TOLERANCE,
        small=small,
    )


def engine_cases() -> Iterator[Case]:
    """All of them."""
    # One below and above an item's sixteen columns, a CPU's 32 and a set of 8 to 256 lanes; rows of sets of 1 to 4.
    for rows, columns in ((1, 4), (5, 12), (3, 16), (7, 20), (37, 48), (9, 508), (9, 512), (3, 1040), (2, 17408)):
        yield counter_matvec_case(rows, columns)
    for rows, columns in ((130, 64), (1027, 256), (4100, 32)):
        yield counter_matvec_case(rows, columns, norm=True)
    for C in (1, 2, 7):
        yield counter_matvec_case(9, 64, C, add=True)
    yield counter_matvec_case(9, 68, 2, norm=True)
    for rows in (1, 6, 37, 515):
        yield counter_matvec_case(rows, 128, norm=True, gated=True)
    yield counter_matvec_case(21, 100, 8, gated=True)
    yield counter_matvec_case(9, 48, add=True, norm=True, small=True)
    yield counter_matvec_case(3, 20, norm=True, gated=True, small=True)
    for op in ("rotate_rows", "token_attention"):
        yield _token_case(op, 2, 4, 3, 1, small=True)
        yield _token_case(op, 1, 6, 0, 1, small=True)
        for heads, head, start in ((4, 64, 127), (3, 128, 128), (5, 8, 129), (2, 2, 1), (1, 20, 300), (1, 1040, 5)):
            yield _token_case(op, heads, head, start, 1)
    yield _token_case("rotate_rows", 3, 20, 7, 33)
