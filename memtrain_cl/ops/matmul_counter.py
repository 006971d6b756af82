"""Products with a counter weight that is decoded on its way into them, and a layer's whole backward.

Signatures and formulas are those of `memtrain_cl.reference.matmul`; float32 sums differ in their order, so results are
compared with a tolerance. The order follows from the shapes and the device: equal calls, equal bytes.
"""

from __future__ import annotations

import numpy as np
import torch

from memtrain_cl.array import DeviceArray
from memtrain_cl.bridge import Crossing
from memtrain_cl.formats import CounterRule, check_c
from memtrain_cl.homes import pooled
from memtrain_cl.launchers.decoded import launch_forward, launch_grad_input, launch_grad_weight
from memtrain_cl.ops.cache import require_cache
from memtrain_cl.ops.clock import launch_advance, launch_observe
from memtrain_cl.ops.counter import launch_update, require_update
from memtrain_cl.ops.launch import ready_device, require_layer, require_tensor, require_together
from memtrain_cl.ops.proxy import launch_proxy_moments


def _weights(
    cross: Crossing, state: torch.Tensor, scale: torch.Tensor, cache: torch.Tensor | None
) -> tuple[DeviceArray, DeviceArray, DeviceArray | None]:
    """A layer's arrays for a product. Where there is a cache the state is not read, and need not travel."""
    scales = cross.read(scale)
    if cache is None:
        return cross.read(state), scales, None
    t = cross.read(cache)
    return t, scales, t


def counter_forward(
    x: torch.Tensor,
    state: torch.Tensor,
    scale: torch.Tensor,
    *,
    C: int,
    packed: bool,
    cache: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x @ (scale*t)^T: float32 [M, in] -> float32 [M, out]; the weight is decoded inside the product.

    cache int8 or float16 [out, in]: t, read in place of the codes; the same bytes come out.
    """
    C = check_c(C, packed=packed)
    require_tensor("x", x, torch.float32, (None, None))
    out, _ = require_layer(state, scale, x.shape[1], packed=packed)
    if cache is not None:
        require_cache(cache, out, x.shape[1])
    require_together(x=x, state=state, cache=cache)
    if x.numel() == 0 or out == 0:
        return torch.zeros((x.shape[0], out), device=x.device)
    device = ready_device(x)
    with Crossing(device, x) as cross:
        y, target = cross.output((x.shape[0], out))
        codes, scales, t = _weights(cross, state, scale, cache)
        launch_forward(device, cross.read(x), codes, scales, target, C=C, packed=packed, cache=t)
    return y


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
    """grad_x = grad_out @ (scale*t): float32 [M, out] -> float32 [M, in]. cache: as in `counter_forward`."""
    C = check_c(C, packed=packed)
    out, n = require_layer(state, scale, in_features, packed=packed)
    require_tensor("grad_out", grad_out, torch.float32, (None, out))
    if cache is not None:
        require_cache(cache, out, n)
    require_together(grad_out=grad_out, state=state, cache=cache)
    if grad_out.numel() == 0 or n == 0:
        return torch.zeros((grad_out.shape[0], n), device=grad_out.device)
    device = ready_device(grad_out)
    with Crossing(device, grad_out) as cross:
        grad_x, target = cross.output((grad_out.shape[0], n))
        codes, scales, t = _weights(cross, state, scale, cache)
        launch_grad_input(device, cross.read(grad_out), codes, scales, target, C=C, packed=packed, cache=t)
    return grad_x


def grad_weight(grad_out: torch.Tensor, x: torch.Tensor, row_offset: int = 0, rows: int | None = None) -> torch.Tensor:
    """grad_w float32 [R, in]: rows row_offset .. row_offset+R of grad_out^T @ x (to the end by default)."""
    require_tensor("x", x, torch.float32, (None, None))
    require_tensor("grad_out", grad_out, torch.float32, (x.shape[0], None))
    out = grad_out.shape[1]
    count = out - row_offset if rows is None else rows
    if not (0 <= row_offset <= out and 0 <= count <= out - row_offset):
        raise ValueError(f"expected rows {row_offset}..{row_offset + count} within {out}")
    require_together(grad_out=grad_out, x=x)
    if count * x.shape[1] == 0 or x.shape[0] == 0:
        return torch.zeros((count, x.shape[1]), device=x.device)
    device = ready_device(x)
    with Crossing(device, x) as cross:
        grad_w, target = cross.output((count, x.shape[1]))
        launch_grad_weight(cross.read(grad_out), cross.read(x), target, row_offset)
    return grad_w


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

    x [M, in], grad_out [M, out], float32. seed None: no update, and neither is there one of no tokens. The gradient of
    the weight exists on the device alone, at most [tile_rows, in] of it (0: the whole), and is gone when the call
    returns. s_base, clock and cache: as in `counter_update_`; the clock is advanced before the update, which it and
    its gradient's product wait for, and observes after it; the cache is what grad_x is made with.
    """
    require_tensor("x", x, torch.float32, (None, None))
    m, n = x.shape
    out, _ = require_layer(state, scale, n, packed=rule.packed)
    require_tensor("grad_out", grad_out, torch.float32, (m, out))
    if cache is not None:
        require_cache(cache, out, n)
    if seed is not None:
        require_update(state, scale, v, totals, n, rule, seed, s_base=s_base, clock=clock, cache=cache)
    require_together(x=x, grad_out=grad_out, state=state, cache=cache)
    if m * n * out == 0:
        return torch.zeros((m, n), device=x.device) if needs_grad_input else None
    device = ready_device(x)
    with Crossing(device, x) as cross:
        outgoing = cross.read(grad_out)
        arrive = cross.read if seed is None else cross.update
        codes, scales, t = arrive(state), arrive(scale), None if cache is None else arrive(cache)
        grad_x = None
        if needs_grad_input:
            grad_x, incoming = cross.output((m, n))
            launch_grad_input(device, outgoing, codes, scales, incoming, C=rule.C, packed=rule.packed, cache=t)
        if seed is not None:
            inputs, counts = cross.read(x), cross.update(totals)
            moments = scales if v is None else cross.update(v)
            base = cross.update(s_base) if s_base is not None and rule.scale_rebase == "lazy" else None
            gate = None if clock is None else cross.update(clock)
            step = tile_rows or out
            scratch = cross.scratch((min(step, out), n), np.float32)
            squares = None
            if gate is not None:
                launch_advance(device, gate, counts)
            if rule.rms_mode == "proxy":
                squares = pooled(device, (out, 1), np.dtype(np.float32))
                launch_proxy_moments(device, outgoing, inputs, squares, gate=gate)
            for row in range(0, out, step):
                # The queue runs in order, so one scratch serves all tiles.
                tile = scratch.rows(min(step, out - row))
                launch_grad_weight(outgoing, inputs, tile, row, gate=gate)
                launch_update(
                    device,
                    codes,
                    scales,
                    moments,
                    tile,
                    counts,
                    rule,
                    seed=seed,
                    row_offset=row,
                    index_base=row * n,
                    s_base=base,
                    g_sq=squares,
                    clock=gate,
                    cache=t,
                )
            if gate is not None:
                launch_observe(device, gate, counts, out * n)
    return grad_x
