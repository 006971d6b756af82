"""DeviceArray's DLPack protocol: who gets which memory, who is refused, and that every capsule is freed once."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.utils.dlpack

from memtrain_cl import dlpack
from memtrain_cl.array import DeviceArray, empty, from_dlpack, from_numpy, wrap_host
from memtrain_cl.device import Device
from memtrain_cl.runtimes import import_pyopencl

pytestmark = pytest.mark.device

VALUES = np.arange(24, dtype=np.float32).reshape(4, 6)
_capsule_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


@pytest.fixture
def shared(device: Device) -> Device:
    if not device.info.unified_memory:
        pytest.skip("this device has memory of its own")
    return device


@pytest.fixture(params=["host", "opencl"])
def place(request: pytest.FixtureRequest, device: Device) -> tuple[int, int]:
    """Both places that a consumer may ask an array of the device for, where it may."""
    if request.param == "opencl":
        return (4, device.info.index)
    request.getfixturevalue("shared")
    return (1, 0)


class Exporter:
    """A foreign object that hands out what it was given."""

    def __init__(self, place: tuple[int, int], make: Any) -> None:
        self.place = place
        self.make = make

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place

    def __dlpack__(self, **options: Any) -> Any:
        return self.make(**options)


class ForeignProducer:
    """A kDLOpenCL producer as another library would write it, with a deleter that counts."""

    #: A capsule's memory and deleter must outlive whoever imports it.
    alive: ClassVar[list[ForeignProducer]] = []

    def __init__(self, handle: int, shape: tuple[int, ...], **changes: Any) -> None:
        self.deleted = 0
        self.managed = dlpack._ManagedVersioned(major=1, minor=0)
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        tensor = self.managed.tensor
        tensor.data, tensor.device, tensor.ndim = handle, dlpack._Device(4, 0), len(shape)
        tensor.dtype, tensor.shape = dlpack._Type(2, 32, 1), self.shape
        for name, value in changes.items():
            setattr(self.managed if hasattr(self.managed, name) else tensor, name, value)
        self.managed.deleter = dlpack._Deleter(self._delete)
        self.device = (4, 0)
        self.alive.append(self)

    def _delete(self, _address: int) -> None:
        self.deleted += 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **_options: Any) -> Any:
        return _capsule_new(ctypes.addressof(self.managed), dlpack._VERSIONED, None)


def strides(*values: int) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def write(array: DeviceArray, value: float) -> None:
    """Fill through the queue, as a kernel would."""
    cl = import_pyopencl()
    cl.enqueue_fill_buffer(array.device.queue, array.buffer, np.float32(value), 0, array.nbytes)


def resident_bytes() -> int:
    with open("/proc/self/statm") as status:
        return int(status.read().split()[1]) * 4096


# ---- from the device to others --------------------------------------------------------------------------------------


@pytest.mark.parametrize("take", [torch.utils.dlpack.from_dlpack, np.from_dlpack])
def test_plain_consumers_see_the_same_memory(shared: Device, take: Any) -> None:
    values = VALUES.copy()
    array = wrap_host(shared, values)
    taken = take(array)
    assert np.shares_memory(np.asarray(taken), values)
    assert np.asarray(taken).ctypes.data == values.ctypes.data
    taken[1, 2] = -5.0
    assert values[1, 2] == -5.0
    del taken
    assert np.array_equal(array.numpy(), values)


def test_kernel_results_reach_the_consumer(device: Device) -> None:
    array = from_numpy(device, VALUES)
    write(array, 3.0)
    assert torch.equal(array.to_torch(), torch.full((4, 6), 3.0))


def test_device_of_shared_and_own_memory(shared: Device, discrete: Device) -> None:
    assert empty(shared, (2,), np.float32).__dlpack_device__() == (1, 0)
    assert empty(shared, (0,), np.float32).__dlpack_device__() == (1, 0)
    assert empty(discrete, (2,), np.float32).__dlpack_device__() == (4, shared.info.index)


@pytest.mark.parametrize(
    ("max_version", "name"),
    [(None, "dltensor"), ((0, 8), "dltensor"), ((1, 0), "dltensor_versioned"), ((7, 1), "dltensor_versioned")],
)
def test_version_follows_the_consumer(device: Device, place: tuple[int, int], max_version: Any, name: str) -> None:
    array = from_numpy(device, VALUES)
    assert f'"{name}"' in repr(array.__dlpack__(max_version=max_version, dl_device=place))


def test_read_only_travels_in_the_versioned_form_alone(shared: Device) -> None:
    values = VALUES.copy()
    values.flags.writeable = False
    array = wrap_host(shared, values)
    assert array.readonly
    assert not np.from_dlpack(array).flags.writeable
    for place in [(1, 0), (4, shared.info.index)]:
        with pytest.raises(BufferError, match="readonly"):
            array.__dlpack__(dl_device=place)
        assert from_dlpack(Exporter(place, array.__dlpack__)).readonly
    with pytest.raises(BufferError, match="read-only"):
        array.map_host(write=True)
    tensor = array.to_torch()
    tensor[0, 0] = 9.0
    assert values[0, 0] == 0.0


def test_copy_is_honoured(shared: Device) -> None:
    values = VALUES.copy()
    array = wrap_host(shared, values)
    copied, same = np.from_dlpack(array, copy=True), np.from_dlpack(array, copy=False)
    assert not np.shares_memory(copied, values)
    assert np.shares_memory(same, values)
    del same
    opencl = from_dlpack(Exporter((4, shared.info.index), array.__dlpack__), copy=True)
    write(opencl, 1.0)
    assert np.array_equal(array.numpy(), VALUES)


@pytest.mark.parametrize("kind", [1, 4])
def test_a_copy_says_so(device: Device, kind: int) -> None:
    array = from_numpy(device, VALUES)
    place = (1, 0) if kind == 1 else (4, device.info.index)
    capsule = array.__dlpack__(max_version=(1, 0), dl_device=place, copy=True)
    assert dlpack._structure(capsule)[1].flags == 2


@pytest.mark.parametrize(
    "request_", [{"stream": 0}, {"stream": 1}, {"dl_device": (2, 0)}, {"dl_device": (4, 99)}, {"dl_device": (1, 1)}]
)
def test_impossible_requests_are_buffer_errors(device: Device, request_: dict[str, Any]) -> None:
    with pytest.raises(BufferError, match="expected"):
        from_numpy(device, VALUES).__dlpack__(**request_)


def test_host_consumers_of_a_discrete_device_are_sent_to_to_torch(discrete: Device) -> None:
    array = from_numpy(discrete, VALUES)
    for take in (
        lambda: torch.utils.dlpack.from_dlpack(array),
        lambda: torch.utils.dlpack.from_dlpack(array, device="cpu"),
        lambda: np.from_dlpack(array, device="cpu"),
        lambda: array.__dlpack__(dl_device=(1, 0), copy=False),
    ):
        with pytest.raises(BufferError, match=r"\.to_torch\(\)"):
            take()
    copied = np.from_dlpack(array, device="cpu", copy=True)
    assert np.array_equal(copied, VALUES)
    assert np.array_equal(array.to_torch().numpy(), VALUES)


def test_opencl_capsule_holds_the_handle(device: Device) -> None:
    array = from_numpy(device, VALUES)
    capsule = array.__dlpack__(dl_device=(4, device.info.index))
    tensor = dlpack._structure(capsule)[1].tensor
    assert (tensor.device.kind, tensor.device.index) == (4, device.info.index)
    assert tensor.data == array.buffer.int_ptr
    assert (tuple(tensor.shape[:2]), tensor.byte_offset) == ((4, 6), 0)
    assert (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) == (2, 32, 1)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), ()])
def test_empty_and_scalar_arrays(device: Device, place: tuple[int, int], shape: tuple[int, ...]) -> None:
    array = from_numpy(device, np.ones(shape, np.int16))
    back = from_dlpack(Exporter(place, lambda **options: array.__dlpack__(**{**options, "dl_device": place})))
    assert (back.shape, back.dtype) == (shape, np.dtype(np.int16))
    assert np.array_equal(back.numpy(), np.ones(shape, np.int16))
    assert tuple(array.to_torch().shape) == shape


# ---- lifetime -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("take", [torch.utils.dlpack.from_dlpack, np.from_dlpack, DeviceArray.to_torch])
def test_producer_may_go_first(shared: Device, take: Any) -> None:
    values = VALUES.copy()
    memory = weakref.ref(values)
    taken = take(wrap_host(shared, values))
    del values
    gc.collect()
    assert memory() is not None
    assert np.array_equal(np.asarray(taken), VALUES)
    del taken
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_a_capsule_that_nobody_consumes_frees_its_memory(
    device: Device, place: tuple[int, int], max_version: Any
) -> None:
    array = from_numpy(device, VALUES)
    alive = weakref.ref(array)
    capsule = array.__dlpack__(max_version=max_version, dl_device=place)
    del array
    gc.collect()
    assert alive() is not None
    del capsule
    gc.collect()
    assert alive() is None


def test_a_consumer_that_refuses_frees_the_capsule(discrete: Device) -> None:
    array = from_numpy(discrete, VALUES)
    alive = weakref.ref(array)
    with pytest.raises((BufferError, RuntimeError), match="device"):
        np.from_dlpack(array)
    del array
    gc.collect()
    assert alive() is None


def test_deleter_runs_once_when_the_last_user_is_gone(device: Device) -> None:
    array = from_numpy(device, VALUES)
    producer = ForeignProducer(array.buffer.int_ptr, (4, 6))
    imported = from_dlpack(producer)
    assert imported.buffer.int_ptr == array.buffer.int_ptr
    rows = imported.rows(2)
    del imported
    gc.collect()
    assert producer.deleted == 0
    assert np.array_equal(rows.numpy(), VALUES[:2])
    thread = threading.Thread(target=rows.__dict__.clear)
    del array
    thread.start()
    thread.join()
    gc.collect()
    assert producer.deleted == 1


def test_a_capsule_is_consumed_once(device: Device) -> None:
    capsule = from_numpy(device, VALUES).__dlpack__(dl_device=(4, device.info.index))
    exporter = Exporter((4, device.info.index), lambda **_: capsule)
    first = from_dlpack(exporter)
    with pytest.raises(BufferError, match="unconsumed"):
        from_dlpack(exporter)
    assert np.array_equal(first.numpy(), VALUES)


def test_a_loop_of_exchanges_leaks_nothing(device: Device) -> None:
    values = np.zeros(1 << 18, np.float32)
    index = device.info.index

    def exchange() -> None:
        array = from_numpy(device, values)
        np.from_dlpack(array, device="cpu", copy=None if array.shares_host else True)
        array.__dlpack__(max_version=(1, 0), dl_device=(4, index))
        from_dlpack(Exporter((4, index), lambda **_: array.__dlpack__(dl_device=(4, index))))
        from_dlpack(values)

    for _ in range(20):
        exchange()
    before = resident_bytes()
    for _ in range(200):
        exchange()
    gc.collect()
    assert resident_bytes() - before < 32 << 20  # one leaked array a round would be 200 MiB


# ---- from others to the device --------------------------------------------------------------------------------------


def test_host_memory_is_shared(shared: Device) -> None:
    tensor = torch.from_numpy(VALUES.copy())
    array = from_dlpack(tensor)
    assert array.to_torch().data_ptr() == tensor.data_ptr()
    write(array, 7.0)
    array.map_host()
    assert torch.equal(tensor, torch.full((4, 6), 7.0))


def test_host_memory_is_copied_to_a_discrete_device(discrete: Device) -> None:
    tensor = torch.from_numpy(VALUES.copy())
    array = from_dlpack(tensor, discrete)
    write(array, 7.0)
    discrete.synchronize()
    assert np.array_equal(tensor.numpy(), VALUES)
    with pytest.raises(BufferError, match="copy=False"):
        from_dlpack(tensor, discrete, copy=False)


def test_read_only_host_memory_stays_read_only(shared: Device) -> None:
    values = VALUES.copy()
    values.flags.writeable = False
    assert from_dlpack(values).readonly
    # A producer from before version 1 cannot say that its memory may be written.
    legacy = Exporter((1, 0), lambda **_: VALUES.copy().__dlpack__())
    assert from_dlpack(legacy).readonly
    assert not from_dlpack(VALUES.copy()).readonly


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[::2],
        lambda x: x.t(),
        lambda x: x[:, 1:5],
        lambda x: x[:1].expand(4, 6),
        lambda x: x.reshape(2, 2, 6)[:, ::2, :],
    ],
)
def test_strided_views_are_refused_or_copied(device: Device, view: Any) -> None:
    strided = view(torch.from_numpy(VALUES.copy()))
    with pytest.raises(BufferError, match="strides"):
        from_dlpack(strided, device)
    assert np.array_equal(from_dlpack(strided, device, copy=True).numpy(), strided.contiguous().numpy())


@pytest.mark.parametrize("start", [1, 2, 3, 8])
def test_offset_views_are_honoured(device: Device, start: int) -> None:
    tensor = torch.from_numpy(VALUES.copy()).flatten()
    array = from_dlpack(tensor[start:], device)
    assert np.array_equal(array.numpy(), VALUES.flatten()[start:])
    if array.shares_host:
        assert (tensor.data_ptr() + 4 * start) % array.alignment == 0
        assert array.alignment == min(128, (tensor.data_ptr() + 4 * start) & -(tensor.data_ptr() + 4 * start))


def test_tensors_that_do_not_cross(device: Device) -> None:
    with pytest.raises(BufferError, match="grad"):
        from_dlpack(torch.ones(3, requires_grad=True), device)
    with pytest.raises(BufferError, match="device type 2"):
        from_dlpack(Exporter((2, 0), None), device)
    with pytest.raises(AttributeError):
        from_dlpack([1.0, 2.0], device)


def test_our_context_comes_back_as_the_same_buffer(device: Device) -> None:
    array = from_numpy(device, VALUES)
    for back in (from_dlpack(array), from_dlpack(ForeignProducer(array.buffer.int_ptr, (4, 6)), device)):
        assert back.buffer.int_ptr == array.buffer.int_ptr
        assert back.shares_host == array.shares_host
    assert from_dlpack(array, copy=True).buffer.int_ptr != array.buffer.int_ptr


def test_unaligned_memory_is_known_as_such_after_a_round_trip(shared: Device) -> None:
    odd = np.zeros(65, np.float32)[1:]
    array = wrap_host(shared, odd)
    back = from_dlpack(Exporter((4, 0), lambda **_: array.__dlpack__(dl_device=(4, shared.info.index))))
    assert back.alignment == array.alignment


def test_another_context_is_refused(device: Device) -> None:
    cl = import_pyopencl()
    other = cl.Context([device.handle])
    buffer = cl.Buffer(other, cl.mem_flags.READ_WRITE, 96)
    producer = ForeignProducer(buffer.int_ptr, (4, 6))
    with pytest.raises(BufferError, match="context"):
        from_dlpack(producer)
    gc.collect()
    assert producer.deleted == 1


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"strides": strides(1, 4)}, "strides"),
        ({"strides": strides(12, 1)}, "strides"),
        ({"dtype": dlpack._Type(4, 16, 1)}, "integer view"),
        ({"dtype": dlpack._Type(2, 32, 4)}, "4 lanes"),
        ({"dtype": dlpack._Type(2, 24, 1)}, "24 bits"),
        ({"major": 2}, r"got 2\.0"),
        ({"device": dlpack._Device(7, 0)}, "device type"),
        ({"byte_offset": 128}, "bytes, got a buffer"),
        ({"byte_offset": 1 << 63}, "bytes, got a buffer"),
    ],
)
def test_hostile_capsules_are_refused(device: Device, changes: dict[str, Any], fault: str) -> None:
    array = from_numpy(device, VALUES)
    producer = ForeignProducer(array.buffer.int_ptr, (4, 6), **changes)
    with pytest.raises(BufferError, match=fault):
        from_dlpack(producer)
    gc.collect()
    assert producer.deleted <= 1


@pytest.mark.parametrize("given", [strides(6, 1), strides(99, 1)])
def test_strides_of_contiguous_memory_are_taken(device: Device, given: Any) -> None:
    shape = (4, 6) if given[0] == 6 else (1, 6)  # a dimension of one element may claim any stride
    array = from_numpy(device, VALUES)
    back = from_dlpack(ForeignProducer(array.buffer.int_ptr, shape, strides=given))
    assert np.array_equal(back.numpy(), VALUES[: shape[0]])


def test_byte_offset_is_honoured_or_refused(device: Device) -> None:
    values = np.arange(256, dtype=np.float32)
    array = from_numpy(device, values)
    step = device.handle.mem_base_addr_align // 8
    back = from_dlpack(ForeignProducer(array.buffer.int_ptr, (8,), byte_offset=step))
    assert np.array_equal(back.numpy(), values[step // 4 : step // 4 + 8])
    with pytest.raises(BufferError, match="got 4"):
        from_dlpack(ForeignProducer(array.buffer.int_ptr, (8,), byte_offset=4))


def test_read_only_opencl_memory_stays_read_only(device: Device) -> None:
    cl = import_pyopencl()
    buffer = cl.Buffer(device.context, cl.mem_flags.READ_ONLY, 96)
    assert from_dlpack(ForeignProducer(buffer.int_ptr, (4, 6))).readonly
    array = from_numpy(device, VALUES)
    assert from_dlpack(ForeignProducer(array.buffer.int_ptr, (4, 6), flags=1)).readonly
    assert not from_dlpack(ForeignProducer(array.buffer.int_ptr, (4, 6))).readonly
