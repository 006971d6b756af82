"""The cheapest way to keep a model's activations within a number of bytes: for each block in full, in few bits, or not.

Backward walks the blocks from the last to the first. While it is in block i, alive are what the blocks before i keep
and what i works on; so a set of choices needs

    max over i of  base_i + kept_0 + ... + kept_(i-1) + working_i

bytes, and after the last block's forward tail + kept_0 + ... + kept_n. Of the sets that need no more than allowed, the
one that costs the fewest seconds is found exactly, unless the fronts below grow beyond `_FRONT`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

#: What a block can do: keep all, keep it in few bits, run again.
ACTIONS = ("store", "bits", "recompute")
#: Partial sets looked at side by side; beyond, of those that keep nearly alike only the best stays.
_FRONT = 1024


@dataclass(frozen=True)
class BlockCost:
    """What was measured of a block, in bytes and seconds.

    inputs: of its arguments, where no earlier block has them.   inner: of what autograd keeps beside those.
    outputs: of what selective checkpointing keeps of a block that runs again; unsaved: of that what autograd would not
    keep.   few: of all that in few bits, None
    where that is not to be.   seconds: running it again.   bits_seconds: saving and restoring.   base: of what else is
    alive while its backward runs.
    """

    inputs: int
    inner: int
    outputs: int = 0
    unsaved: int = 0
    few: int | None = None
    seconds: float = 0.0
    bits_seconds: float = 0.0
    base: int = 0

    @property
    def actions(self) -> tuple[str, ...]:
        """What the block can do."""
        return ACTIONS if self.few is not None else ("store", "recompute")

    def kept(self, action: str) -> int:
        """Bytes until backward."""
        return {
            "store": self.inputs + self.inner,
            "bits": self.few or 0,
            "recompute": self.inputs + self.outputs,
        }[action]

    def working(self, action: str) -> int:
        """Bytes while its own backward runs, at most; what was in few bits comes back, perhaps all at once."""
        beside = {"store": 0, "bits": self.few or 0, "recompute": self.unsaved}
        return self.inputs + self.inner + beside[action]

    def cost(self, action: str) -> float:
        """Seconds more than keeping all takes."""
        return {"store": 0.0, "bits": self.bits_seconds, "recompute": self.seconds}[action]


@dataclass(frozen=True)
class Choice:
    """What each block does; the bytes that are alive at most, and the seconds that it costs."""

    actions: tuple[str, ...]
    peak: int
    seconds: float


@dataclass(frozen=True)
class _Partial:
    kept: int = 0
    peak: int = 0
    seconds: float = 0.0
    last: str = ""
    before: _Partial | None = field(default=None, repr=False)

    def actions(self) -> tuple[str, ...]:
        found: list[str] = []
        at: _Partial | None = self
        while at is not None and at.before is not None:
            found.append(at.last)
            at = at.before
        return tuple(reversed(found))


def peak_of(costs: Sequence[BlockCost], actions: Sequence[str], tail: int = 0) -> int:
    """Bytes that are alive at most."""
    kept = peak = 0
    for cost, action in zip(costs, actions, strict=True):
        peak = max(peak, cost.base + kept + cost.working(action))
        kept += cost.kept(action)
    return max(peak, tail + kept)


def cheapest(costs: Sequence[BlockCost], budget: int, tail: int = 0) -> Choice | None:
    """The choice that costs the fewest seconds with at most `budget` bytes alive; None where none is so small."""
    front = _fronts(costs, tail, budget)
    best = min(front, key=lambda one: (one.seconds, one.peak), default=None)
    return None if best is None else Choice(best.actions(), best.peak, best.seconds)


def smallest(costs: Sequence[BlockCost], tail: int = 0) -> Choice:
    """The choice with the fewest bytes alive."""
    best = min(_fronts(costs, tail, None), key=lambda one: (one.peak, one.seconds))
    return Choice(best.actions(), best.peak, best.seconds)


def _fronts(costs: Sequence[BlockCost], tail: int, budget: int | None) -> list[_Partial]:
    """Sets of choices that no other beats in bytes kept and in seconds; without a budget, in bytes kept and peak."""
    front = [_Partial()]
    for cost in costs:
        grown = []
        for one in front:
            for action in cost.actions:
                peak = max(one.peak, cost.base + one.kept + cost.working(action))
                if budget is None or peak <= budget:
                    kept, seconds = one.kept + cost.kept(action), one.seconds + cost.cost(action)
                    grown.append(_Partial(kept, peak, seconds, action, one))
        front = _undominated(grown, by_peak=budget is None)
    ended = [_Partial(one.kept, max(one.peak, tail + one.kept), one.seconds, one.last, one.before) for one in front]
    return [one for one in ended if budget is None or one.peak <= budget]


def _undominated(sets: list[_Partial], *, by_peak: bool) -> list[_Partial]:
    """Those with less of the second quantity than any that keep no more."""

    def second(one: _Partial) -> float:
        return one.peak if by_peak else one.seconds

    kept: list[_Partial] = []
    for one in sorted(sets, key=lambda it: (it.kept, second(it), it.seconds)):
        if not kept or second(one) < second(kept[-1]):
            kept.append(one)
    if len(kept) <= _FRONT:
        return kept
    step = max(1, (kept[-1].kept - kept[0].kept) // (_FRONT // 2))
    thinned = {(one.kept - kept[0].kept) // step: one for one in reversed(kept)}
    return list(thinned.values())
