"""Cases of kernels/fp8.cl: casts to 8-bit floating types and back (see `memtrain_cl.cases`). Imports no torch.

What is checked stands in `memtrain_cl.verify_fp8`. Each set of template constants is a program to build, so that sizes
vary more than options.
"""

from __future__ import annotations

from collections.abc import Iterator

from memtrain_cl.case import Case
from memtrain_cl.elements import ELEMENTS
from memtrain_cl.formats import check_fp8


def fp8_case(
    op: str,
    n: int,
    form: str = "float8_e4m3fn",
    *,
    element: str = "float32",
    saturate: bool = True,
    small: bool = False,
) -> Case:
    """fp8_cast, fp8_cast_counted or fp8_restore of n numbers."""
    return Case(
        "fp8",
        "fp8_restore" if op == "fp8_restore" else "fp8_cast",
        op,
        {"n": n},
        {"form": check_fp8(form).name, "element": element} | ({} if saturate else {"unbounded": True}),
        bytes_moved=n * (ELEMENTS[element].itemsize + 1),
        flops=0 if op == "fp8_restore" else n,
        small=small,
        also=(("fp8", "fp8_counts"),) if op == "fp8_cast_counted" else (),
    )


def fp8_cases() -> Iterator[Case]:
    """All of them. Sizes cross vectors of 4 and 8, groups of 256 vectors, and what the groups of two units take."""
    for n in (1, 2, 3, 4, 5, 7, 8, 9, 1020, 1021, 1024, 1028, 65540, 131077):
        yield fp8_case("fp8_cast_counted", n)
    for n in (1021, 4096, 70001):
        yield fp8_case("fp8_cast_counted", n, "float8_e5m2", element="bfloat16")
    for n in (1, 6, 12, 2047):
        yield fp8_case("fp8_cast", n, "float8_e5m2", element="float16", saturate=False)
        yield fp8_case("fp8_restore", n, "float8_e5m2", element="float16")
    for n in (1, 7, 8, 1028, 4099):
        yield fp8_case("fp8_restore", n)
        yield fp8_case("fp8_restore", n, "float8_e5m2", element="bfloat16")
    yield fp8_case("fp8_cast", 4099, saturate=False)
    yield fp8_case("fp8_cast_counted", 77, small=True)
    yield fp8_case("fp8_cast_counted", 64, "float8_e5m2", element="float16", small=True)
    yield fp8_case("fp8_cast", 64, "float8_e5m2", element="bfloat16", small=True)
    yield fp8_case("fp8_restore", 77, element="bfloat16", small=True)
    yield fp8_case("fp8_restore", 64, "float8_e5m2", small=True)
