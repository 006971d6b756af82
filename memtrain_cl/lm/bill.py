"""The memory bill of training `CausalLM`, before it is trained: a step on tensors that have shapes and no memory.

The model's own forward and its backward run on torch's fake tensors while a meter counts what would be alive, so that
what is counted is what is really saved, whatever the model. Counter layers have a stand-in of their shapes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from memtrain_cl.activation_store import Stored
from memtrain_cl.activations import Session, saved_activations
from memtrain_cl.device import DeviceInfo
from memtrain_cl.formats import packed_row_bytes
from memtrain_cl.launchers.matmul import workspace_bytes
from memtrain_cl.lm.config import ModelConfig
from memtrain_cl.lm.model import CausalLM, RMSNorm
from memtrain_cl.meter import HostMeter
from memtrain_cl.nn.memory import POOLS, gradient_bytes
from memtrain_cl.ops.saved_rows import stored_form

aten = torch.ops.aten
#: Ways to train, as (kind of linears, what is kept of activations).
REGIMES = {
    "dense, AdamW": ("dense", "fp"),
    "dense, AdamW, recompute": ("dense", "recompute"),
    "counters": ("counter", "fp"),
    "counters, 8-bit activations": ("counter", "8"),
    "counters, 4-bit activations": ("counter", "4"),
    "counters, recompute": ("counter", "recompute"),
}
#: Products of matrices, and the place of their left operand.
_PRODUCTS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}
#: How a run treats its activations: in full, in 8 or 4 bits, or computed again.
ACTIVATIONS = ("fp", "8", "4", "recompute")


@dataclass(frozen=True)
class Bill:
    """Bytes of a step by pool (`memtrain_cl.nn.memory.POOLS`), the most alive, and how many weights there are."""

    pools: dict[str, int]
    peak: int
    parameters: int


class _CounterFunction(torch.autograd.Function):
    """What a counter layer's node keeps and works on, in shapes."""

    saved_may_be_rounded = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, tap: Tensor, out_features: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.out_features = out_features
        return x.new_empty((*x.shape[:-1], out_features))

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        _weight_gradient = grad_out.flatten(0, -2).t() @ x.flatten(0, -2)
        return grad_x, None, None


