"""What `memtrain_cl.recompute` puts around the regions of torch.utils.checkpoint: hooks that keep, count or time.

torch.utils.checkpoint enters two contexts, one around a region's forward, inside its own hooks, and one around the
second run. Hooks of ours in the first, further in than its own, take what autograd saves for themselves: then there is
no second run. Or they count it and hand it on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memtrain_cl.activation_store import Kept, Use, unpack
from memtrain_cl.activations import Session, saved_activations
from memtrain_cl.meter import AllocatorMeter, SavedBytes, memory_name, synchronize


def region_arguments(frame: Any) -> tuple[list[torch.Tensor], torch.device]:
    """The tensors that a region was given, and where it runs. RuntimeError unless torch.utils.checkpoint is asking."""
    while frame is not None and frame.f_globals.get("__name__") != "torch.utils.checkpoint":
        frame = frame.f_back
    if frame is None or "args" not in frame.f_locals:
        raise RuntimeError(
            "expected to be called by torch.utils.checkpoint: checkpoint(block, x, use_reentrant=False, context_fn=...)"
        )
    values = tree_leaves((frame.f_locals["args"], frame.f_locals.get("kwargs", {})))
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    places = [tensor.device for tensor in tensors if tensor.device.type != "cpu"]
    return tensors, places[0] if places else torch.device("cpu")


@dataclass
class Region:
    """What was measured of one region, in bytes and seconds; see `recompute_choice.BlockCost`.

    saves: how often autograd saved something.   peak: bytes alive at most from its second run until the next one's.
    """

    inputs: int = 0
    inner: int = 0
    outputs: int = 0
    unsaved: int = 0
    few: int = 0
    seconds: float = 0.0
    bits_seconds: float = 0.0
    saves: int = 0
    peak: int = 0


@dataclass
class Step:
    """The regions of one step's forward, in order, and the names of the memory of their inputs.

    tail_peak: bytes alive at most between the last region's forward and the first second run.
    """

    regions: list[Region] = field(default_factory=list)
    inputs: set[int] = field(default_factory=set)
    tail_peak: int = 0
    meter: AllocatorMeter | None = None
    current: Region | None = None

    def settle(self) -> None:
        """Note the peak of the phase that ends here, and begin another."""
        if self.meter is not None:
            if self.current is None:
                self.tail_peak = self.meter.peak()
            else:
                self.current.peak = self.meter.peak()
            self.meter.reset()


class _Outputs(TorchDispatchMode):
    """Counts what some operations give, which selective checkpointing keeps."""

    def __init__(self, operations: tuple[Any, ...], kept: SavedBytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations, self._kept = operations, kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in self._operations:
            for tensor in tree_leaves(made):
                if isinstance(tensor, torch.Tensor):
                    self._kept.add(tensor)
        return made


@contextlib.contextmanager
def measured_forward(
    step: Step,
    region: Region,
    inputs: list[torch.Tensor],
    place: torch.device,
    saver: saved_activations | None,
    operations: tuple[Any, ...],
) -> Iterator[None]:
    """Counts what the forward saves, in full and as `saver` would keep it, and hands it on to the checkpoint."""
    # Those of the checkpoint that is being entered, or of another context around it.
    outer_pack, outer_unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)
    few = SavedBytes(step.inputs)
    for tensor in inputs:
        name, nbytes = memory_name(tensor)
        if name not in step.inputs:
            step.inputs.add(name)
            region.inputs += nbytes
    inner, outputs = SavedBytes(step.inputs), SavedBytes(step.inputs)
    session = None if saver is None else Session(saver)
    alive: list[Kept | Use] = []
    known: set[int] = set()

    def pack(tensor: torch.Tensor) -> Any:
        region.saves += 1
        inner.add(tensor)
        if session is not None:
            synchronize(place)
            started = time.perf_counter()
            saved = session.pack(tensor)
            alive.append(saved)
            if isinstance(saved, Kept):
                few.add(tensor)
            elif id(saved.stored) not in known:
                known.add(id(saved.stored))
                few.nbytes += saved.stored.nbytes
            if not isinstance(saved, Kept):
                saved.restore()
            synchronize(place)
            region.bits_seconds += time.perf_counter() - started
        return outer_pack(tensor)

    with contextlib.ExitStack() as stack:
        stack.enter_context(saved_tensors_hooks(pack, outer_unpack))
        if session is not None:
            stack.enter_context(session.watch)
        if operations:
            stack.enter_context(_Outputs(operations, outputs))
        yield
    region.inner, region.outputs, region.few = inner.nbytes, outputs.nbytes, few.nbytes
    region.unsaved = sum(size for name, size in outputs.sizes.items() if name not in inner.sizes)
    if step.meter is not None:
        alive.clear()
        inner.forget()
        few.forget()
        outputs.forget()
        step.meter.reset()


@contextlib.contextmanager
def measured_again(step: Step, region: Region, place: torch.device, inside: Any) -> Iterator[None]:
    """Times the second run."""
    step.settle()
    step.current = region
    synchronize(place)
    started = time.perf_counter()
    try:
        with inside:
            yield
    finally:
        synchronize(place)
        region.seconds = time.perf_counter() - started


class KeepAll(saved_tensors_hooks):
    """What a region saves stays as it is, and its forward is not run again. begun: called when backward asks for it."""

    def __init__(self, begun: Callable[[], None]) -> None:
        super().__init__(Kept, noting(begun))


class KeepFew:
    """What a region saves is kept in few bits, as `saver` does it."""

    def __init__(self, saver: saved_activations, begun: Callable[[], None]) -> None:
        self._session = Session(saver, noting(begun))

    def __enter__(self) -> None:
        self._session.open()

    def __exit__(self, *error: object) -> None:
        self._session.close()


def noting(begun: Callable[[], None]) -> Callable[[Kept | Use], torch.Tensor]:
    """`unpack`, with a word about it before."""

    def restore(saved: Kept | Use) -> torch.Tensor:
        begun()
        return unpack(saved)

    return restore


@contextlib.contextmanager
def runs_again(begun: Callable[[], None], inside: Any) -> Iterator[None]:
    """A second run, with a word about it before."""
    begun()
    with inside:
        yield
