"""Fixtures for every test: seeds, the OpenCL devices, and the shapes that kernels take on each."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings

from memtrain_cl.case import Case
from memtrain_cl.device import Device, DeviceInfo, devices, get_device, use_device
from memtrain_cl.probe import note_short_loops
from memtrain_cl.tuning import groups_share_rows
from memtrain_cl.verify import shapes_of
from tests.large_kernels import LARGE

# The same trials in every run, so that a change fails by its own faults; `make acceptance` draws new ones, and many.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


def wanted_devices() -> list[DeviceInfo]:
    """The device that is used when none is named: the best one, or that of MEMTRAIN_CL_DEVICE.

    It is "opencl:0", the one on which torch differentiates; `make platforms` gives each platform a process in which its
    device is.
    """
    infos = devices()
    selector = os.environ.get("MEMTRAIN_CL_DEVICE", "")
    if selector.isdigit():
        infos = infos[int(selector) :]
    elif selector and not (infos and selector.lower() in infos[0].label.lower()):
        raise pytest.UsageError(f"MEMTRAIN_CL_DEVICE={selector!r} matches no OpenCL device")
    return infos[:1]


def short_name(info: DeviceInfo) -> str:
    """A name for test ids: the platform, and the version too where two devices share the platform's name."""
    words = info.platform.split("(")[0].replace(" ", "-")
    alike = [other for other in devices() if other.platform == info.platform]
    return words if len(alike) == 1 else f"{words}-{info.index}"


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (libraries under test may draw from it)
    torch.manual_seed(0)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "_opened" in metafunc.fixturenames:
        infos = wanted_devices()
        # Without any device the test runs, and fails with the message that names what to install.
        metafunc.parametrize(
            "_opened", infos or [None], ids=short_name if infos else ["none"], indirect=True, scope="session"
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "device" in getattr(item, "fixturenames", ()):
            item.add_marker("device")
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            case = item.callspec.params.get("case")
            if item.callspec.params.get("shaped") == "other":
                item.add_marker("other_shape")
            if isinstance(case, Case) and not case.small and case.kernel not in LARGE:
                item.add_marker("large")


def pytest_collection_finish() -> None:
    # What the tests import lives as long as the process, torch's operations with samples being some million objects:
    # left to the collector, each full collection and each test that counts objects would look through them again.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def _opened(request: pytest.FixtureRequest) -> Device:
    info: DeviceInfo | None = request.param
    device = get_device(None if info is None else info.index)
    note_short_loops(device)
    return device


@pytest.fixture
def device(_opened: Device) -> Iterator[Device]:
    """Each OpenCL device in turn, current while the test runs."""
    with use_device(_opened):
        yield _opened


@pytest.fixture
def place(device: Device) -> torch.device:
    """torch's name of the device."""
    return torch.device("opencl", device.info.index)


_twins: dict[tuple[int, str], Device] = {}


@pytest.fixture(params=["native", "other"])
def shaped(request: pytest.FixtureRequest, device: Device) -> Iterator[Device]:
    """Each device as it is, and so that kernels take their other shape there. Current while the test runs."""
    other = "as a CPU" if groups_share_rows(device.info) else "as a GPU"
    key = (device.info.index, other if request.param == "other" else "native")
    # One twin a session: kernels are cached by the device that asked for them.
    _twins.setdefault(key, shapes_of(device)[key[1]])
    with use_device(_twins[key]) as twin:
        yield twin


@pytest.fixture
def discrete(device: Device) -> Iterator[Device]:
    """The device as one with memory of its own: data is staged and layers keep their state there. Current meanwhile."""
    with use_device(device.with_capabilities(unified_memory=False)) as twin:
        yield twin
