"""share(): move tensors into memory that torch and OpenCL both work on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from memtrain_cl.device import get_device
from memtrain_cl.homes import operand_of
from memtrain_cl.sharing.cuda import shared_pool

Shareable = TypeVar("Shareable", bound="torch.Tensor | nn.Module | torch.optim.Optimizer")


def share(obj: Shareable) -> Shareable:
    """Move a CUDA tensor's memory to where OpenCL kernels work on it in place; returns `obj`.

    obj: a tensor (its gradient comes along), a module (its parameters, gradients and buffers), or an optimizer (its
    parameters, their gradients and every tensor of its state). The tensor objects stay, so do types and values; tensors
    become contiguous, except that tensors that together fill one storage keep their strides and go on sharing it. What
    is shared already stays where it is. Tensors that another API took, such as a view held elsewhere, are not followed.
    Gradients and state that torch makes anew afterwards are ordinary CUDA memory: share again, or keep them
    (``zero_grad(set_to_none=False)``).

    Nothing is to be done for tensors of the device "opencl", and for host tensors of a device that shares the host's
    memory: they are used in place as they are. Host tensors among CUDA ones (AdamW's step) are left alone.

    Raises TypeError for other objects and for tensors of other layouts or devices; ValueError for host tensors of a
    device with memory of its own, and for a tensor that is only a part of a storage; UnsupportedDevice, saying what is
    missing, where the CUDA device has no OpenCL partner that takes its memory.
    """
    owned, copied = _tensors(obj)
    for tensor in (*owned, *copied):
        _require_known(tensor)
    if owned and all(tensor.device.type == "cpu" for tensor in (*owned, *copied)):
        info = get_device().info
        if not info.unified_memory:
            raise ValueError(f"expected tensors on CUDA, got host tensors, and {info.name} has memory of its own")
    for group in _by_storage(filter(_moves, owned)):
        _move_storage(group)
    for tensor in filter(_moves, copied):
        _move(tensor)
    return obj


def _moves(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda" and shared_pool(tensor.device).find(tensor) is None


def _tensors(obj: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(tensors that own their memory, tensors that count by their values: gradients and state), none of them twice."""
    if isinstance(obj, torch.Tensor):
        owned = [obj]
        copied: list[torch.Tensor] = []
    elif isinstance(obj, nn.Module):
        owned = [*obj.parameters(), *obj.buffers()]
        copied = []
    elif isinstance(obj, torch.optim.Optimizer):
        owned = [parameter for group in obj.param_groups for parameter in group["params"]]
        copied = [tensor for state in obj.state.values() for tensor in _inside(state)]
    else:
        raise TypeError(f"expected a tensor, a module or an optimizer, got {type(obj).__name__}")
    copied += [tensor.grad for tensor in owned if tensor.is_leaf and tensor.grad is not None]
    return list({id(it): it for it in owned}.values()), list({id(it): it for it in copied}.values())


def _inside(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _inside(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _inside(item)


def _require_known(tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise TypeError(f"expected dense tensors, got one of layout {tensor.layout}")
    if tensor.device.type not in ("cpu", "cuda") and operand_of(tensor) is None:
        raise TypeError(f"expected tensors on CUDA, on the CPU or on the device opencl, got one on {tensor.device}")


def _by_storage(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
    for tensor in tensors:
        # An empty storage has no address to be told by, and nothing to share.
        if tensor.numel():
            groups.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), []).append(tensor)
    return list(groups.values())


def _move(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        home = shared_pool(tensor.device).empty(tensor.shape, tensor.dtype)
        home.copy_(tensor)
        tensor.data = home


def _move_storage(group: list[torch.Tensor]) -> None:
    """Move tensors that are all of one storage."""
    first = group[0]
    pool = shared_pool(first.device)
    storage = first.untyped_storage()
    _require_whole(group, storage.nbytes())
    if len(group) == 1:
        _move(first)
        return
    with torch.no_grad():
        flat = torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage)
        home = pool.empty(flat.shape, torch.uint8)
        home.copy_(flat)
        for tensor in group:
            moved = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            moved.set_(home.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
            tensor.data = moved


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """(first, last + 1) byte of its storage that a tensor with elements uses."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset()) * tensor.element_size()
    return first, first + (last + 1) * tensor.element_size()


def _require_whole(group: list[torch.Tensor], nbytes: int) -> None:
    """ValueError when memory outside the tensors hangs on their storage: whoever uses it would lose them."""
    reached = 0
    for first, end in sorted(map(_span, group)):
        if first > reached:
            break
        reached = max(reached, end)
    if reached < nbytes:
        raise ValueError(
            f"expected tensors that fill their storage of {nbytes} bytes, got a part of it; share the whole, or a clone"
        )
