"""Rendering, building, caching and launching: what errors say, what is built once, what threads may share."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memtrain_cl import ops, program
from memtrain_cl._resources import kernels_dir
from memtrain_cl.array import DeviceArray, empty, from_numpy, wrap_host
from memtrain_cl.device import Device
from memtrain_cl.errors import BuildError, MemtrainError
from memtrain_cl.program import build_options, expand_includes, get_kernel, render

Write = Callable[[str, str], str]

SCALE = """
__kernel void scale(__global const float *x, __global float *y, const float factor, const uint n) {
    const uint i = get_global_id(0);
    if (i < n) {
        float sum = x[i];
        for (int round = 0; round < ROUNDS; round++) sum = sum + 0.0f * round;
        y[i] = factor * sum + ${OFFSET};
    }
}
""".replace("ROUNDS", "${ROUNDS}")


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a kernel file into a folder of this test's own; the name to give to get_kernel, unique to the test."""
    monkeypatch.setattr(program, "kernels_dir", lambda: tmp_path)

    def write_file(name: str, text: str) -> str:
        unique = f"{name}_{tmp_path.name}"
        (tmp_path / f"{unique}.cl").write_text(text)
        return unique

    return write_file


# ---- text -----------------------------------------------------------------------------------------------------------


def test_includes_are_expanded_once_in_order(tmp_path: Path) -> None:
    (tmp_path / "_a.cl").write_text('#include "_b.cl"\nint a;\n')
    (tmp_path / "_b.cl").write_text("int b;\n")
    (tmp_path / "main.cl").write_text(
        '#include "_a.cl"\n#include "_b.cl"\n  #include "_not_at_the_margin.cl"\nint c;\n'
    )
    text = expand_includes(tmp_path / "main.cl")
    assert re.findall(r"int (\w);", text) == ["b", "a", "c"]
    assert text.count("#include") == 1


@pytest.mark.parametrize("missing", ["main", "_gone"])
def test_a_missing_file_is_named(write: Write, tmp_path: Path, missing: str) -> None:
    if missing == "_gone":
        (tmp_path / "main.cl").write_text('#include "_gone.cl"\n')
    with pytest.raises(BuildError, match=rf"{missing}\.cl is missing from {re.escape(str(tmp_path))}"):
        render("main", {})


def test_an_undefined_template_name_is_named(write: Write) -> None:
    file = write("undefined", "int x = ${NO_SUCH_NAME} + ${GIVEN};")
    with pytest.raises(BuildError, match="NO_SUCH_NAME") as caught:
        render(file, {"GIVEN": 5})
    assert f"{file}.cl" in str(caught.value)
    assert "'GIVEN': 5" in str(caught.value)


@pytest.mark.parametrize("text", ["% if True:\nint x;\n", "int x = ${1 +};"])
def test_a_broken_template_is_a_build_error(write: Write, text: str) -> None:
    file = write("syntax", text)
    with pytest.raises(BuildError, match=f"{file}.cl did not render"):
        render(file, {})


def test_shipped_kernels_use_no_type_that_a_device_may_lack() -> None:
    files = sorted(kernels_dir().glob("*.cl"))
    assert files
    for file in files:
        # Comments, Mako's documentation and Mako's Python are no OpenCL.
        other = r"//[^\n]*|##[^\n]*|/\*.*?\*/|<%doc>.*?</%doc>|<%!?\s.*?%>"
        code = re.sub(other, "", file.read_text(), flags=re.DOTALL)
        # A pointer to half is what vload_half takes on every device.
        assert not re.search(r"\bdouble\d*\b|\bhalf\d*\b(?! \*)", code), file.name
        assert not re.search(r"cl_khr_fp(16|64)", code), file.name


# ---- options --------------------------------------------------------------------------------------------------------


@pytest.mark.device
@pytest.mark.parametrize("exact", [True, False])
def test_options_come_from_the_device(device: Device, exact: bool) -> None:
    twin = device.with_capabilities(correctly_rounded_divide=exact, fp16=False, opencl_c_version="OpenCL C 1.2")
    assert build_options(twin) == (["-cl-fp32-correctly-rounded-divide-sqrt"] if exact else [])


