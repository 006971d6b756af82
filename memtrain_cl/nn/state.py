"""What a counter layer holds, and how it is read: buffers, options, codes, weights, statistics."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from types import ModuleType
from typing import Any, ClassVar

import torch

from memtrain_cl.formats import PULSE_MODES, CounterRule, check_c
from memtrain_cl.nn.accumulation import GradientSum
from memtrain_cl.nn.cache import TYPES, TernaryCache
from memtrain_cl.nn.live import LiveBuffers
from memtrain_cl.nn.options import Option, at_least, flag, flag_or_none, one_of, saved_bits
from memtrain_cl.nn.uses import Uses
from memtrain_cl.reference.codes import decode_state


class CounterState(LiveBuffers):
    """The part of a counter layer that is not its step; see `memtrain_cl.nn.counter` for the options' meanings."""

    packed: ClassVar[bool] = False
    resident: ClassVar[tuple[str, ...]] = ("state", "scale", "counts", "clock")
    #: The buffers of the published package.
    published: ClassVar[tuple[str, ...]] = ("state", "scale")
    #: The constructor's options.
    option_names: ClassVar[tuple[str, ...]] = (
        "C",
        "lr",
        "lr_scale",
        "init_gain",
        "tile_rows",
        "local_grad_clip",
        "pulse_mode",
        "act_save_bits",
        "decimate_updates",
        "cache_mode",
        "cache_patch",
        "update_compute",
        "forward_compute",
        "accumulate",
        "reuse",
        "update_from_io",
    )

    tile_rows = Option(at_least(0))
    pulse_mode = Option(one_of(*PULSE_MODES))
    act_save_bits = Option(saved_bits)
    cache_mode = Option(one_of("none", *TYPES))
    cache_patch = Option(one_of("full", "flip"))
    update_compute = Option(one_of("fp", "int8"))
    forward_compute = Option(one_of("fp", "int8"))
    accumulate = Option(at_least(1))
    reuse = Option(flag)
    update_from_io = Option(flag_or_none)
    update_enabled = Option(flag)
    average_gradients = Option(flag)

    in_features: int
    out_features: int
    C: int
    init_gain: float
    local_grad_clip: float
    ops: ModuleType
    seed: int
    step: int
    process_group: Any
    state: torch.Tensor
    scale: torch.Tensor
    counts: torch.Tensor
    clock: torch.Tensor
    _uses: Uses
    _sum: GradientSum
    _cache: TernaryCache
    _rates: MutableMapping[str, Any]
    _followed: Callable[[], MutableMapping[str, Any]] | None

    # ---- options -------------------------------------------------------------------------------------------------

    @property
    def lr(self) -> Any:
        """Step size of the counters: the layer's own, or that of the controller it follows (also when assigned)."""
        return self._current_rates()["lr"]

    @lr.setter
    def lr(self, value: Any) -> None:
        self._current_rates()["lr"] = value

    @property
    def lr_scale(self) -> Any:
        """Step size of the row scales, from where `lr` comes."""
        return self._current_rates()["lr_scale"]

    @lr_scale.setter
    def lr_scale(self, value: Any) -> None:
        self._current_rates()["lr_scale"] = value

    def _current_rates(self) -> MutableMapping[str, Any]:
        return self._rates if self._followed is None else self._followed()

    def follow(self, rates: Callable[[], MutableMapping[str, Any]] | None) -> None:
        """Take "lr" and "lr_scale" from the mapping that `rates` gives, each time anew (None: keep what they are)."""
        self._rates = {"lr": self.lr, "lr_scale": self.lr_scale}
        self._followed = rates

    @property
    def decimate_updates(self) -> bool:
        """Whether updates become rarer as weights settle, by the buffer `clock`: period, steps since an update, ..."""
        return self._buffers.get("clock") is not None

    @decimate_updates.setter
    def decimate_updates(self, value: Any) -> None:
        if flag("decimate_updates", value) and not self.decimate_updates:
            clock = torch.tensor([1, 0, 0, 0], device=self.resident_buffer("state").device)
            self.register_buffer("clock", clock, persistent=False)
        elif not value and self.decimate_updates:
            del self._buffers["clock"]

    def clock_buffer(self) -> torch.Tensor | None:
        """`clock` for a launcher; None without decimate_updates."""
        return self._buffers.get("clock")

    def rule(self) -> CounterRule:
        """The constants of the next update, from the attributes as they are now; ValueError for one out of range."""
        return CounterRule(
            self.C,
            self.packed,
            self.lr,
            self.lr_scale,
            use_rms=False,
            pulse_mode=self.pulse_mode,
            clip=self.local_grad_clip,
            clipped_scale=True,
        )

    def hyper(self) -> dict[str, Any]:
        """The constructor's options as they are now, JSON-able."""
        return {name: getattr(self, name) for name in type(self).option_names}

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, C={self.C}, lr={self.lr}"

    # ---- weights -------------------------------------------------------------------------------------------------

    def codes(self) -> torch.Tensor:
        """The codes, uint8 [out, in] (a copy)."""
        state = self.state
        return self.ops.unpack_codes(state, self.in_features) if self.packed else state.clone()

    def packed_state(self) -> torch.Tensor:
        """The codes in 6-bit storage, uint8 [out, in/4*3], a copy; ValueError when C > 11 or in_features % 4 != 0."""
        check_c(self.C, packed=True)
        state = self.state
        return state.clone() if self.packed else self.ops.pack_codes(state)

    def visible_ternary(self) -> torch.Tensor:
        """t, int8 [out, in]."""
        return decode_state(self.codes(), self.C)[0].to(torch.int8)

    def dense_weight(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """scale*t, [out, in]."""
        dense: torch.Tensor = self.ops.decode_dense(
            self.resident_buffer("state"), self.resident_buffer("scale"), self.in_features, C=self.C, packed=self.packed
        )
        return dense.to(dtype)

    def state_statistics(self) -> dict[str, float]:
        """Shares of -1, 0, +1; mean |c|; the share of counters at +-(C-1); the mean scale."""
        t, c = decode_state(self.codes(), self.C)
        return {
            "minus": float((t == -1).float().mean()),
            "zero": float((t == 0).float().mean()),
            "plus": float((t == 1).float().mean()),
            "counter_abs_mean": float(c.float().abs().mean()),
            "counter_edge": float((c.abs() == self.C - 1).float().mean()),
            "scale_mean": float(self.scale.mean()),
        }

    # ---- counts --------------------------------------------------------------------------------------------------

    @property
    def update_events(self) -> torch.Tensor:
        """Counters moved since construction, an int64 scalar."""
        return self.counts[0].clone()

    @property
    def weight_flips(self) -> torch.Tensor:
        """Ternary weights changed since construction, an int64 scalar."""
        return self.counts[1].clone()

    @property
    def skipped_updates(self) -> torch.Tensor:
        """Row updates skipped for a gradient that was not finite, an int64 scalar."""
        return self.counts[2].clone()

    @property
    def decimation_period(self) -> torch.Tensor:
        """Steps from one update to the next, an int64 scalar: 1, 2, 4 or 8 (1 without decimate_updates)."""
        return self.clock[0].clone() if self.decimate_updates else torch.ones((), dtype=torch.int64)
