"""Launchers of kernels/stochastic.cl for rows saved in few bits, to be restored once: codes and a bfloat16 scale a row.

Signatures, formulas and results are those of `memtrain_cl.reference.stochastic`, byte for byte on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from memtrain_cl.array import DeviceArray
from memtrain_cl.bridge import Crossing
from memtrain_cl.device import Device
from memtrain_cl.errors import NotFinite
from memtrain_cl.faults import row_not_finite
from memtrain_cl.formats import check_bits
from memtrain_cl.homes import array_of, operand_of, pooled
from memtrain_cl.operand import Operand
from memtrain_cl.ops.launch import ready_device, require_tensor, require_together
from memtrain_cl.ops.stochastic import (
    FLOATING_DTYPES,
    launch_dequantize,
    launch_nibbles,
    launch_rows,
    least_scale,
    name_of,
    operand_from,
    require_numbers,
)
from memtrain_cl.ops.stochastic_plan import Style
from memtrain_cl.probe import require_exact
from memtrain_cl.tuning import ceil_div


def stored_form(bits: int, rows: int, n: int) -> tuple[torch.dtype, tuple[int, ...]]:
    """Type and shape of the codes of [rows, n] numbers: to 4 bits two in a byte."""
    if bits <= 4:
        return torch.uint8, (ceil_div(rows * n, 2),)
    return torch.int8 if bits <= 8 else torch.int16, (rows, n)


def launch_save(
    device: Device,
    x: Operand,
    codes: DeviceArray,
    scale: DeviceArray,
    *,
    bits: int,
    seed: int,
    reports: bool = False,
) -> Any:
    """Enqueue `save_rows` of x [M, n], contiguous, not empty; the last launch's event.

    reports: a row that is not finite becomes a fault of the device (memtrain_cl/faults.py); its scale is NaN anyway.
    """
    rows, n = x.shape
    if bits > 4 or n % 2 == 0:
        name = "int4" if bits <= 4 else codes.dtype.name
        style = Style(x.element, name, stochastic=True, save=True)
        return launch_rows(device, style, x, codes, scale, rows, n, bits, seed, reports=reports)
    # Pairs of codes lie across rows of an odd length.
    style = Style(x.element, "int8", stochastic=True, save=True)
    apart = pooled(device, (rows, n), np.dtype(np.int8))
    launch_rows(device, style, x, apart, scale, rows, n, bits, seed, reports=reports)
    return launch_nibbles(device, "pack_int4", apart, codes, rows * n)


def launch_restore(
    device: Device, codes: DeviceArray, scale: DeviceArray, y: DeviceArray, *, bits: int, element: str
) -> Any:
    """Enqueue y [M, n], of a floating element, = codes * scale; the last launch's event."""
    rows, n = y.shape
    name = "int4" if bits <= 4 else codes.dtype.name
    if bits <= 4 and n % 2:
        apart, name = pooled(device, (rows, n), np.dtype(np.int8)), "int8"
        launch_nibbles(device, "unpack_int4", codes, apart, rows * n)
        codes = apart
    return launch_dequantize(device, Style(element, name, save=True), codes, scale, y, (rows, n, 1))


def save_operand(x: Operand, bits: int, *, seed: int) -> tuple[DeviceArray, DeviceArray]:
    """`save_rows` of x [M, n] on its device, contiguous and not empty, into arrays of the device's allocator, without
    a tensor; what is not finite is a fault of the device.
    """
    rows, n = x.shape
    require_exact(x.device)
    stored, shape = stored_form(bits, rows, n)
    codes, scale = pooled(x.device, shape, np.dtype(name_of(stored))), pooled(x.device, (rows,), np.dtype(np.uint16))
    launch_save(x.device, x, codes, scale, bits=bits, seed=seed, reports=True)
    return codes, scale


def restore_operand(codes: DeviceArray, scale: DeviceArray, y: Operand, *, bits: int) -> None:
    """Enqueue y [M, n], contiguous from the start of its memory, = codes * scale of `save_operand`."""
    launch_restore(y.device, codes, scale, array_of(y), bits=bits, element=y.element)


def save_rows(x: torch.Tensor, bits: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scale) of x [M, n] for `restore_rows`, stochastically: 4 + 16/n bits an element to 4 bits.

    codes: to 4 bits packed as `pack_int4` does, flat uint8; to 8 int8 [M, n]; to 15 int16 [M, n]. scale: bfloat16 [M],
    max |x| / (2^(bits-1) - 1) rounded up, so that no element lies beyond the codes. NotFinite (a ValueError) for a row
    that is not finite, or whose largest magnitude the scale cannot give back; for tensors on "opencl" at the next wait.
    """
    bits = require_numbers(x, bits, seed)
    if seed is None:
        raise ValueError("expected a seed in 0..2^32-1, got None")
    if x.ndim != 2:
        raise ValueError(f"expected x [M, n], got {list(x.shape)}")
    rows, n = x.shape
    stored, shape = stored_form(bits, rows, n)
    if x.numel() == 0:
        codes = torch.empty(shape, dtype=stored, device=x.device)
        return codes, least_scale((rows,), bits, x).to(torch.bfloat16)
    device = ready_device(x)
    # Who waits anyway looks at once.
    waits = operand_of(x) is None
    with Crossing(device, x) as cross:
        codes, target = cross.output(shape, stored)
        scale, scales = cross.output((rows,), torch.bfloat16)
        source = operand_from(cross.read(x), x)
        launch_save(device, source, target, scales, bits=bits, seed=seed, reports=not waits)
    if waits:
        wrong = torch.isnan(scale).nonzero()
        if len(wrong):
            raise NotFinite(row_not_finite(int(wrong[0])))
    return codes, scale


def restore_rows(
    codes: torch.Tensor,
    scale: torch.Tensor,
    bits: int,
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """[M, n] = codes * scale from what `save_rows` gave, each product rounded to float32, then to `dtype`."""
    bits = check_bits(bits)
    rows, n = shape
    stored, stored_shape = stored_form(bits, rows, n)
    require_tensor("codes", codes, stored, stored_shape)
    require_tensor("scale", scale, torch.bfloat16, (rows,))
    require_together(codes=codes, scale=scale)
    if dtype not in FLOATING_DTYPES:
        raise TypeError(f"expected dtype as {' or '.join(map(str, FLOATING_DTYPES))}, got {dtype}")
    if rows * n == 0:
        return torch.empty((rows, n), dtype=dtype, device=codes.device)
    device = ready_device(codes)
    with Crossing(device, codes) as cross:
        result, target = cross.output((rows, n), dtype)
        launch_restore(device, cross.read(codes), cross.read(scale), target, bits=bits, element=name_of(dtype))
    return result
