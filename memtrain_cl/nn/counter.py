"""Linear layers whose weights are counters and update themselves in backward.

    y = x @ (scale*t)^T          backward: grad_x = grad_out @ (scale*t) with the old weight, then one counter update

No master weight, no gradient and no optimizer state beside the packed codes and a few numbers a row; see
`memtrain_cl.reference.counter` for the update's equations. The layers have no Parameters and no bias.
"""

from __future__ import annotations

import math
import numbers
from types import ModuleType
from typing import Any, ClassVar, NoReturn

import torch

from memtrain_cl.formats import (
    C_DEFAULT,
    RMS_MODES,
    SCALE_REBASES,
    STREAM_INPUT,
    CounterRule,
    check_c,
    hash_number,
    packed_row_bytes,
    stream_seed,
)
from memtrain_cl.nn import step
from memtrain_cl.nn.accumulation import GradientSum
from memtrain_cl.nn.averaging import Replicas, replicas_of
from memtrain_cl.nn.cache import TernaryCache
from memtrain_cl.nn.dense import FromDense
from memtrain_cl.nn.function import CounterLinearFunction, flat_rows, rows_of, shaped_like
from memtrain_cl.nn.options import Option, at_least, flag, one_of
from memtrain_cl.nn.saving import SavedState
from memtrain_cl.nn.uses import Use, Uses
from memtrain_cl.reference.codes import encode_state
from memtrain_cl.reference.counter import pack_codes
from memtrain_cl.saved_tensors import in_backward

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _default_ops() -> ModuleType:
    from memtrain_cl import ops

    return ops


