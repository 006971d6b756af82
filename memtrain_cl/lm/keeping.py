"""How a training run keeps activations until backward, and within which memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from memtrain_cl.activations import saved_activations
from memtrain_cl.formats import step_seed
from memtrain_cl.lm.config import MIB, TrainConfig
from memtrain_cl.lm.model import CausalLM
from memtrain_cl.recompute_plan import BudgetTooSmall, recompute

#: Of blocks that "auto" keeps in few bits.
AUTO_BITS = 4
_STREAM = 9


class Keeping:
    """`config.activations` and `config.memory_limit` for a model on a device.

    "fp" keeps all, "8" and "4" in so many bits, "recompute" runs blocks again; "auto" chooses for each block between
    all of these, so that the device holds at most memory_limit MiB: in the third step, from what was measured in the
    second. Until then blocks are recomputed. What was chosen, and the steps' random numbers, are the same in a run that
    is resumed.

    ValueError for a limit on the host, whose allocator is not ours.
    """

    def __init__(self, config: TrainConfig, model: CausalLM, place: torch.device) -> None:
        self._config, self._model, self._place = config, model, place
        self._limit = round(config.memory_limit * MIB)
        self._before: int | None = None
        if (self._limit or config.activations == "auto") and place.type == "cpu":
            raise ValueError(
                "expected a run on an OpenCL device beside --memory-limit and --activations auto, got one on the host, "
                "whose memory nobody counts"
            )
        self._saver = saved_activations(int(config.activations)) if config.activations in ("8", "4") else None
        self.plan: recompute | None = None
        model.gradient_checkpointing = config.activations in ("recompute", "auto")
        if config.activations == "auto":
            self._follow(recompute(limit_bytes=self._limit or self._device_limit(), bits=AUTO_BITS))
        else:
            self._enforce()

    def _follow(self, plan: recompute) -> None:
        self.plan = self._model.model.context_fn = plan

    def _device_limit(self) -> int:
        return int(getattr(torch, self._place.type).memory_stats(self._place)["limit"])

    def _enforce(self) -> None:
        if self._limit:
            if self._before is None:
                self._before = self._device_limit()
            getattr(torch, self._place.type).set_memory_limit(self._limit, self._place)

    def release(self) -> None:
        """The run is over: the device may hold again what it might before."""
        if self._before is not None:
            getattr(torch, self._place.type).set_memory_limit(self._before, self._place)
            self._before = None

    @property
    def validation_batch(self) -> int:
        """Most sequences that validation may take at once: where memory is limited, as many as training."""
        return self._config.batch if self._limit else 1 << 16

    @contextlib.contextmanager
    def forward(self, step: int) -> Iterator[None]:
        """Around the forward of a step."""
        seed = step_seed(self._config.seed & 0xFFFFFFFF, step, _STREAM)
        if self._saver is not None:
            self._saver.reseed(seed)
            with self._saver:
                yield
            return
        undecided = self.plan is not None and not self.plan.decided
        if self.plan is not None:
            self.plan.reseed(seed)
        try:
            yield
        except BudgetTooSmall as error:
            least = -(-error.least // MIB)
            raise ValueError(
                f"expected --memory-limit of at least {least} (MiB), the smallest that these options can meet, "
                f"got {self._config.memory_limit:g}"
            ) from error
        if undecided and self.plan is not None and self.plan.decided:
            self._enforce()

    def state(self) -> dict[str, Any]:
        """What was chosen."""
        return {} if self.plan is None else {"activations": list(self.plan.actions)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on with what was chosen; where nothing was yet, measure again."""
        actions = state.get("activations")
        if self.plan is not None and actions:
            self._follow(recompute(policy=actions, bits=AUTO_BITS))
            self._enforce()
