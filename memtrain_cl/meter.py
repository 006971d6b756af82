"""Measuring a model at work: the bytes that autograd keeps, the bytes that live at most, and the time of a piece.

Bytes are those of memory, counted once however many tensors look at it. On "opencl" and CUDA the most that lived is
their allocators' to tell; on the host `HostMeter` sees every tensor that torch makes, and its end.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memtrain_cl.activation_store import Kept, is_parameter, root_of, unpack
from memtrain_cl.homes import operand_of

T = TypeVar("T")


def memory_name(tensor: torch.Tensor) -> tuple[int, int]:
    """(a name of the tensor's memory, good while that lives, and its bytes)."""
    operand = operand_of(tensor)
    if operand is not None:
        return id(operand.array), operand.array.nbytes
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()


def synchronize(place: torch.device) -> None:
    """Wait for a device's kernels; on the host there is nothing to wait for."""
    if place.type != "cpu":
        getattr(torch, place.type).synchronize(place)


def seconds_of(work: Callable[[], T], place: torch.device) -> tuple[float, T]:
    """The seconds that `work` takes on a device, waited for before and after, and its result."""
    synchronize(place)
    started = time.perf_counter()
    result = work()
    synchronize(place)
    return time.perf_counter() - started, result


class SavedBytes:
    """Bytes of memory that autograd was given to keep, without parameters. known: names of memory not to count.

    sizes: what was counted, by the memory's name.
    """

    def __init__(self, known: Iterable[int] = ()) -> None:
        self.nbytes = 0
        self.sizes: dict[int, int] = {}
        self._known = frozenset(known)
        # What was counted stays alive, or its place might be taken by what comes after.
        self._alive: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor where its memory is new."""
        if is_parameter(tensor, root_of(tensor)):
            return
        name, nbytes = memory_name(tensor)
        if name not in self._known and name not in self.sizes:
            self.sizes[name] = nbytes
            self._alive.append(tensor.detach())
            self.nbytes += nbytes

    def forget(self) -> None:
        """Let go of what was counted."""
        self._alive.clear()


@contextmanager
def saved_bytes() -> Iterator[SavedBytes]:
    """Counts what autograd keeps of the forward inside, which it keeps as ever.

    Hooks that are entered further in (those of a checkpoint, of `saved_activations`) take their tensors for themselves,
    and what they keep is not counted.
    """
    kept = SavedBytes()

    def pack(tensor: torch.Tensor) -> Kept:
        kept.add(tensor)
        return Kept(tensor)

    with saved_tensors_hooks(pack, unpack):
        yield kept
    kept.forget()


class Meter(Protocol):
    """Bytes of tensors on a device: those that live, and the most that lived since the meter was reset."""

    def now(self) -> int:
        """Bytes that live."""

    def peak(self) -> int:
        """The most that lived."""

    def reset(self) -> None:
        """Let the peak begin at what lives."""


class AllocatorMeter:
    """What a device's own allocator counts."""

    def __init__(self, place: torch.device) -> None:
        self._module: Any = getattr(torch, place.type)
        self._place = place

    def now(self) -> int:
        """Bytes that live."""
        return int(self._module.memory_allocated(self._place))

    def peak(self) -> int:
        """The most that lived."""
        return int(self._module.max_memory_allocated(self._place))

    def reset(self) -> None:
        """Let the peak begin at what lives."""
        self._module.reset_peak_memory_stats(self._place)


class HostMeter(TorchDispatchMode):
    """Bytes of the tensors that torch makes on the host while this mode is entered, as long as they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._living: dict[int, int] = {}
        self._now = self._peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        # What looks at memory that was there before is not new, whether this meter has seen that before or not.
        given = {memory_name(it)[0] for it in tree_leaves((args, kwargs)) if self._counts(it)}
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if self._counts(tensor) and memory_name(tensor)[0] not in given:
                self.note(tensor)
        return made

    @staticmethod
    def _counts(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.layout is torch.strided and operand_of(value) is None

    def note(self, tensor: torch.Tensor) -> None:
        """Count the memory of a tensor until it ends, unless it is counted already."""
        storage = tensor.untyped_storage()
        name = storage._cdata
        if name in self._living or not storage.nbytes():
            return
        self._living[name] = storage.nbytes()
        self._now += storage.nbytes()
        self._peak = max(self._peak, self._now)
        weakref.finalize(storage, self._end, name)

    def _end(self, name: int) -> None:
        self._now -= self._living.pop(name, 0)

    def now(self) -> int:
        """Bytes that live."""
        return self._now

    def peak(self) -> int:
        """The most that lived."""
        return self._peak

    def reset(self) -> None:
        """Let the peak begin at what lives."""
        self._peak = self._now


@contextmanager
def metered(place: torch.device) -> Iterator[Meter]:
    """The meter of a device; on the host it counts what is made inside."""
    if place.type == "cpu":
        with HostMeter() as meter:
            yield meter
        return
    allocator = AllocatorMeter(place)
    allocator.reset()
    yield allocator
