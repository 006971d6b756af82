"""The element types of tensors on a device, by the names that torch gives them, and how NumPy sees their bits.

float32, float16 and bfloat16 compute in float32; kernels name the types as kernels/_types.cl does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Element:
    """name: torch's. itemsize: bytes. bits: the NumPy type that holds an element's bits. floating, signed: as said."""

    name: str
    itemsize: int
    bits: np.dtype[np.generic]
    floating: bool = False
    signed: bool = True


def _element(name: str, bits: str, *, floating: bool = False, signed: bool = True) -> Element:
    dtype: np.dtype[np.generic] = np.dtype(bits)
    return Element(name, dtype.itemsize, dtype, floating, signed)


#: NumPy has no bfloat16, so its bits travel as int16.
ELEMENTS: dict[str, Element] = {
    element.name: element
    for element in (
        _element("float32", "float32", floating=True),
        _element("float16", "float16", floating=True),
        _element("bfloat16", "int16", floating=True),
        _element("int64", "int64"),
        _element("int32", "int32"),
        _element("int16", "int16"),
        _element("int8", "int8"),
        _element("uint8", "uint8", signed=False),
        _element("bool", "bool", signed=False),
    )
}
