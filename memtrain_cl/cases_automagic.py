"""Cases of kernels/automagic.cl: steps on rotated int8 state (see `memtrain_cl.cases`). Imports no torch.

Each set of template constants is a program to build, so that sizes vary more than options.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memtrain_cl.automagic_rule import CHUNK, sign_planes
from memtrain_cl.case import Case
from memtrain_cl.elements import ELEMENTS


def automagic_case(
    rows: int, columns: int, *, history: int = 8, element: str = "float32", small: bool = False, **options: Any
) -> Case:
    """automagic_step_ of [rows, columns], of a vector [columns] where rows is 0. options: grad, another element."""
    n, planes = max(rows, 1) * columns, sign_planes(history)
    grad = ELEMENTS[options.get("grad", element)].itemsize
    state = 2 if rows else 8
    also = [("automagic", "automagic_measure")]
    if n > CHUNK:
        also += [("automagic", "automagic_sum"), ("automagic", "automagic_tally")]
    return Case(
        "automagic",
        "automagic_apply",
        "automagic_step_",
        {"rows": rows, "columns": columns},
        {"history": history} | ({"element": element} if element != "float32" else {}) | options,
        # A full ring is read, and one of its planes written.
        bytes_moved=n * (grad + 2 * ELEMENTS[element].itemsize + state + planes + 1) + 8 * rows,
        flops=n * (22 + (2 * 13 if rows else 0)),
        small=small,
        also=tuple(also),
    )


def rate_case(tensors: int, *, small: bool = False) -> Case:
    """automagic_rate_ of the votes of some tensors."""
    shape = {"tensors": tensors}
    return Case("automagic", "automagic_rate", "automagic_rate_", shape, bytes_moved=16 * tensors, small=small)


def sum_case(n: int, element: str, *, small: bool = False, **options: Any) -> Case:
    """add_rounded_ of n elements. options: grad, an element of its own."""
    size, grad = ELEMENTS[element].itemsize, ELEMENTS[options.get("grad", element)].itemsize
    moved = n * (2 * size + grad)
    return Case(
        "automagic", "add_rounded", "add_rounded_", {"n": n}, {"element": element} | options, moved, n, small=small
    )


def automagic_cases() -> Iterator[Case]:
    """All of them."""
    yield from (automagic_case(*sizes, small=True) for sizes in ((3, 5), (2, 48), (0, 21)))
    yield automagic_case(2, 256, history=12, small=True)
    yield automagic_case(2, 64, element="bfloat16", small=True)
    yield automagic_case(241, 35, small=True)
    # Chunks of 8192 elements end in rows and between them; rows are of one number, short such that vectors reach over,
    # and long.
    yield from (automagic_case(*sizes) for sizes in ((0, 1), (0, 8191), (0, 8192), (0, 8193), (0, 70_000)))
    yield from (automagic_case(*sizes) for sizes in ((1, 1), (9001, 1), (2731, 3), (700, 12), (3, 9001), (33, 1021)))
    yield from (automagic_case(*sizes) for sizes in ((513, 16), (200, 48), (5, 8208), (30, 320), (3, 16_448)))
    yield from (automagic_case(*sizes) for sizes in ((31, 256), (33, 256), (2, 8192), (5, 9216), (1, 40_960)))
    yield from (automagic_case(5, 80, history=history) for history in (2, 3, 9, 64))
    yield automagic_case(30, 320, element="bfloat16")
    yield automagic_case(7, 45, element="float16")
    yield automagic_case(31, 256, element="bfloat16", grad="float32")
    yield from (rate_case(tensors, small=tensors == 3) for tensors in (1, 3, 70))
    yield from (sum_case(n, "bfloat16", small=n == 13) for n in (1, 13, 1000, 9004))
    yield sum_case(77, "float16", grad="float32")
