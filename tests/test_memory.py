"""The caching allocator: what it counts, reuses, gives back and refuses, and that the host's memory stays flat."""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memtrain_cl
from memtrain_cl.device import Device
from memtrain_cl.errors import OutOfMemory
from memtrain_cl.memory import Pool, allocate, pool_of
from memtrain_cl.torch_device.tensor import torch_device
from tests.torch_cases import on

MIB = 1 << 20


@pytest.fixture
def pool(device: Device) -> Iterator[Pool]:
    """The device's allocator, with nothing kept for reuse and peaks from here on; the limit is put back."""
    gc.collect()
    found = pool_of(device)
    found.release()
    found.reset_peak()
    limit = found.limit
    yield found
    found.limit = limit


def test_bytes_are_counted(device: Device, pool: Pool) -> None:
    before = pool.statistics()
    one, two = allocate(device, 3 * MIB), allocate(device, MIB)
    held = pool.statistics()
    assert held.allocated - before.allocated >= 4 * MIB
    assert held.blocks == before.blocks + 2
    assert held.requests == before.requests + 2
    assert held.peak_allocated == held.allocated
    assert held.reserved >= held.allocated
    del one
    left = pool.statistics()
    assert left.blocks == before.blocks + 1
    assert left.allocated < held.allocated
    assert left.peak_allocated == held.allocated
    assert left.reserved == held.reserved, "what was freed is kept for the next tensor"
    pool.reset_peak()
    assert pool.statistics().peak_allocated == left.allocated
    assert two.nbytes == MIB


def test_freed_memory_is_reused(device: Device, pool: Pool) -> None:
    first = allocate(device, 5 * MIB)
    handle = first.buffer.int_ptr
    reserved = pool.statistics().reserved
    del first
    again = allocate(device, 5 * MIB)
    assert again.buffer.int_ptr == handle
    assert pool.statistics().reserved == reserved
    del again
    pool.release()
    assert pool.statistics().reserved < reserved


def test_nothing_takes_no_buffer(device: Device, pool: Pool) -> None:
    before = pool.statistics()
    assert allocate(device, 0).buffer is None
    assert pool.statistics() == before


def test_views_keep_their_bytes(device: Device, pool: Pool) -> None:
    before = pool.statistics().allocated
    x = torch.zeros(1024, 1024, device=torch_device(device))
    row = x[5]
    del x
    assert pool.statistics().allocated - before >= 4 * MIB
    del row
    assert pool.statistics().allocated == before


def test_a_limit_is_kept(device: Device, pool: Pool) -> None:
    held = pool.statistics()
    pool.set_limit(held.reserved + 8 * MIB)
    kept = allocate(device, 4 * MIB)
    with pytest.raises(OutOfMemory) as refusal:
        allocate(device, 5 * MIB)
    message = str(refusal.value)
    assert f"{5 * MIB} bytes were asked for" in message
    assert f"{pool.statistics().allocated} are held by tensors" in message
    assert f"the limit is {held.reserved + 8 * MIB} in all" in message
    assert device.info.name in message
    # What is kept for reuse gives way.
    del kept
    assert allocate(device, 7 * MIB).nbytes == 7 * MIB
    for wrong in (0, -1, 2.5):
        with pytest.raises(ValueError, match="positive number of bytes"):
            pool.set_limit(wrong)  # type: ignore[arg-type]


def test_one_tensor_larger_than_the_device_allows(device: Device, pool: Pool) -> None:
    most = device.info.max_alloc_bytes
    with pytest.raises(OutOfMemory, match=f"{most + 1} bytes were asked for.* {min(pool.limit, most)} in one tensor"):
        allocate(device, most + 1)
    with pytest.raises(torch.OutOfMemoryError, match="were asked for"):
        torch.empty(most // 4 + 1, device=torch_device(device))
    assert torch.zeros(3, device=torch_device(device)).tolist() == [0, 0, 0], "goes on after a refusal"


def test_torch_s_names_of_the_numbers(device: Device, pool: Pool) -> None:
    opencl: Any = torch.opencl  # type: ignore[attr-defined]
    index = device.info.index
    before = opencl.memory_allocated(index)
    x = torch.empty(MIB, device=torch_device(device))
    assert opencl.memory_allocated(index) - before >= 4 * MIB
    assert opencl.max_memory_allocated(index) >= opencl.memory_allocated(index)
    assert opencl.max_memory_reserved(index) >= opencl.memory_reserved(index) >= opencl.memory_allocated(index)
    assert opencl.memory_stats(index)["blocks"] >= 1
    assert f"memory of opencl:{index} ({device.info.name})" in opencl.memory_summary(index)
    del x
    opencl.reset_peak_memory_stats(index)
    assert opencl.max_memory_allocated(index) == before
    opencl.empty_cache()
    assert opencl.memory_reserved(index) <= opencl.memory_allocated(index) + MIB
    opencl.set_memory_limit(opencl.memory_reserved(index) + MIB, index)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(MIB, device=torch_device(device))
    assert memtrain_cl.memory_allocated(index) == opencl.memory_allocated(index)


def test_the_host_stays_flat(device: Device, pool: Pool) -> None:
    x = on(device, torch.randn(64, 64))

    def work() -> None:
        for _ in range(300):
            y = (x * 2 + 1).relu()
            y[::2].add_(1)
            y.t().contiguous().cpu()

    work()
    gc.collect()
    device.synchronize()
    blocks, reserved = pool.statistics().blocks, pool.statistics().reserved
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work()
    assert pool.statistics().blocks == blocks
    assert pool.statistics().reserved == reserved
    # 300 rounds of five tensors of 16 KiB would be 24 MB; kilobytes here.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 8 << 10