@pytest.mark.device
@pytest.mark.parametrize(
    "options", ["-cl-fast-relaxed-math", "-DX=1 -cl-finite-math-only", "-cl-mad-enable -cl-denorms-are-zero"]
)
def test_relaxed_arithmetic_is_refused(
    device: Device, write: Write, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write("relaxed", SCALE)
    monkeypatch.setenv("PYOPENCL_BUILD_OPTIONS", options)
    with pytest.raises(BuildError, match=r"PYOPENCL_BUILD_OPTIONS holds -cl-.*unset it"):
        get_kernel(device, file, "scale", OFFSET="0.0f", ROUNDS=0)
    monkeypatch.setenv("PYOPENCL_BUILD_OPTIONS", "-DHARMLESS=1")
    get_kernel(device, file, "scale", OFFSET="0.0f", ROUNDS=0)


# ---- building -------------------------------------------------------------------------------------------------------


@pytest.mark.device
def test_a_build_error_tells_kernel_constants_device_and_log(device: Device, write: Write) -> None:
    file = write("broken", "__kernel void broken(__global int *x) { x[0] = no_such_function_${N}(1) }\n")
    with pytest.raises(BuildError) as caught:
        get_kernel(device, file, "broken", N=7, WIDTH=3)
    message = str(caught.value)
    for part in ("kernel broken", f"{file}.cl", "'N': 7", "'WIDTH': 3", device.info.label):
        assert part in message
    log = message.partition("the compiler said:")[2]
    assert "no_such_function_7" in log or "error" in log.lower()


@pytest.mark.device
def test_a_kernel_that_the_file_lacks_is_named(device: Device, write: Write) -> None:
    file = write("lacking", SCALE)
    with pytest.raises(BuildError, match=rf"{file}\.no_such_kernel\(OFFSET=0\.0f, ROUNDS=0\) has no such kernel"):
        get_kernel(device, file, "no_such_kernel", OFFSET="0.0f", ROUNDS=0)


@pytest.mark.device
def test_equal_constants_build_once(device: Device, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write("once", SCALE)
    rendered: list[Any] = []

    def counted(*given: Any) -> str:
        rendered.append(given)
        return render(*given)

    monkeypatch.setattr(program, "render", counted)
    programs = len(program._programs)
    first = get_kernel(device, file, "scale", OFFSET="1.0f", ROUNDS=1)
    assert get_kernel(device, file, "scale", ROUNDS=1, OFFSET="1.0f") is first
    assert (len(rendered), len(program._programs)) == (1, programs + 1)
    # Constants that the text does not use render alike, and one text is one program.
    second = get_kernel(device, file, "scale", OFFSET="1.0f", ROUNDS=1, UNUSED=2)
    assert second is not first
    assert second._program is first._program
    assert len(program._programs) == programs + 1


@pytest.mark.device
def test_equal_numbers_of_other_types_are_other_constants(device: Device, write: Write) -> None:
    file = write("types", SCALE)
    integer, real = (get_kernel(device, file, "scale", OFFSET=value, ROUNDS=0) for value in (2, 2.0))
    assert integer.label != real.label
    x = from_numpy(device, np.ones(1, np.float32))
    integer((1,), None, x, x, np.float32(3), np.uint32(1))
    assert x.numpy() == [5.0]


# ---- launching ------------------------------------------------------------------------------------------------------


def launch(kernel: program.Kernel, x: DeviceArray, y: DeviceArray, factor: float) -> None:
    kernel((x.size,), None, x, y, np.float32(factor), np.uint32(x.size))


@pytest.fixture
def scale(device: Device, write: Write) -> program.Kernel:
    return get_kernel(device, write("scale", SCALE), "scale", OFFSET="0.0f", ROUNDS=0)


@pytest.mark.device
def test_a_launch_that_fails_names_kernel_device_and_sizes(device: Device, scale: program.Kernel) -> None:
    x = from_numpy(device, np.ones(4, np.float32))
    too_many = device.handle.max_work_group_size * 2
    with pytest.raises(MemtrainError) as caught:
        scale((too_many,), (too_many,), x, x, np.float32(1), np.uint32(4))
    for part in ("scale(OFFSET=0.0f, ROUNDS=0)", device.info.name, f"({too_many},)"):
        assert part in str(caught.value)
    launch(scale, x, x, 2.0)  # and the queue goes on
    assert np.array_equal(x.numpy(), np.full(4, 2.0))


@pytest.mark.device
def test_threads_with_inputs_of_their_own_are_each_right(device: Device, scale: program.Kernel) -> None:
    wrong: list[str] = []
    barrier = threading.Barrier(8)

    def work(number: int) -> None:
        x = from_numpy(device, np.arange(1000 + number, dtype=np.float32))
        y = empty(device, x.shape, np.float32)
        barrier.wait()
        for turn in range(60):
            launch(scale, x, y, number + turn)
            if not np.array_equal(y.numpy(), np.arange(x.size, dtype=np.float32) * np.float32(number + turn)):
                wrong.append(f"thread {number}, turn {turn}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.device
def test_threads_may_use_the_launchers(device: Device) -> None:
    codes = [torch.randint(0, 60, (3 + number, 64), dtype=torch.uint8) for number in range(8)]
    results: dict[int, bool] = {}
    barrier = threading.Barrier(8)

    def work(number: int) -> None:
        from memtrain_cl.device import use_device

        barrier.wait()
        with use_device(device):
            packed = [ops.pack_codes(codes[number]) for _ in range(10)]
            results[number] = all(torch.equal(ops.unpack_codes(one, 64), codes[number]) for one in packed)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(8), True)


@pytest.mark.device
def test_temporaries_live_until_their_kernel_has_ended(device: Device, write: Write) -> None:
    slow = get_kernel(device, write("slow", SCALE), "scale", OFFSET="0.0f", ROUNDS=2000)
    values = np.arange(4096, dtype=np.float32)
    outputs = []
    for turn in range(5):
        y = empty(device, values.shape, np.float32)
        launch(slow, from_numpy(device, values + turn), y, 2.0)
        gc.collect()
        empty(device, values.shape, np.float32)
        outputs.append(y)
    for turn, y in enumerate(outputs):
        assert np.array_equal(y.numpy(), 2 * (values + turn))


@pytest.mark.device
def test_borrowed_host_memory_is_given_back_after_the_kernel(device: Device, write: Write) -> None:
    if not device.info.unified_memory:
        pytest.skip("this device has memory of its own")
    slow = get_kernel(device, write("borrowed", SCALE), "scale", OFFSET="0.0f", ROUNDS=4000)
    values = np.arange(1 << 16, dtype=np.float32)
    y = empty(device, values.shape, np.float32)
    for turn in range(3):
        launch(slow, wrap_host(device, values + turn), y, 2.0)
        np.full(1 << 16, -1.0, np.float32)  # takes the place of freed memory
        assert np.array_equal(y.numpy(), 2 * (values + turn))


def resident_bytes() -> int:
    with open("/proc/self/statm") as status:
        return int(status.read().split()[1]) * 4096


@pytest.mark.device
def test_launches_and_builds_leave_memory_flat(device: Device, write: Write) -> None:
    file = write("flat", SCALE)
    x = from_numpy(device, np.ones(256, np.float32))

    def turn(count: int) -> None:
        for _ in range(count):
            kernel = get_kernel(device, file, "scale", OFFSET="0.0f", ROUNDS=0)
            launch(kernel, x, x, 1.0)
        device.synchronize()
        gc.collect()

    turn(500)
    before = resident_bytes()
    turn(3000)
    assert resident_bytes() - before < 8 << 20


@pytest.mark.slow
@pytest.mark.device
def test_builds_of_one_text_leave_memory_flat(device: Device, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write("builds", SCALE)
    x = from_numpy(device, np.ones(256, np.float32))

    def build(count: int) -> None:
        for _ in range(count):
            program._cached_kernel.cache_clear()
            program._programs.clear()
            launch(get_kernel(device, file, "scale", OFFSET="0.0f", ROUNDS=0), x, x, 1.0)
            device.synchronize()
        gc.collect()

    monkeypatch.setattr(program, "_programs", {})
    build(10)
    before = resident_bytes()
    build(50)
    assert resident_bytes() - before < 16 << 20
