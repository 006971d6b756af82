"""Operands from torch CPU tensors and back, and results compared, for tests of launchers."""

from __future__ import annotations

from typing import Any

import torch

from memtrain_cl.array import from_numpy
from memtrain_cl.device import Device
from memtrain_cl.operand import Operand, empty_operand

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int64": torch.int64}


def same(got: Any, want: Any) -> bool:
    """Equal bytes of tensors or tuples of them; a NaN equals every other."""
    if isinstance(got, tuple):
        return all(same(a, b) for a, b in zip(got, want, strict=True))
    got, want = got.cpu(), want.cpu()
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    if got.is_floating_point():
        return torch.equal(got.nan_to_num(1.5), want.nan_to_num(1.5)) and torch.equal(got.isnan(), want.isnan())
    return torch.equal(got, want)


def element_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def operand_of(device: Device, tensor: torch.Tensor, offset: int = 0) -> Operand:
    """The tensor's elements, contiguous, behind `offset` others that are NaN or -1."""
    filler = float("nan") if tensor.is_floating_point() else -1
    flat = torch.cat([torch.full((offset,), filler, dtype=tensor.dtype), tensor.reshape(-1)])
    array = from_numpy(device, flat.view(torch.uint8).numpy())
    whole = Operand(array, tuple(flat.shape), (1,), 0, element_of(tensor))
    return whole.viewed(tensor.shape, offset=offset)


def like(device: Device, tensor: torch.Tensor, element: str | None = None) -> Operand:
    return empty_operand(device, tensor.shape, element or element_of(tensor))


def tensor_of(operand: Operand) -> torch.Tensor:
    """The elements of a contiguous operand."""
    assert operand.contiguous
    if operand.size == 0:
        return torch.empty(operand.shape, dtype=DTYPES[operand.element])
    flat = torch.from_numpy(operand.array.numpy()).view(DTYPES[operand.element])
    return flat[operand.offset : operand.offset + operand.size].reshape(operand.shape)
