"""Products with counter weights in torch: the weight is decoded to dense, so this is the simple way, not the small one.

forward      y      = x @ (scale*t)^T           x [M, in]      -> [M, out]
grad_input   grad_x = grad_out @ (scale*t)      grad_out [M, out] -> [M, in]
grad_weight  grad_w = grad_out[:, rows]^T @ x   -> [R, in]
"""

from __future__ import annotations

import torch

from memtrain_cl.formats import CounterRule
from memtrain_cl.reference.clock import advance_clock_, observe_clock_
from memtrain_cl.reference.counter import counter_update_, decode_dense, require_base
from memtrain_cl.reference.proxy import proxy_moments


def _weight(
    state: torch.Tensor, scale: torch.Tensor, n: int, C: int, packed: bool, cache: torch.Tensor | None
) -> torch.Tensor:
    if cache is not None:
        return scale * cache.to(torch.float32)
    return decode_dense(state, scale, n, C=C, packed=packed)


def counter_forward(
    x: torch.Tensor,
    state: torch.Tensor,
    scale: torch.Tensor,
    *,
    C: int,
    packed: bool,
    cache: torch.Tensor | None = None,
) -> torch.Tensor:
    """y float32 [M, out] of x float32 [M, in]. cache int8 or float16 [out, in]: t, read in place of the codes."""
    return x @ _weight(state, scale, x.shape[1], C, packed, cache).t()


def counter_grad_input(
    grad_out: torch.Tensor,
    state: torch.Tensor,
    scale: torch.Tensor,
    in_features: int,
    *,
    C: int,
    packed: bool,
    cache: torch.Tensor | None = None,
) -> torch.Tensor:
    """grad_x float32 [M, in] of grad_out float32 [M, out]. cache: as in `counter_forward`."""
    return grad_out @ _weight(state, scale, in_features, C, packed, cache)


def grad_weight(grad_out: torch.Tensor, x: torch.Tensor, row_offset: int = 0, rows: int | None = None) -> torch.Tensor:
    """grad_w float32 [R, in]: rows row_offset .. row_offset+R of grad_out^T @ x (all rows by default)."""
    stop = None if rows is None else row_offset + rows
    return grad_out[:, row_offset:stop].t() @ x


def counter_backward_(
    x: torch.Tensor,
    grad_out: torch.Tensor,
    state: torch.Tensor,
    scale: torch.Tensor,
    v: torch.Tensor | None,
    totals: torch.Tensor,
    rule: CounterRule,
    *,
    seed: int | None,
    needs_grad_input: bool = True,
    tile_rows: int = 0,
    s_base: torch.Tensor | None = None,
    clock: torch.Tensor | None = None,
    cache: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """A layer's whole backward: grad_x by the old weight (None when not needed), then the update in place.

    x [M, in], grad_out [M, out], float32. seed None: no update, and neither is there one of no tokens. tile_rows bounds
    the gradient alive to [tile_rows, in]; 0: whole. s_base, clock and cache: as in `counter_update_`; the clock is
    advanced before the update and observes after it; the cache is what grad_x is made with.
    """
    (m, n), out = x.shape, state.shape[0]
    if seed is not None:
        require_base(s_base, out, rule)
    if m * n * out == 0:
        return torch.zeros(m, n) if needs_grad_input else None
    grad_x = None
    if needs_grad_input:
        grad_x = counter_grad_input(grad_out, state, scale, n, C=rule.C, packed=rule.packed, cache=cache)
    if seed is None:
        return grad_x
    if clock is not None:
        advance_clock_(clock, totals)
    g_sq = proxy_moments(grad_out, x) if rule.rms_mode == "proxy" else None
    step = tile_rows or out
    for row in range(0, out, step):
        tile = grad_weight(grad_out, x, row, min(step, out - row))
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
    if clock is not None:
        observe_clock_(clock, totals, out * n)
    return grad_x