class CompactCounterLinear(FromDense, SavedState):
    """A ternary linear layer trained as counters, without row moments; one uint8 code a weight.

    in_features, out_features: sizes.   C: carry radix, 1..43.   lr: step size of the counter in units of the scale.
    lr_scale: step size of the row scales.   init_gain: factor on the initial scale sqrt(3/(2*in)).   tile_rows: rows of
    the weight's gradient alive at once, 0 for all.   local_grad_clip: bound of a row's gradient norm, 0 for none.
    pulse_mode: "direct" drives the counters by the gradient, "ternary" by an unbiased ternary estimate of it.
    act_save_bits: bits of the input's copy that backward works with, 2..15, stochastically rounded; 0 keeps the input.
    decimate_updates: update every 1, 2, 4 or 8 steps with as many times the lr, ever rarer as fewer weights change.
    cache_mode: also keep the ternary weights unpacked, as "fp16" or "int8"; cache_patch: after an update rewrite them
    all ("full") or the changed ones ("flip").   forward_compute, update_compute: "int8" quantises what meets the
    weights, or what makes their gradient, and sums exactly.
    accumulate: backwards whose gradients are summed for one update.   reuse: the layer may be used more than once in a
    forward; one update follows the last backward of its uses.   Both, and a layer that is used twice in a forward with
    accumulate, keep the sum as float32 [out, in].
    update_from_io: form the gradient inside the update's kernel; None: where that saves memory.
    ops: the module of launchers, `memtrain_cl.ops` (OpenCL) by default, or `memtrain_cl.reference` (torch on the host).
    The device is that of the tensors, "opencl" or CUDA's, and the current one for tensors on the host.

    x may be float32, or float16/bfloat16, which are computed in float32 and returned in their own type.

    Buffers: `state` uint8 [out, in], `scale` float32 [out, 1]. They are live: what is written into them counts at the
    next use, and reading them after an update shows it. `seed` and `step` (ints) place the layer in its stream of
    rounding numbers. Read-outs: `update_events` (counters moved), `weight_flips` (ternary weights changed),
    `skipped_updates` (rows left alone for a gradient that was not finite), `decimation_period`; int64 scalars.

    Where torch.distributed runs more than one process, the gradient is averaged over the ranks of `process_group`
    (None: all) before the update, and the layers stay equal; `average_gradients = False` leaves each rank to itself.
    The first averaged update compares the layers, and takes the first rank's seed.

    Raises ValueError for options out of range, TypeError for inputs of other types, RuntimeError when a second training
    forward comes before the backward of the first (unless accumulate or reuse), for a second backward through one
    graph, and for a backward that meets other weights than its forward; nothing has changed then. The rule is that of
    the PyTorch package memory_native, whose checkpoints load here.
    """

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
        pulse_mode: str = "direct",
        act_save_bits: int = 0,
        decimate_updates: bool = False,
        cache_mode: str = "none",
        cache_patch: str = "full",
        update_compute: str = "fp",
        forward_compute: str = "fp",
        accumulate: int = 1,
        reuse: bool = False,
        update_from_io: bool | None = None,
        ops: ModuleType | None = None,
    ) -> None:
        super().__init__()
        self.in_features = at_least(1)("in_features", in_features)
        self.out_features = at_least(1)("out_features", out_features)
        self.C = check_c(C, packed=self.packed)
        if self.packed:
            packed_row_bytes(self.in_features)
        if not (isinstance(init_gain, numbers.Real) and 0.0 < init_gain < math.inf):
            raise ValueError(f"expected init_gain as a finite number > 0, got {init_gain!r}")
        self.init_gain = float(init_gain)
        self._rates, self._followed = {"lr": lr, "lr_scale": lr_scale}, None
        self.tile_rows = tile_rows
        self.local_grad_clip = local_grad_clip
        self.pulse_mode = pulse_mode
        self.act_save_bits = act_save_bits
        self.cache_mode = cache_mode
        self.cache_patch = cache_patch
        self.update_compute = update_compute
        self.forward_compute = forward_compute
        self.accumulate = accumulate
        self.reuse = reuse
        self.update_from_io = update_from_io
        self.update_enabled = True
        self.average_gradients = True
        self.process_group = None
        self.ops = ops or _default_ops()
        # Chance is the host's wherever the layer is made, so that a seed gives one layer on every device.
        self.seed = int(torch.randint(0, 1 << 32, (), device="cpu"))
        self.step = 0
        self._uses, self._sum, self._cache, self._agreed = Uses(), GradientSum(), TernaryCache(), False
        self.rule()
        self.require_possible()

        with torch.device("cpu"):
            t = torch.randint(-1, 2, (self.out_features, self.in_features), dtype=torch.int16)
            codes = encode_state(t, torch.zeros_like(t), self.C)
            # The oracle packs: a layer must be constructible before any device is opened, and the bytes are the same.
            state = pack_codes(codes) if self.packed else codes
        self.register_buffer("state", state.to(torch.get_default_device()))
        scale = self.init_gain * math.sqrt(3.0 / (2.0 * self.in_features))
        self.register_buffer("scale", torch.full((self.out_features, 1), scale, dtype=torch.float32))
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64), persistent=False)
        self.decimate_updates = decimate_updates

    # ---- what the step asks ---------------------------------------------------------------------------------------

    def _moments(self) -> torch.Tensor | None:
        return None

    def _lazy_base(self) -> torch.Tensor | None:
        """s_base where the update works with it."""
        return None

    def step_seed(self) -> int:
        """The seed of the next update's random numbers, uint32."""
        return hash_number(self.seed + self.step)

    def replicas(self) -> Replicas | None:
        """The ranks whose gradients are averaged; None for a process that trains alone."""
        return replicas_of(self.process_group) if self.average_gradients else None

    def cache_buffer(self) -> torch.Tensor | None:
        """The ternary weights unpacked, current for a launcher; None in cache_mode "none"."""
        state = self.resident_buffer("state")
        return self._cache.current(self.cache_mode, state, self.in_features, self.ops, C=self.C, packed=self.packed)

    def require_possible(self) -> None:
        """RuntimeError for options that cannot work together."""
        if self.update_from_io and self.update_compute == "int8":
            raise RuntimeError("expected update_from_io as None or False beside update_compute='int8', got True")
        if self.update_from_io and (self.accumulate > 1 or self.reuse or self.replicas() is not None):
            raise RuntimeError(
                "expected update_from_io as None or False beside accumulate, reuse and averaging over ranks, which see "
                "the gradient that a from-IO update never makes"
            )

    def _agree(self, replicas: Replicas) -> None:
        if not self._agreed:
            tensors = {name: getattr(self, name) for name in type(self).published}
            numbers_ = {"seed": self.seed, "step": self.step, "rounds": self._sum.rounds}
            self.seed = replicas.agree(numbers_, tensors)
            self._agreed = True

    def _updated(self) -> None:
        """The step is done: its weights are those of the next."""
        self.step += 1
        self._uses.generation += 1
        self._sum.clear()
        if self.cache_mode != "none" and self.cache_patch == "flip":
            self._cache.follow(self.resident_buffer("state"))

    # ---- forward and backward -------------------------------------------------------------------------------------

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y [..., out] of x [..., in]."""
        if not isinstance(x, torch.Tensor) or x.dtype not in _FLOATS:
            got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
            raise TypeError(f"expected x as a tensor of float32, float16 or bfloat16, got {got}")
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"expected x of shape [..., {self.in_features}], got {list(x.shape)}")
        trains = self.training and self.update_enabled
        if not torch.is_grad_enabled():
            if trains and not torch.is_inference_mode_enabled():
                self._uses.hide(self._sum.next_index, self._room())
            return self._product(x)
        tap = torch.zeros((), requires_grad=True, device="cpu")
        use = self._begin() if trains else Use(self._uses.generation, trains=False)
        result: torch.Tensor = CounterLinearFunction.apply(x, tap, self, use)  # type: ignore[no-untyped-call]
        return result

    def _begin(self) -> Use:
        """The use of a training forward."""
        self.rule()
        self.require_possible()
        if in_backward():
            return self._uses.repeat(self._sum.next_index)
        kept = self._sum
        if kept.open and not self._uses.pending():
            # The graphs of the uses that were still to come are gone, so the last backward was the last.
            kept.open = False
            kept.rounds += 1
            if kept.rounds >= self.accumulate:
                step.finish_sum(self, self.replicas())
        return self._uses.begin(kept.next_index, self._room())

    def _room(self) -> int | None:
        """Uses that may wait for their backward at once; None: any number."""
        return None if self.reuse else max(1, self.accumulate - self._sum.rounds)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return shaped_like(step.product(self, rows_of(x)), x, x.dtype)

    def _to_save(self, x: torch.Tensor, use: Use, bits: int) -> tuple[torch.Tensor, ...]:
        """What backward needs of x: itself, or its codes and scales in few bits."""
        if not bits:
            return (x,)
        codes, scale = self.ops.save_rows(
            flat_rows(x), bits, seed=stream_seed(step.use_seed(self, use.index), STREAM_INPUT)
        )
        return codes, scale

    def _backward(
        self, saved: tuple[torch.Tensor, ...], bits: int, grad_out: torch.Tensor, use: Use, needs_grad_input: bool
    ) -> torch.Tensor | None:
        outgoing = rows_of(grad_out)
        if not use.trains:
            return step.input_gradient(self, outgoing, use) if needs_grad_input else None
        if bits:
            x = self.ops.restore_rows(*saved, bits, (outgoing.shape[0], self.in_features))
        else:
            x = rows_of(*saved)
        return step.backward(self, step.Backward(x, outgoing, use, low_bits=bits > 0), needs_grad_input)

    def apply_update_from_grad_w(self, grad_w: torch.Tensor) -> None:
        """One update from a given gradient float32 [out, in], as backward would make it (averaged over ranks, too).

        RuntimeError while a sum of gradients is under way, and for rms_mode "proxy", whose moments come from what the
        gradient is made of.
        """
        if self._sum.partial:
            raise RuntimeError("expected no sum of gradients under way, got one; it has an update of its own to come")
        rule = self.rule()
        if rule.rms_mode == "proxy":
            raise RuntimeError("expected rms_mode exact or lagged for a given gradient, got proxy")
        shape, state = (self.out_features, self.in_features), self.resident_buffer("state")
        if not isinstance(grad_w, torch.Tensor) or grad_w.dtype != torch.float32 or tuple(grad_w.shape) != shape:
            got = f"{grad_w.dtype} {list(grad_w.shape)}" if isinstance(grad_w, torch.Tensor) else type(grad_w).__name__
            raise ValueError(f"expected grad_w as torch.float32 {list(shape)}, got {got}")
        if grad_w.device != state.device:
            raise ValueError(f"expected tensors on one device, got grad_w on {grad_w.device}, state on {state.device}")
        replicas = self.replicas()
        given = grad_w.detach() if replicas is None else grad_w.detach().clone()
        step.update(self, lambda row, count: given[row : row + count], None, replicas, self.out_features)

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise RuntimeError(
            "a counter layer cannot run in torch.nn.DataParallel, whose copies would update themselves and be dropped; "
            "use torch.nn.parallel.DistributedDataParallel"
        )


class RMSCounterLinear(CompactCounterLinear):
    """CompactCounterLinear whose gradient is normalised by a row's second moment before it drives the counters.

    rms_beta, rms_eps: decay and floor of the moment.   use_rms: False leaves the gradient as it is.   rms_mode: "exact"
    normalises by the moment with this step's gradient in it, "lagged" by the one before, "proxy" by one of squares that
    are estimated from input and outgoing gradient (of several backwards: their sum).   scale_rebase: "eager" rebases
    the counters as the scale moves, "lazy" rounds them to the present scale at the next update.   Further buffers: `v`
    and `s_base`, float32 [out, 1].
    """

    resident: ClassVar[tuple[str, ...]] = ("state", "scale", "v", "s_base", "counts", "clock")
    published: ClassVar[tuple[str, ...]] = ("state", "scale", "v", "s_base")
    option_names: ClassVar[tuple[str, ...]] = (
        *CompactCounterLinear.option_names,
        "rms_beta",
        "rms_eps",
        "use_rms",
        "rms_mode",
        "scale_rebase",
    )

    use_rms = Option(flag)
    rms_mode = Option(one_of(*RMS_MODES))
    scale_rebase = Option(one_of(*SCALE_REBASES))

    rms_beta: float
    rms_eps: float
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
        scale_rebase: str = "eager",
        **options: Any,
    ) -> None:
        # Before nn.Module is ready: the base constructor already asks for the rule.
        self.rms_beta, self.rms_eps = rms_beta, rms_eps
        self.use_rms, self.rms_mode, self.scale_rebase = use_rms, rms_mode, scale_rebase
        super().__init__(in_features, out_features, **options)
        self.register_buffer("v", torch.zeros(self.out_features, 1, dtype=torch.float32))
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
            scale_rebase=self.scale_rebase,
            pulse_mode=self.pulse_mode,
            clip=self.local_grad_clip,
        )

    def _moments(self) -> torch.Tensor | None:
        return self.resident_buffer("v")

    def _lazy_base(self) -> torch.Tensor | None:
        return self.resident_buffer("s_base") if self.scale_rebase == "lazy" else None


class PackedRMSCounterLinear(RMSCounterLinear):
    """RMSCounterLinear whose `state` is uint8 [out, in/4*3], 0.75 byte a weight. C in 1..11, in_features % 4 == 0."""

    packed: ClassVar[bool] = True
