"""The name "opencl" in torch: registered on import at little cost, never in the way, the device that was asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch

import memtrain_cl
from memtrain_cl import _autoload
from memtrain_cl.device import Device, devices
from memtrain_cl.errors import UnsupportedDevice
from memtrain_cl.torch_device import backend
from memtrain_cl.torch_device.tensor import OpenCLTensor, torch_device
from tests.torch_cases import on, same, values


def child(code: str, **environment: str) -> Any:
    """What a fresh interpreter prints as JSON."""
    kept = {key: value for key, value in os.environ.items() if key not in ("MEMTRAIN_CL_DEVICE", "PYOPENCL_CTX")}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**kept, **environment}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# ---- registration ----


@pytest.mark.skipif(_autoload.has_own_gpu(), reason="a torch with support for a GPU keeps that as its accelerator")
def test_torch_finds_the_device_by_itself() -> None:
    (entry,) = entry_points(group="torch.backends", name="opencl")
    assert entry.value == "memtrain_cl._autoload:register"
    code = """
import json, sys, torch
print(json.dumps({
    "device": str(torch.device("opencl:0")), "module": hasattr(torch, "opencl"),
    "opened": "pyopencl" in sys.modules,
}))
"""
    assert child(code) == {"device": "opencl:0", "module": True, "opened": False}


def test_the_device_can_be_left_out() -> None:
    code = """
import json, torch
before = hasattr(torch, "opencl")
import memtrain_cl
lazy = hasattr(torch, "opencl")
import memtrain_cl.torch_device
print(json.dumps([before, lazy, hasattr(torch, "opencl")]))
"""
    assert child(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == [False, False, True]


def test_registration_loads_little() -> None:
    """What makes torch's import slow is what is loaded with it: no driver, no kernels, no table of operations."""
    code = """
import json, sys, torch
import memtrain_cl._autoload
memtrain_cl._autoload.register()
heavy = {"pyopencl", "mako", "memtrain_cl.program", "memtrain_cl.torch_device.registry"} & set(sys.modules)
print(json.dumps([hasattr(torch, "opencl"), sorted(heavy)]))
"""
    assert child(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == [not _autoload.has_own_gpu(), []]


def test_a_name_that_is_taken_stays_so() -> None:
    code = """
import json, torch
torch.utils.rename_privateuse1_backend("other")
import memtrain_cl._autoload
memtrain_cl._autoload.register()
try:
    import memtrain_cl.torch_device
    said = ""
except memtrain_cl.UnsupportedDevice as error:
    said = str(error)
print(json.dumps([said, len(memtrain_cl.devices()) >= 0]))
"""
    said, listed = child(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert said == "torch has room for one device of others, and this process gave it to 'other'"
    assert listed


def test_a_torch_that_is_too_old_is_named() -> None:
    code = """
import json, torch
import torch.utils.backend_registration as registration
del registration._setup_privateuseone_for_python_backend
import memtrain_cl._autoload
memtrain_cl._autoload.register()
try:
    import memtrain_cl.torch_device
    said = ""
except memtrain_cl.UnsupportedDevice as error:
    said = str(error)
print(json.dumps(said))
"""
    said = child(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert said == f"the device 'opencl' needs torch 2.10 or newer, got {torch.__version__}; everything else works"


def test_autoload_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_autoload, "has_own_gpu", lambda: 1 / 0)
    _autoload.register()
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "memtrain_cl.torch_device", None)
    _autoload.register()


def test_refusals_are_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_registered", False)
    monkeypatch.setattr(backend, "_refusal", "no reason")
    backend.register()
    with pytest.raises(UnsupportedDevice, match="no reason"):
        backend.require_registered()


# ---- which device ----

_ORDER = """
import json
from memtrain_cl.device import choose, devices, put_first
put_first({selector!r})
print(json.dumps([[info.label for info in devices()], [info.index for info in devices()], choose()[0].label]))
"""
_TENSOR = """
import json, torch, memtrain_cl.torch_device
x = torch.zeros(2, device="opencl")
print(json.dumps([x.operand.device.info.label, x.device.index, torch.opencl.device_count()]))
"""


@pytest.mark.device
def test_the_device_that_is_named_is_the_first() -> None:
    labels, indices, chosen = child(_ORDER.format(selector=0))
    assert labels[0] == chosen
    assert indices == list(range(len(labels)))
    last = labels[-1]
    # A name moves its device to the front; an index means the list as it is.
    named, numbers, chosen = child(_ORDER.format(selector=0), MEMTRAIN_CL_DEVICE=last)
    assert named[0] == chosen == last
    assert sorted(named) == sorted(labels)
    assert numbers == indices
    assert child(_ORDER.format(selector=0), MEMTRAIN_CL_DEVICE=str(indices[-1]))[0] == labels
    assert child(_ORDER.format(selector=indices[-1]))[0] == [last, *labels[:-1]]
    assert child(_TENSOR, MEMTRAIN_CL_DEVICE=last) == [last, 0, len(labels)]


def test_devices_have_names_and_numbers(device: Device) -> None:
    opencl: Any = torch.opencl  # type: ignore[attr-defined]
    index = device.info.index
    assert opencl.is_available()
    assert opencl.device_count() == len(devices())
    assert opencl.get_device_name(index) == device.info.name
    assert opencl.get_device_name(f"opencl:{index}") == device.info.name
    assert opencl.get_device_properties(index) == devices()[index]
    assert opencl.current_device() == index
    with opencl.device(index):
        assert torch.zeros(1, device="opencl").device.index == index
    with pytest.raises(ValueError, match="type 'opencl'"):
        opencl.get_device_name("cpu")
    with pytest.raises(UnsupportedDevice, match="got 99"):
        torch.zeros(1, device="opencl:99")
    with pytest.raises(RuntimeError, match="autocast"), torch.autocast("opencl", torch.bfloat16):
        pass
    opencl.synchronize()


def test_a_tensor_is_an_ordinary_one(device: Device) -> None:
    x = on(device, values(torch.float32, 3, 4))
    assert isinstance(x, torch.Tensor)
    assert type(x) is OpenCLTensor
    assert x.device == torch_device(device)
    assert x.device.type == "opencl"
    assert not x.is_cpu
    assert not x.is_cuda
    assert not x.is_sparse
    assert x.get_device() == device.info.index
    assert x.layout == torch.strided
    assert x.element_size() == 4
    assert x.nbytes == 48
    assert x.dim() == 2
    assert torch.is_tensor(x)
    assert x.type() == "torch.opencl.FloatTensor"


def test_what_is_shown(device: Device) -> None:
    name = f"device='opencl:{device.info.index}'"
    x = on(device, torch.tensor([[1.0, 2.5], [-3.0, 0.0]]))
    lines = f"tensor([[ 1.0000,  2.5000],\n        [-3.0000,  0.0000]], {name})"
    assert repr(x) == lines
    assert str(x) == lines
    assert f"{x[0, 1]:.2f}" == "2.50"
    assert repr(on(device, torch.tensor(3))) == f"tensor(3, {name})"
    assert repr(on(device, torch.empty(0, 2))) == f"tensor([], size=(0, 2), {name})"
    assert repr(on(device, torch.tensor([1, 2], dtype=torch.int8))) == f"tensor([1, 2], dtype=torch.int8, {name})"
    assert "..." in repr(torch.zeros(5000, device=torch_device(device)))
    if device.info.index == 0:
        leaf = on(device, torch.tensor([1.0])).requires_grad_()
        assert repr(leaf) == f"tensor([1.], {name}, requires_grad=True)"
        assert repr(leaf * 2) == f"tensor([2.], {name}, grad_fn=<MulBackward0>)"
        assert repr(torch.nn.Parameter(leaf.detach())).startswith("Parameter containing:\ntensor([1.], device=")


def test_gradients_are_for_the_first_device(device: Device) -> None:
    x = on(device, values(torch.float32, 3))
    if device.info.index == 0:
        assert x.requires_grad_().requires_grad
    else:
        with pytest.raises(RuntimeError, match=r"differentiates on opencl:0 alone, .*MEMTRAIN_CL_DEVICE"):
            x.requires_grad_()
        assert not x.requires_grad_(False).requires_grad


def test_errors_in_a_backward_are_the_operation_s_own(device: Device) -> None:
    if device.info.index:
        pytest.skip("torch differentiates on opencl:0 alone")

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0].view(99)

    leaf = on(device, values(torch.float32, 3)).requires_grad_()
    with pytest.raises(RuntimeError, match=r"shape '\[99\]' is invalid"):
        Broken.apply(leaf).sum().backward()  # type: ignore[no-untyped-call]
    (leaf * 2).sum().backward()
    assert leaf.grad is not None
    same(leaf.grad, torch.full((3,), 2.0))


