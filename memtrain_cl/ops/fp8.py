"""Launchers of kernels/fp8.cl: casts to torch's 8-bit floating types, with the numbers that a guard asks for, and back.

Signatures, formulas and results are those of `memtrain_cl.reference.fp8`, byte for byte on every device. Codes are
uint8: the bits of torch's types, which not every torch and no device "opencl" has.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from memtrain_cl.array import DeviceArray
from memtrain_cl.bridge import Crossing
from memtrain_cl.device import Device
from memtrain_cl.formats import FP8_FORMATS, Fp8Format, check_fp8
from memtrain_cl.homes import pooled
from memtrain_cl.ops.launch import ready_device, require_dtype
from memtrain_cl.ops.stochastic import FLOATING_DTYPES, name_of
from memtrain_cl.program import get_kernel
from memtrain_cl.tuning import ceil_div, flat_shape, groups_share_rows

#: Items of a GPU's work-group at most, and its groups a compute unit, which share what there is.
GROUP, GROUPS_PER_UNIT = 256, 32
#: How many numbers `fp8_cast_counted` counts into.
COUNTS = 4


@dataclass(frozen=True)
class _Shape:
    """How kernels/fp8.cl runs over n numbers: constants of its shape, launch sizes, and vectors an item of a CPU."""

    constants: dict[str, int]
    global_size: tuple[int, ...]
    local_size: tuple[int, ...]
    per: int

    @property
    def parts(self) -> int:
        """Groups of a GPU, items of a CPU: each leaves counts of its own."""
        return self.global_size[0] // self.local_size[0]


def _shape(device: Device, n: int, *, aligned: bool = False) -> _Shape:
    info = device.info
    gpu = groups_share_rows(info)
    group = min(GROUP, 1 << (info.max_work_group_size.bit_length() - 1)) if gpu else 1
    constants = {"GPU": int(gpu), "WG_SIZE": group, "ALIGNED": int(gpu and aligned and n % 4 == 0)}
    constants |= {"LANES": 1, "SLOTS": 1, "HELD": 0}
    if gpu:
        groups = min(ceil_div(ceil_div(n, 4), group), info.compute_units * GROUPS_PER_UNIT)
        return _Shape(constants, (groups * group,), (group,), 0)
    global_size, per = flat_shape(info, ceil_div(n, 8))
    return _Shape(constants, global_size, (1,), per)


def _kernel(device: Device, name: str, shape: _Shape, form: Fp8Format, element: str, *, counted: bool = False) -> Any:
    types = {"X": element, "MANTISSA": form.mantissa, "BIAS": form.bias}
    return get_kernel(device, "fp8", name, NAME=name, COUNTED=int(counted), **types, **shape.constants)


def _aligned(*arrays: DeviceArray) -> bool:
    """Whether vectors of four lie as the device likes them."""
    return min(array.alignment for array in arrays) >= 16


def launch_cast(
    device: Device,
    x: DeviceArray,
    codes: DeviceArray,
    *,
    element: str,
    form: Fp8Format,
    beyond: int,
    counts: DeviceArray | None = None,
) -> Any:
    """Enqueue codes uint8 of x, not empty, of a floating element; counts int64 [4] as `fp8_cast_counted` gives them.

    beyond: the code of magnitudes beyond the type's largest. Nothing waits; the last launch's event.
    """
    shape = _shape(device, x.size, aligned=_aligned(x, codes))
    kernel = _kernel(device, "fp8_cast", shape, form, element, counted=counts is not None)
    sizes = (np.uint64(x.size), np.uint64(shape.per), np.uint32(beyond))
    if counts is None:
        return kernel(shape.global_size, shape.local_size, x, codes, *sizes)
    parts = pooled(device, (shape.parts, COUNTS), np.dtype(np.uint32))
    kernel(shape.global_size, shape.local_size, x, codes, parts, *sizes)
    # One program for all types: of those the sums know nothing.
    one = _shape(device, 1)
    kernel = _kernel(device, "fp8_counts", one, FP8_FORMATS["float8_e4m3fn"], "float32")
    return kernel(one.local_size, one.local_size, parts, counts, np.uint32(shape.parts))


def launch_restore(device: Device, codes: DeviceArray, y: DeviceArray, *, element: str, form: Fp8Format) -> Any:
    """Enqueue y, not empty, of a floating element, from uint8 codes; the launch's event."""
    shape = _shape(device, codes.size, aligned=_aligned(codes, y))
    kernel = _kernel(device, "fp8_restore", shape, form, element)
    return kernel(shape.global_size, shape.local_size, codes, y, np.uint64(codes.size), np.uint64(shape.per))


