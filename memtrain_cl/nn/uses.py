"""Which training forwards of a layer still wait for their backward, also where a checkpoint runs forwards twice.

Each makes a `Use`, which its graph keeps alive and the layer knows weakly: a graph that is dropped no longer counts.
Two kinds of forward do not begin a use of their own:

- One inside a running backward repeats an earlier one (torch.utils.checkpoint, use_reentrant=False). Its graph is
  dropped when the tensors that the first one wanted to save are there, and only the first one's backward comes.
- A Function that runs its body without a graph first, and again in its own backward (use_reentrant=True, reversible
  blocks), would hide the first forward from the layer. The use of such a forward hangs on the Function's context, and
  lives as long as that does; the repetition in the Function's backward takes its place.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator

import torch
import torch.utils.checkpoint
from torch.autograd.function import FunctionCtx

from memtrain_cl.saved_tensors import in_backward

#: Where a Function's context keeps the uses of forwards that ran in it without a graph: a list of (Uses, Use).
_HIDDEN = "_memtrain_cl_uses"


class Use:
    """One forward.

    trains: its backward updates the layer.   index: its number since the layer's last update, which places it among
    the random numbers of the step.   generation: that of the weights it was computed with.   spent: its backward has
    been.   repeated: a checkpoint has run it once more.
    """

    __slots__ = ("__weakref__", "generation", "index", "repeated", "spent", "trains")

    def __init__(self, generation: int, index: int = 0, *, trains: bool = True) -> None:
        self.generation = generation
        self.index = index
        self.trains = trains
        self.spent = False
        self.repeated = False


def _running_functions() -> Iterator[tuple[str, FunctionCtx]]:
    """("forward" or "backward", context) of the autograd Functions whose code is running here, innermost first.

    Up to where a checkpoint repeats its forward for a saved tensor: the Function that asked for that runs no body.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "unpack_hook" and code.co_filename == torch.utils.checkpoint.__file__:
            return
        if code.co_name in ("forward", "backward") and code.co_argcount and code.co_varnames[0] != "self":
            context = frame.f_locals.get(code.co_varnames[0])
            if isinstance(context, FunctionCtx):
                yield code.co_name, context
        frame = frame.f_back  # type: ignore[assignment]


def _outermost_forward() -> FunctionCtx | None:
    """The context of the Function that keeps this forward out of the graph, up to a backward that runs it; or None."""
    outermost = None
    for role, context in _running_functions():
        if role == "backward":
            break
        outermost = context
    return outermost


class Uses:
    """The uses of one layer. generation: how often its weights have changed."""

    def __init__(self) -> None:
        self.generation = 0
        self._pending: list[weakref.ref[Use]] = []

    def pending(self) -> list[Use]:
        """Uses whose graph is alive, whose backward has not been, and whose weights are still there."""
        alive = [use for reference in self._pending if (use := reference()) is not None]
        alive = [use for use in alive if not use.spent and use.generation == self.generation]
        self._pending = [weakref.ref(use) for use in alive]
        return alive

    def _register(self, index: int) -> Use:
        use = Use(self.generation, index)
        self._pending.append(weakref.ref(use))
        return use

    def begin(self, first_index: int, room: int | None) -> Use:
        """The use of a new forward. first_index: the lowest number that no earlier use has.

        RuntimeError where `room` uses are pending already (None: any number may be).
        """
        pending = self.pending()
        if room is not None and len(pending) >= room:
            raise RuntimeError(
                "a counter layer was used again in training before the backward of its first use; its update needs "
                "one forward a backward (use torch.no_grad() or .eval() for forwards that do not train, reuse=True for "
                "a layer that stands in a model more than once, accumulate=k to sum the gradients of k backwards)"
            )
        return self._register(max([first_index, *(use.index + 1 for use in pending)]))

    def repeat(self, first_index: int) -> Use:
        """The use of a forward with a graph inside a backward."""
        index, counts = self._repeated(first_index)
        return self._register(index) if counts else Use(self.generation, index)

    def hide(self, first_index: int, room: int | None) -> None:
        """Note a forward without a graph, where a Function runs it that may run it again for its backward."""
        context = _outermost_forward()
        if context is None:
            return
        if in_backward():
            index, counts = self._repeated(first_index)
            use = self._register(index) if counts else Use(self.generation, index)
        else:
            use = self.begin(first_index, room)
        hidden = getattr(context, _HIDDEN, None)
        if hidden is None:
            hidden = []
            setattr(context, _HIDDEN, hidden)
        hidden.append((self, use))

    def _repeated(self, first_index: int) -> tuple[int, bool]:
        """(index of the use that a forward inside a backward repeats, whether it takes that one's place)."""
        for role, context in _running_functions():
            hidden = [use for uses, use in getattr(context, _HIDDEN, ()) if role == "backward" and uses is self]
            if hidden:
                waiting = next((use for use in hidden if not use.spent), None)
                self._require_same_weights(waiting or hidden[-1])
                if waiting is not None:
                    waiting.spent = True
                    return waiting.index, True
                return hidden[-1].index, False
        pending = self.pending()
        # Backwards come in the reverse order of forwards, so the last use that was not repeated yet is this one.
        last = max([use for use in pending if not use.repeated] or pending, key=lambda use: use.index, default=None)
        if last is None:
            return first_index, False
        last.repeated = True
        return last.index, False

    def require_current(self, use: Use) -> None:
        """RuntimeError unless a backward of this use would meet the weights of its forward, and for the first time."""
        if use.spent and use.trains:
            raise RuntimeError(
                "this counter layer has already been updated by a backward through this graph; its weights have "
                "changed, so a second backward (retain_graph=True) would be wrong; run the forward again"
            )
        self._require_same_weights(use)

    def _require_same_weights(self, use: Use) -> None:
        if use.generation != self.generation:
            raise RuntimeError(
                "the weights of this counter layer have changed since this forward, by an update or by loading a "
                "state, so its backward would be wrong; run the forward again"
            )
