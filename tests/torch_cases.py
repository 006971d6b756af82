"""What tests of the torch device share: where a device is in torch, and values that are hard."""

from __future__ import annotations

import math
from typing import Any

import torch

from memtrain_cl.device import Device
from memtrain_cl.torch_device import require_registered
from memtrain_cl.torch_device.tensor import DTYPES, torch_device

require_registered()

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
ALL = tuple(DTYPES)

#: Infinities, NaN, both zeros, ties of rounding, and a subnormal.
HARD = (math.nan, math.inf, -math.inf, 0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -2.5, 1.0, -1.0, 3.7, -3.7, 1e-40, 65504.0)


def on(device: Device, value: Any) -> Any:
    """A tensor on the device."""
    return value.to(torch_device(device))


def values(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Small numbers of a type, both signs where it has them, many of them equal."""
    chance = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=chance).to(dtype)
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=chance) * 3).to(dtype)
    low = 0 if dtype == torch.uint8 else -9
    return torch.randint(low, 10, shape, generator=chance).to(dtype)


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Values (NaN equals NaN, signs of zeros count), type, shape and strides agree."""
    host = got.detach().cpu()
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert got.stride() == want.stride() or got.numel() < 2
    torch.testing.assert_close(host, want, rtol=0, atol=0, equal_nan=True)
    if want.is_floating_point():
        assert torch.equal(host.signbit() & ~host.isnan(), want.signbit() & ~want.isnan())


def near(got: torch.Tensor, want: torch.Tensor, **tolerance: Any) -> None:
    """Like `same`, within torch's tolerances for the type."""
    assert got.dtype == want.dtype
    torch.testing.assert_close(got.detach().cpu(), want, equal_nan=True, **tolerance)
