"""Which device is chosen, what the messages say, and what happens where there is none."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memtrain_cl import device as room
from memtrain_cl.array import DeviceArray, empty, from_numpy
from memtrain_cl.device import Device, DeviceInfo, choose, devices, get_device, platforms, score, use_device
from memtrain_cl.errors import UnsupportedDevice
from memtrain_cl.runtimes import import_pyopencl
from tests.children import on_path


@pytest.fixture(autouse=True)
def _no_choice_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMTRAIN_CL_DEVICE", raising=False)
    monkeypatch.delenv("PYOPENCL_CTX", raising=False)


@pytest.fixture
def zoo(monkeypatch: pytest.MonkeyPatch) -> list[DeviceInfo]:
    """A machine with two platforms for its CPU, and a GPU that two platforms drive."""
    real = devices()[0]
    infos = [
        replace(real, index=0, platform="Portable Computing Language", name="pthread-zen", type="cpu"),
        replace(real, index=1, platform="Intel(R) OpenCL", name="Zen", type="cpu", same_hardware_as=0),
        replace(real, index=2, platform="rusticl", name="AMD Radeon 90", type="gpu"),
        replace(real, index=3, platform="AMD APP", name="gfx90", type="gpu", same_hardware_as=2),
        replace(real, index=4, platform="Board", name="fpga", type="accelerator"),
    ]
    monkeypatch.setattr(room, "_listed", [(info, None) for info in infos])
    monkeypatch.setattr(room, "_listed_by", os.getpid())
    return infos


# ---- choosing -------------------------------------------------------------------------------------------------------


def test_devices_are_numbered_in_order() -> None:
    infos = devices()
    assert [info.index for info in infos] == list(range(len(infos)))
    assert all(info.platform in info.label and info.name in info.label for info in infos)
    assert sum(count for _, _, count in platforms()) == len(infos)


@pytest.mark.device
def test_capabilities_are_the_devices_own(device: Device) -> None:
    handle, info = device.handle, device.info
    assert info.max_work_group_size == handle.max_work_group_size
    assert info.global_mem_bytes == handle.global_mem_size
    assert info.max_alloc_bytes == handle.max_mem_alloc_size
    assert info.fp16 == ("cl_khr_fp16" in handle.extensions.split())
    assert info.fp64 == ("cl_khr_fp64" in handle.extensions.split())
    assert info.correctly_rounded_divide == bool(handle.single_fp_config & 128)
    assert info.unified_memory == bool(handle.host_unified_memory)


def test_selectors_find_by_index_and_by_part_of_a_name(zoo: list[DeviceInfo]) -> None:
    found = {text: room._select(text, "test").index for text in ("0", " 3 ", "radeon", "INTEL", "gfx90", "rusticl |")}
    assert found == {"0": 0, " 3 ": 3, "radeon": 2, "INTEL": 1, "gfx90": 3, "rusticl |": 2}
    assert room._select(4, "test").index == 4


def test_of_several_matches_the_best_scored_is_taken(zoo: list[DeviceInfo]) -> None:
    assert room._select("zen", "test").index == 1
    assert room._select("amd", "test").index == 2
    assert [room._select(kind, "test").index for kind in ("CPU", "gpu", "accelerator")] == [1, 2, 4]


@pytest.mark.parametrize("selector", ["AMD:90", "", "  ", "nonsense", -1, 99, "99", "-1"])
def test_a_selector_without_a_match_lists_the_devices(zoo: list[DeviceInfo], selector: str | int) -> None:
    with pytest.raises(UnsupportedDevice) as caught:
        get_device(selector)
    message = str(caught.value)
    assert repr(selector) in message
    for info in zoo:
        assert f"{info.index}: {info.label}" in message


@pytest.mark.parametrize("selector", [1.0, True, [0], b"Intel"])
def test_selectors_of_other_types_are_type_errors(selector: Any) -> None:
    with pytest.raises(TypeError, match="expected a device selector as int, str, Device or None"):
        get_device(selector)


def test_score_prefers_gpus_then_intels_cpu_runtime(zoo: list[DeviceInfo]) -> None:
    assert sorted(zoo, key=lambda info: (-score(info), info.index)) == [zoo[i] for i in (2, 3, 4, 1, 0)]
    info, why = choose()
    assert (info, "GPUs come before CPUs" in why) == (zoo[2], True)


def test_environment_chooses_in_its_order(zoo: list[DeviceInfo], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMTRAIN_CL_DEVICE", "fpga")
    info, why = choose()
    assert (info.index, why) == (4, "MEMTRAIN_CL_DEVICE is 'fpga'")
    monkeypatch.setenv("MEMTRAIN_CL_DEVICE", "no such thing")
    with pytest.raises(UnsupportedDevice, match=r"MEMTRAIN_CL_DEVICE expected.*'no such thing'"):
        choose()
    monkeypatch.setenv("MEMTRAIN_CL_DEVICE", "")
    assert choose()[0].index == 2


def test_pyopencl_ctx_is_read() -> None:
    infos = devices()
    wanted = infos[-1]
    names = [platform.name for platform in import_pyopencl().get_platforms()]  # its indices are pyopencl's own
    for value in (
        f"{names.index(wanted.platform)}",
        f"{wanted.platform.lower()}:0",
        f"{wanted.platform}:{wanted.name}",
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYOPENCL_CTX", value)
            info, why = choose()
            assert (info.platform, value in why) == (wanted.platform, True)
            patch.setenv("MEMTRAIN_CL_DEVICE", "0")
            assert choose()[0].index == 0


@pytest.mark.parametrize("value", ["99", "nonsense", "0:99", ":0", "0:nonsense"])
def test_pyopencl_ctx_without_a_match(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYOPENCL_CTX", value)
    with pytest.raises(UnsupportedDevice, match="PYOPENCL_CTX expected") as caught:
        get_device()
    assert devices()[0].label in str(caught.value)


@pytest.mark.device
def test_use_device_nests_and_ends(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    room._current.set(None)  # the fixture's; it is set back when the test ends
    monkeypatch.setenv("MEMTRAIN_CL_DEVICE", "matches nothing")
    twin = device.with_capabilities(max_work_group_size=64)
    with use_device(device.info.index) as outer:
        assert get_device() is outer
        with use_device(twin):
            assert get_device() is twin
        assert get_device() is outer
    with pytest.raises(UnsupportedDevice, match="matches nothing"):
        get_device()


@pytest.mark.device
def test_use_device_ends_with_an_error(device: Device) -> None:
    before = get_device(device.info.index)
    with pytest.raises(KeyError), use_device(device.with_capabilities(fp16=True)):
        raise KeyError
    assert get_device(device.info.index) is before


@pytest.mark.device
def test_equal_selectors_give_one_device_and_announce_it_once(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    room._announced.discard(device.info.index)
    with caplog.at_level(logging.INFO, "memtrain_cl"):
        first = get_device(device.info.index)
        assert get_device(str(device.info.index)) is first
    assert [record.getMessage() for record in caplog.records] == [
        f"using OpenCL device {device.info.index}: {device.info.label}"
    ]


@pytest.mark.device
def test_with_capabilities_leaves_the_device_alone(device: Device) -> None:
    twin = device.with_capabilities(max_work_group_size=1, unified_memory=False)
    assert (twin.info.max_work_group_size, twin.info.unified_memory) == (1, False)
    assert twin.queue is device.queue
    assert device.info.max_work_group_size == device.handle.max_work_group_size
    with pytest.raises(TypeError):
        device.with_capabilities(no_such_field=1)


class _Handle:
    """A device handle that knows its place on the bus, as a GPU's does."""

    def __init__(self, bus: int | None) -> None:
        if bus is not None:
            self.pci_bus_id_nv = bus


