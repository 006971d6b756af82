"""What stands in for a tensor that torch saves for backward: the tensor itself, 8-bit numbers, or codes of few bits.

Which memory a tensor lives in, and whether it is a parameter, is told here, too.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memtrain_cl.homes import operand_of
from memtrain_cl.ops.fp8 import fp8_restore
from memtrain_cl.ops.saved_rows import restore_rows, save_rows

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
        # Not the tensor itself: an output that its own node keeps would never be freed.
        self.tensor = tensor.detach()
        self.version = tensor._version

    def restore(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self.tensor.dtype} {list(self.tensor.shape)} is at version {self.tensor._version}; expected version "
                f"{self.version} instead"
            )
        return self.tensor


class Stored:
    """A matrix in fewer bits. What it was saved from is remembered, but not kept: `is_of` says whether it is that."""

    __slots__ = ("__weakref__", "codes", "dtype", "memory", "root")

    def __init__(self, matrix: torch.Tensor, codes: torch.Tensor, root: torch.Tensor) -> None:
        self.codes = codes
        self.dtype = matrix.dtype
        self.root = weakref.ref(root)
        self.memory = memory_of(root)

    def is_of(self, root: torch.Tensor) -> bool:
        """Whether `root` is the tensor that this one was saved from, and has its memory still."""
        return self.root() is root and _is_memory_of(self.memory, root)

    @property
    def nbytes(self) -> int:
        return self.codes.numel() * self.codes.element_size()

    def matrix(self) -> torch.Tensor:
        """What comes back: here wider codes, which are numbers themselves."""
        return self.codes.to(self.dtype)


class Fp8Stored(Stored):
    """8-bit floating numbers, as uint8."""

    __slots__ = ()

    def matrix(self) -> torch.Tensor:
        return fp8_restore(self.codes, FP8, dtype=self.dtype)


class RowsStored(Stored):
    """Codes of few bits, a scale a row."""

    __slots__ = ("bits", "rows", "scale")

    def __init__(self, matrix: torch.Tensor, bits: int, seed: int, root: torch.Tensor) -> None:
        codes, self.scale = save_rows(matrix, bits, seed=seed)
        super().__init__(matrix, codes, root)
        self.bits = bits
        self.rows = tuple(matrix.shape)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.scale.numel() * self.scale.element_size()

    def matrix(self) -> torch.Tensor:
        return restore_rows(self.codes, self.scale, self.bits, self.rows, dtype=self.dtype)


class Use:
    """One save of a stored tensor: it comes back in the shape and the order of dimensions that were saved."""

    __slots__ = ("order", "shape", "stored")

    def __init__(self, stored: Stored, shape: tuple[int, ...], order: tuple[int, ...] | None) -> None:
        self.stored = stored
        self.shape = shape
        self.order = order

    def restore(self) -> torch.Tensor:
        matrix = self.stored.matrix()
        if self.order is None:
            return matrix.view(self.shape)
        ordered = matrix.view([self.shape[dim] for dim in self.order])
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
