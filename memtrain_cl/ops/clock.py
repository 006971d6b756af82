"""Launchers of kernels/clock.cl: the decimation clock of a layer. The rule stands in `memtrain_cl.reference.clock`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from memtrain_cl.array import DeviceArray
from memtrain_cl.bridge import Crossing
from memtrain_cl.device import Device
from memtrain_cl.ops.launch import ready_device, require_tensor, require_together
from memtrain_cl.program import get_kernel

_ONE = (1,)
#: Weights of one layer at most: sizes stay below 2^31 each.
_MOST_WEIGHTS = 1 << 62


def launch_advance(device: Device, clock: DeviceArray, totals: DeviceArray) -> Any:
    """Enqueue the begin of a step; nothing waits. The launch's event."""
    return get_kernel(device, "clock", "advance_clock")(_ONE, _ONE, clock, totals)


def launch_observe(device: Device, clock: DeviceArray, totals: DeviceArray, weights: int) -> Any:
    """Enqueue the end of a step of a layer of so many weights; nothing waits. The launch's event."""
    return get_kernel(device, "clock", "observe_clock")(_ONE, _ONE, clock, totals, np.int64(weights))


def require_clock(clock: torch.Tensor, totals: torch.Tensor) -> None:
    """TypeError or ValueError unless these are a layer's clock and counts."""
    require_tensor("clock", clock, torch.int64, (4,))
    require_tensor("totals", totals, torch.int64, (3,))
    require_together(clock=clock, totals=totals)


def advance_clock_(clock: torch.Tensor, totals: torch.Tensor) -> None:
    """A step begins: since += 1; fire = since >= period; where it fires, since = 0 and flips_before = totals[1].

    clock int64 [4] of (period, since, fire, flips_before), changed in place; totals int64 [3], the layer's counts.
    """
    require_clock(clock, totals)
    device = ready_device(clock)
    with Crossing(device, clock) as cross:
        launch_advance(device, cross.update(clock), cross.read(totals))


def observe_clock_(clock: torch.Tensor, totals: torch.Tensor, weights: int) -> None:
    """A step ends: where it fired, the share r of the layer's `weights` that its update changed gives the next period:

    1 if r > 1e-3, 2 if r > 1e-4, 4 if r > 1e-5, else 8, compared in whole numbers.
    """
    require_clock(clock, totals)
    if isinstance(weights, bool) or not isinstance(weights, int) or not 0 <= weights <= _MOST_WEIGHTS:
        raise ValueError(f"expected weights as an integer in 0..2^62, got {weights!r}")
    device = ready_device(clock)
    with Crossing(device, clock) as cross:
        launch_observe(device, cross.update(clock), cross.read(totals), weights)