class _CounterShape(nn.Module):
    """A `PackedRMSCounterLinear`'s buffers and node."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.out_features = out_features
        self.register_buffer("state", torch.empty(out_features, packed_row_bytes(in_features), dtype=torch.uint8))
        for name in ("scale", "v", "s_base"):
            self.register_buffer(name, torch.empty(out_features, 1))
        self.register_buffer("counts", torch.empty(3, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        tap = torch.zeros((), requires_grad=True)
        result: Tensor = _CounterFunction.apply(x, tap, self.out_features)  # type: ignore[no-untyped-call]
        return result


class _Few(Stored):
    """Codes and scales of their sizes."""

    __slots__ = ("parts",)

    def __init__(self, matrix: Tensor, bits: int, root: Tensor) -> None:
        super().__init__(matrix.dtype, root)
        dtype, shape = stored_form(bits, *matrix.shape)
        self.parts = matrix.new_empty(shape, dtype=dtype), matrix.new_empty(matrix.shape[0], dtype=torch.bfloat16)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def restored(self, shape: Sequence[int]) -> Tensor:
        return self.parts[0].new_empty(shape, dtype=self.dtype)


class _FewSession(Session):
    """What `saved_activations` would take, without kernels."""

    @staticmethod
    def _is_plain(tensor: Tensor) -> bool:
        return True

    def _in_few_bits(self, matrix: Tensor, bits: int, root: Tensor) -> Stored:
        return _Few(matrix, bits, root)


class _NormFunction(torch.autograd.Function):
    """A norm as one operation, as the device "opencl" has it, in shapes; torch writes it out on the host."""

    saved_may_be_rounded = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.new_empty((*x.shape[:-1], 1)))
        ctx.width = weight.shape
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        x, _ = ctx.saved_tensors
        return torch.empty_like(x), x.new_empty(ctx.width)


def _norm_of(norm: RMSNorm) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        result: Tensor = _NormFunction.apply(x, norm.weight)  # type: ignore[no-untyped-call]
        return result

    return forward


class _Workspaces(TorchDispatchMode):
    """Beside a product stands what its kernels work on, on such a device."""

    def __init__(self, info: DeviceInfo) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._info = info

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _PRODUCTS:
            a, b = args[_PRODUCTS[func] :][:2]
            sizes = (a.shape[0] if a.ndim == 3 else 1, a.shape[-2], b.shape[-1], a.shape[-1])
            leads = (max(x.stride()[-2:]) for x in (a, b))
            made.new_empty(workspace_bytes(self._info, sizes, *leads), dtype=torch.uint8)
        return made


@contextlib.contextmanager
def _saving(activations: str) -> Iterator[None]:
    if activations not in ("8", "4"):
        yield
        return
    session = _FewSession(saved_activations(int(activations)))
    session.open()
    try:
        yield
    finally:
        session.close()


def forecast(
    config: ModelConfig,
    batch: int,
    activations: str = "fp",
    *,
    fused_norms: bool = True,
    info: DeviceInfo | None = None,
) -> Bill:
    """The bill of one step of `Trainer` on this model, from the second step on, when AdamW has its state.

    activations: one of `ACTIVATIONS`.   fused_norms: as on "opencl" and CUDA; False: as on the host.   info: the device
    whose products' workspaces count, too; without, those are the forecast's error.
    ValueError for activations of another name, and for a shape that cannot be.
    """
    if activations not in ACTIVATIONS:
        raise ValueError(f"expected activations as one of {', '.join(ACTIVATIONS)}, got {activations!r}")
    with FakeTensorMode(), HostMeter() as meter:
        model = CausalLM(replace(config, linear="dense"))
        codes = 0
        if config.linear == "counter":
            for block in model.blocks:
                for name, layer in list(block.named_modules()):
                    if isinstance(layer, nn.Linear):
                        codes += layer.in_features * layer.out_features
                        block.set_submodule(name, _CounterShape(layer.in_features, layer.out_features))
            del layer
        if fused_norms:
            for norm in model.modules():
                if isinstance(norm, RMSNorm):
                    norm.forward = _norm_of(norm)  # type: ignore[method-assign, assignment]
        model.gradient_checkpointing = activations == "recompute"
        held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        # Two moments and a step, which fused AdamW keeps beside each parameter.
        state = sum(2 * parameter.nbytes + 4 for parameter in model.parameters())
        tokens = torch.zeros(batch, config.seq + 1, dtype=torch.int64)
        model.model._rope(0, config.seq, tokens.device)
        before = meter.now()
        meter.reset()
        working = contextlib.nullcontext() if info is None else _Workspaces(info)
        with working, _saving(activations):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        del logits
        kept = meter.now() - before
        with working:
            loss.backward()
        gradients = gradient_bytes(model)
        sizes = (held, gradients, state, kept)
        peak = meter.peak() + state
        count = sum(parameter.numel() for parameter in model.parameters()) + codes
    return Bill(dict(zip(POOLS, (*sizes, max(0, peak - sum(sizes))), strict=True)), peak, count)


def weights_of(config: ModelConfig) -> int:
    """Weights of a model: of its linears, its norms, its embedding and its head."""
    block = 4 * config.dim**2 + 3 * config.dim * config.hidden + 2 * config.dim
    return config.layers * block + config.dim + 2 * config.vocab * config.dim


def width_step(heads: int) -> int:
    """What widths are multiples of: packed rows of whole words, and pairs in each head."""
    return math.lcm(8, 2 * heads)


def widest_with(config: ModelConfig, weights: int) -> ModelConfig:
    """The widest model of config's depth and heads with at most so many weights; ValueError where none is so small."""
    step, width = width_step(config.heads), 0
    while weights_of(replace(config, dim=(width + 1) * step, hidden=0)) <= weights:
        width += 1
    if not width:
        least = weights_of(replace(config, dim=step, hidden=0))
        raise ValueError(f"expected at least {least} parameters for {config.layers} layers, got {weights}")
    return replace(config, dim=width * step, hidden=0)


def largest(
    config: ModelConfig,
    batch: int,
    activations: str,
    limit: int,
    *,
    fused_norms: bool = True,
    info: DeviceInfo | None = None,
) -> tuple[ModelConfig, Bill] | None:
    """The widest model of config's depth, heads and kind whose step needs at most `limit` bytes, and its bill; None
    where the narrowest needs more. fused_norms, info: as for `forecast`.

    Widths are multiples of 8 and of twice the number of heads. The feed-forward width follows.
    """
    step = width_step(config.heads)
    found: dict[int, tuple[ModelConfig, Bill]] = {}

    def peak(width: int) -> int:
        if width not in found:
            wide = replace(config, dim=width * step, hidden=0)
            found[width] = wide, forecast(wide, batch, activations, fused_norms=fused_norms, info=info)
        return found[width][1].peak

    low, high = 0, max(1, config.dim // step)
    while peak(high) <= limit:
        low, high = high, high * 2
    while high - low > 1:
        # Memory grows between the width and its square: of the two guesses, both fall within.
        share = 0.5
        if low:
            share = (limit - peak(low)) / (peak(high) - peak(low))
            share = ((1 + share * ((high / low) ** 2 - 1)) ** 0.5 - 1) / (high / low - 1) / 2 + share / 2
        middle = min(high - 1, max(low + 1, low + int(share * (high - low))))
        if peak(middle) <= limit:
            low = middle
        else:
            high = middle
    return found[low] if low else None
