"""What stands in for a tensor that torch saves for backward: the tensor itself, 8-bit numbers, or codes of few bits.

Which memory a tensor lives in, and whether it is a parameter, is told here, too.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memtrain_cl.errors import OutOfMemory
from memtrain_cl.homes import operand_of
from memtrain_cl.operand import Operand
from memtrain_cl.ops.fp8 import fp8_restore
from memtrain_cl.ops.saved_rows import restore_operand, restore_rows, save_operand, save_rows

#: The 8-bit type of activations: the one with more bits for the mantissa.
FP8 = "float8_e4m3fn"

#: Nodes of the graph behind which a parameter is still the parameter: views of it, and casts.
_SAME_VALUES = frozenset(
    f"{name}Backward0"
    for name in ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias", "Unsqueeze", "ToCopy")
)


class Kept:
    """A tensor that was left as it is. Torch does not watch over what hooks keep, so the version is checked here."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Not an output itself: one that its own node keeps would never be freed.
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self.version = tensor._version

    def restore(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self.tensor.dtype} {list(self.tensor.shape)} is at version {self.tensor._version}; expected version "
                f"{self.version} instead"
            )
        return self.tensor


class Stored(ABC):
    """A matrix in fewer bits. What it was saved from is remembered, but not kept: `is_of` says whether it is that."""

    __slots__ = ("__weakref__", "dtype", "memory", "root")

    def __init__(self, dtype: torch.dtype, root: torch.Tensor) -> None:
        self.dtype = dtype
        self.root = weakref.ref(root)
        self.memory = memory_of(root)

    def is_of(self, root: torch.Tensor) -> bool:
        """Whether `root` is the tensor that this one was saved from, and has its memory still."""
        return self.root() is root and _is_memory_of(self.memory, root)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that are kept."""

    @abstractmethod
    def restored(self, shape: Sequence[int]) -> torch.Tensor:
        """What comes back, contiguous, in a shape of as many elements."""


class NarrowStored(Stored):
    """Numbers of a floating type of fewer bits."""

    __slots__ = ("numbers",)

    def __init__(self, dtype: torch.dtype, numbers: torch.Tensor, root: torch.Tensor) -> None:
        super().__init__(dtype, root)
        self.numbers = numbers

    @property
    def nbytes(self) -> int:
        return self.numbers.numel() * self.numbers.element_size()

    def restored(self, shape: Sequence[int]) -> torch.Tensor:
        return self.numbers.to(self.dtype).view(shape)


class Fp8Stored(NarrowStored):
    """8-bit floating numbers, as uint8."""

    __slots__ = ()

    def restored(self, shape: Sequence[int]) -> torch.Tensor:
        return fp8_restore(self.numbers, FP8, dtype=self.dtype).view(shape)


class RowsStored(Stored):
    """Codes of few bits, a scale a row."""

    __slots__ = ("bits", "codes", "rows", "scale")

    def __init__(self, matrix: torch.Tensor, bits: int, seed: int, root: torch.Tensor) -> None:
        super().__init__(matrix.dtype, root)
        self.codes, self.scale = save_rows(matrix, bits, seed=seed)
        self.bits = bits
        self.rows = tuple(matrix.shape)

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.codes, self.scale))

    def restored(self, shape: Sequence[int]) -> torch.Tensor:
        return restore_rows(self.codes, self.scale, self.bits, self.rows, dtype=self.dtype).view(shape)


class OperandStored(Stored):
    """The same of a tensor on "opencl", without the tensors that codes, scale and views of them would be: these cost
    the host more than the kernels cost the device.
    """

    __slots__ = ("bits", "codes", "element", "rows", "scale")

    def __init__(self, matrix: Operand, dtype: torch.dtype, bits: int, seed: int, root: torch.Tensor) -> None:
        from memtrain_cl.torch_device.tensor import OutOfDeviceMemory

        super().__init__(dtype, root)
        self.bits, self.rows, self.element = bits, matrix.shape, matrix.element
        try:
            self.codes, self.scale = save_operand(matrix, bits, seed=seed)
        except OutOfMemory as error:
            raise OutOfDeviceMemory(str(error)) from None

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def restored(self, shape: Sequence[int]) -> torch.Tensor:
        from memtrain_cl.torch_device.tensor import allocated, wrap

        result = allocated(self.codes.device, shape, self.element)
        restore_operand(self.codes, self.scale, result.viewed(self.rows), bits=self.bits)
        return wrap(result)


class Use:
    """One save of a stored tensor: it comes back in the shape and the order of dimensions that were saved."""

    __slots__ = ("order", "shape", "stored")

    def __init__(self, stored: Stored, shape: tuple[int, ...], order: tuple[int, ...] | None) -> None:
        self.stored = stored
        self.shape = shape
        self.order = order

    def restore(self) -> torch.Tensor:
        if self.order is None:
            return self.stored.restored(self.shape)
        ordered = self.stored.restored([self.shape[dim] for dim in self.order])
        return ordered.permute([self.order.index(dim) for dim in range(len(self.order))])


def memory_of(tensor: torch.Tensor) -> Any:
    """A weak reference to a tensor's memory, whose place no other memory takes as long as the reference is there."""
    operand = operand_of(tensor)
    return StorageWeakRef(tensor.untyped_storage()) if operand is None else weakref.ref(operand.array)


def _is_memory_of(reference: Any, tensor: torch.Tensor) -> bool:
    operand = operand_of(tensor)
    if operand is None:
        return bool(reference == StorageWeakRef(tensor.untyped_storage()))
    return reference() is operand.array


def root_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that this one is a view of, or itself."""
    base = tensor._base
    return tensor if base is None else base


def is_parameter(tensor: torch.Tensor, root: torch.Tensor) -> bool:
    """Whether it is a parameter or another leaf that requires grad, a view of one, or one in another type."""
    if any(isinstance(it, torch.nn.Parameter) or (it.is_leaf and it.requires_grad) for it in (tensor, root)):
        return True
    node = tensor.grad_fn
    while node is not None and node.name() in _SAME_VALUES:
        node = node.next_functions[0][0]
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


def order_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The order of dimensions, the last one last, in which the tensor is contiguous; None where it is so already, or
    in no such order.
    """
    if tensor.is_contiguous():
        return None
    last = tensor.ndim - 1
    strides = tensor.stride()
    order = (*sorted(range(last), key=lambda dim: (-strides[dim], dim)), last)
    return order if tensor.permute(order).is_contiguous() else None


def unpack(saved: Kept | Use) -> torch.Tensor:
    """The tensor again."""
    return saved.restore()
