"""The counter update whose gradient is formed inside it, tile of rows by tile: no [out, in] gradient exists.

    grad_w[o, j] = ((grad_out[0, o]*x[0, j] + grad_out[1, o]*x[1, j]) + grad_out[2, o]*x[2, j]) + ...

The tokens are added in their order, each product and each sum rounded to float32, so that this update's bytes, unlike
those of an update from a product's gradient, are the same on every device.
"""

from __future__ import annotations

import torch

from memtrain_cl.formats import CounterRule
from memtrain_cl.reference.counter import counter_update_

#: Rows whose gradient is alive at once.
_TILE = 64


def grad_weight_in_order(grad_out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """grad_w float32 [out, in] of grad_out float32 [M, out] and x float32 [M, in], added token by token."""
    grad_w = torch.zeros(grad_out.shape[1], x.shape[1])
    for outgoing, incoming in zip(grad_out, x, strict=True):
        grad_w = grad_w + outgoing[:, None] * incoming[None, :]
    return grad_w


def wants_from_io(x: torch.Tensor, out_features: int, tile_rows: int) -> bool:
    """Whether the update from x and grad_out is the better choice: never here, where it saves nothing."""
    return False


def counter_update_from_io_(
    state: torch.Tensor,
    scale: torch.Tensor,
    v: torch.Tensor | None,
    x: torch.Tensor,
    grad_out: torch.Tensor,
    totals: torch.Tensor,
    rule: CounterRule,
    *,
    seed: int,
    s_base: torch.Tensor | None = None,
    g_sq: torch.Tensor | None = None,
    clock: torch.Tensor | None = None,
    cache: torch.Tensor | None = None,
) -> None:
    """One update in place of a whole layer from x float32 [M, in] and grad_out float32 [M, out].

    No tokens change nothing. The other arguments are those of `counter_update_`.
    """
    if x.shape[0] == 0:
        return
    for row in range(0, grad_out.shape[1], _TILE):
        tile = grad_weight_in_order(grad_out[:, row : row + _TILE], x)
        counter_update_(
            state,
            scale,
            v,
            tile,
            totals,
            rule,
            seed=seed,
            row_offset=row,
            s_base=s_base,
            g_sq=g_sq,
            clock=clock,
            cache=cache,
        )


def counter_update_from_io_hashsr(
    codes: torch.Tensor,
    scale: torch.Tensor,
    v: torch.Tensor,
    x: torch.Tensor,
    grad_out: torch.Tensor,
    *,
    C: int,
    lr: float,
    lr_scale: float,
    rms_beta: float,
    rms_eps: float,
    seed: int,
    lagged: bool = False,
    clip: float = 0.0,
) -> torch.Tensor:
    """New codes uint8 [out, in] of one update; scale and v [out, 1] change in place (the published signature)."""
    rms_mode = "lagged" if lagged else "exact"
    rule = CounterRule(C, False, lr, lr_scale, rms_beta, rms_eps, rms_mode=rms_mode, clip=clip)
    result = codes.clone()
    counter_update_from_io_(result, scale, v, x, grad_out, torch.zeros(3, dtype=torch.int64), rule, seed=seed)
    return result
