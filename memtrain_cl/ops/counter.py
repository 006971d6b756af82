"""Launchers of kernels/counter.cl: row sums, and the counter update.

Signatures, formulas and results are those of `memtrain_cl.reference.counter`, byte for byte on every device.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from memtrain_cl.array import DeviceArray
from memtrain_cl.bridge import Crossing
from memtrain_cl.device import Device
from memtrain_cl.formats import CounterRule, check_c, state_row_bytes
from memtrain_cl.launchers.decoded import cache_element, rows_aligned
from memtrain_cl.ops.cache import require_cache
from memtrain_cl.ops.launch import ready_device, require_layer, require_seed, require_tensor, require_together
from memtrain_cl.program import Kernel, get_kernel
from memtrain_cl.tuning import RowShape, from_io_shape, row_shape


def _row_kernel(
    device: Device,
    name: str,
    rule: CounterRule,
    shape: RowShape,
    source: DeviceArray,
    *,
    clocked: bool = False,
    cache: str = "",
) -> Kernel:
    """source: the gradient, or x where the kernel forms the gradient."""
    return get_kernel(
        device,
        "counter",
        name,
        C=rule.C,
        PACKED=int(rule.packed),
        GPU=shape.gpu,
        ALIGNED=int(rows_aligned(source, source.shape[1])),
        WG_SIZE=shape.wg_size,
        HELD=shape.held,
        # A step in which the clock does not fire takes its rows to be shorter.
        EVEN=int(shape.even and not clocked),
        FUSED=int(device.info.subnormals),
        LAGGED=int(rule.rms_mode == "lagged" and rule.use_rms),
        USE_RMS=int(rule.use_rms),
        PROXY=int(rule.rms_mode == "proxy"),
        CLIP=int(rule.clip > 0),
        CLIPPED_SCALE=int(rule.clipped_scale),
        LAZY=int(rule.scale_rebase == "lazy"),
        TERNARY=int(rule.pulse_mode == "ternary"),
        CLOCK=int(clocked),
        CACHE=cache,
        FORM=shape.form,
        PITCH=shape.pitch,
    )


def row_statistics(state: torch.Tensor, grad_w: torch.Tensor, *, C: int, packed: bool) -> torch.Tensor:
    """float32 [rows, 2]: the sums of grad^2 and of grad*t of each row, in the one summation order."""
    C = check_c(C, packed=packed)
    require_tensor("grad_w", grad_w, torch.float32, (None, None))
    rows, n = grad_w.shape
    require_tensor("state", state, torch.uint8, (rows, state_row_bytes(n, packed=packed)))
    require_together(state=state, grad_w=grad_w)
    if rows * n == 0:
        return torch.zeros((rows, 2), device=grad_w.device)
    device = ready_device(grad_w)
    with Crossing(device, grad_w) as cross:
        result, sums = cross.output((rows, 2))
        codes, grad = cross.read(state), cross.read(grad_w)
        rule = CounterRule(C, packed, lr=0.0, lr_scale=0.0)
        shape = row_shape(device.info, rows, n)
        kernel = _row_kernel(device, "row_statistics", rule, shape, grad)
        kernel(
            shape.global_size, shape.local_size, codes, grad, sums, np.uint32(n), np.uint32(rows), np.uint32(shape.per)
        )
    return result


def launch_update(
    device: Device,
    state: DeviceArray,
    scale: DeviceArray,
    v: DeviceArray,
    grad_w: DeviceArray,
    totals: DeviceArray,
    rule: CounterRule,
    *,
    seed: int,
    row_offset: int,
    index_base: int,
    s_base: DeviceArray | None = None,
    g_sq: DeviceArray | None = None,
    clock: DeviceArray | None = None,
    cache: DeviceArray | None = None,
) -> Any:
    """Enqueue the update of the tile whose gradient is grad_w [R, in], all on the device, and return its event.

    What the rule does not ask for is not read: s_base belongs to the lazy rebase, g_sq to rms_mode "proxy".
    """
    shape = row_shape(device.info, *grad_w.shape)
    return _enqueue(
        device,
        shape,
        grad_w,
        (grad_w,),
        (state, scale, v, totals),
        (s_base, g_sq, clock, cache),
        rule,
        rows=grad_w.shape[0],
        seed=seed,
        row_offset=row_offset,
        index_base=index_base,
    )


def launch_update_from_io(
    device: Device,
    state: DeviceArray,
    scale: DeviceArray,
    v: DeviceArray,
    x: DeviceArray,
    grad_out: DeviceArray,
    totals: DeviceArray,
    rule: CounterRule,
    *,
    seed: int,
    s_base: DeviceArray | None = None,
    g_sq: DeviceArray | None = None,
    clock: DeviceArray | None = None,
    cache: DeviceArray | None = None,
) -> Any:
    """Enqueue the update of a whole layer by a kernel that forms the gradient of x [M, in] and grad_out [M, out].

    ValueError where a row of the layer is too long for that on this device.
    """
    (tokens, n), rows = x.shape, grad_out.shape[1]
    shape = from_io_shape(device.info, rows, n)
    if shape is None:
        raise ValueError(f"expected in_features that {device.info.name} holds a row's gradient of in a kernel, got {n}")
    return _enqueue(
        device,
        shape,
        x,
        (x, grad_out, np.uint32(tokens)),
        (state, scale, v, totals),
        (s_base, g_sq, clock, cache),
        rule,
        rows=rows,
        seed=seed,
        row_offset=0,
        index_base=0,
    )


def _enqueue(
    device: Device,
    shape: RowShape,
    source: DeviceArray,
    gradient: tuple[Any, ...],
    layer: tuple[DeviceArray, DeviceArray, DeviceArray, DeviceArray],
    options: tuple[DeviceArray | None, DeviceArray | None, DeviceArray | None, DeviceArray | None],
    rule: CounterRule,
    *,
    rows: int,
    seed: int,
    row_offset: int,
    index_base: int,
) -> Any:
    """gradient: the arguments that bring it. layer: state, scale, v, totals. options: s_base, g_sq, clock, cache."""
    n = source.shape[1]
    state, scale, v, totals = layer
    s_base, g_sq, clock, cache = options
    kernel = _row_kernel(
        device, "counter_update", rule, shape, source, clocked=clock is not None, cache=cache_element(cache)
    )
    # Host scalars are float64 until here and rounded to float32 once: part of the rule.
    beside = (
        (s_base, rule.scale_rebase == "lazy"),
        (g_sq, rule.rms_mode == "proxy"),
        (clock, clock is not None),
        (cache, cache is not None),
    )
    reals = (rule.lr, rule.lr_scale, rule.rms_beta, 1.0 - rule.rms_beta, rule.rms_eps, rule.clip, 1.0 / math.sqrt(n))
    return kernel(
        shape.global_size,
        shape.local_size,
        state,
        scale,
        v,
        *gradient,
        totals,
        *(array for array, used in beside if used),
        np.uint32(n),
        np.uint32(rows),
        np.uint32(shape.per),
        np.uint32(row_offset),
        np.uint64(index_base),
        np.uint32(seed),
        *(np.float32(value) for value in reals),
    )


def _require_given(name: str, tensor: torch.Tensor | None, out: int, why: str) -> None:
    if tensor is None:
        raise ValueError(f"expected {name} for {why}, got None")
    require_tensor(name, tensor, torch.float32, (out, 1))


def require_update(
    state: torch.Tensor,
    scale: torch.Tensor,
    v: torch.Tensor | None,
    totals: torch.Tensor,
    n: int,
    rule: CounterRule,
    seed: Any,
    *,
    s_base: torch.Tensor | None = None,
    clock: torch.Tensor | None = None,
    cache: torch.Tensor | None = None,
) -> int:
    """Check what an update reads and changes before anything is changed; the number of rows."""
    out, _ = require_layer(state, scale, n, packed=rule.packed)
    if rule.use_rms:
        require_tensor("v", v, torch.float32, (out, 1))
    require_tensor("totals", totals, torch.int64, (3,))
    if rule.scale_rebase == "lazy":
        _require_given("s_base", s_base, out, "scale_rebase='lazy'")
    if clock is not None:
        require_tensor("clock", clock, torch.int64, (4,))
    if cache is not None:
        require_cache(cache, out, n)
    require_together(state=state, v=v, totals=totals, s_base=s_base, clock=clock, cache=cache)
    require_seed("a step's seed", seed)
    return out


def require_moments(g_sq: torch.Tensor | None, out: int, rule: CounterRule) -> None:
    """ValueError or TypeError unless g_sq [out, 1] is there where the rule asks for it, and nowhere else."""
    if rule.rms_mode == "proxy":
        _require_given("g_sq", g_sq, out, "rms_mode='proxy'")
    elif g_sq is not None:
        raise ValueError(f"expected g_sq for rms_mode='proxy' alone, got it for {rule.rms_mode!r}")


def optional_arrays(
    cross: Crossing,
    rule: CounterRule,
    s_base: torch.Tensor | None,
    g_sq: torch.Tensor | None,
    clock: torch.Tensor | None,
    cache: torch.Tensor | None,
) -> dict[str, DeviceArray | None]:
    """What an update's options bring, across the bridge, by the names that the launchers give it."""
    return {
        "s_base": cross.update(s_base) if s_base is not None and rule.scale_rebase == "lazy" else None,
        "g_sq": None if g_sq is None else cross.read(g_sq),
        "clock": None if clock is None else cross.read(clock),
        "cache": None if cache is None else cross.update(cache),
    }


