"""A layer's ternary weights unpacked, in a type that products read as it is: derived from the state, never saved."""

from __future__ import annotations

from types import ModuleType

import torch

from memtrain_cl import bridge

#: cache_mode -> the type of the weights.
TYPES = {"int8": torch.int8, "fp16": torch.float16}


class TernaryCache:
    """t as int8 or float16 [out, in], brought up to date when the state has changed since it was last compared.

    torch's version of the state tensor tells: it also counts what a user or a loader wrote.
    """

    def __init__(self) -> None:
        self.values: torch.Tensor | None = None
        self._state: torch.Tensor | None = None
        self._version = -1

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, 0 before they were first asked for."""
        return 0 if self.values is None else self.values.nbytes

    def drop(self) -> None:
        """Forget the weights; the next use makes them again."""
        self.__init__()  # type: ignore[misc]

    def current(
        self, mode: str, state: torch.Tensor, in_features: int, ops: ModuleType, *, C: int, packed: bool
    ) -> torch.Tensor | None:
        """The weights of `state`; None in mode "none"."""
        if mode == "none":
            self.values = self._state = None
            return None
        values = self.values
        if values is None or values.dtype != TYPES[mode] or values.device != state.device:
            # A tensor made in inference mode could not be written in a later step.
            with torch.inference_mode(False):
                values = torch.empty((state.shape[0], in_features), dtype=TYPES[mode], device=state.device)
            bridge.keep_resident(values)
            self.values, self._state = values, None
        if self._state is not state or state.is_inference() or self._version != state._version:
            ops.refresh_cache_(values, state, C=C, packed=packed)
            self.follow(state)
        return values

    def follow(self, state: torch.Tensor) -> None:
        """The weights are those of `state` as it is now."""
        self._state = state
        self._version = -1 if state.is_inference() else state._version
