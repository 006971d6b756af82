"""Linear layers whose weights are counters and update themselves in backward.

    y = x @ (scale*t)^T          backward: grad_x = grad_out @ (scale*t) with the old weight, then one counter update

No master weight, no gradient and no optimizer state beside the packed codes and a few numbers a row; see
`memtrain_cl.reference.counter` for the update's equations. The layers have no Parameters and no bias.
"""

from __future__ import annotations

import importlib
import math
import numbers
import weakref
from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar

import torch

from memtrain_cl.formats import C_DEFAULT, CounterRule, check_c, code_count, packed_row_bytes
from memtrain_cl.nn.function import CounterLinearFunction, ForwardToken, rows_of, shaped_like
from memtrain_cl.nn.live import LiveBuffers
from memtrain_cl.reference.codes import decode_state, encode_state, hash_u32

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _default_ops() -> ModuleType:
    from memtrain_cl import ops

    return ops


def _size(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"expected {name} as an integer >= 1, got {value!r}")
    return int(value)


class CompactCounterLinear(LiveBuffers):
    """A ternary linear layer trained as counters, without row moments; one uint8 code a weight.

    in_features, out_features: sizes.   C: carry radix, 1..43.   lr: step size of the counter in units of the scale.
    lr_scale: step size of the row scales.   init_gain: factor on the initial scale sqrt(3/(2*in)).   tile_rows: rows of
    the weight's gradient alive at once, 0 for all.   local_grad_clip: bound of a row's gradient norm, 0 for none.
    ops: the module of launchers, `memtrain_cl.ops` (OpenCL) by default, or `memtrain_cl.reference` (torch on the host).
    The device is that of the tensors, "opencl" or CUDA's, and the current one for tensors on the host.

    x may be float32, or float16/bfloat16, which are computed in float32 and returned in their own type.

    Buffers: `state` uint8 [out, in], `scale` float32 [out, 1]. They are live: what is written into them counts at the
    next use, and reading them after an update shows it. `seed` and `step` (ints) place the layer in its stream of
    rounding numbers. Read-outs: `update_events` (counters moved), `weight_flips` (ternary weights changed),
    `skipped_updates` (rows left alone for a gradient that was not finite), int64 scalars since construction.

    Raises ValueError for options out of range, TypeError for inputs of other types, RuntimeError when a second training
    forward comes before the backward of the first, or a second backward through one graph. The rule is
    that of the PyTorch package memory_native, whose checkpoints load here.
    """

    packed: ClassVar[bool] = False
    resident: ClassVar[tuple[str, ...]] = ("state", "scale", "counts")

    C: int
    lr: float
    lr_scale: float
    tile_rows: int
    local_grad_clip: float
    update_enabled: bool
    ops: ModuleType
    seed: int
    step: int
    state: torch.Tensor
    scale: torch.Tensor
    counts: torch.Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        C: int = C_DEFAULT,
        lr: float = 0.04,
        lr_scale: float = 2e-4,
        init_gain: float = 1.0,
        tile_rows: int = 0,
        local_grad_clip: float = 0.0,
        ops: ModuleType | None = None,
    ) -> None:
        super().__init__()
        self.in_features = _size("in_features", in_features)
        self.out_features = _size("out_features", out_features)
        self.C = check_c(C, packed=self.packed)
        if self.packed:
            packed_row_bytes(self.in_features)
        if isinstance(tile_rows, bool) or not isinstance(tile_rows, numbers.Integral) or tile_rows < 0:
            raise ValueError(f"expected tile_rows as an integer >= 0, got {tile_rows!r}")
        if not (isinstance(init_gain, numbers.Real) and 0.0 < init_gain < math.inf):
            raise ValueError(f"expected init_gain as a finite number > 0, got {init_gain!r}")
        self.lr = lr
        self.lr_scale = lr_scale
        self.init_gain = float(init_gain)
        self.tile_rows = int(tile_rows)
        self.local_grad_clip = local_grad_clip
        self.update_enabled = True
        self.ops = ops or _default_ops()
        # Chance is the host's wherever the layer is made, so that a seed gives one layer on every device.
        self.seed = int(torch.randint(0, 1 << 32, (), device="cpu"))
        self.step = 0
        self._pending: weakref.ref[ForwardToken] | None = None
        self.rule()

        with torch.device("cpu"):
            t = torch.randint(-1, 2, (self.out_features, self.in_features), dtype=torch.int16)
            codes = encode_state(t, torch.zeros_like(t), self.C)
            state = self._pack(codes) if self.packed else codes
        self.register_buffer("state", state.to(torch.get_default_device()))
        scale = self.init_gain * math.sqrt(3.0 / (2.0 * self.in_features))
        self.register_buffer("scale", torch.full((self.out_features, 1), scale))
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64), persistent=False)

    # ---- rule and storage ------------------------------------------------------------------------------------

    def rule(self) -> CounterRule:
        """The constants of the next update, from the attributes as they are now; ValueError for one out of range."""
        return CounterRule(
            self.C, self.packed, self.lr, self.lr_scale, use_rms=False, clip=self.local_grad_clip, clipped_scale=True
        )

    def _pack(self, codes: torch.Tensor) -> torch.Tensor:
        # The oracle packs: a layer must be constructible before any device is opened, and the bytes are the same.
        from memtrain_cl.reference.counter import pack_codes

        return pack_codes(codes)

    def _moments(self) -> torch.Tensor | None:
        return None

    # ---- forward and backward --------------------------------------------------------------------------------

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y [..., out] of x [..., in]."""
        if not isinstance(x, torch.Tensor) or x.dtype not in _FLOATS:
            got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
            raise TypeError(f"expected x as a tensor of float32, float16 or bfloat16, got {got}")
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"expected x of shape [..., {self.in_features}], got {list(x.shape)}")
        if not torch.is_grad_enabled():
            return self._product(x)
        updates = self.training and self.update_enabled
        token = ForwardToken()
        if updates:
            pending = self._pending() if self._pending is not None else None
            if pending is not None and not pending.used:
                raise RuntimeError(
                    "a counter layer was used again in training before the backward of its first use; its update needs "
                    "one forward a backward (use torch.no_grad() or .eval() for forwards that do not train)"
                )
            self.rule()
            self._pending = weakref.ref(token)
        tap = torch.zeros((), requires_grad=True, device="cpu")
        result: torch.Tensor = CounterLinearFunction.apply(x, tap, self, token, updates)  # type: ignore[no-untyped-call]
        return result

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.ops.counter_forward(
            rows_of(x), self._buffers["state"], self._buffers["scale"], C=self.C, packed=self.packed
        )
        return shaped_like(y, x)

    def _backward(
        self, x: torch.Tensor, grad_out: torch.Tensor, needs_grad_input: bool, updates: bool
    ) -> torch.Tensor | None:
        grad_x: torch.Tensor | None = self.ops.counter_backward_(
            rows_of(x),
            rows_of(grad_out),
            self._buffers["state"],
            self._buffers["scale"],
            self._moments(),
            self._buffers["counts"],
            self.rule(),
            seed=self._step_seed() if updates else None,
            needs_grad_input=needs_grad_input,
            tile_rows=self.tile_rows,
        )
        if updates:
            self.step += 1
        return None if grad_x is None else shaped_like(grad_x, x)

    def _step_seed(self) -> int:
        return int(hash_u32(torch.tensor(self.seed + self.step, device="cpu")))

    def apply_update_from_grad_w(self, grad_w: torch.Tensor) -> None:
        """One update from a given gradient float32 [out, in], as backward would make it."""
        self.ops.counter_update_(
            self._buffers["state"],
            self._buffers["scale"],
            self._moments(),
            grad_w,
            self._buffers["counts"],
            self.rule(),
            seed=self._step_seed(),
        )
        self.step += 1

    # ---- read-outs -------------------------------------------------------------------------------------------

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
            self._buffers["state"], self._buffers["scale"], self.in_features, C=self.C, packed=self.packed
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

    def hyper(self) -> dict[str, Any]:
        """The constructor's options as they are now, JSON-able."""
        names = ("C", "lr", "lr_scale", "init_gain", "tile_rows", "local_grad_clip")
        return {name: getattr(self, name) for name in names}

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, C={self.C}, lr={self.lr}"

    # ---- saving ---------------------------------------------------------------------------------------------------

    def published_state_dict(self) -> dict[str, torch.Tensor]:
        """Exactly the buffers that the published package saves under these names."""
        return {name: getattr(self, name) for name in type(self).resident if name != "counts"}

    def __getstate__(self) -> dict[str, Any]:
        # A module and a weak reference do not pickle; a copy has no forward of its own pending.
        return {**super().__getstate__(), "_pending": None, "ops": self.ops.__name__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "ops": importlib.import_module(state["ops"])})

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "seed"] = torch.tensor(self.seed, device="cpu")
        destination[prefix + "step"] = torch.tensor(self.step, device="cpu")
        # Beside torch's own version number: codes of another C would load and mean other weights.
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if metadata is not None:
            metadata["C"] = self.C

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
        # A checkpoint of the published package has no seed and step: the layer keeps its own then.
        seed, step = rest.pop(prefix + "seed", self.seed), rest.pop(prefix + "step", self.step)
        fault = self._fault_in(rest, prefix, local_metadata.get("C", self.C))
        if fault:
            error_msgs.append(fault)
            return
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        self.seed, self.step = int(seed), int(step)

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
            from memtrain_cl.reference.counter import unpack_codes

            with torch.device("cpu"):
                codes = unpack_codes(codes, self.in_features)
        highest = int(codes.max())
        if highest >= code_count(self.C):
            return f"{prefix}state: expected codes below {code_count(self.C)} for C={self.C}, got {highest}"
        return None


