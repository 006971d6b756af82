"""Products with counter weights in torch: the weight is decoded to dense, so this is the simple way, not the small one.

forward      y      = x @ (scale*t)^T           x [M, in]      -> [M, out]
grad_input   grad_x = grad_out @ (scale*t)      grad_out [M, out] -> [M, in]
grad_weight  grad_w = grad_out[:, rows]^T @ x   -> [R, in]
"""

from __future__ import annotations

import torch

from memtrain_cl.formats import CounterRule
from memtrain_cl.reference.counter import counter_update_, decode_dense


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
) -> torch.Tensor | None:
    """A layer's whole backward: grad_x by the old weight (None when not needed), then the update in place.

    x [M, in], grad_out [M, out], float32. seed None: no update. tile_rows bounds the gradient alive to [tile_rows, in];
    0: whole.
    """
    out, n = state.shape[0], x.shape[1]
    grad_x = counter_grad_input(grad_out, state, scale, n, C=rule.C, packed=rule.packed) if needs_grad_input else None
    if seed is not None:
        step = tile_rows or max(out, 1)
        for row in range(0, out, step):
            tile = grad_weight(grad_out, x, row, min(step, out - row))
            counter_update_(state, scale, v, tile, totals, rule, seed=seed, row_offset=row)
    return grad_x
