"""The name "opencl" in torch: registered on import, everything else loaded with the first tensor.

torch calls `register` through the entry point group ``torch.backends`` while it is imported itself, so this module
costs little, opens nothing, and never raises there.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

import torch

from memtrain_cl.device import Device
from memtrain_cl.errors import UnsupportedDevice

NAME = "opencl"
#: Why the name could not be registered, or None.
_refusal: str | None = None
_registered = False
_libraries: list[Any] = []


def register() -> None:
    """Make "opencl" a device of torch. Does nothing a second time; a torch that cannot is remembered, not an error."""
    global _refusal, _registered
    if _registered or _refusal:
        return
    try:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as setup
    except ImportError:
        _refusal = f"the device 'opencl' needs torch 2.10 or newer, got {torch.__version__}; everything else works"
        return
    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", NAME):
        _refusal = f"torch has room for one device of others, and this process gave it to {taken!r}"
        return
    guard = import_module("memtrain_cl.torch_device.engine").Guard()
    setup(NAME, backend_module=import_module("memtrain_cl.torch_device.module"), device_guard=guard)
    others = torch.library.Library("_", "IMPL")
    others.fallback(_without_tensors, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    # torch.tensor(..., device="opencl") copies with the tensor's own dispatch turned off, which reaches no fallback.
    for overload in (
        "empty.memory_format",
        "empty_strided",
        "_copy_from",
        "arange",
        "arange.start",
        "arange.start_step",
    ):
        aten.impl(overload, _Factory(overload), "PrivateUse1")
    # torch would write these out as smaller operations before a kernel sees them; silu's gradient in six tensors.
    aten.impl("silu_backward", _Factory("silu_backward"), "PrivateUse1")
    aten.impl("linear", _linear, "AutogradPrivateUse1")
    aten.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    aten.impl("rms_norm", _rms_norm, "AutogradPrivateUse1")
    import_module("memtrain_cl.torch_device.conversion").install()
    import_module("memtrain_cl.torch_device.storages").install()
    # torch takes the device for the machine's accelerator, whose pinned memory a DataLoader may ask for.
    aten.impl("_pin_memory", _pinned, "CPU")
    _libraries.extend([others, aten])
    _registered = True


def require_registered() -> None:
    """UnsupportedDevice, with the reason, where this torch has no device "opencl"."""
    register()
    if _refusal:
        raise UnsupportedDevice(_refusal)


class _Factory:
    """The call of one operation, with the table of operations loaded on the first."""

    def __init__(self, overload: str) -> None:
        self._overload = overload
        self._handler: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._handler is None:
            load()
            from memtrain_cl.torch_device.registry import resolve

            name, _, variant = self._overload.partition(".")
            self._handler = resolve(getattr(getattr(torch.ops.aten, name), variant or "default"))
        return self._handler(*args, **kwargs)


def _without_tensors(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Operations that name the device without a tensor on it: factories, and copies from elsewhere."""
    load()
    from memtrain_cl.torch_device.fallback import run_on_host
    from memtrain_cl.torch_device.registry import resolve

    result = resolve(func)(*args, **kwargs)
    return run_on_host(func, args, kwargs) if result is NotImplemented else result


def _pinned(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """An ordinary copy: uploads go through pinned memory of the device's own where that is faster."""
    return tensor.clone()


def _attention(*args: Any, **kwargs: Any) -> Any:
    return import_module("memtrain_cl.torch_device.aten.attention").scaled_dot_product_attention(*args, **kwargs)


def _rms_norm(*args: Any, **kwargs: Any) -> Any:
    return import_module("memtrain_cl.torch_device.aten.norm").rms_norm(*args, **kwargs)


def _linear(*args: Any, **kwargs: Any) -> Any:
    return import_module("memtrain_cl.torch_device.aten.linear").linear(*args, **kwargs)


_loaded = False


def load() -> None:
    """Fill the table of operations."""
    global _loaded
    if _loaded:
        return
    _loaded = True
    families = import_module("memtrain_cl.torch_device.aten")
    for family in pkgutil.iter_modules(families.__path__):
        import_module(f"{families.__name__}.{family.name}")
    import_module("memtrain_cl.torch_device.derive")
    import_module("memtrain_cl.torch_device.engine").install()
    _hide_from_compilers()


def _hide_from_compilers() -> None:
    """Let torch.compile not look into operations: it would take them for a part of the model, for minutes."""
    from torch._C._dynamo import eval_frame

    tensor: Any = import_module("memtrain_cl.torch_device.tensor").OpenCLTensor
    skip = getattr(eval_frame, "_FrameAction", None)
    if skip is not None:
        strategy = eval_frame._FrameExecStrategy(skip.SKIP, skip.SKIP)
        of_autograd = (_attention, _rms_norm, _linear)
        for function in (tensor.__torch_dispatch__.__func__, _without_tensors, _Factory.__call__, *of_autograd):
            eval_frame.set_code_exec_strategy(function.__code__, strategy)


def prepare(device: Device) -> None:
    """What a device needs before its first tensor."""
    load()
    from memtrain_cl.probe import note_short_loops

    device.check_process()
    note_short_loops(device)
    device.kept["torch_device"] = True