@functools.cache
def _saturates(form: Fp8Format) -> bool:
    """Whether torch's own cast gives the largest number for what lies beyond; as 2.13 does where it lacks the type."""
    own = getattr(torch, form.name, None)
    if own is None:
        return form.name == "float8_e4m3fn"
    return int(torch.tensor([3e38]).to(own).view(torch.uint8)) == form.largest_code


def _cast(x: Any, fp8_dtype: Any, saturate: Any, *, counted: bool) -> tuple[torch.Tensor, ...]:
    """The codes, and the counts too where they are asked for."""
    form = check_fp8(fp8_dtype)
    require_dtype("x", x, *FLOATING_DTYPES)
    if saturate is not None and not isinstance(saturate, bool):
        raise ValueError(f"expected saturate as True, False or None, got {saturate!r}")
    if x.numel() == 0:
        codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        # Zeros of the host's travel without a kernel.
        return (codes, torch.zeros(COUNTS, dtype=torch.int64).to(x.device)) if counted else (codes,)
    saturate = _saturates(form) if saturate is None else saturate
    beyond = form.largest_code if saturate else form.beyond_code
    device = ready_device(x)
    with Crossing(device, x) as cross:
        codes, target = cross.output(tuple(x.shape), torch.uint8)
        made, counts = [codes], None
        if counted:
            sums, counts = cross.output((COUNTS,), torch.int64)
            made.append(sums)
        launch_cast(device, cross.read(x), target, element=name_of(x.dtype), form=form, beyond=beyond, counts=counts)
    return tuple(made)


def fp8_cast(x: torch.Tensor, fp8_dtype: Any = "float8_e4m3fn", *, saturate: bool | None = None) -> torch.Tensor:
    """The codes of x, uint8 of its shape: the bits that torch's ``x.to(fp8_dtype)`` on the CPU has.

    x: float32, float16 or bfloat16. fp8_dtype: "float8_e4m3fn" or "float8_e5m2", or torch's type. To nearest, ties to
    even. saturate: whether what lies beyond the largest number, infinities too, becomes that, or the NaN of e4m3fn and
    the infinity of e5m2; None does as the torch that is installed (e4m3fn saturates from 2.13 on, e5m2 does not).
    """
    return _cast(x, fp8_dtype, saturate, counted=False)[0]


def fp8_cast_counted(
    x: torch.Tensor, fp8_dtype: Any = "float8_e4m3fn", *, saturate: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes of `fp8_cast`, counts int64 [4]), in one pass over x.

    counts: the largest bits of |x| as float32, how many numbers are not finite, how many are not zero, and how many of
    those have a code of zero. A subnormal number is not zero. Both tensors are where x is; nobody waits for "opencl".
    """
    codes, counts = _cast(x, fp8_dtype, saturate, counted=True)
    return codes, counts


def fp8_restore(
    codes: torch.Tensor, fp8_dtype: Any = "float8_e4m3fn", *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The numbers of uint8 codes, exact, in float32, float16 or bfloat16: torch's ``.to(dtype)`` from `fp8_dtype`."""
    form = check_fp8(fp8_dtype)
    require_dtype("codes", codes, torch.uint8)
    if dtype not in FLOATING_DTYPES:
        raise TypeError(f"expected dtype as {' or '.join(map(str, FLOATING_DTYPES))}, got {dtype}")
    if codes.numel() == 0:
        return torch.empty(codes.shape, dtype=dtype, device=codes.device)
    device = ready_device(codes)
    with Crossing(device, codes) as cross:
        y, target = cross.output(tuple(codes.shape), dtype)
        launch_restore(device, cross.read(codes), target, element=name_of(dtype), form=form)
    return y