# ---- the host in place of kernels ----


def _without_kernel(x: torch.Tensor) -> torch.Tensor:
    return torch.special.bessel_j0(x)  # type: ignore[no-any-return]


def test_what_has_no_kernel_runs_on_the_host_and_is_counted(device: Device) -> None:
    memtrain_cl.reset_fallbacks()
    x = values(torch.float32, 5, 7)
    moved = on(device, x)
    with pytest.warns(memtrain_cl.torch_device.fallback.FallbackWarning, match=r"special_bessel_j0.*runs on the host"):
        same(_without_kernel(moved), _without_kernel(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(_without_kernel(moved.t()), _without_kernel(x.t()))
        same(_without_kernel(moved[1:, 2:]), _without_kernel(x[1:, 2:].clone()))
        same(moved, x)
    (row,) = memtrain_cl.fallbacks()
    assert (row.name, row.calls) == ("aten.special_bessel_j0.default", 3)
    assert row.bytes == 2 * (35 + 35 + 20) * 4
    row.calls = 99
    assert memtrain_cl.fallbacks()[0].calls == 3
    memtrain_cl.reset_fallbacks()
    assert memtrain_cl.fallbacks() == []


def test_the_host_changes_and_fills_the_device_s_tensors(device: Device, discrete: Device) -> None:
    for home in (device, discrete):
        x = values(torch.float32, 4, 6)
        moved = on(home, x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for tensor in (x, moved):
                tensor[:, ::2].digamma_()
                out = torch.empty(0, device=tensor.device)
                torch.special.bessel_j0(tensor, out=out)
                tensor.copy_(out)
        torch.testing.assert_close(moved.cpu(), x, equal_nan=True)
    memtrain_cl.reset_fallbacks()


def test_strict_mode_refuses_the_host(device: Device) -> None:
    x = on(device, values(torch.float32, 3))
    refused = pytest.raises(NotImplementedError, match=r"special_bessel_j0.*strict mode")
    with memtrain_cl.strict():
        with refused:
            _without_kernel(x)
        with memtrain_cl.strict(False), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _without_kernel(x)
        with pytest.raises(memtrain_cl.errors.MemtrainError):
            _without_kernel(x)
    switch = memtrain_cl.strict()
    with pytest.raises(NotImplementedError, match="strict mode"):
        _without_kernel(x)
    switch.__exit__()
    memtrain_cl.strict(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _without_kernel(x)
    memtrain_cl.reset_fallbacks()
