"""The tensor subclass of the device "opencl": torch keeps its geometry, `operand` its bytes on the device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from memtrain_cl.device import Device, current_device, device_at
from memtrain_cl.errors import OutOfMemory
from memtrain_cl.operand import Operand, empty_operand
from memtrain_cl.torch_device.registry import RESOLVED, resolve
from memtrain_cl.torch_device.storages import DeviceStorage

#: torch's types and the names of what a device can hold.
DTYPES: dict[torch.dtype, str] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}
_OF_ELEMENT = {element: dtype for dtype, element in DTYPES.items()}
_make = Tensor._make_wrapper_subclass


def dtype_of(element: str) -> torch.dtype:
    """torch's type of an element."""
    return _OF_ELEMENT[element]


def element_of(dtype: torch.dtype) -> str:
    """The element of a torch type; TypeError names the types that a device holds."""
    element = DTYPES.get(dtype)
    if element is None:
        names = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise TypeError(f"the device 'opencl' holds {names}, got {str(dtype).removeprefix('torch.')}")
    return element


class OutOfDeviceMemory(OutOfMemory, torch.OutOfMemoryError):
    """OutOfMemory, as code that catches torch's own error expects it."""


class OpenCLTensor(Tensor):
    """A tensor on the device "opencl". Made by `wrap`; an ordinary torch.Tensor to its users."""

    operand: Operand

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        handler = RESOLVED.get(func) or resolve(func)
        result = handler(*args, **kwargs) if kwargs else handler(*args)
        if result is NotImplemented:
            from memtrain_cl.torch_device.fallback import run_on_host

            return run_on_host(func, args, kwargs or {})
        return result

    @property
    def data(self) -> Tensor:
        """As torch's: the values without their history. Assigning replaces the values and keeps the object."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        if isinstance(value, OpenCLTensor):
            self.operand = value.operand

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """As torch's. RuntimeError on other devices than opencl:0, which torch's engine does not reach."""
        if requires_grad and self.operand.device.info.index != 0:
            raise RuntimeError(
                f"torch differentiates on opencl:0 alone, got a tensor on {self.device}; choose the device that should "
                "be opencl:0 with MEMTRAIN_CL_DEVICE"
            )
        return super().requires_grad_(requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment"
            )
        if id(self) in memo:
            return memo[id(self)]
        with torch.no_grad():
            twin = self.detach().clone()
        if self.requires_grad:
            twin.requires_grad_()
        if self.grad is not None:
            twin.grad = self.grad.__deepcopy__(memo)
        twin.__dict__.update({key: value for key, value in self.__dict__.items() if key != "operand"})
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the CPU tensor of its values, so that files load anywhere."""
        host = self.detach().cpu().requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            host = torch.nn.Parameter(host, requires_grad=self.requires_grad)
        return host.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        text = repr(self.detach().cpu())
        grad = ", requires_grad=True" if self.is_leaf and self.requires_grad else ""
        if self.grad_fn is not None:
            grad = f", grad_fn=<{type(self.grad_fn).__name__}>"
        head = "Parameter containing:\n" if getattr(self, "_is_param", False) else ""
        return f"{head}{text[:-1]}, device='{self.device}'{grad})"

    def numpy(self, *, force: bool = False) -> Any:
        """TypeError unless `force`, as of any device but the host."""
        if force:
            return self.detach().cpu().numpy(force=True)
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
            "memory first."
        )

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def untyped_storage(self) -> torch.UntypedStorage:
        """What stands for the bytes on the device (see storages.py)."""
        storage: Any = super().untyped_storage()
        storage.__class__ = DeviceStorage
        storage.array = self.operand.array
        return storage  # type: ignore[no-any-return]

    def data_ptr(self) -> int:
        """A number by which tensors of the same bytes can be told, and no address."""
        return self.untyped_storage().data_ptr() + self.operand.offset * self.element_size()

    def tolist(self) -> Any:
        """As torch's; waits for the device."""
        return self.detach().cpu().tolist()

    def __format__(self, format_spec: str) -> str:
        return format(self.item(), format_spec) if self.ndim == 0 else object.__format__(self, format_spec)

    def __dlpack__(self, **options: Any) -> Any:
        """BufferError: torch would hand out a capsule without memory."""
        raise BufferError(f"a tensor on {self.device} gives no DLPack capsule; copy it to the host with .cpu() first")

    def pin_memory(self, device: Any = None) -> Any:
        """RuntimeError: only tensors of the host can be pinned."""
        raise RuntimeError(f"only dense CPU tensors can be pinned, got one on {self.device}")


