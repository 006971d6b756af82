"""The autograd node of a counter layer: forward, backward by the old weight, then the layer's own update."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from memtrain_cl.nn.uses import Use, Uses
from memtrain_cl.saved_tensors import save, saved


class SelfUpdating(Protocol):
    """What the node asks of its layer."""

    act_save_bits: int
    _uses: Uses

    def _product(self, x: torch.Tensor) -> torch.Tensor: ...

    def _to_save(self, x: torch.Tensor, use: Use, bits: int) -> tuple[torch.Tensor, ...]: ...

    def _backward(
        self, saved: tuple[torch.Tensor, ...], bits: int, grad_out: torch.Tensor, use: Use, needs_grad_input: bool
    ) -> torch.Tensor | None: ...


class CounterLinearFunction(torch.autograd.Function):
    """y = x @ (scale*t)^T. The scalar `tap` requires grad, so that backward also runs for inputs that do not."""

    #: To `saved_activations`: the gradient is linear in what is saved.
    saved_may_be_rounded = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tap: torch.Tensor, layer: SelfUpdating, use: Use) -> torch.Tensor:
        ctx.layer, ctx.use, ctx.dtype, ctx.bits = layer, use, x.dtype, layer.act_save_bits
        # The input's gradient needs no input, so without an update nothing is kept.
        save(ctx, *(layer._to_save(x, use, ctx.bits) if use.trains else ()))
        return layer._product(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        ctx.layer._uses.require_current(ctx.use)
        grad_x = ctx.layer._backward(saved(ctx), ctx.bits, grad_out, ctx.use, ctx.needs_input_grad[0])
        ctx.use.spent = True
        return None if grad_x is None else shaped_like(grad_x, grad_out, ctx.dtype), None, None, None


def flat_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., n] as [M, n] of its own type."""
    # Torch is asked for what is needed alone: on the device "opencl" each call costs more than a launch.
    if x.ndim == 2:
        return x
    return (x.detach() if torch.is_grad_enabled() else x).reshape(-1, x.shape[-1])


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x [..., n] as float32 [M, n], without a gradient."""
    flat = flat_rows(x)
    return flat if flat.dtype == torch.float32 else flat.detach().to(torch.float32)


def shaped_like(y: torch.Tensor, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """y [M, n] as [..., n] of `like` [..., any], in `dtype`."""
    shaped = y if like.ndim == 2 else y.reshape(*like.shape[:-1], y.shape[-1])
    return shaped if shaped.dtype == dtype else shaped.to(dtype)
