"""Launchers of kernels/profile.cl: profiles of blocks, the way back, and how well a table of quantiles fits.

Signatures, formulas and results are those of `memtrain_cl.reference.profile`, byte for byte on every device. To pool
the standardised values they are sorted on the device (`ops.sort`), which takes 28 bytes an element meanwhile.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from memtrain_cl.array import DeviceArray
from memtrain_cl.bridge import Crossing
from memtrain_cl.device import Device
from memtrain_cl.errors import UnsupportedDevice
from memtrain_cl.homes import pooled
from memtrain_cl.launchers.sort import sort
from memtrain_cl.operand import Operand, contiguous_strides
from memtrain_cl.ops.launch import ready_device, require_dtype, require_tensor, require_together
from memtrain_cl.ops.stochastic import FLOATING_DTYPES, name_of, operand_from
from memtrain_cl.program import get_kernel
from memtrain_cl.tuning import BLOCKS_PER_UNIT, SIZE_LIMIT, ceil_div, groups_share_rows, power_of_two_at_least

#: Elements of a block at most, and work-items of a GPU's group at least.
LARGEST_BLOCK, GROUP = 256, 64
#: Work-items a compute unit gets to measure distances with on a GPU.
ITEMS_PER_UNIT = 512


@dataclass(frozen=True)
class Blocks:
    """How n elements in blocks of `block` are launched. aligned: every block begins and ends on four elements."""

    device: Device
    n: int
    block: int
    aligned: bool

    def __post_init__(self) -> None:
        if self.count >= SIZE_LIMIT:
            raise UnsupportedDevice(f"expected fewer than 2^31 blocks, got {self.n} elements in blocks of {self.block}")

    @property
    def count(self) -> int:
        """Blocks."""
        return ceil_div(self.n, self.block)

    @property
    def constants(self) -> dict[str, int]:
        """The template's: LANES work-items of a GPU share a block, SLOTS blocks a group."""
        if not groups_share_rows(self.device.info):
            return {"GPU": 0, "LANES": 1, "SLOTS": 1, "HELD": 0, "ALIGNED": 0}
        lanes = max(4, power_of_two_at_least(ceil_div(self.block, 4)))
        slots = max(1, GROUP // lanes)
        return {"GPU": 1, "LANES": lanes, "SLOTS": slots, "HELD": 0, "ALIGNED": int(self.aligned)}

    def launch(self, name: str, element: str, *arguments: Any) -> Any:
        """Enqueue the kernel `name` over every block; its event. element: of x, float32 where there is none."""
        constants = self.constants
        kernel = get_kernel(self.device, "profile", name, NAME=name, X=element, **constants)
        if constants["GPU"]:
            local, per = constants["LANES"] * constants["SLOTS"], 1
            size = ceil_div(self.count, constants["SLOTS"]) * local
        else:
            local = 1
            per = ceil_div(self.count, self.device.info.compute_units * BLOCKS_PER_UNIT)
            size = ceil_div(self.count, per)
        sizes = (np.uint64(self.n), np.uint32(self.block), np.uint64(self.count), np.uint64(per))
        return kernel((size,), (local,), *arguments, *sizes)


def _blocks(device: Device, n: int, block_size: int, *operands: Operand | DeviceArray) -> Blocks:
    """The plan for operands of n elements each, in the blocks' order."""
    aligned = n % 4 == 0 and block_size % 4 == 0
    for operand in operands:
        array, offset = (operand.array, operand.offset) if isinstance(operand, Operand) else (operand, 0)
        aligned = aligned and offset % 4 == 0 and array.alignment >= 16
    return Blocks(device, n, block_size, aligned)


def launch_encode(device: Device, x: Operand, codes: DeviceArray, pairs: DeviceArray, block_size: int) -> Any:
    """Enqueue codes uint8 [n] and pairs float32 [blocks, 2] of x, contiguous, of a floating element; the event."""
    return _blocks(device, x.size, block_size, x, codes).launch("encode_profile", x.element, *x.place, codes, pairs)


def launch_decode(
    device: Device,
    codes: DeviceArray,
    pairs: DeviceArray,
    table: DeviceArray,
    y: DeviceArray,
    block_size: int,
    *,
    positive: bool,
) -> Any:
    """Enqueue y float32 [n] of codes, pairs and table float32 [256]; the event."""
    plan = _blocks(device, codes.size, block_size, codes, y)
    return plan.launch("decode_profile", "float32", codes, pairs, table, np.uint32(positive), y)


def require_block_size(block_size: Any) -> int:
    """The block size as an int; ValueError unless an integer in 1..256."""
    wrong = isinstance(block_size, bool) or not isinstance(block_size, numbers.Integral)
    if wrong or not 1 <= int(block_size) <= LARGEST_BLOCK:
        raise ValueError(f"expected block_size as an integer in 1..{LARGEST_BLOCK}, got {block_size!r}")
    return int(block_size)


def _require_pairs(mean_scale: Any, n: int, block_size: int) -> None:
    require_tensor("mean_scale", mean_scale, torch.float32, (ceil_div(n, block_size), 2))


def encode_profile(x: torch.Tensor, block_size: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8 of x's shape, mean_scale float32 [blocks, 2]) of x of float32, float16 or bfloat16, of any shape.

    TypeError for other types; ValueError unless block_size is an integer in 1..256.
    """
    block_size = require_block_size(block_size)
    require_dtype("x", x, *FLOATING_DTYPES)
    shape, blocks = tuple(x.shape), ceil_div(x.numel(), block_size)
    if x.numel() == 0:
        codes = torch.empty(shape, dtype=torch.uint8, device=x.device)
        return codes, torch.empty((0, 2), dtype=torch.float32, device=x.device)
    device = ready_device(x)
    with Crossing(device, x) as cross:
        codes, codes_array = cross.output(shape, torch.uint8)
        mean_scale, pairs = cross.output((blocks, 2))
        launch_encode(device, operand_from(cross.read(x), x), codes_array, pairs, block_size)
    return codes, mean_scale


def decode_profile(
    codes: torch.Tensor,
    mean_scale: torch.Tensor,
    table: torch.Tensor,
    block_size: int = 256,
    *,
    positive: bool = False,
) -> torch.Tensor:
    """float32 of codes' shape from what `encode_profile` gives. table: float32 [256].

    positive: of numbers that are none of them negative; one that is not zero comes back as at least mean/16.
    TypeError and ValueError for tensors of other types and shapes, and for block sizes out of 1..256.
    """
    block_size = require_block_size(block_size)
    require_dtype("codes", codes, torch.uint8)
    _require_pairs(mean_scale, codes.numel(), block_size)
    require_tensor("table", table, torch.float32, (256,))
    require_together(codes=codes, mean_scale=mean_scale, table=table)
    if codes.numel() == 0:
        return torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    device = ready_device(codes)
    with Crossing(device, codes) as cross:
        y, target = cross.output(tuple(codes.shape))
        held, pairs, quantiles = (cross.read(tensor) for tensor in (codes, mean_scale, table))
        launch_decode(device, held, pairs, quantiles, target, block_size, positive=positive)
    return y


def pool_profile(x: torch.Tensor, mean_scale: torch.Tensor, block_size: int = 256) -> torch.Tensor:
    """(x - mean)/scale of all elements that are not zero, in blocks whose scale is not, in ascending order.

    float32 [x.numel()]; what the other elements leave free at the end is NaN. Errors as `encode_profile`'s.
    """
    block_size = require_block_size(block_size)
    require_dtype("x", x, *FLOATING_DTYPES)
    _require_pairs(mean_scale, x.numel(), block_size)
    require_together(x=x, mean_scale=mean_scale)
    n = x.numel()
    if n == 0:
        return torch.empty((0,), dtype=torch.float32, device=x.device)
    device = ready_device(x)
    with Crossing(device, x) as cross:
        pooled_values, target = cross.output((n,))
        loose = pooled(device, (n,), np.float32)
        places = pooled(device, (n,), np.int64)
        source = operand_from(cross.read(x), x)
        plan = _blocks(device, n, block_size, source, loose)
        plan.launch("standardize_profile", source.element, *source.place, cross.read(mean_scale), loose)
        z, values, order = (
            Operand(array, (n,), contiguous_strides((n,)), 0, element, contiguous=True)
            for array, element in ((loose, "float32"), (target, "float32"), (places, "int64"))
        )
        sort(z, 0, values, order, descending=False)
    return pooled_values


def profile_distance(pooled_values: torch.Tensor, curve: torch.Tensor, start: float, stop: float) -> tuple[float, int]:
    """(the Kolmogorov-Smirnov distance of sorted values, NaN behind all others, from a curve; how many are numbers).

    curve: float32 [cells + 1], a distribution function at equally spaced places from start to stop, straight between
    them and level beyond. Waits for the device. 0 numbers are at distance 0.
    """
    require_tensor("pooled_values", pooled_values, torch.float32, (None,))
    require_tensor("curve", curve, torch.float32, (None,))
    require_together(pooled_values=pooled_values, curve=curve)
    cells = curve.numel() - 1
    if cells < 1 or not start < stop:
        raise ValueError(f"expected a curve of two places or more, start below stop, got {cells + 1}, {start}, {stop}")
    n = pooled_values.numel()
    if n == 0:
        return 0.0, 0
    device = ready_device(pooled_values)
    gpu = groups_share_rows(device.info)
    items = min(n, device.info.compute_units * (ITEMS_PER_UNIT if gpu else BLOCKS_PER_UNIT))
    count = ceil_div(n, items)
    with Crossing(device, pooled_values) as cross:
        parts, parts_array = cross.output((items,))
        found, found_array = cross.output((1,), torch.int64)
        constants = {"GPU": int(gpu), "LANES": 4, "SLOTS": 1, "HELD": 0, "ALIGNED": 0}
        kernel = get_kernel(device, "profile", "profile_distances", NAME="profile_distances", X="float32", **constants)
        apart, step = (1, items) if gpu else (count, 1)
        kernel(
            (items,),
            None,
            cross.read(pooled_values),
            cross.read(curve),
            parts_array,
            found_array,
            np.uint64(n),
            np.uint32(cells),
            np.float32(start),
            np.float32(cells / (stop - start)),
            *(np.uint64(number) for number in (apart, step, count)),
        )
    return float(parts.max()), int(found)


def profile_error(
    x: torch.Tensor,
    codes: torch.Tensor,
    mean_scale: torch.Tensor,
    table: torch.Tensor,
    block_size: int = 256,
    *,
    positive: bool = False,
) -> float:
    """||decoded - x|| / ||x|| of what `encode_profile` made of x; 0 where x is zero, NaN where it is not finite.

    Waits for the device; the blocks' sums, 12 bytes a block, are added up on the host, in float64.
    """
    block_size = require_block_size(block_size)
    require_dtype("x", x, *FLOATING_DTYPES)
    require_tensor("codes", codes, torch.uint8, tuple(x.shape))
    _require_pairs(mean_scale, x.numel(), block_size)
    require_tensor("table", table, torch.float32, (256,))
    require_together(x=x, codes=codes, mean_scale=mean_scale, table=table)
    if x.numel() == 0:
        return 0.0
    device = ready_device(x)
    with Crossing(device, x) as cross:
        sums, target = cross.output((ceil_div(x.numel(), block_size), 3))
        source, codes_array = operand_from(cross.read(x), x), cross.read(codes)
        plan = _blocks(device, x.numel(), block_size, source, codes_array)
        arguments = (codes_array, cross.read(mean_scale), cross.read(table), np.uint32(positive), target)
        plan.launch("profile_errors", name_of(x.dtype), *source.place, *arguments)
    error, whole, power = sums.cpu().double().unbind(1)
    root = float(((whole * power.square()).sum()).sqrt())
    return float(((error * power.square()).sum()).sqrt()) / root if root else 0.0
