"""Grounds for tests of shared memory: CUDA where it is, and elsewhere host memory in its place, cut and visited by the
same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from memtrain_cl import bridge
from memtrain_cl.bridge import Crossing
from memtrain_cl.device import Device
from memtrain_cl.dlpack import Held
from memtrain_cl.errors import OutOfMemory
from memtrain_cl.runtimes import import_pyopencl
from memtrain_cl.sharing import cuda, external, rehome
from memtrain_cl.sharing.home import CudaHome
from memtrain_cl.sharing.pool import Block, Pool

SOURCE = """
__kernel void fill(__global int *x, int value) { x[get_global_id(0)] = value; }
__kernel void add_one(__global int *x) { x[get_global_id(0)] += 1; }
__kernel void copy(__global const int *x, __global int *y) { y[get_global_id(0)] = x[get_global_id(0)]; }
"""

GRANULE = 1 << 16


class HostSegment:
    """A segment in host memory."""

    def __init__(self, device: Device | None, nbytes: int) -> None:
        self._bytes = np.zeros(nbytes + 4096, np.uint8)
        start = -self._bytes.ctypes.data % 4096
        self._part = self._bytes[start : start + nbytes]
        self.nbytes = nbytes
        self.address = self._part.ctypes.data
        self.freed = 0
        self.buffer: Any = None
        if device is not None:
            cl = import_pyopencl()
            flags = cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR
            self.buffer = cl.Buffer(device.context, flags, hostbuf=self._part)

    def tensor(self, block: Block) -> torch.Tensor:
        held = Held(block.address, (block.nbytes,), np.dtype(np.uint8), False, (block, self))
        return torch.from_numpy(np.asarray(held))

    def free(self) -> None:
        self.freed += 1


class HostMemory:
    """A pool of host segments, with what happened to it."""

    def __init__(self, device: Device | None = None, limit: int = 1 << 30) -> None:
        self.segments: list[HostSegment] = []
        self.settled = 0
        self.limit = limit
        self._device = device
        self.pool = Pool(self._make, granule=GRANULE, step=512, settle=self._settle, place=torch.device("cpu"))

    def _make(self, nbytes: int) -> HostSegment:
        if sum(it.nbytes for it in self.segments if not it.freed) + nbytes > self.limit:
            raise OutOfMemory("full")
        self.segments.append(HostSegment(self._device, nbytes))
        return self.segments[-1]

    def _settle(self) -> None:
        self.settled += 1


class Ground:
    """Where a test's tensors live, and kernels on them."""

    def __init__(self, device: Device, place: torch.device, pool: Pool | None) -> None:
        self.device = device
        self.place = place
        self.pool = pool
        program = import_pyopencl().Program(device.context, SOURCE).build()
        self._kernels = {name: import_pyopencl().Kernel(program, name) for name in ("fill", "add_one", "copy")}

    def _launch(self, name: str, count: int, *arguments: Any) -> None:
        kernel = self._kernels[name]
        kernel.set_args(*(getattr(it, "buffer", it) for it in arguments))
        import_pyopencl().enqueue_nd_range_kernel(self.device.queue, kernel, (count,), None)

    def fill(self, tensor: torch.Tensor, value: int) -> None:
        with Crossing(self.device, tensor) as cross:
            self._launch("fill", tensor.numel(), cross.update(tensor), np.int32(value))

    def add_one(self, tensor: torch.Tensor) -> None:
        with Crossing(self.device, tensor) as cross:
            self._launch("add_one", tensor.numel(), cross.update(tensor))

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        with Crossing(self.device, tensor) as cross:
            result, target = cross.output(tensor.shape, tensor.dtype)
            self._launch("copy", tensor.numel(), cross.read(tensor), target)
        return result

    def is_shared(self, tensor: torch.Tensor) -> bool:
        """Whether kernels work on the tensor's own memory."""
        return self.pool is None or self.pool.find(tensor) is not None


class NoStream:
    def synchronize(self) -> None: ...


def stand_in(device: Device, patch: pytest.MonkeyPatch) -> Ground:
    """Host tensors in the place of CUDA's: what crosses goes through `CudaHome`, and `share` moves it."""
    if not device.info.unified_memory:
        pytest.skip("this device has memory of its own")
    memory = HostMemory(device)
    held: set[int] = set()

    def hand_over(_device: Device, buffers: Sequence[Any], *, back: bool) -> None:
        cl = import_pyopencl()
        for buffer in buffers:
            assert (buffer.int_ptr in held) == back, "memory is acquired once, and then released once"
            (held.discard if back else held.add)(buffer.int_ptr)
            flags = cl.map_flags.READ if back else cl.map_flags.READ | cl.map_flags.WRITE
            mapped, _ = cl.enqueue_map_buffer(device.queue, buffer, flags, 0, (buffer.size,), np.uint8)
            mapped.base.release(device.queue)

    patch.setattr(external, "acquire", lambda device, buffers: hand_over(device, buffers, back=False))
    patch.setattr(external, "release", lambda device, buffers: hand_over(device, buffers, back=True))
    patch.setattr(bridge, "home_of", lambda device, tensor: CudaHome(device, memory.pool, NoStream()))
    patch.setattr(rehome, "shared_pool", lambda place: memory.pool)
    patch.setattr(rehome, "_moves", lambda tensor: memory.pool.find(tensor) is None)
    return Ground(device, torch.device("cpu"), memory.pool)


def real(device: Device) -> Ground:
    """CUDA, where this device is its partner."""
    place = torch.device("cuda", 0)
    if cuda.partner(place) is not device:
        pytest.skip("this device is not CUDA's partner")
    if torch._C._get_privateuse1_backend_name() == "opencl":
        # torch takes a registered device for the machine's accelerator, and a backward on CUDA ends in an assertion.
        pytest.skip("the device opencl is registered here: run tests/test_cuda_sharing.py in a process of its own")
    return Ground(device, place, cuda.shared_pool(place))
