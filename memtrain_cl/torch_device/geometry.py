"""What torch's own meta functions say of an operation's result: its shape, strides, offset and type, without data."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from memtrain_cl.operand import Operand
from memtrain_cl.torch_device.tensor import OpenCLTensor, dtype_of


def meta_of(operand: Operand) -> torch.Tensor:
    """A meta tensor of the operand's geometry, first element at 0."""
    return torch.empty_strided(operand.shape, operand.strides, dtype=dtype_of(operand.element), device="meta")


def meta(func: Any, args: Any, kwargs: Any = None) -> Any:
    """The result of `func` on meta tensors in place of OpenCL tensors: raises torch's own errors for bad arguments.

    A device argument must not be among the arguments.
    """
    args, kwargs = tree_map_only(OpenCLTensor, lambda tensor: meta_of(tensor.operand), (args, kwargs or {}))
    return func(*args, **kwargs)
