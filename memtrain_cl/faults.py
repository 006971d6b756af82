"""Faults that kernels find in their data: an index outside its dimension, a probability that is none, a row to be saved
in few bits that is not finite.

A kernel cannot raise, and asking it whether it would have means waiting for it. So it writes the first fault into a
small buffer of its device (kernels/_faults.cl), goes on with a value that touches no memory but its own, and whoever
next waits for the device calls `raise_pending`. The operation is then past, and its result is not to be used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrain_cl.array import DeviceArray, from_numpy
from memtrain_cl.device import Device
from memtrain_cl.errors import NotFinite
from memtrain_cl.runtimes import import_pyopencl

_INDEX, _PROBABILITY, _EMPTY, _ROW = 1, 2, 3, 4


@dataclass
class _Faults:
    """array: int64 [3], what kernels write. launched: whether one that may write came after the last look."""

    array: DeviceArray
    launched: bool = False


def faults_of(device: Device) -> DeviceArray:
    """The device's buffer of faults, for the arguments of a kernel that is about to be launched."""
    found: _Faults | None = device.kept.get("faults")
    if found is None:
        found = device.kept["faults"] = _Faults(from_numpy(device, np.zeros(3, np.int64)))
    found.launched = True
    return found.array


def raise_pending(device: Device) -> None:
    """Wait for the device and raise what its kernels found wrong since the last call; costs nothing if none could.

    IndexError for an index outside its dimension, RuntimeError for probabilities that are none, NotFinite for a row
    that cannot be saved in few bits.
    """
    found: _Faults | None = device.kept.get("faults")
    if found is None or not found.launched:
        return
    found.launched = False
    kind, value, limit = (int(number) for number in found.array.numpy())
    if kind == 0:
        return
    import_pyopencl().enqueue_copy(device.queue, found.array.buffer, np.zeros(3, np.int64), is_blocking=True)
    if kind == _INDEX:
        raise IndexError(
            f"index {value} is out of bounds for dimension with size {limit} "
            f"(in an operation on {device.info.name} since it was last waited for)"
        )
    if kind == _PROBABILITY:
        raise RuntimeError(f"probability tensor contains either `inf`, `nan` or element < 0 (in row {value})")
    if kind == _ROW:
        raise NotFinite(row_not_finite(value))
    raise RuntimeError(f"invalid multinomial distribution (sum of probabilities <= 0) (in row {value})")


def row_not_finite(row: int) -> str:
    """What is said of a row that cannot be saved in few bits."""
    return f"expected finite numbers to save in few bits, got inf, nan or a magnitude beyond all scales in row {row}"