class RMSCounterLinear(CompactCounterLinear):
    """CompactCounterLinear whose gradient is normalised by a row's second moment before it drives the counters.

    rms_beta, rms_eps: decay and floor of the moment.   use_rms: False leaves the gradient as it is.   rms_mode: "exact"
    normalises by the moment with this step's gradient in it, "lagged" by the one before.   Further buffers: `v` and
    `s_base`, float32 [out, 1].
    """

    resident: ClassVar[tuple[str, ...]] = ("state", "scale", "v", "s_base", "counts")

    v: torch.Tensor
    s_base: torch.Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rms_beta: float = 0.9,
        rms_eps: float = 1e-3,
        use_rms: bool = True,
        rms_mode: str = "exact",
        **options: Any,
    ) -> None:
        if rms_mode not in ("exact", "lagged"):
            raise ValueError(f"expected rms_mode 'exact' or 'lagged', got {rms_mode!r}")
        # Set before nn.Module is ready, past its attribute hooks: the base constructor already asks for the rule.
        self.__dict__.update(rms_beta=rms_beta, rms_eps=rms_eps, use_rms=bool(use_rms), rms_mode=rms_mode)
        super().__init__(in_features, out_features, **options)
        self.register_buffer("v", torch.zeros(self.out_features, 1))
        # The scale that the counters are calibrated to; under eager rebase it keeps its first value.
        self.register_buffer("s_base", self.scale.clone())

    def rule(self) -> CounterRule:
        """The constants of the next update, from the attributes as they are now; ValueError for one out of range."""
        return CounterRule(
            self.C,
            self.packed,
            self.lr,
            self.lr_scale,
            self.rms_beta,
            self.rms_eps,
            use_rms=self.use_rms,
            rms_mode=self.rms_mode,
            clip=self.local_grad_clip,
        )

    def _moments(self) -> torch.Tensor | None:
        return self._buffers["v"]

    def hyper(self) -> dict[str, Any]:
        """The constructor's options as they are now, JSON-able."""
        names = ("rms_beta", "rms_eps", "use_rms", "rms_mode")
        return {**super().hyper(), **{name: getattr(self, name) for name in names}}


class PackedRMSCounterLinear(RMSCounterLinear):
    """RMSCounterLinear whose `state` is uint8 [out, in/4*3], 0.75 byte a weight. C in 1..11, in_features % 4 == 0."""

    packed: ClassVar[bool] = True
