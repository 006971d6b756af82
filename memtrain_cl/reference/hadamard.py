"""Rows rotated by a regular Hadamard matrix, and rotated rows in 8 bits, in torch.

R_4 = [[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]] / 2, and R of 16, 64, 256 ... are its Kronecker
powers: symmetric, orthogonal, each its own inverse. `rotate` multiplies each block of `rot` consecutive elements by
R_rot, in float32, each operation rounded in this order: for k = 0, 1 .. log4(rot) - 1 all quadruples of elements
(a, b, c, d) that lie 4^k apart become

    ((a + b) + c) - d,   ((a + b) - c) + d,   ((a - b) + c) + d,   ((b - a) + c) + d

and at last every element is multiplied by 1/sqrt(rot), a power of two.

A tensor in rotated rows is seen as rows [shape[0], K], K = numel/shape[0], whose blocks are `row_rotation(K)` long:
the largest power of 4 that divides K, at most 256; below 16 they are not rotated. A row is then held in int8, code =
x/scale rounded half to even, scale = largest/127, as `reference.blockwise` has it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memtrain_cl.formats import check_rotation, largest_pow4_divisor, row_length
from memtrain_cl.reference.blockwise import FLOATING, dequantize_int8_blockwise, quantize_int8_blockwise

__all__ = [
    "decode_rotated",
    "dequantize_int8_rows",
    "encode_rotated",
    "largest_pow4_divisor",
    "quantize_int8_rows",
    "regular_hadamard",
    "rotate",
]


def regular_hadamard(rot: int) -> torch.Tensor:
    """R, float32 [rot, rot]; ValueError unless rot is a power of 4 (1 among them)."""
    check_rotation(rot, largest=None)
    first = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]) / 2
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < rot:
        matrix = torch.kron(first, matrix)
    return matrix


def _require(name: str, x: Any, *dtypes: torch.dtype) -> None:
    if not isinstance(x, torch.Tensor) or x.dtype not in dtypes:
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"expected {name} as a tensor of {', '.join(map(str, dtypes))}, got {got}")


def rotate(x: torch.Tensor, rot: int) -> torch.Tensor:
    """float32 of x's shape: each block of rot elements of x, along its last dimension, times R.

    x: float32, float16 or bfloat16. ValueError unless rot is 1, 4, 16, 64 or 256 and divides the last dimension.
    """
    _require("x", x, *FLOATING)
    check_rotation(rot, x.shape[-1] if x.ndim else 1)
    values = x.detach().to(torch.float32).contiguous()
    stride = 1
    while stride < rot:
        a, b, c, d = values.reshape(-1, 4, stride).unbind(1)
        values = torch.stack([((a + b) + c) - d, ((a + b) - c) + d, ((a - b) + c) + d, ((b - a) + c) + d], dim=1)
        stride *= 4
    return (values * (1 / math.sqrt(rot))).reshape(x.shape)


def quantize_int8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes int8 of x's shape, scale float32 [rows]) of x in rows [shape[0], numel/shape[0]]."""
    _require("x", x, *FLOATING)
    return quantize_int8_blockwise(x, row_length(x.shape))


def dequantize_int8_rows(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 of codes' shape, code * scale of its row."""
    _require("codes", codes, torch.int8)
    return dequantize_int8_blockwise(codes, scale, row_length(codes.shape))


def encode_rotated(x: torch.Tensor, rot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes int8 of x's shape, scale float32 [rows]) of x in rotated rows.

    ValueError unless rot is 1, 4, 16, 64 or 256 and divides the length of a row.
    """
    _require("x", x, *FLOATING)
    check_rotation(rot, row_length(x.shape))
    return quantize_int8_rows(rotate(x.reshape(-1, rot), rot).reshape(x.shape))


def decode_rotated(codes: torch.Tensor, scale: torch.Tensor, rot: int) -> torch.Tensor:
    """float32 of codes' shape, from what `encode_rotated` gave for the same rot."""
    values = dequantize_int8_rows(codes, scale)
    check_rotation(rot, row_length(codes.shape))
    return rotate(values.reshape(-1, rot), rot).reshape(codes.shape)
