"""Cases of kernels/blockwise.cl: numbers in 8 bits by blocks (see `memtrain_cl.cases`). Imports no torch.

Each set of template constants is a program to build, so that sizes vary more than options.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memtrain_cl.case import Case
from memtrain_cl.elements import ELEMENTS


def blockwise_case(
    op: str, n: int, block_size: int, *, element: str = "float32", small: bool = False, **options: Any
) -> Case:
    """quantize_blockwise or dequantize_blockwise of n elements. options: dynamic, unsigned, positive, stochastic."""
    blocks = -(-n // block_size)
    forth = op == "quantize_blockwise"
    flops = (30 if options.get("dynamic") else 3) + (8 if options.get("stochastic") else 0) if forth else 1
    return Case(
        "blockwise",
        "quantize_blocks" if forth else "dequantize_blocks",
        op,
        {"n": n, "block_size": block_size},
        ({"element": element} if element != "float32" else {}) | options,
        bytes_moved=n * (ELEMENTS[element].itemsize + 1) + 4 * blocks,
        flops=flops * n,
        small=small,
    )


#: Blocks of GPUs end at 32, 128, 512, 2048 and 4096 elements, those that a CPU's item keeps at 2048.
_SIZES = ((1, 1), (7, 3), (64, 16), (1029, 37), (4096, 256), (4097, 512), (6145, 2048), (9004, 4096), (9001, 4097))
_MAPS: tuple[dict[str, Any], ...] = ({}, {"dynamic": True}, {"dynamic": True, "unsigned": True, "positive": True})


def blockwise_cases() -> Iterator[Case]:
    """All of them."""
    for options in _MAPS:
        yield _quantize(30, 12, small=True, **options)
        yield _quantize(13, 5, small=True, stochastic=True, **options)
        yield _dequantize(30, 12, small=True, **{name: flag for name, flag in options.items() if name != "positive"})
    yield from (_quantize(*sizes) for sizes in _SIZES)
    yield from (_quantize(*sizes, dynamic=True) for sizes in _SIZES[3:7:3])
    yield from (_dequantize(*sizes) for sizes in _SIZES[:6])
    yield _dequantize(4097, 256, dynamic=True)
    yield _quantize(4097, 128, positive=True)
    yield _quantize(3000, 128, stochastic=True)
    yield from (_quantize(999, 64, element=element) for element in ("bfloat16", "float16"))


def _quantize(n: int, block_size: int, **options: Any) -> Case:
    return blockwise_case("quantize_blockwise", n, block_size, **options)


def _dequantize(n: int, block_size: int, **options: Any) -> Case:
    return blockwise_case("dequantize_blockwise", n, block_size, **options)