def test_one_gpu_behind_two_platforms_is_known(zoo: list[DeviceInfo]) -> None:
    gpu, other = zoo[2], zoo[3]
    assert room._hardware_key(gpu, _Handle(3)) == room._hardware_key(other, _Handle(3))
    assert room._hardware_key(gpu, _Handle(3)) != room._hardware_key(other, _Handle(4))
    assert room._hardware_key(gpu, _Handle(None)) != room._hardware_key(other, _Handle(None))


def test_every_cpu_driver_after_the_first_is_marked() -> None:
    cpus = [info for info in devices() if info.type == "cpu"]
    assert [info.same_hardware_as for info in cpus[:1]] == [None] * len(cpus[:1])
    assert all(info.same_hardware_as == cpus[0].index for info in cpus[1:])


# ---- arrays and their limits ----------------------------------------------------------------------------------------


@pytest.mark.device
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (0, 3), (3, 0)])
@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.int64, np.float16, np.float64])
def test_arrays_go_there_and_back(device: Device, shape: tuple[int, ...], dtype: Any) -> None:
    values = np.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape)
    array = from_numpy(device, values)
    assert (array.shape, array.dtype, array.size, array.nbytes) == (shape, values.dtype, values.size, values.nbytes)
    assert (array.buffer is None) == (values.size == 0)
    assert np.array_equal(array.numpy(), values)
    copied = array.copy()
    assert np.array_equal(copied.numpy(), values)
    assert values.size == 0 or copied.buffer.int_ptr != array.buffer.int_ptr


