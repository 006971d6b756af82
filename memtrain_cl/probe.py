"""Whether a device computes the bytes that memtrain_cl promises: checked once a process, before its first kernel.

Division and square root must be correctly rounded (several devices promise less and deliver it all the same), a*b - c*d
must not be contracted to a fused multiply-add, subnormal results must survive, and 32-bit integers must wrap. Where a
work-item's loops end early, without an error, kernels are given shapes of short loops.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import replace

import numpy as np

from memtrain_cl.array import empty, from_numpy
from memtrain_cl.device import Device
from memtrain_cl.errors import UnsupportedDevice
from memtrain_cl.program import get_kernel
from memtrain_cl.runtimes import import_pyopencl

OPERANDS = 1 << 16

_lock = threading.Lock()
_verdicts: dict[tuple[str, ...], list[str]] = {}


def operands() -> tuple[np.ndarray, np.ndarray]:
    """Two float32 arrays of random bits, a sixteenth of them around and below the smallest normal number."""
    rng = np.random.default_rng(20)
    bits = rng.integers(0, 1 << 32, (2, OPERANDS), dtype=np.uint32)
    exponent = rng.integers(64, 192, (2, OPERANDS), dtype=np.uint32)
    exponent[:, : OPERANDS // 16] = rng.integers(0, 3, (2, OPERANDS // 16), dtype=np.uint32)
    bits = (bits & np.uint32(0x807FFFFF)) | exponent << np.uint32(23)
    a, b = bits.view(np.float32)
    # A divisor of ordinary size, so that a subnormal a meets quotients and products that are subnormal too.
    b[: OPERANDS // 16] = rng.uniform(0.5, 2.0, OPERANDS // 16).astype(np.float32)
    return a, b


def _hash(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        x = x ^ (x >> np.uint32(16))
        x = x * np.uint32(0x7FEB352D)
        x = x ^ (x >> np.uint32(15))
        x = x * np.uint32(0x846CA68B)
        result: np.ndarray = x ^ (x >> np.uint32(16))
        return result


def faults(device: Device) -> list[str]:
    """What the device computes otherwise than IEEE 754, a phrase each; empty where it can be trusted."""
    a, b = operands()
    with np.errstate(all="ignore"):
        expected = {
            "division": a / b,
            "square root": np.sqrt(np.abs(a)),
            "a*b - c*d without contraction": a * b - b * np.roll(a, -1),
            "32-bit integer hash": _hash(a.view(np.uint32)),
        }
    outputs = [empty(device, a.shape, values.dtype) for values in expected.values()]
    kernel = get_kernel(device, "probe", "arithmetic_probe", VECTOR_WIDTHS=(1,))
    kernel((OPERANDS,), None, from_numpy(device, a), from_numpy(device, b), *outputs, np.uint32(OPERANDS))
    found = []
    for (name, right), output in zip(expected.items(), outputs, strict=True):
        wrong = int(np.count_nonzero(output.numpy().view(np.uint32) != right.view(np.uint32)))
        if wrong:
            found.append(f"{name} ({wrong} of {OPERANDS})")
    return found


#: Turns of the loop that must not end early: llvmpipe ends a work-item's loops after 65535, without an error.
TURNS = 70_000
# A step that no compiler replaces by a formula.
_LOOP = """
__kernel void loop_probe(__global uint *result, const uint turns) {
    uint x = 1;
    for (uint i = 0; i < turns; i++) x = (x ^ (x >> 7)) * 0x846ca68bu + i;
    result[0] = x;
}
"""


def _loops_end_early(device: Device) -> bool:
    cl = import_pyopencl()
    device.check_process()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cl.CompilerWarning)  # a compiler that talks about a program that it built
        kernel = cl.Kernel(cl.Program(device.context, _LOOP).build(), "loop_probe")
    result = empty(device, (1,), np.uint32)
    kernel(device.queue, (1,), (1,), result.buffer, np.uint32(TURNS))
    x = 1
    for i in range(TURNS):
        x = ((x ^ (x >> 7)) * 0x846CA68B + i) & 0xFFFFFFFF
    return int(result.numpy()[0]) != x


_short_loops: dict[tuple[str, ...], bool] = {}


def note_short_loops(device: Device) -> None:
    """Find out once whether a CPU's loops end early, and keep it in the device's `info`: its kernels then take the
    shape of GPUs, whose loops are short.
    """
    if device.info.type != "cpu" or device.info.short_loops:
        return
    key = device.cache_key
    with _lock:
        if key not in _short_loops:
            _short_loops[key] = _loops_end_early(device)
    if _short_loops[key]:
        device.info = replace(device.info, short_loops=True)


def require_exact(device: Device) -> None:
    """UnsupportedDevice where the device fails the probe; the verdict is kept for the process."""
    note_short_loops(device)
    key = device.cache_key
    if key not in _verdicts:
        with _lock:
            if key not in _verdicts:
                _verdicts[key] = faults(device)
    if _verdicts[key]:
        raise UnsupportedDevice(
            f"{device.info.label} computes otherwise than IEEE 754 in: {', '.join(_verdicts[key])}; "
            "its results would differ from every other device, so it is not used"
        )
