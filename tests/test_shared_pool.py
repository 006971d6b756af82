"""Shared memory cut into tensors, and CUDA's memory made and freed in order: on host memory and a recorded driver."""

from __future__ import annotations

import contextlib
import gc
import importlib
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memtrain_cl.device import Device
from memtrain_cl.errors import MemtrainError, OutOfMemory, UnsupportedDevice
from memtrain_cl.sharing import cuda, external, segment
from memtrain_cl.sharing.segment import CudaSegment
from tests.sharing_cases import GRANULE, HostMemory

# ---- the pool -------------------------------------------------------------------------------------------------------


def test_small_tensors_share_a_segment() -> None:
    memory = HostMemory()
    tensors = [memory.pool.empty((size,), torch.uint8).fill_(size) for size in range(1, 100)]
    assert len(memory.segments) == 1
    assert memory.pool.statistics().allocated == 99 * 512
    assert all(bool((tensor == size).all()) for size, tensor in enumerate(tensors, start=1))
    assert all(tensor.data_ptr() % 512 == 0 for tensor in tensors)


@pytest.mark.parametrize("size", [GRANULE - 1, GRANULE, GRANULE + 1, 5 * GRANULE - 512])
def test_segments_are_whole_granules(size: int) -> None:
    memory = HostMemory()
    tensor = memory.pool.empty((size,), torch.uint8)
    assert memory.segments[0].nbytes == -(-size // GRANULE) * GRANULE
    assert tensor.untyped_storage().nbytes() == size


def test_any_order_of_making_and_dropping_ends_whole() -> None:
    memory, chance = HostMemory(), random.Random(1)
    living: dict[int, torch.Tensor] = {}
    for turn in range(2000):
        if living and chance.random() < 0.5:
            key = chance.choice(list(living))
            assert bool((living.pop(key) == key % 251).all())
        living[turn] = memory.pool.empty((chance.choice([1, 500, 513, 3000, 20000, 90000]),), torch.uint8)
        living[turn].fill_(turn % 251)
        if len(living) > 40:
            del living[chance.choice(list(living))]
    assert all(bool((tensor == key % 251).all()) for key, tensor in living.items())
    living.clear()
    gc.collect()
    memory.pool.release()
    assert memory.pool.statistics() == HostMemory().pool.statistics()
    assert {it.freed for it in memory.segments} == {1}, "each is freed once"


def test_what_comes_back_is_used_again_only_after_a_wait() -> None:
    memory = HostMemory()
    first = memory.pool.empty((GRANULE,), torch.uint8)
    where = first.data_ptr()
    assert memory.settled == 0
    del first
    second = memory.pool.empty((GRANULE,), torch.uint8)
    assert second.data_ptr() == where
    assert memory.settled == 1


def test_a_block_lives_as_long_as_the_storage() -> None:
    memory = HostMemory()
    tensor = memory.pool.empty((4, 8), torch.float32)
    view = tensor[1:, ::2]
    found = memory.pool.find(view)
    assert found == (memory.segments[0], 32)
    del tensor
    assert memory.pool.find(view) == found
    assert memory.pool.find(torch.zeros(3)) is None
    assert memory.pool.find(torch.zeros(0)) is None


def test_room_is_made_before_an_error() -> None:
    memory = HostMemory(limit=2 * GRANULE)
    small = memory.pool.empty((GRANULE,), torch.uint8)
    other = memory.pool.empty((GRANULE,), torch.uint8)
    with pytest.raises(OutOfMemory):
        memory.pool.empty((2 * GRANULE,), torch.uint8)
    del small, other
    assert memory.pool.empty((2 * GRANULE,), torch.uint8).numel() == 2 * GRANULE
    assert memory.pool.statistics().segments == 1


def test_threads_get_memory_of_their_own() -> None:
    memory = HostMemory()
    wrong = []

    def work(value: int) -> None:
        for size in range(1, 300):
            tensor = memory.pool.empty((size,), torch.uint8).fill_(value)
            if not bool((tensor == value).all()):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- a segment of CUDA's memory -------------------------------------------------------------------------------------

MADE = ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemExportToShareableHandle", "import"]
FREED = ["release buffer", "cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], dict[str, str]]:
    """(the names of the driver's functions as they are called, faults: the status that a function ends with)."""
    seen: list[str] = []
    faults: dict[str, str] = {}

    def function(name: str, *results: int) -> Any:
        def called(*_: Any) -> tuple[Any, ...]:
            seen.append(name)
            return (SimpleNamespace(name=faults.get(name, "CUDA_SUCCESS")), *results)

        called.__name__ = name
        return called

    class Anything:
        def __getattr__(self, name: str) -> Any:
            return SimpleNamespace()

    functions = {name: function(name) for name in ("cuMemMap", "cuMemSetAccess", *FREED[1:])}
    functions |= {
        "cuMemCreate": function("cuMemCreate", 7),
        "cuMemAddressReserve": function("cuMemAddressReserve", 4096),
    }
    functions["cuMemExportToShareableHandle"] = function("cuMemExportToShareableHandle", 3)
    kinds = ("CUmemAllocationType", "CUmemLocationType", "CUmemAllocationHandleType", "CUmemAccess_flags")
    structs = {
        name: lambda: SimpleNamespace(location=SimpleNamespace()) for name in ("CUmemAllocationProp", "CUmemAccessDesc")
    }
    fake = SimpleNamespace(**functions, **structs, **{name: Anything() for name in kinds})

    def import_fd(device: Any, fd: int, nbytes: int) -> Any:
        seen.append("import")
        if "import" in faults:
            raise MemtrainError(faults["import"])
        return SimpleNamespace(release=lambda: seen.append("release buffer"))

    monkeypatch.setattr(segment, "driver", lambda: fake)
    monkeypatch.setattr(segment, "import_fd", import_fd)
    monkeypatch.setattr(torch.cuda, "device", lambda place: contextlib.nullcontext())
    return seen, faults


def make() -> CudaSegment:
    return CudaSegment(None, torch.device("cuda", 0), 1 << 21)  # type: ignore[arg-type]


def test_a_segment_is_freed_in_order_and_once(steps: tuple[list[str], dict[str, str]]) -> None:
    seen, _ = steps
    piece = make()
    assert seen == MADE
    assert piece.address == 4096
    piece.free()
    piece.free()
    assert seen[len(MADE) :] == FREED


@pytest.mark.parametrize("step", range(len(MADE)))
def test_a_step_that_fails_undoes_the_steps_before(steps: tuple[list[str], dict[str, str]], step: int) -> None:
    seen, faults = steps
    faults[MADE[step]] = "CUDA_ERROR_OUT_OF_MEMORY" if step == 0 else "CUDA_ERROR_UNKNOWN"
    with pytest.raises(OutOfMemory if step == 0 else MemtrainError, match=faults[MADE[step]]):
        make()
    assert seen[: step + 1] == MADE[: step + 1]
    assert seen[step + 1 :] == {0: [], 1: FREED[3:], 2: FREED[2:]}.get(step, FREED[1:])


def test_without_the_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError("No module named 'cuda'")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UnsupportedDevice, match="pip install cuda-bindings"):
        segment.driver()


# ---- which device ---------------------------------------------------------------------------------------------------


def handle(**attributes: Any) -> Any:
    return SimpleNamespace(**{"extensions": "", "type": 4, **attributes})


def test_devices_are_told_by_uuid_and_else_by_pci_address(monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia = "cl_nv_device_attribute_query"
    slot = 3 << 3
    plain = handle(extensions=nvidia, pci_domain_id_nv=0, pci_bus_id_nv=9, pci_slot_id_nv=slot)
    known = {"a": b"a" * 16, "b": b"b" * 16}
    monkeypatch.setattr(external, "device_uuid", lambda handle: known.get(getattr(handle, "uuid", "")))
    assert cuda._same(handle(uuid="a"), b"a" * 16, (0, 9, 3))
    assert not cuda._same(handle(uuid="b", extensions=nvidia), b"a" * 16, (0, 9, 3))
    assert cuda._same(plain, b"a" * 16, (0, 9, 3))
    assert not cuda._same(plain, b"a" * 16, (0, 8, 3))
    assert not cuda._same(handle(), b"a" * 16, (0, 9, 3))


@pytest.mark.device
def test_a_uuid_is_read_where_the_driver_gives_one(device: Device) -> None:
    uuid = external.device_uuid(device.handle)
    assert (uuid is not None) == ("cl_khr_device_uuid" in device.handle.extensions.split())
    assert uuid is None or (len(uuid) == 16 and any(uuid))