_dispatch = OpenCLTensor.__torch_dispatch__


def _dispatch_in_fork(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    flat, _ = tree_flatten((args, kwargs))
    for value in flat:
        if isinstance(value, OpenCLTensor):
            value.operand.array.device.check_process()
    return _dispatch(func, types, args, kwargs)


def _forked() -> None:
    OpenCLTensor.__torch_dispatch__ = classmethod(_dispatch_in_fork)  # type: ignore[assignment]


# A worker that a DataLoader forks may hold tensors of the parent's; the driver would end it without a word.
os.register_at_fork(after_in_child=_forked)

_devices: dict[int, torch.device] = {}


def torch_device(device: Device) -> torch.device:
    """torch's name of an opened device."""
    index = device.info.index
    if index not in _devices:
        _devices[index] = torch.device("opencl", index)
    return _devices[index]


def opened(device: torch.device | None) -> Device:
    """The device that torch's name means, opened and prepared for tensors on first use."""
    home = current_device() if device is None or device.index is None else device_at(device.index)
    if "torch_device" not in home.kept:
        from memtrain_cl.torch_device.backend import prepare

        prepare(home)
    return home


def wrap(operand: Operand) -> OpenCLTensor:
    """The tensor of an operand."""
    tensor: OpenCLTensor = _make(
        OpenCLTensor,
        operand.shape,
        strides=operand.strides,
        storage_offset=operand.offset,
        dtype=_OF_ELEMENT[operand.element],
        device=torch_device(operand.array.device),
    )
    tensor.operand = operand
    return tensor


def empty(device: Device, shape: Sequence[int], dtype: torch.dtype) -> OpenCLTensor:
    """An uninitialised contiguous tensor. torch.OutOfMemoryError (and OutOfMemory) where there is no room."""
    return wrap(allocated(device, shape, element_of(dtype)))


def allocated(device: Device, shape: Sequence[int], element: str) -> Operand:
    """`empty_operand`, with the error that torch's users expect."""
    try:
        return empty_operand(device, shape, element)
    except OutOfMemory as error:
        raise OutOfDeviceMemory(str(error)) from None


def view_of(tensor: OpenCLTensor, operand: Operand) -> OpenCLTensor:
    """The tensor of a view of `tensor`: an ordinary one of an ordinary one, in inference mode too."""
    if torch.is_inference_mode_enabled() and not tensor.is_inference():
        with torch.inference_mode(False):
            return wrap(operand)
    return wrap(operand)


def adopt(tensor: OpenCLTensor, operand: Operand) -> OpenCLTensor:
    """Give `tensor` another geometry or other bytes in place, as resize_ and transpose_ do."""
    Tensor.data.__set__(tensor, view_of(tensor, operand))  # type: ignore[attr-defined]
    tensor.operand = operand
    return tensor


def same_device(*tensors: Any) -> Device:
    """The one device of all OpenCL tensors among the arguments. RuntimeError for tensors elsewhere, but CPU scalars."""
    home: Device | None = None
    for tensor in tensors:
        if isinstance(tensor, OpenCLTensor):
            device = tensor.operand.array.device
            if home is None:
                home = device
            elif device.queue is not home.queue:
                raise _apart(torch_device(home), tensor.device)
        elif isinstance(tensor, Tensor) and (tensor.ndim or tensor.device.type != "cpu"):
            raise _apart(next(t.device for t in tensors if isinstance(t, OpenCLTensor)), tensor.device)
    if home is None:
        raise RuntimeError("expected a tensor on the device 'opencl'")
    return home


def _apart(one: torch.device, other: torch.device) -> RuntimeError:
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {one} and {other}!"
    )
