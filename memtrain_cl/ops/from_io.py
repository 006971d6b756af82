"""The counter update that forms its gradient itself, kernels/counter.cl with FORM: no [out, in] gradient exists.

Signatures, formulas and results are those of `memtrain_cl.reference.from_io`, byte for byte on every device.
"""

from __future__ import annotations

import torch

from memtrain_cl.bridge import Crossing, device_for
from memtrain_cl.formats import CounterRule
from memtrain_cl.launchers.matmul import workspace_bytes
from memtrain_cl.memory import pool_of
from memtrain_cl.ops.counter import launch_update_from_io, optional_arrays, require_moments, require_update
from memtrain_cl.ops.launch import ready_device, require_tensor, require_together
from memtrain_cl.tuning import from_io_shape


def wants_from_io(x: torch.Tensor, out_features: int, tile_rows: int) -> bool:
    """Whether a layer [out_features, in] on x [M, in] is better updated by a kernel that forms the gradient.

    It computes more slowly than a product, so only for the sake of memory: where no more rows are to be alive than the
    kernel forms at a time, or where a tile of the gradient (tile_rows of it, 0: all) and what its product works on
    find no room on the device.
    """
    device = device_for(x)
    shape = from_io_shape(device.info, out_features, x.shape[1])
    if shape is None:
        return False
    if 0 < tile_rows <= shape.form:
        return True
    (tokens, columns), rows = x.shape, tile_rows or out_features
    workspace = workspace_bytes(device.info, (1, rows, columns, tokens), out_features, columns)
    return 4 * rows * columns + workspace > pool_of(device).available()


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

    No tokens change nothing. The other arguments, and the errors, are those of `counter_update_`. ValueError too where
    a row's gradient is too long for the device to hold in a kernel.
    """
    require_tensor("x", x, torch.float32, (None, None))
    out = require_update(state, scale, v, totals, x.shape[1], rule, seed, s_base=s_base, clock=clock, cache=cache)
    require_tensor("grad_out", grad_out, torch.float32, (x.shape[0], out))
    require_moments(g_sq, out, rule)
    require_together(x=x, grad_out=grad_out, state=state, g_sq=g_sq)
    if out * x.numel() == 0:
        return
    device = ready_device(state)
    with Crossing(device, state) as cross:
        launch_update_from_io(
            device,
            cross.update(state),
            cross.update(scale),
            cross.update(scale if v is None else v),
            cross.read(x),
            cross.read(grad_out),
            cross.update(totals),
            rule,
            seed=seed,
            **optional_arrays(cross, rule, s_base, g_sq, clock, cache),
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
    """New codes uint8 [out, in] of one update; scale and v float32 [out, 1] change in place (the published signature).

    The equations stand in `memtrain_cl.reference.from_io`. C: carry radix. clip: bound of the row norm, 0 for none.
    """
    rms_mode = "lagged" if lagged else "exact"
    rule = CounterRule(C, False, lr, lr_scale, rms_beta, rms_eps, rms_mode=rms_mode, clip=clip)
    result = codes.clone()
    totals = torch.zeros(3, dtype=torch.int64, device=codes.device)
    counter_update_from_io_(result, scale, v, x, grad_out, totals, rule, seed=seed)
    return result
