"""How a counter layer is saved, loaded, copied and moved, so that it goes on bit for bit.

Beside the published buffers a state_dict holds `seed` and `step`, the decimation `clock` of a layer that has one, and
a sum of gradients that is under way (see `memtrain_cl.nn.accumulation`). Its metadata names C and scale_rebase.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Self

import torch

from memtrain_cl.formats import DECIMATION_PERIODS, code_count
from memtrain_cl.nn import accumulation
from memtrain_cl.nn.cache import TernaryCache
from memtrain_cl.nn.state import CounterState
from memtrain_cl.nn.uses import Uses
from memtrain_cl.reference.counter import unpack_codes


class SavedState(CounterState):
    """The part of a counter layer that deals with state_dict, pickling, copying and `.to()`."""

    _agreed: bool

    def published_state_dict(self) -> dict[str, torch.Tensor]:
        """Exactly the buffers that the published package saves under these names."""
        return {name: getattr(self, name) for name in type(self).published}

    def _changed_outside(self) -> None:
        """Weights or place have changed by other than an update."""
        self._uses.generation += 1
        self._agreed = False

    # ---- copies ----------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # Modules, weak references and process groups do not pickle. A copy has no forward of its own pending, follows
        # no controller (it has the rates of now), and averages over all ranks until it is told otherwise.
        return {
            **super().__getstate__(),
            "ops": self.ops.__name__,
            "process_group": None,
            "_rates": {"lr": self.lr, "lr_scale": self.lr_scale},
            "_followed": None,
            "_uses": None,
            "_cache": None,
            "_agreed": False,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = {"ops": importlib.import_module(state["ops"]), "_uses": Uses(), "_cache": TernaryCache()}
        super().__setstate__({**state, **own})

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._sum.move(self.resident_buffer("state").device)
        self._cache.drop()
        return self

    # ---- state_dict ------------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "seed"] = torch.tensor(self.seed, device="cpu")
        destination[prefix + "step"] = torch.tensor(self.step, device="cpu")
        if self.decimate_updates:
            clock = self.clock.clone()
            clock[3] = 0  # what this process has counted
            destination[prefix + "clock"] = clock
        for name, part in self._sum.saved().items():
            destination[prefix + name] = part
        # Beside torch's own version number: codes of another C would load and mean other weights.
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if metadata is not None:
            metadata["C"] = self.C
            metadata["scale_rebase"] = getattr(self, "scale_rebase", None)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        rest = dict(state_dict)
        # A checkpoint of the published package has no seed, step and clock: the layer keeps its own then.
        seed, step = rest.pop(prefix + "seed", self.seed), rest.pop(prefix + "step", self.step)
        clock = rest.pop(prefix + "clock", None)
        kept = {name: rest.pop(prefix + name) for name in accumulation.KEYS if prefix + name in rest}
        fault = self._fault_in(rest, prefix, local_metadata.get("C", self.C)) or self._fault_of_ours(clock, kept)
        if fault:
            error_msgs.append(fault)
            return
        if local_metadata.get("scale_rebase") == "eager" and getattr(self, "scale_rebase", None) == "lazy":
            # An eager layer keeps its counters calibrated to the scale, and s_base at its first value.
            rest[prefix + "s_base"] = rest.get(prefix + "scale", self.scale)
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        self.seed, self.step = int(seed), int(step)
        if clock is not None:
            self.clock.copy_(clock)
        self._sum.load(kept, self.resident_buffer("state").device)
        self._changed_outside()

    def _fault_in(self, state_dict: Mapping[str, Any], prefix: str, C: Any) -> str | None:
        """What is wrong with a state that is about to be loaded, or None. C: what the state was saved with."""
        if C != self.C:
            return f"expected a state with C={self.C}, got one with C={C}"
        for name, own in self._resident_buffers().items():
            value = state_dict.get(prefix + name)
            if value is None:
                continue
            if value.shape != own.shape or (name == "state" and value.dtype != own.dtype):
                types = ("uint8 ", f"{value.dtype} ") if name == "state" else ("", "")
                return f"{prefix}{name}: expected {types[0]}{list(own.shape)}, got {types[1]}{list(value.shape)}"
        state = state_dict.get(prefix + "state")
        if state is None or not state.numel():
            return None
        codes = state.cpu()
        if self.packed:
            with torch.device("cpu"):
                codes = unpack_codes(codes, self.in_features)
        highest = int(codes.max())
        if highest >= code_count(self.C):
            return f"{prefix}state: expected codes below {code_count(self.C)} for C={self.C}, got {highest}"
        return None

    def _fault_of_ours(self, clock: torch.Tensor | None, kept: Mapping[str, torch.Tensor]) -> str | None:
        """What is wrong with a decimation clock and a partial sum that are about to be loaded, or None."""
        if clock is not None:
            if not self.decimate_updates:
                return "expected decimate_updates=True for a state with a clock, got False"
            if tuple(clock.shape) != (4,) or int(clock[0]) not in DECIMATION_PERIODS:
                return f"clock: expected [4] with a period of {DECIMATION_PERIODS}, got {clock.tolist()}"
        shape = (self.out_features, self.in_features)
        return accumulation.sum_fault(kept, shape, accumulates=self.accumulate > 1 or self.reuse)