@pytest.mark.device
def test_from_numpy_takes_strided_values(device: Device) -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (values[::2], values.T, np.broadcast_to(values[0], (3, 6))):
        assert np.array_equal(from_numpy(device, view).numpy(), view)


@pytest.mark.device
def test_rows_lie_over_the_same_memory(device: Device) -> None:
    array = from_numpy(device, np.arange(24, dtype=np.float32).reshape(4, 6))
    first = array.rows(2)
    assert (first.shape, first.buffer is array.buffer) == ((2, 6), True)
    assert np.array_equal(first.numpy(), array.numpy()[:2])
    assert array.rows(0).buffer is None


@pytest.mark.device
@pytest.mark.parametrize("size", [2**30 + 1, 2**31 - 1, 2**31, 2**40])
def test_a_buffer_beyond_the_devices_limit_is_refused_before_it_is_made(device: Device, size: int) -> None:
    small = device.with_capabilities(max_alloc_bytes=1 << 30)
    with pytest.raises(UnsupportedDevice, match=f"a buffer of {size} bytes .* at most {1 << 30} at once"):
        empty(small, (size,), np.uint8)
    # The count itself has no limit of its own: nothing of this size is allocated here.
    assert DeviceArray(small, None, (size, 4), np.float32).nbytes == size * 16


# ---- another process ------------------------------------------------------------------------------------------------


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    merged = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], env=merged, capture_output=True, text=True, timeout=300)


FORK = """
import os, signal, sys
import numpy as np
from memtrain_cl import devices, get_device
from memtrain_cl.array import from_numpy
from memtrain_cl.errors import UnsupportedDevice
from memtrain_cl.probe import require_exact
array = from_numpy(get_device(), np.ones(4, np.float32))
device = get_device()
child = os.fork()
if child == 0:
    signal.alarm(60)
    uses = (array.numpy, array.copy, device.synchronize, lambda: from_numpy(device, np.ones(4)), get_device, devices,
            lambda: device.transfer_queue, lambda: require_exact(device))
    for number, use in enumerate(uses):
        try:
            use()
        except UnsupportedDevice as error:
            assert "before this process was forked" in str(error) and "spawn" in str(error), error
        else:
            os._exit(10 + number)
    os._exit(0)
_, status = os.waitpid(child, 0)
print(array.numpy()[0], os.waitstatus_to_exitcode(status))
"""


@pytest.mark.device
def test_a_forked_child_gets_a_clear_error(device: Device) -> None:
    done = run_python(FORK, MEMTRAIN_CL_DEVICE=str(device.info.index))
    assert done.stdout.split() == ["1.0", "0"], done.stderr


