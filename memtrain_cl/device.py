"""Choose an OpenCL device and hold its context, queue and capabilities.

Capabilities are read from the device, never derived from its name. The order of choice: the argument, the device set by
`use_device`, ``MEMTRAIN_CL_DEVICE``, ``PYOPENCL_CTX``, then the best-scored device (GPU before CPU, Intel's CPU runtime
before PoCL). Nothing here ever prompts; the pick is logged once.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from memtrain_cl.errors import UnsupportedDevice
from memtrain_cl.runtimes import import_pyopencl

if TYPE_CHECKING:
    import pyopencl

logger = logging.getLogger("memtrain_cl")

INSTALL_HINT = (
    "install one with: pip install 'memtrain-cl[cpu]' (a CPU runtime from pip), "
    "apt install pocl-opencl-icd (a CPU driver from Debian or Ubuntu), or your GPU vendor's OpenCL driver"
)

_FORKED = (
    "before this process was forked and cannot be used here; "
    "start worker processes with the 'spawn' method, or use OpenCL only in the children"
)

#: This process, as the last fork left it: asking the system at every launch would cost a tenth of one.
_process = os.getpid()


def _after_fork() -> None:
    global _process
    _process = os.getpid()


os.register_at_fork(after_in_child=_after_fork)

#: How a device's tensor cores multiply bytes, "" for not at all, "narrow" for the way of "mma" in smaller blocks, which
#: need less local memory: see kernels/_core_mma.cl and _core_wgmma.cl. A device has all that come before its own.
TensorCores = Literal["", "narrow", "mma", "wgmma"]
TENSOR_CORES: tuple[TensorCores, ...] = ("narrow", "mma", "wgmma")
DeviceType = Literal["gpu", "accelerator", "cpu"]
_CORRECTLY_ROUNDED_DIVIDE = 1 << 7
_SUBNORMALS = 1 << 0
#: The compute capability, times ten, of the first GPUs of NVIDIA that have every instruction of the kernels' PTX.
_PTX_CAPABILITY = 80
_DOT_OF_WORDS = "__opencl_c_integer_dot_product_input_4x8bit_packed"
_TYPE_SCORE = {"gpu": 2000, "accelerator": 1000, "cpu": 0}


@dataclass(frozen=True)
class DeviceInfo:
    """What a device says of itself. Sizes in bytes; `index` is its place in `devices()`.

    `same_hardware_as` is the index of an earlier entry that drives the same hardware through another platform, or None.
    `integer_dot`: dot products of four bytes in a word, built in where a program asks for OpenCL C 3.0.
    `inline_ptx`: the compiler takes NVIDIA's inline PTX, and the GPU all that kernels write in it (capability 8.0).
    `short_loops`: found by the probe (probe.py) on an opened device, on which a work-item's loops end early.
    `inline_vnni`, `tensor_cores`: found on an opened device (inline_assembly.py); None before.
    """

    index: int
    platform: str
    platform_version: str
    name: str
    vendor: str
    driver_version: str
    opencl_c_version: str
    type: DeviceType
    compute_units: int
    max_work_group_size: int
    local_mem_bytes: int
    global_mem_bytes: int
    max_alloc_bytes: int
    native_vector_width: int
    unified_memory: bool
    correctly_rounded_divide: bool
    subnormals: bool
    fp16: bool
    fp64: bool
    subgroups: bool
    integer_dot: bool
    inline_ptx: bool
    same_hardware_as: int | None = None
    short_loops: bool = False
    inline_vnni: bool | None = None
    tensor_cores: TensorCores | None = None

    @property
    def label(self) -> str:
        """Platform, version, device and its type in one line: the text that selectors match."""
        return f"{self.platform} | {self.platform_version} | {self.name} | {self.type}"


class Device:
    """An opened device: one context and one in-order queue for the process, and what the device can do.

    A process that forks after opening a device cannot use it in the child (the driver's threads do not survive a fork):
    `check_process` turns the hang into an UnsupportedDevice error.
    """

    def __init__(self, info: DeviceInfo, handle: Any) -> None:
        cl = import_pyopencl()
        self.info = info
        self.handle = handle
        self._pid = os.getpid()
        self.context: pyopencl.Context = cl.Context([handle])
        self.queue: pyopencl.CommandQueue = cl.CommandQueue(self.context)
        #: What other rooms keep for as long as the device is open, each under its own name.
        self.kept: dict[str, Any] = {}

    def check_process(self) -> None:
        """UnsupportedDevice when this process is a fork of the one that opened the device."""
        if self._pid != _process:
            raise UnsupportedDevice(f"the OpenCL device {self.info.name} was opened {_FORKED}")

    def synchronize(self) -> None:
        """Wait until every kernel and copy queued so far has ended."""
        self.check_process()
        self.queue.finish()

    def with_capabilities(self, **changes: Any) -> Device:
        """The same context and queue under other capabilities, fields of DeviceInfo: a smaller device's, say."""
        twin = object.__new__(Device)
        twin.__dict__.update(self.__dict__)
        twin.info = replace(self.info, **changes)
        return twin

    @cached_property
    def transfer_queue(self) -> pyopencl.CommandQueue:
        """A second queue, for copies that run beside kernels."""
        self.check_process()
        queue: pyopencl.CommandQueue = import_pyopencl().CommandQueue(self.context)
        return queue

    @cached_property
    def cache_key(self) -> tuple[str, ...]:
        """What identifies the compiler behind this device, for caches that outlive the process."""
        info = self.info
        return (info.platform, info.platform_version, info.name, info.driver_version)

    def __repr__(self) -> str:
        return f"Device({self.info.index}: {self.info.label})"


def _features(device: Any) -> set[str]:
    """Names of the optional features of OpenCL C 3.0 that the device's compiler has."""
    with contextlib.suppress(import_pyopencl().Error, AttributeError):  # devices and bindings older than the question
        return {feature.name for feature in device.opencl_c_features}
    return set()


def _read_info(index: int, platform: Any, device: Any) -> DeviceInfo:
    cl = import_pyopencl()
    extensions = set(device.extensions.split())
    kind: DeviceType = "cpu"
    if device.type & cl.device_type.GPU:
        kind = "gpu"
    elif device.type & cl.device_type.ACCELERATOR:
        kind = "accelerator"
    return DeviceInfo(
        index=index,
        platform=platform.name.strip(),
        platform_version=platform.version.strip(),
        name=device.name.strip(),
        vendor=device.vendor.strip(),
        driver_version=device.driver_version.strip(),
        opencl_c_version=device.opencl_c_version.strip(),
        type=kind,
        compute_units=device.max_compute_units,
        max_work_group_size=device.max_work_group_size,
        local_mem_bytes=device.local_mem_size,
        global_mem_bytes=device.global_mem_size,
        max_alloc_bytes=device.max_mem_alloc_size,
        native_vector_width=device.native_vector_width_float,
        unified_memory=bool(device.host_unified_memory),
        correctly_rounded_divide=bool(device.single_fp_config & _CORRECTLY_ROUNDED_DIVIDE),
        subnormals=bool(device.single_fp_config & _SUBNORMALS),
        fp16="cl_khr_fp16" in extensions,
        fp64="cl_khr_fp64" in extensions,
        subgroups="cl_khr_subgroups" in extensions,
        integer_dot="cl_khr_integer_dot_product" in extensions and _DOT_OF_WORDS in _features(device),
        # The extension that names NVIDIA's compiler options is the device's own word that its compiler takes PTX.
        inline_ptx="cl_nv_compiler_options" in extensions and compute_capability(device) >= _PTX_CAPABILITY,
    )


def compute_capability(handle: Any) -> int:
    """NVIDIA's number for what a GPU's instructions are, times ten; 0 of a device that has none."""
    with contextlib.suppress(import_pyopencl().Error, AttributeError):
        return 10 * int(handle.compute_capability_major_nv) + int(handle.compute_capability_minor_nv)
    return 0


def _hardware_key(info: DeviceInfo, handle: Any) -> tuple[Any, ...]:
    """Equal keys mean one piece of hardware behind two platforms; every CPU driver drives the one host processor."""
    if info.type == "cpu":
        return ("cpu",)
    for attribute in ("pci_bus_info_khr", "pci_bus_id_nv"):
        with contextlib.suppress(Exception):  # an attribute that the driver does not know raises its own error type
            value = getattr(handle, attribute)
            return ("pci", getattr(value, "pci_bus", value), getattr(value, "pci_device", 0))
    return (info.type, info.name, info.platform, info.index)


def platforms() -> list[tuple[str, str, int]]:
    """(name, version, number of devices) of every OpenCL platform, also of those without a device."""
    count = collections.Counter(handle.platform.int_ptr for _, handle in inventory())
    return [
        (platform.name.strip(), platform.version.strip(), count[platform.int_ptr]) for platform in _platform_handles()
    ]


def _platform_handles() -> list[Any]:
    # By name: the loader's order is that of a folder on disk, and an index must mean one device in every process.
    cl = import_pyopencl()
    try:
        return sorted(cl.get_platforms(), key=lambda platform: (platform.name, platform.version))
    except cl.Error:
        return []


def _list_handles() -> list[tuple[Any, Any]]:
    cl = import_pyopencl()
    found = []
    for platform in _platform_handles():
        try:
            handles = platform.get_devices()
        except cl.Error as error:
            logger.warning("OpenCL platform %s lists no devices: %s", platform.name, error)
            continue
        found += [(platform, handle) for handle in handles]
    return found


_lock = threading.RLock()
_listed: list[tuple[DeviceInfo, Any]] | None = None
_listed_by = 0
_opened: dict[int, Device] = {}
_current: contextvars.ContextVar[Device | None] = contextvars.ContextVar("memtrain_cl_device", default=None)
_announced: set[int] = set()


def _matches(info: DeviceInfo, text: str) -> bool:
    return text.lower() in info.label.lower()


def _with_first(found: list[tuple[DeviceInfo, Any]], text: str) -> list[tuple[DeviceInfo, Any]]:
    """The list with the first device that a name matches in front. An index counts in the list as it is."""
    text = text.strip()
    if not text or text.lstrip("-").isdigit():
        return found
    first = next((pair for pair in found if _matches(pair[0], text)), None)
    return found if first is None else [first, *(pair for pair in found if pair is not first)]


def _numbered(found: list[tuple[DeviceInfo, Any]]) -> list[tuple[DeviceInfo, Any]]:
    listed = []
    seen: dict[tuple[Any, ...], int] = {}
    for index, (info, handle) in enumerate(found):
        info = replace(info, index=index, same_hardware_as=None)
        first = seen.setdefault(_hardware_key(info, handle), index)
        listed.append((info if first == index else replace(info, same_hardware_as=first), handle))
    return listed


def put_first(selector: str | int | None = None) -> DeviceInfo:
    """Make the device that `selector` names (None: that of `choose`) the first of `devices()`, torch's "opencl:0".

    RuntimeError once a device other than that has been opened; the errors of `get_device`.
    """
    global _listed
    with _lock:
        info = choose()[0] if selector is None else _select(selector, "a device selector")
        if info.index:
            if _opened:
                raise RuntimeError("expected to put a device first before any is opened")
            listed = inventory()
            chosen = listed[info.index]
            _listed = _numbered([chosen, *(pair for pair in listed if pair is not chosen)])
        return devices()[0]


def inventory() -> list[tuple[DeviceInfo, Any]]:
    """Every device with pyopencl's object of it, in the order of `devices`."""
    global _listed, _listed_by
    with _lock:
        if _listed is None:
            _listed_by = os.getpid()
            found = [(_read_info(0, platform, handle), handle) for platform, handle in _list_handles()]
            # Best first, so that index 0 is a good choice; by name where equal (the sort is stable).
            found.sort(key=lambda pair: -score(pair[0]))
            listed = _numbered(_with_first(found, os.environ.get("MEMTRAIN_CL_DEVICE", "")))
            _listed = listed
        if _listed_by != os.getpid():
            # Several drivers start threads when they are listed, and hang in a child that lacks them.
            raise UnsupportedDevice(f"the OpenCL drivers were loaded {_FORKED}")
        return _listed


def devices() -> list[DeviceInfo]:
    """Every OpenCL device, the best first and then by the names of the platforms; empty where there is no driver.

    Where ``MEMTRAIN_CL_DEVICE`` is a part of a name, the device that it chooses is the first, torch's "opencl:0".
    """
    return [info for info, _ in inventory()]


def score(info: DeviceInfo) -> int:
    """Rank of a device when nobody chose: higher is better; ties go to the lower index."""
    vendor_score = 0
    if info.type == "cpu":
        # Two CPU drivers differ by how fast they run barrier kernels, which no capability tells.
        platform = info.platform.lower()
        vendor_score = 20 if "intel" in platform else 10 if "portable computing language" in platform else 0
    return _TYPE_SCORE[info.type] + vendor_score


def choices() -> str:
    """The devices as text, one a line, for messages."""
    return "\n".join(f"  {info.index}: {info.label}" for info in devices()) or "  (none)"


def _require_any() -> None:
    if not devices():
        raise UnsupportedDevice(f"no OpenCL device was found on this machine; {INSTALL_HINT}")


def _select(selector: str | int, source: str) -> DeviceInfo:
    _require_any()
    infos = devices()
    text = str(selector).strip()
    if text.lstrip("-").isdigit():
        if 0 <= int(text) < len(infos):
            return infos[int(text)]
    elif text:
        matches = [info for info in infos if _matches(info, text)]
        if matches:
            return max(matches, key=lambda info: (score(info), -info.index))
    raise UnsupportedDevice(
        f"{source} expected the index of a device or a part of its platform's or its own name, got {selector!r}; "
        f"the devices are:\n{choices()}"
    )


def _from_pyopencl_ctx(value: str) -> DeviceInfo:
    """PYOPENCL_CTX: platform[:device], each an index within its list or a part of a name."""
    _require_any()
    platform_text, _, device_text = value.partition(":")
    cl = import_pyopencl()
    names = [platform.name.strip() for platform in cl.get_platforms()]
    if platform_text.isdigit() and int(platform_text) < len(names):
        wanted = [cl.get_platforms()[int(platform_text)]]
    else:
        wanted = [p for p in cl.get_platforms() if platform_text.lower() in p.name.lower() and platform_text]
    inside = [info for info, handle in inventory() if handle.platform in wanted]
    if device_text.isdigit():
        inside = inside[int(device_text) : int(device_text) + 1]
    elif device_text:
        inside = [info for info in inside if device_text.lower() in info.name.lower()]
    if not inside:
        raise UnsupportedDevice(
            f"PYOPENCL_CTX expected platform:device, each as an index or a part of its name, got {value!r}; "
            f"the devices are:\n{choices()}"
        )
    return inside[0]


def choose() -> tuple[DeviceInfo, str]:
    """The device that is used when no argument and no `use_device` names one, and why. Opens nothing; the errors of
    `get_device`.
    """
    chosen = os.environ.get("MEMTRAIN_CL_DEVICE", "")
    if chosen:
        return _select(chosen, "MEMTRAIN_CL_DEVICE"), f"MEMTRAIN_CL_DEVICE is {chosen!r}"
    context = os.environ.get("PYOPENCL_CTX", "")
    if context:
        return _from_pyopencl_ctx(context), f"PYOPENCL_CTX is {context!r}"
    _require_any()
    best = max(devices(), key=lambda info: (score(info), -info.index))
    return best, "GPUs come before CPUs, and Intel's CPU runtime before PoCL"


def get_device(selector: str | int | Device | None = None) -> Device:
    """The device for `selector`: an index of `devices()`, a case-insensitive part of "platform | version | name | type"
    (so "cpu" is the best CPU runtime), or an opened Device. None: the one set by `use_device`, else by the environment,
    else the best-scored one.

    Raises UnsupportedDevice: no driver at all (the message names the command that installs one), or no match (the
    message lists what there is). Opening is cached, so equal selectors give the same object.
    """
    if isinstance(selector, Device):
        return selector
    if selector is None:
        current = _current.get()
        if current is not None:
            return current
        info, _ = choose()
    elif isinstance(selector, (str, int)) and not isinstance(selector, bool):
        info = _select(selector, "a device selector")
    else:
        raise TypeError(f"expected a device selector as int, str, Device or None, got {type(selector).__name__}")
    with _lock:
        if info.index not in _opened:
            _opened[info.index] = Device(info, inventory()[info.index][1])
        if info.index not in _announced:
            _announced.add(info.index)
            logger.info("using OpenCL device %d: %s", info.index, info.label)
        return _opened[info.index]


def device_at(index: int) -> Device:
    """The device of an index of `devices()`, opened; the one set by `use_device` where that has the index."""
    current = _current.get()
    if current is not None and current.info.index == index:
        return current
    return _opened.get(index) or get_device(index)


def current_device() -> Device:
    """What "opencl" without an index means: the device set by `use_device`, else the first of `devices()`."""
    return _current.get() or device_at(0)


def current_index() -> int:
    """The index of `current_device`, without opening it."""
    current = _current.get()
    return 0 if current is None else current.info.index


def opened_devices() -> list[Device]:
    """The devices that this process has opened so far."""
    with _lock:
        return list(_opened.values())


@contextlib.contextmanager
def use_device(selector: str | int | Device) -> Iterator[Device]:
    """Within the block, `get_device()` gives this device (in this thread and in tasks started from it)."""
    device = get_device(selector)
    token = _current.set(device)
    try:
        yield device
    finally:
        _current.reset(token)
