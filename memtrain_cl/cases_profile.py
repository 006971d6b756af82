"""Cases of kernels/profile.cl: profiles of blocks and how well they fit (see `memtrain_cl.cases`). Imports no torch.

What is checked stands in `memtrain_cl.verify_profile`. Sizes vary more than block sizes, each of whose quarters rounded
up to a power of two is a program to build.
"""

from __future__ import annotations

from collections.abc import Iterator

from memtrain_cl.case import Case
from memtrain_cl.elements import ELEMENTS

_SORTS = (("sort", "sort_tiles"), ("sort", "sort_finish"))
#: By operation: its kernel, and the bytes that it moves an element beside x and a block.
_KERNELS = {
    "encode_profile": ("encode_profile", 1, 8),
    "decode_profile": ("decode_profile", 5, 8),
    "pool_profile": ("standardize_profile", 4, 8),
    "profile_error": ("profile_errors", 1, 20),
    "profile_distance": ("profile_distances", 4, 0),
}


def profile_case(
    op: str, n: int, block_size: int = 256, *, element: str = "float32", positive: bool = False, small: bool = False
) -> Case:
    """An operation on n elements in blocks. positive: of numbers that are none of them negative."""
    kernel, beside, a_block = _KERNELS[op]
    of_x = 0 if op in ("decode_profile", "profile_distance") else ELEMENTS[element].itemsize
    options = {"element": element} if element != "float32" else {}
    return Case(
        "profile",
        kernel,
        op,
        {"n": n, "block_size": block_size},
        options | ({"positive": True} if positive else {}),
        bytes_moved=n * (of_x + beside) + -(-n // block_size) * a_block,
        flops=12 * n,
        small=small,
        also=_SORTS if op == "pool_profile" else (),
    )


def profile_cases() -> Iterator[Case]:
    """All of them."""
    for op in ("encode_profile", "decode_profile", "pool_profile", "profile_error"):
        yield profile_case(op, 300, small=True)
        yield profile_case(op, 45, 16, positive=op in ("decode_profile", "profile_error"), small=True)
        # One below and above blocks, vectors of four and eight, and both ways to store them.
        yield from (profile_case(op, n) for n in (1, 255, 256, 257, 1024, 4099))
        yield profile_case(op, 1000, 200, positive=op in ("decode_profile", "profile_error"))
        yield from (profile_case(op, 333, block) for block in (1, 7, 15))
    for op in ("encode_profile", "pool_profile", "profile_error"):
        yield profile_case(op, 1300, element="bfloat16")
    yield profile_case("encode_profile", 1300, element="float16")
    yield profile_case("profile_distance", 45, small=True)
    yield from (profile_case("profile_distance", n) for n in (1, 2, 4099, 70_000))
