"""Launchers of kernels/blockwise.cl: numbers in 8 bits, a scale a block of consecutive elements, and back.

Signatures, formulas and results are those of `memtrain_cl.reference.blockwise`, byte for byte on every device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from memtrain_cl.array import DeviceArray
from memtrain_cl.bridge import Crossing
from memtrain_cl.code_maps import CODES
from memtrain_cl.device import Device
from memtrain_cl.ops.blocks import block_shape, map_of
from memtrain_cl.ops.launch import ready_device, require_dtype, require_seed, require_tensor, require_together
from memtrain_cl.ops.stochastic import FLOATING_DTYPES, name_of
from memtrain_cl.program import get_kernel
from memtrain_cl.tuning import ceil_div


@dataclass(frozen=True)
class Blocks:
    """How a tensor lies in codes. code: of `memtrain_cl.code_maps.CODES`. signed: which dynamic map."""

    block_size: int
    code: str = "linear"
    signed: bool = True

    def __post_init__(self) -> None:
        size = self.block_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"expected block_size as an integer >= 1, got {size!r}")
        if self.code not in CODES:
            raise ValueError(f"expected code as one of {', '.join(CODES)}, got {self.code!r}")

    @property
    def dtype(self) -> torch.dtype:
        """Of the codes."""
        return torch.int8 if self.code == "linear" else torch.uint8

    def count(self, n: int) -> int:
        """Blocks of n elements."""
        return ceil_div(n, self.block_size)

    def launch(
        self, device: Device, name: str, arrays: tuple[DeviceArray, ...], n: int, *rest: Any, **constants: Any
    ) -> Any:
        """Enqueue the kernel `name` over n elements, of which there are some; its event."""
        size = min(self.block_size, n)
        dynamic = self.code == "dynamic"
        aligned = n % 4 == 0 and size % 4 == 0 and all(array.alignment >= 16 for array in arrays)
        shape = block_shape(device, self.count(n), size, aligned=aligned, mapped=dynamic)
        held = shape.constants["HELD"] if name == "quantize_blocks" and shape.constants["GPU"] else 0
        kernel = get_kernel(
            device,
            "blockwise",
            name,
            NAME=name,
            CODING=self.code,
            CODES=str(self.dtype).removeprefix("torch."),
            KIND="signed" if self.signed or not dynamic else "unsigned",
            **{**shape.constants, "HELD": held},
            **constants,
        )
        chart = (map_of(device, self.signed),) if dynamic else ()
        sizes = (np.uint64(n), np.uint32(size), np.uint64(self.count(n)), np.uint32(shape.per))
        return kernel(shape.global_size, shape.local_size, *arrays, *chart, *sizes, *rest)


def launch_quantize(
    device: Device,
    x: DeviceArray,
    codes: DeviceArray,
    scales: DeviceArray,
    blocks: Blocks,
    *,
    element: str,
    positive: bool = False,
    seed: int | None = None,
) -> Any:
    """Enqueue codes and scales of x, not empty, whose elements are of the type `element`; the launch's event."""
    drawn = () if seed is None else (np.uint32(seed),)
    constants = {"X": element, "STOCHASTIC": int(seed is not None)}
    arrays = (x, codes, scales)
    return blocks.launch(device, "quantize_blocks", arrays, x.size, np.uint32(positive), *drawn, **constants)


def launch_dequantize(device: Device, codes: DeviceArray, scales: DeviceArray, x: DeviceArray, blocks: Blocks) -> Any:
    """Enqueue x float32 of codes, not empty; the launch's event."""
    arrays = (codes, scales, x)
    return blocks.launch(device, "dequantize_blocks", arrays, x.size, X="float32", STOCHASTIC=0)


def quantize_blockwise(
    x: torch.Tensor,
    block_size: int,
    *,
    code: str = "linear",
    signed: bool = True,
    positive: bool = False,
    seed: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes of x's shape, scales float32 [blocks]) of x, taken flat in blocks of block_size elements.

    x: float32, float16 or bfloat16, of any shape. code "linear": int8, code*scale, scale = largest/127. "dynamic":
    uint8, map[code]*scale, scale = largest, of the signed or the unsigned map of `memtrain_cl.code_maps`. positive: a
    number above 0 never gets the code of 0 (`memtrain_cl.reference.blockwise` has the formulas). seed None rounds to
    nearest, a seed stochastically: the mean of what comes back is then x. A block that is not finite has scale NaN.

    ValueError for a block size below 1, an unknown code, a seed out of 0..2^32-1; TypeError for other dtypes.
    """
    blocks = Blocks(block_size, code, signed)
    require_dtype("x", x, *FLOATING_DTYPES)
    if seed is not None:
        require_seed("a seed", seed)
    if x.numel() == 0:
        return (
            torch.empty(x.shape, dtype=blocks.dtype, device=x.device),
            torch.empty(0, dtype=torch.float32, device=x.device),
        )
    device = ready_device(x)
    with Crossing(device, x) as cross:
        codes, codes_array = cross.output(tuple(x.shape), blocks.dtype)
        scales, scales_array = cross.output((blocks.count(x.numel()),))
        launch_quantize(
            device,
            cross.read(x),
            codes_array,
            scales_array,
            blocks,
            element=name_of(x.dtype),
            positive=positive,
            seed=seed,
        )
    return codes, scales


def dequantize_blockwise(
    codes: torch.Tensor, scales: torch.Tensor, block_size: int, *, code: str = "linear", signed: bool = True
) -> torch.Tensor:
    """float32 of codes' shape, from what `quantize_blockwise` gave for the same block size, code and signed.

    codes: int8 for "linear", uint8 for "dynamic". scales: float32 [blocks]. ValueError or TypeError for others.
    """
    blocks = Blocks(block_size, code, signed)
    require_dtype("codes", codes, blocks.dtype)
    require_tensor("scales", scales, torch.float32, (blocks.count(codes.numel()),))
    require_together(codes=codes, scales=scales)
    if codes.numel() == 0:
        return torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    device = ready_device(codes)
    with Crossing(device, codes) as cross:
        x, array = cross.output(tuple(codes.shape))
        launch_dequantize(device, cross.read(codes), cross.read(scales), array, blocks)
    return x


def quantize_int8_blockwise(flat: torch.Tensor, block_size: int = 2048) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes int8 of its shape, scales float32 [blocks]): scale = largest/127, 1 for a block of zeros; code = x/scale,
    rounded half to even. The published signature of `quantize_blockwise` with code "linear".
    """
    return quantize_blockwise(flat, block_size)


def dequantize_int8_blockwise(codes: torch.Tensor, scales: torch.Tensor, block_size: int = 2048) -> torch.Tensor:
    """float32 of codes' shape, code * scale: the way back of `quantize_int8_blockwise`."""
    return dequantize_blockwise(codes, scales, block_size)
