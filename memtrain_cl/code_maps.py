"""The 8-bit maps of numbers in blocks: which number, of a block's largest, each code stands for. Imports numpy alone.

linear     codes are integers -127..127 (int8), and a number is code * scale with scale = largest/127.
dynamic    codes are places (uint8) in a sorted map of 256 numbers up to 1, and a number is map[code] * scale with
           scale = largest. The map spends its codes by decades: few on the smallest, most near the largest.
"""

from __future__ import annotations

import functools

import numpy as np

#: Names of the maps.
CODES = ("linear", "dynamic")
#: Decades of the dynamic map; the last one ends at 1.
DECADES = 7


@functools.cache
def dynamic_map(signed: bool) -> np.ndarray:
    """The dynamic-exponent map of 8-bit optimizers, float32 [256]: sorted, distinct, with 0 and 1 among its numbers.

    For i = 0..6, the midpoints of 2^i (signed) or 2^(i+1) (unsigned) equal parts of [0.1, 1], times 10^(i-6); signed,
    their negatives too; and 0 and 1. Computed in float64 and rounded once. Read-only; one array for all callers.
    """
    numbers = [0.0, 1.0]
    for decade in range(DECADES):
        parts = 2**decade if signed else 2 ** (decade + 1)
        edges = np.linspace(0.1, 1.0, parts + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - DECADES + 1)
        numbers.extend(middles)
        if signed:
            numbers.extend(-middles)
    result = np.sort(np.array(numbers)).astype(np.float32)
    result.setflags(write=False)
    return result


@functools.cache
def dynamic_midpoints(signed: bool) -> np.ndarray:
    """Where rounding to nearest turns from one code to the next: float32 [255], fl((map[i] + map[i+1]) / 2)."""
    numbers = dynamic_map(signed).astype(np.float64)
    result = ((numbers[:-1] + numbers[1:]) / 2).astype(np.float32)
    result.setflags(write=False)
    return result


def zero_code(signed: bool) -> int:
    """The place of 0 in the dynamic map."""
    return int(np.searchsorted(dynamic_map(signed), 0.0))
