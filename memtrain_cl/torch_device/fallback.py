"""Operations without a kernel run on the host: correct, slow, counted and said aloud once.

Where device and host share memory the host works on the device's own bytes; elsewhere they travel both ways.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from memtrain_cl.device import Device
from memtrain_cl.errors import MemtrainError
from memtrain_cl.torch_device.registry import Handler
from memtrain_cl.torch_device.tensor import OpenCLTensor, adopt, element_of, same_device, torch_device
from memtrain_cl.torch_device.transfer import from_host, host_alias, host_copy, write_back


class FallbackRefused(MemtrainError, NotImplementedError):
    """An operation without a kernel was met in strict mode."""


class FallbackWarning(UserWarning):
    """An operation without a kernel ran on the host."""


@dataclass
class Fallback:
    """Calls of one operation that ran on the host, and the bytes of the device's tensors that they took and gave."""

    name: str
    calls: int = 0
    bytes: int = 0


_counts: dict[str, Fallback] = {}
_lock = threading.Lock()
_strict = False


def fallbacks() -> list[Fallback]:
    """What ran on the host so far in this process, most calls first."""
    with _lock:
        return sorted((Fallback(f.name, f.calls, f.bytes) for f in _counts.values()), key=lambda f: -f.calls)


def reset_fallbacks() -> None:
    """Forget the counts, and warn again of each operation."""
    with _lock:
        _counts.clear()


class strict:
    """Turn fallbacks to the host into errors (FallbackRefused), for the process: ``memtrain_cl.strict()``.

    ``strict(False)`` allows them again; ``with strict(): ...`` restores the former mode at the end.
    """

    def __init__(self, enabled: bool = True) -> None:
        global _strict
        self._before = _strict
        _strict = bool(enabled)

    def __enter__(self) -> strict:
        return self

    def __exit__(self, *exception: object) -> None:
        global _strict
        _strict = self._before


def is_strict() -> bool:
    """Whether fallbacks are errors now."""
    return _strict


def _count(name: str, nbytes: int) -> None:
    with _lock:
        entry = _counts.get(name)
        first = entry is None
        if entry is None:
            entry = _counts[name] = Fallback(name)
        entry.calls += 1
        entry.bytes += nbytes
    if first:
        warnings.warn(
            f"{name} has no OpenCL kernel for these arguments and runs on the host; memtrain_cl.fallbacks() counts "
            "such calls, memtrain_cl.strict() refuses them",
            FallbackWarning,
            stacklevel=4,
        )


def _written(func: Any, args: Any, kwargs: Any) -> set[int]:
    """Identities of the tensors that the call changes."""
    written: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
            written += value if isinstance(value, (list, tuple)) else [value]
    return {id(value) for value in written}


def run_on_host(func: Any, args: Any, kwargs: Any) -> Any:
    """The operation on CPU copies of its tensors; what it makes comes back to the device, what it changes is changed.

    FallbackRefused in strict mode.
    """
    name = str(func)
    if _strict:
        raise FallbackRefused(f"{name} has no OpenCL kernel for these arguments, and strict mode allows no fallback")
    flat, spec = tree_flatten((args, kwargs))
    guests = {id(value): value for value in flat if isinstance(value, OpenCLTensor)}
    home: Device | None = same_device(*guests.values()) if guests else None
    shared = home is not None and home.info.unified_memory
    maps: dict[int, Any] = {}
    hosts = {key: host_alias(tensor, maps) if shared else host_copy(tensor) for key, tensor in guests.items()}
    device: torch.device | None = torch_device(home) if home is not None else None
    moved = []
    for value in flat:
        if isinstance(value, torch.device) and value.type == "opencl":
            device, value = value, torch.device("cpu")
        moved.append(hosts.get(id(value), value) if isinstance(value, OpenCLTensor) else value)
    host_args, host_kwargs = tree_unflatten(moved, spec)
    try:
        results, result_spec = tree_flatten(func(*host_args, **host_kwargs))
    except NotImplementedError as error:
        raise NotImplementedError(f"{name} has no OpenCL kernel for these arguments, and none on the host") from error
    changed = _written(func, args, kwargs)
    nbytes = 0
    for key, tensor in guests.items():
        nbytes += hosts[key].nbytes
        if key in changed:
            if hosts[key].shape != tensor.shape:
                adopt(tensor, from_host(hosts[key], home).operand)
            elif not shared:
                write_back(tensor, hosts[key])
    origin = {id(host): guests[key] for key, host in hosts.items()}
    returned = []
    for value in results:
        if isinstance(value, torch.Tensor) and id(value) in origin:
            value = origin[id(value)]
        elif isinstance(value, torch.Tensor) and device is not None:
            element_of(value.dtype)
            nbytes += value.nbytes
            value = from_host(value, home or device)
        returned.append(value)
    _count(name, nbytes)
    return tree_unflatten(returned, result_spec)


def host_fallback(func: Any) -> Handler:
    """The kind that answers every operation."""

    def on_host(*args: Any, **kwargs: Any) -> Any:
        return run_on_host(func, args, kwargs)

    on_host.on_device = False  # type: ignore[attr-defined]
    return on_host