def counter_update_(
    state: torch.Tensor,
    scale: torch.Tensor,
    v: torch.Tensor | None,
    grad_w: torch.Tensor,
    totals: torch.Tensor,
    rule: CounterRule,
    *,
    seed: int,
    row_offset: int = 0,
    index_base: int | None = None,
    s_base: torch.Tensor | None = None,
    g_sq: torch.Tensor | None = None,
    clock: torch.Tensor | None = None,
    cache: torch.Tensor | None = None,
) -> None:
    """One update in place of rows row_offset .. row_offset+R of a layer, from grad_w float32 [R, in].

    state uint8 [out, in] or packed [out, in/4*3]; scale, v float32 [out, 1] (v may be None without RMS); totals int64
    [3] gains the counters moved, the ternary weights changed, the rows skipped. seed: the step's, uint32. index_base:
    the index of the tile's first element in the layer (row_offset*in by default), which the rounding hashes.

    s_base float32 [out, 1]: the scale that the counters are calibrated to, read and written by the lazy rebase alone.
    g_sq float32 [out, 1]: the layer's estimates for rms_mode "proxy" (`proxy_moments`), None in other modes. clock
    int64 [4] (`advance_clock_`): nothing happens where it does not fire, and lr is multiplied by its period where it
    does. cache int8 or float16 [out, in]: the layer's ternary weights, of which those that change are written.
    ValueError or TypeError, before anything changes, for what is missing or of another shape or dtype.
    """
    require_tensor("grad_w", grad_w, torch.float32, (None, None))
    rows, n = grad_w.shape
    out = require_update(state, scale, v, totals, n, rule, seed, s_base=s_base, clock=clock, cache=cache)
    require_moments(g_sq, out, rule)
    base = row_offset * n if index_base is None else index_base
    if rule.packed and base % 4:
        raise ValueError(f"expected index_base divisible by 4 for packed rows, got {base}")
    if not 0 <= row_offset <= out - rows:
        raise ValueError(f"expected rows {row_offset}..{row_offset + rows} within the layer's {out}")
    require_together(grad_w=grad_w, state=state, g_sq=g_sq)
    if rows * n == 0:
        return
    device = ready_device(state)
    with Crossing(device, state) as cross:
        launch_update(
            device,
            cross.update(state),
            cross.update(scale),
            cross.update(scale if v is None else v),
            cross.read(grad_w),
            cross.update(totals),
            rule,
            seed=seed,
            row_offset=row_offset,
            index_base=base,
            **optional_arrays(cross, rule, s_base, g_sq, clock, cache),
        )


def counter_update_hashsr(
    codes: torch.Tensor,
    scale: torch.Tensor,
    v: torch.Tensor,
    grad_w: torch.Tensor,
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

    The equations stand in `memtrain_cl.reference.counter`. C: carry radix. clip: bound of the row norm, 0 for none.
    """
    rms_mode = "lagged" if lagged else "exact"
    rule = CounterRule(C, False, lr, lr_scale, rms_beta, rms_eps, rms_mode=rms_mode, clip=clip)
    result = codes.clone()
    counter_update_(result, scale, v, grad_w, torch.zeros(3, dtype=torch.int64, device=codes.device), rule, seed=seed)
    return result
