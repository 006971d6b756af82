"""Whether a device's compiler takes inline assembly that multiplies bytes: x86's dot products, NVIDIA's tensor cores.

x86 (kernels/_int8_vnni.cl): the processor must have the instruction (AVX-512 VNNI), the device be that processor, and
its compiler put the instruction where the kernel wants it. Compilers of OpenCL differ in this, and some end the
process: so a child process multiplies once before anybody relies on it. Tensor cores (kernels/_core_mma.cl and
_core_wgmma.cl): a GPU and a driver that take the PTX and grant more local memory than they list; it multiplies once in
this process, since a refusal is an ordinary error. Where the right numbers do not come back, the portable way stays.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from memtrain_cl.array import empty, from_numpy
from memtrain_cl.device import Device, DeviceInfo, TensorCores, compute_capability, devices, get_device
from memtrain_cl.errors import MemtrainError
from memtrain_cl.program import get_kernel
from memtrain_cl.runtimes import import_pyopencl
from memtrain_cl.tuning_cores import CHUNK
from memtrain_cl.tuning_int8 import int8_shape

logger = logging.getLogger("memtrain_cl")

#: Sizes of the trials (M, N, K, lead): an odd number of tiles, panels and blocks of K, none of them whole.
_SIZES = (13, 75, 2077, 2077)
_SIZES_OF_CORES = (390, 515, 2077, 2080)
#: What the child says; and how long it may take, in seconds.
_WELL, _PATIENCE = "the sums are right", 120

#: The only compute capability, times ten, with products of the kind "wgmma".
_WGMMA = 90

_lock = threading.Lock()
_verdicts: dict[tuple[str, ...], Any] = {}


def note_inline_assembly(device: Device) -> None:
    """Find out once a process, and keep it in the device's `info`."""
    if device.info.inline_vnni is not None and device.info.tensor_cores is not None:
        return
    with _lock:
        vnni = _verdict(device, "vnni", lambda: _possible(device) and _child_succeeds(device))
        cores = _verdict(device, "tensor cores", lambda: _tensor_cores(device))
    info = device.info
    device.info = replace(
        info,
        inline_vnni=vnni if info.inline_vnni is None else info.inline_vnni,
        tensor_cores=cores if info.tensor_cores is None else info.tensor_cores,
    )


def _verdict(device: Device, what: str, find: Callable[[], Any]) -> Any:
    info = device.info
    key = (what, info.type, str(info.short_loops), str(info.inline_ptx), *device.cache_key)
    if key not in _verdicts:
        _verdicts[key] = find()
    return _verdicts[key]


def _tensor_cores(device: Device) -> TensorCores:
    if not (device.info.inline_ptx and device.info.type == "gpu" and _trial_succeeds(device, "narrow")):
        return ""
    if not _trial_succeeds(device, "mma"):
        return "narrow"
    return "wgmma" if compute_capability(device.handle) == _WGMMA and _trial_succeeds(device, "wgmma") else "mma"


def _trial_succeeds(device: Device, kind: TensorCores) -> bool:
    # Of one compute unit, so that the blocks are large.
    info = replace(device.info, inline_vnni=False, tensor_cores=kind, compute_units=1)
    try:
        if sums_are_right(device, info, *_SIZES_OF_CORES):
            return True
        fault = "its sums were wrong"
    except (MemtrainError, import_pyopencl().Error) as error:  # the latter where the sums are read
        fault = str(error)
    logger.warning("%s multiplies without its tensor cores' way %r: %s", device.info.name, kind, fault)
    return False


def _possible(device: Device) -> bool:
    """Whether it is worth a child: a processor with the instruction, as itself, whose loops are long."""
    cl = import_pyopencl()
    if device.info.type != "cpu" or device.info.short_loops or device.handle.type != cl.device_type.CPU:
        return False
    description = Path("/proc/cpuinfo")
    return description.is_file() and "avx512_vnni" in description.read_text().split()


def _child_succeeds(device: Device) -> bool:
    command = [sys.executable, "-m", "memtrain_cl.inline_assembly", device.info.label]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and _WELL in done.stdout


def sums_are_right(device: Device, info: DeviceInfo, M: int, N: int, K: int, lead: int) -> bool:
    """One product as a device of this `info` forms it, [M, K] by [N, K] with rows `lead` apart, against NumPy's."""
    rng = np.random.default_rng(7)
    a, b = (rng.integers(-127, 128, (rows, lead), dtype=np.int8) for rows in (M, N))
    shape = int8_shape(info, M, N, K, ternary=False, chunks=lead % CHUNK == 0)
    kernel = get_kernel(device, "matmul_int8", "matmul_int8", NAME="matmul_int8", **shape.constants)
    out = empty(device, (M, N), np.int32)
    neither = (np.uint32(0), out, np.uint32(0))  # scales, nor a gate
    own = shape.arguments(words=lead % 4 == 0, pairs=N % 2 == 0)
    sizes = (np.uint32(value) for value in (M, N, K, lead, lead, *own))
    operands = (from_numpy(device, a), from_numpy(device, b), out, out, out)
    kernel(shape.global_size, shape.local_size, *operands, *neither, *(np.uint64(0),) * 3, *sizes)
    return bool(np.array_equal(out.numpy(), a[:, :K].astype(np.int32) @ b[:, :K].astype(np.int32).T))


def main() -> None:
    """The child: the device of the label given as argument multiplies."""
    found = [info for info in devices() if info.label == sys.argv[1]]
    if found:
        device = get_device(found[0].index)
        if sums_are_right(device, replace(device.info, inline_vnni=True), *_SIZES):
            print(_WELL)


if __name__ == "__main__":
    main()
