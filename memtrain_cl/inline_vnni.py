"""Whether a device's compiler takes x86's dot products of bytes as inline assembly (kernels/_int8_vnni.cl).

The processor must have the instruction (AVX-512 VNNI), the device be that processor, and its compiler put the
instruction where the kernel wants it. Compilers of OpenCL differ in this, and some end the process: so a child process
multiplies once before anybody relies on it, and where it does not come back with the right numbers, the portable way
stays.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np

from memtrain_cl.array import empty, from_numpy
from memtrain_cl.device import Device, devices, get_device
from memtrain_cl.program import get_kernel
from memtrain_cl.runtimes import import_pyopencl
from memtrain_cl.tuning_int8 import int8_shape

#: Sizes of the trial: an odd number of tiles, panels and blocks of K, none of them whole.
_SIZES = (13, 75, 2077)
#: What the child says; and how long it may take, in seconds.
_WELL, _PATIENCE = "the sums are right", 120

_lock = threading.Lock()
_verdicts: dict[tuple[str, ...], bool] = {}


def note_inline_vnni(device: Device) -> None:
    """Find out once a process, and keep it in the device's `info`."""
    if device.info.inline_vnni is not None:
        return
    key = device.cache_key
    with _lock:
        if key not in _verdicts:
            _verdicts[key] = _possible(device) and _child_succeeds(device)
    device.info = replace(device.info, inline_vnni=_verdicts[key])


def _possible(device: Device) -> bool:
    """Whether it is worth a child: a processor with the instruction, as itself, whose loops are long."""
    cl = import_pyopencl()
    if device.info.type != "cpu" or device.info.short_loops or device.handle.type != cl.device_type.CPU:
        return False
    description = Path("/proc/cpuinfo")
    return description.is_file() and "avx512_vnni" in description.read_text().split()


def _child_succeeds(device: Device) -> bool:
    command = [sys.executable, "-m", "memtrain_cl.inline_vnni", device.info.label]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and _WELL in done.stdout


def sums_are_right(device: Device) -> bool:
    """One product by the instruction against NumPy's."""
    M, N, K = _SIZES
    rng = np.random.default_rng(7)
    a, b = (rng.integers(-127, 128, (rows, K), dtype=np.int8) for rows in (M, N))
    info = replace(device.info, inline_vnni=True)
    shape = int8_shape(info, M, N, K, ternary=False)
    kernel = get_kernel(device, "matmul_int8", "matmul_int8", NAME="matmul_int8", **shape.constants)
    out = empty(device, (M, N), np.int32)
    neither = (np.uint32(0), out, np.uint32(0))  # scales, nor a gate
    sizes = (np.uint32(value) for value in (M, N, K, K, K, shape.per, shape.columns))
    operands = (from_numpy(device, a), from_numpy(device, b), out, out, out)
    kernel(shape.global_size, shape.local_size, *operands, *neither, *(np.uint64(0),) * 3, *sizes)
    return bool(np.array_equal(out.numpy(), a.astype(np.int32) @ b.astype(np.int32).T))


def main() -> None:
    """The child: the device of the label given as argument multiplies."""
    found = [info for info in devices() if info.label == sys.argv[1]]
    if found and sums_are_right(get_device(found[0].index)):
        print(_WELL)


if __name__ == "__main__":
    main()
