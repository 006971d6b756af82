"""A module whose buffers may be newer on the device than on the host, and never show it.

Between steps a layer's state stays on the device (see `memtrain_cl.bridge`); every way of reaching a buffer from
outside first makes its host bytes current: attributes, `state_dict`, `buffers()`, `.to()`, `copy.deepcopy`, pickling.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Self

import torch
from torch import nn

from memtrain_cl import bridge


class LiveBuffers(nn.Module):
    """Base of layers that update their buffers on a device. Subclasses name those buffers in `resident`."""

    #: Buffers that live on the device between steps.
    resident: ClassVar[tuple[str, ...]] = ()

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        if name in type(self).resident:
            bridge.refresh_host(value)
        return value

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """As in torch; resident buffers are announced to the bridge."""
        super().register_buffer(name, tensor, persistent)
        self._announce()

    def resident_buffer(self, name: str) -> torch.Tensor:
        """A buffer for a launcher: the device has its current values, the host's may be behind."""
        buffer = self._buffers[name]
        if buffer is None:
            raise RuntimeError(f"expected a buffer {name}, got none")
        return buffer

    def _resident_buffers(self) -> dict[str, torch.Tensor]:
        named = ((name, self._buffers.get(name)) for name in type(self).resident)
        return {name: buffer for name, buffer in named if buffer is not None}

    def _announce(self) -> None:
        for buffer in self._resident_buffers().values():
            bridge.keep_resident(buffer)

    def _refresh(self) -> None:
        for buffer in self._resident_buffers().values():
            bridge.refresh_host(buffer)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """As in torch, with current values."""
        self._refresh()
        return super().named_buffers(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._refresh()
        before = self._resident_buffers()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            if new is not None and new.dtype != old.dtype:
                # .half() and its kin speak of weights; the types of the state are its format.
                self._buffers[name] = old.to(new.device)
        self._announce()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._refresh()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self._refresh()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:
        self._refresh()
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._announce()
