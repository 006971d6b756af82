"""The autograd node of a counter layer: forward, backward by the old weight, then the layer's own update."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable


class SelfUpdating(Protocol):
    """What the node asks of its layer."""

    def _product(self, x: torch.Tensor) -> torch.Tensor: ...

    def _backward(
        self, x: torch.Tensor, grad_out: torch.Tensor, needs_grad_input: bool, updates: bool
    ) -> torch.Tensor | None: ...


class ForwardToken:
    """Lives as long as one forward's graph; the layer holds it weakly to know whether a backward is still to come."""

    __slots__ = ("__weakref__", "used")

    def __init__(self) -> None:
        self.used = False


class CounterLinearFunction(torch.autograd.Function):
    """y = x @ (scale*t)^T. The scalar `tap` requires grad, so that backward also runs for inputs that do not."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, tap: torch.Tensor, layer: SelfUpdating, token: ForwardToken, updates: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.token, ctx.updates = layer, token, updates
        return layer._product(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None]:
        (x,) = ctx.saved_tensors
        if ctx.token.used and ctx.updates:
            raise RuntimeError(
                "this counter layer has already been updated by a backward through this graph; its weights have "
                "changed, so a second backward (retain_graph=True) would be wrong; run the forward again"
            )
        grad_x = ctx.layer._backward(x, grad_out, ctx.needs_input_grad[0], ctx.updates)
        ctx.token.used = True
        return grad_x, None, None, None, None


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x [..., n] as float32 [M, n], without a gradient."""
    # Torch is asked for what is needed alone: on the device "opencl" each call costs more than a launch.
    flat = x if x.ndim == 2 else x.detach().reshape(-1, x.shape[-1])
    return flat if flat.dtype == torch.float32 else flat.detach().to(torch.float32)


def shaped_like(y: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """y [M, n] as [..., n] of `like` [..., any], in its type."""
    shaped = y if like.ndim == 2 else y.reshape(*like.shape[:-1], y.shape[-1])
    return shaped if shaped.dtype == like.dtype else shaped.to(like.dtype)