LIST_AND_FORK = """
import os, signal
from memtrain_cl import devices, get_device
from memtrain_cl.errors import UnsupportedDevice
devices()
child = os.fork()
if child == 0:
    signal.alarm(60)
    try:
        get_device()
    except UnsupportedDevice as error:
        os._exit(0 if "were loaded before this process was forked" in str(error) else 1)
    os._exit(2)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_of_a_process_that_only_listed_devices_gets_it_too() -> None:
    done = run_python(LIST_AND_FORK)
    assert done.stdout.strip() == "0", done.stderr


HIDE_DRIVERS = """
import os
import memtrain_cl.runtimes
memtrain_cl.runtimes.intel_library = lambda: None
import pyopencl
os.environ["PYOPENCL_HOME"] = os.environ["OCL_ICD_VENDORS"]  # where pyopencl's loader looks for PoCL's wheel
"""
HIDE_PYOPENCL = """
import sys
sys.modules["pyopencl"] = None
"""


@pytest.fixture(params=["no driver", "no pyopencl"])
def bare_machine(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[dict[str, str], str]:
    """(environment of a machine without drivers or without pyopencl, what a message must say there)."""
    site, vendors = tmp_path / "site", tmp_path / "vendors"
    site.mkdir()
    vendors.mkdir()
    bare = request.param == "no driver"
    (site / "sitecustomize.py").write_text(HIDE_DRIVERS if bare else HIDE_PYOPENCL)
    environment = {"PYTHONPATH": on_path(site), "OCL_ICD_VENDORS": str(vendors), "PYTHONWARNINGS": "ignore"}
    return environment, "pip install 'memtrain-cl[cpu]'" if bare else "pip install pyopencl"


@pytest.mark.parametrize(
    ("extensions", "capability", "takes"),
    [("", (9, 0), False), ("cl_nv_compiler_options", (7, 5), False), ("cl_nv_compiler_options", (), False)]
    + [("cl_nv_compiler_options", capability, True) for capability in ((8, 0), (8, 6), (12, 0))],
)
def test_ptx_is_for_gpus_that_have_its_instructions(
    device: Device, extensions: str, capability: tuple[int, ...], takes: bool
) -> None:
    names = ("compute_capability_major_nv", "compute_capability_minor_nv")

    class Handle:
        def __getattr__(self, name: str) -> Any:
            if name in names:
                if not capability:
                    raise import_pyopencl().LogicError("no such question")
                return capability[names.index(name)]
            return extensions if name == "extensions" else getattr(device.handle, name)

    info = room._read_info(0, device.handle.platform, Handle())
    assert info.inline_ptx is takes
    assert room.compute_capability(Handle()) == (10 * capability[0] + capability[1] if capability else 0)


def test_without_a_driver_importing_works_and_the_first_use_says_what_to_install(bare_machine: Any) -> None:
    environment, command = bare_machine
    code = (
        "import torch, memtrain_cl\n"
        "from memtrain_cl import nn, ops\n"
        "layer = nn.PackedRMSCounterLinear(8, 4)\n"
        "assert layer.state.shape == (4, 6)\n"
        "for use in (memtrain_cl.get_device, lambda: memtrain_cl.get_device(0), lambda: layer(torch.ones(1, 8))):\n"
        "    try:\n"
        "        use()\n"
        "    except memtrain_cl.UnsupportedDevice as error:\n"
        "        print(error)\n"
    )
    done = run_python(code, **environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all(command in line for line in lines)
    if "memtrain-cl" in command:
        assert all("no OpenCL device was found" in line and "apt install pocl-opencl-icd" in line for line in lines)


@pytest.mark.parametrize("command", [["devices"], ["devices", "--json"], ["doctor"], ["doctor", "--json"]])
def test_without_a_driver_the_commands_end_with_one_sentence(bare_machine: Any, command: list[str]) -> None:
    environment, install = bare_machine
    done = subprocess.run(
        [sys.executable, "-m", "memtrain_cl.cli", *command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("memtrain-cl: ")
    assert install in line
