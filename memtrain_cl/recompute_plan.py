"""What each block of a model does with its activations: keep them, keep them in few bits, or compute them again.

`recompute` is a `context_fn` for torch.utils.checkpoint, whose engine does the second runs; a block that keeps what it
computed is one whose hooks take it before the checkpoint's see it. What a block costs is measured on the device in use.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from memtrain_cl.activations import saved_activations
from memtrain_cl.formats import check_bits
from memtrain_cl.meter import AllocatorMeter
from memtrain_cl.recompute_choice import ACTIONS, BlockCost, cheapest, peak_of, smallest
from memtrain_cl.recompute_policy import SelectiveRecomputePolicy
from memtrain_cl.recompute_regions import (
    KeepAll,
    KeepFew,
    Region,
    Step,
    measured_again,
    measured_forward,
    region_arguments,
    runs_again,
)
from memtrain_cl.saved_tensors import in_backward

#: The first step builds kernels; what the second one takes is measured.
_MEASURED = 2

Policy = str | Sequence[str | bool] | SelectiveRecomputePolicy


@dataclass(frozen=True)
class BlockPlan:
    """What a block does ("store", "bits" or "recompute"), what that was chosen by (None: not measured), and why."""

    index: int
    action: str
    cost: BlockCost | None
    reason: str


class BudgetTooSmall(ValueError):
    """No set of choices needs so little. least: the bytes of the smallest."""

    def __init__(self, message: str, least: int) -> None:
        super().__init__(message)
        self.least = least


class recompute:
    """Activations of a model's blocks within a budget, as a context_fn for torch.utils.checkpoint:

        plan = recompute(budget_bytes=200 << 20, bits=4)
        ...
            x = checkpoint(block, x, use_reentrant=False, context_fn=plan)    # in the model, for every block
        ...
        print(plan)     # after two steps: what each block does, by which numbers, and why

    Give one of three:

    budget_bytes: bytes that blocks may have alive, all together. Those are their inputs and what autograd keeps until
    backward, and in backward what a block works on. The cheapest set of choices that fits is taken.
    limit_bytes: bytes that the device's allocator may have alive at all, weights and working memory included, on
    "opencl" or CUDA. Chosen likewise, by the peaks that the allocator counted (whose statistics are reset meanwhile).
    policy: "store", "bits" or "recompute" for all blocks; a sequence with one of these, or a bool, a block (True:
    recompute); or a `SelectiveRecomputePolicy`, whose memory_value_per_byte is in seconds here, as costs are measured.

    bits: blocks may keep their activations in this many bits, as `saved_activations(bits)` does. None: they may not.
    save: operations (such as torch.ops.aten.mm.default) whose results a block keeps that is run again; the second run
    does not compute them (torch's selective checkpointing).   seed: of the rounding to few bits.

    The first two steps recompute everything; the second is measured: bytes, the time of each second run, and the time
    of saving and restoring in few bits. A step ends when the first block's forward follows a backward; blocks count
    from there in the order of their forwards. A forward under no_grad, or within a backward, does not count. Blocks
    beyond those of the measured step are recomputed.

    Raises BudgetTooSmall, a ValueError, at the third step's begin, with the smallest that can be met.
    Warns where hooks in a block keep what the checkpoint was to recompute, so that nothing is saved.
    """

    def __init__(
        self,
        *,
        budget_bytes: int | None = None,
        limit_bytes: int | None = None,
        policy: Policy | None = None,
        bits: int | None = None,
        save: Sequence[Any] = (),
        seed: int = 0,
    ) -> None:
        given = {"budget_bytes": budget_bytes, "limit_bytes": limit_bytes, "policy": policy}
        names = [name for name, value in given.items() if value is not None]
        if len(names) != 1:
            raise ValueError(
                f"expected one of budget_bytes, limit_bytes and policy, got {' and '.join(names) or 'none'}"
            )
        for name, value in (("budget_bytes", budget_bytes), ("limit_bytes", limit_bytes)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"expected {name} as an integer >= 1, got {value!r}")
        for operation in save:
            if not isinstance(operation, torch._ops.OpOverload):
                raise TypeError(f"expected save as operations such as torch.ops.aten.mm.default, got {operation!r}")
        self.budget_bytes, self.limit_bytes, self.bits = budget_bytes, limit_bytes, bits
        self.save = tuple(save)
        self._saver = saved_activations(8 if bits is None else check_bits(bits), seed)
        self._policy = policy
        self._fixed = _fixed(policy, bits)
        #: What each block does, once it is decided.
        self.blocks: tuple[BlockPlan, ...] = ()
        #: Bytes of the chosen set at most, as `budget_bytes` or `limit_bytes` counts them; 0 where neither is.
        self.peak_bytes = 0
        self._decided = self._fixed is not None
        self._steps, self._index = 1, 0
        self._begun = False
        self._step = Step()

    # ---- what torch asks --------------------------------------------------------------------------------------------

    def __call__(self) -> tuple[Any, Any]:
        """The contexts around a region's forward and its second run."""
        if not torch.is_grad_enabled() or in_backward():
            return contextlib.nullcontext(), contextlib.nullcontext()
        inputs, place = region_arguments(sys._getframe(1))
        if self._begun:
            self._next_step()
        index, self._index = self._index, self._index + 1
        return self._decision(index) if self._decided else self._observed(index, inputs, place)

    def reseed(self, seed: int) -> None:
        """Let the rounding to few bits go on from a seed, so that a run that is resumed rounds as one that ran on."""
        self._saver.reseed(seed)

    def _began(self) -> None:
        self._begun = True

    def _again(self) -> tuple[Any, Any]:
        """Torch's contexts of a region that runs again."""
        if not self.save:
            return contextlib.nullcontext(), contextlib.nullcontext()
        forward, again = create_selective_checkpoint_contexts(list(self.save))
        return forward, again

    def _decision(self, index: int) -> tuple[Any, Any]:
        action = self._action(index)
        if action == "store":
            return KeepAll(self._began), contextlib.nullcontext()
        if action == "bits":
            return KeepFew(self._saver, self._began), contextlib.nullcontext()
        forward, again = self._again()
        return forward, runs_again(self._began, again)

    def _action(self, index: int) -> str:
        if self._fixed is None:
            return self.blocks[index].action if index < len(self.blocks) else "recompute"
        if isinstance(self._fixed, str):
            return self._fixed
        if index >= len(self._fixed):
            raise ValueError(f"expected a policy for every block of a step, got {len(self._fixed)} and one more block")
        return self._fixed[index]

    # ---- measuring --------------------------------------------------------------------------------------------------

    def _observed(self, index: int, inputs: list[torch.Tensor], place: torch.device) -> tuple[Any, Any]:
        step, region = self._step, Region()
        if index == 0 and self.limit_bytes is not None:
            if place.type == "cpu":
                raise ValueError(
                    "expected limit_bytes on a device with an allocator of its own, got tensors of the host"
                )
            step.meter = AllocatorMeter(place)
        step.regions.append(region)
        saver = self._saver if self.bits is not None and self._steps == _MEASURED else None
        forward, again = self._again()
        measured = measured_forward(step, region, inputs, place, saver, self.save)
        return _both(forward, measured), runs_again(self._began, measured_again(step, region, place, again))

    def _next_step(self) -> None:
        self._begun, self._index = False, 0
        if self._decided:
            return
        self._step.settle()
        for index, region in enumerate(self._step.regions):
            if not region.saves and self._steps == 1:
                warnings.warn(
                    f"nothing of block {index} is recomputed: it saves nothing, or hooks in it keep what it saves; "
                    "leave those away, or put them around the checkpoint",
                    RuntimeWarning,
                    stacklevel=3,
                )
        if self._steps < _MEASURED:
            self._steps += 1
        else:
            self._decide(self._step)
            self._decided = True
        self._step = Step()

    def _decide(self, step: Step) -> None:
        costs = [
            BlockCost(
                inputs=region.inputs,
                inner=region.inner,
                outputs=region.outputs,
                unsaved=region.unsaved,
                few=None if self.bits is None else region.few,
                seconds=region.seconds,
                bits_seconds=region.bits_seconds,
            )
            for region in step.regions
        ]
        if isinstance(self._policy, SelectiveRecomputePolicy):
            self.blocks = tuple(_by_price(index, cost, self._policy) for index, cost in enumerate(costs))
            return
        name, allowed, tail = "budget_bytes", self.budget_bytes, 0
        if self.limit_bytes is not None:
            name, allowed = "limit_bytes", self.limit_bytes
            costs, tail = _beside_others(costs, step)
        choice = cheapest(costs, allowed or 0, tail)
        # The steps that were measured have recomputed everything, and must have met a limit, too.
        least = peak_of(costs, ["recompute"] * len(costs), tail) if self.limit_bytes else smallest(costs, tail).peak
        if choice is None or least > (allowed or 0):
            raise BudgetTooSmall(
                f"expected {name} of at least {least}, the smallest that {len(costs)} blocks can meet, got {allowed}",
                least,
            )
        self.peak_bytes = choice.peak
        self.blocks = tuple(
            BlockPlan(index, action, cost, f"in the cheapest set within {allowed} bytes")
            for index, (action, cost) in enumerate(zip(choice.actions, costs, strict=True))
        )

    # ---- what it tells ----------------------------------------------------------------------------------------------

    @property
    def decided(self) -> bool:
        """Whether it is settled what each block does."""
        return self._decided

    @property
    def actions(self) -> tuple[str, ...]:
        """What each block does, once that was chosen by measurement."""
        return tuple(block.action for block in self.blocks)

    def __str__(self) -> str:
        if not self.blocks:
            return "not measured yet" if self._fixed is None else f"as told: {self._fixed}"
        rows = [("block", "does", "in full", "in few bits", "inputs", "again", "few bits", "why")]
        for block in self.blocks:
            cost = block.cost
            if cost is None:
                rows.append((str(block.index), block.action, "", "", "", "", "", block.reason))
                continue
            few = f"{cost.kept('bits'):,}" if cost.few is not None else ""
            few_time = f"{cost.bits_seconds * 1e3:.2f} ms" if cost.few is not None else ""
            rows.append(
                (
                    str(block.index),
                    block.action,
                    f"{cost.kept('store'):,}",
                    few,
                    f"{cost.kept('recompute'):,}",
                    f"{cost.seconds * 1e3:.2f} ms",
                    few_time,
                    block.reason,
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join(
            "  ".join(cell.ljust(width) if at in (1, 7) else cell.rjust(width) for at, (cell, width) in cells).rstrip()
            for cells in (list(enumerate(zip(row, widths, strict=True))) for row in rows)
        )


def _fixed(policy: Policy | None, bits: int | None) -> str | tuple[str, ...] | None:
    """What a policy says without measurements; None where it needs them."""
    if policy is None or isinstance(policy, SelectiveRecomputePolicy):
        return None
    if not isinstance(policy, (str, Sequence)):
        raise TypeError(
            "expected policy as an action, a sequence of them or a SelectiveRecomputePolicy, "
            f"got {type(policy).__name__}"
        )
    given = (policy,) if isinstance(policy, str) else policy
    actions = tuple(("store", "recompute")[one] if isinstance(one, bool) else one for one in given)
    for action in actions:
        if action not in ACTIONS:
            raise ValueError(f"expected what a block does as one of {', '.join(ACTIONS)}, got {action!r}")
        if action == "bits" and bits is None:
            raise ValueError("expected bits beside the action 'bits', got None")
    return actions[0] if isinstance(policy, str) else actions


def _by_price(index: int, cost: BlockCost, policy: SelectiveRecomputePolicy) -> BlockPlan:
    """The action with the largest net benefit over keeping all, in seconds."""
    worth = {
        action: policy.memory_value_per_byte * (cost.kept("store") - cost.kept(action)) - cost.cost(action)
        for action in cost.actions
    }
    action = max(cost.actions, key=lambda one: worth[one])
    reason = ", ".join(f"{one} {value:+.3g}" for one, value in worth.items())
    return BlockPlan(index, action, cost, f"net seconds: {reason}")


def _beside_others(costs: list[BlockCost], step: Step) -> tuple[list[BlockCost], int]:
    """The costs with what else was alive in each block's phase, and the same of the phase before them all."""
    kept, found = 0, []
    for cost, region in zip(costs, step.regions, strict=True):
        found.append(replace(cost, base=max(0, region.peak - kept - cost.working("recompute"))))
        kept += cost.kept("recompute")
    return found, max(0, step.tail_peak - kept)


@contextlib.contextmanager
def _both(outer: Any, inner: Any) -> Iterator[None]:
    with outer, inner:
        yield
