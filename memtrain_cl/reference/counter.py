"""Counter weights in torch: packing, decoding, row sums, and the update of one step.

With everything in float32 and each operation rounded by itself, per row o of n columns:

    S(x)   = sum in the one order: 1024 lanes, element j in lane j mod 1024, ascending, then halved 512, 256 ... 1
    g_sq   = S(g*g) / n, or what is given (rms_mode "proxy");   v' = rms_beta*v + (1 - rms_beta)*g_sq
    denom  = max(sqrt(v' or, lagged, v), rms_eps), or 1 without RMS
    clip   : denom /= min(1, clip / max(sqrt(g_sq*n)/denom, 1e-30))
    grad_s = S(g*t) * (1/sqrt(n)), divided by denom with clipped_scale;   s' = clamp(s - lr_scale*grad_s, 1e-5, 10)
    pulse  : p = g, or (pulse_mode "ternary") a = max |g|, p = sign(g)*a where uniform01(seed_2 ^ inner) < |g|/a, else 0
    eager  : k = (lr/denom)*(C/s');  r = s/s';  val = c*r - p*k
    lazy   : k = (lr/denom)*(C/s);  r = s_base/s;  y = c*r;  c1 = floor(y) + (uniform01(seed_1 ^ inner) < y - floor(y));
             val = c1 - p*k;  s_base' = s
    cc = floor(val) + (uniform01(seed ^ inner) < val - floor(val)), with val clamped to +-4C
    carry = trunc(cc/C);  t' = clamp(t + carry, -1, 1);  c' = cc - carry*C, or sign(cc)*(C-1) where the clamp was active

inner hashes the element's index in the layer, seed_n is `formats.stream_seed(seed, n)`. A clipped gradient makes the
clipped pulse: the division by denom is in k. A row whose sum of squares or given g_sq is not finite stays as it is and
is counted; so does a lazy one whose k or r is not (scales that no update leaves behind).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from memtrain_cl.formats import LANES, STREAM_PULSE, STREAM_REBASE, CounterRule, stream_seed
from memtrain_cl.reference.codes import decode_state, encode_state, hash_index, pulse_of, uniform01


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [out, in] (the low six bits count) -> packed uint8 [out, in/4*3].

    Three bytes are the little-endian number c0 | c1<<6 | c2<<12 | c3<<18.
    """
    if codes.shape[1] % 4:
        raise ValueError(f"expected in_features divisible by 4 for 6-bit packing, got {codes.shape[1]}")
    c = (codes.to(torch.int64) & 63).reshape(codes.shape[0], codes.shape[1] // 4, 4)
    number = c[..., 0] | c[..., 1] << 6 | c[..., 2] << 12 | c[..., 3] << 18
    shifts = torch.tensor([0, 8, 16])
    return ((number.unsqueeze(-1) >> shifts) & 255).to(torch.uint8).reshape(codes.shape[0], codes.shape[1] // 4 * 3)


def unpack_codes(packed: torch.Tensor, in_features: int) -> torch.Tensor:
    """The inverse of `pack_codes`: uint8 [out, in_features]."""
    p = packed.to(torch.int64).reshape(packed.shape[0], in_features // 4, 3)
    number = p[..., 0] | p[..., 1] << 8 | p[..., 2] << 16
    shifts = torch.tensor([0, 6, 12, 18])
    return ((number.unsqueeze(-1) >> shifts) & 63).to(torch.uint8).reshape(packed.shape[0], in_features)


def _codes(state: torch.Tensor, in_features: int, packed: bool) -> torch.Tensor:
    return unpack_codes(state, in_features) if packed else state


def decode_dense(state: torch.Tensor, scale: torch.Tensor, in_features: int, *, C: int, packed: bool) -> torch.Tensor:
    """float32 [out, in]: scale[row] * t. state [out, in] or packed, scale [out, 1]."""
    t, _ = decode_state(_codes(state, in_features, packed), C)
    return scale * t.to(torch.float32)


def lane_sum(values: torch.Tensor) -> torch.Tensor:
    """Row sums [rows] of float32 [rows, n] in the one summation order."""
    rows, n = values.shape
    chunks = max(1, -(-n // LANES))
    padded = torch.zeros(rows, chunks * LANES)
    padded[:, :n] = values
    lanes = torch.zeros(rows, LANES)
    for chunk in padded.reshape(rows, chunks, LANES).unbind(1):
        lanes = lanes + chunk
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def row_statistics(state: torch.Tensor, grad_w: torch.Tensor, *, C: int, packed: bool) -> torch.Tensor:
    """float32 [rows, 2]: S(g*g) and S(g*t) of each row."""
    t, _ = decode_state(_codes(state, grad_w.shape[1], packed), C)
    return torch.stack([lane_sum(grad_w * grad_w), lane_sum(grad_w * t.to(torch.float32))], dim=1)


def _transition(t: torch.Tensor, cc: torch.Tensor, C: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(t', c') from the ternary weight and the rounded counter, both float32 tensors of integers."""
    carry = torch.trunc(cc / C)
    proposed = t + carry
    t_new = proposed.clamp(-1, 1)
    rest = torch.where(proposed != t_new, torch.sign(cc) * (C - 1), cc - carry * C)
    return t_new, rest.clamp(-(C - 1), C - 1)


def _float32(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64).to(torch.float32)


def _sqrt(values: torch.Tensor) -> torch.Tensor:
    """Correctly rounded float32 roots. torch's own float32 sqrt is off by one place now and then (MKL's vector code);
    through float64 the result cannot be, since no root of a float32 lies within a few float64 places of a rounding
    border.
    """
    return torch.sqrt(values.to(torch.float64)).to(torch.float32)


@dataclass
class _RowSteps:
    """What the elements of each row need, [rows] each: k, r, the scale and moment to come, and which rows change."""

    k: torch.Tensor
    r: torch.Tensor
    scale: torch.Tensor
    v: torch.Tensor | None
    keep: torch.Tensor


def _row_steps(
    rule: CounterRule,
    n: int,
    lr: torch.Tensor,
    sums: tuple[torch.Tensor, torch.Tensor],
    s: torch.Tensor,
    v: torch.Tensor | None,
    s_base: torch.Tensor | None,
    given: torch.Tensor | None,
) -> _RowSteps:
    """sums: S(g*g) and S(g*t). s, v, s_base: the rows' old values. given: g_sq of rms_mode "proxy"."""
    sum_sq, sum_gt = sums
    count = _float32(n)
    keep = torch.isfinite(sum_sq)
    g_sq = sum_sq / count
    if given is not None:
        g_sq = given
        keep = keep & torch.isfinite(g_sq) & (g_sq >= 0)
    denom = torch.ones_like(s)
    if v is not None:
        v_new = _float32(rule.rms_beta) * v + _float32(1.0 - rule.rms_beta) * g_sq
        denom = torch.maximum(_sqrt(v if rule.rms_mode == "lagged" else v_new), _float32(rule.rms_eps))
        v = v_new
    if rule.clip > 0:
        norm = _sqrt(g_sq * count) / denom
        denom = denom / torch.minimum(torch.tensor(1.0), _float32(rule.clip) / torch.maximum(norm, _float32(1e-30)))
    grad_s = sum_gt * _float32(1.0 / math.sqrt(n))
    if rule.clipped_scale:
        grad_s = grad_s / denom
    s_new = torch.clamp(s - _float32(rule.lr_scale) * grad_s, 1e-5, 10.0)
    k = (lr / denom) * (_float32(rule.C) / (s_new if s_base is None else s))
    r = s / s_new if s_base is None else s_base / s
    if s_base is not None:
        keep = keep & torch.isfinite(k) & torch.isfinite(_float32(rule.C) * r)
    return _RowSteps(k, r, s_new, v, keep)


def _round(x: torch.Tensor, seed: int, inner: torch.Tensor) -> torch.Tensor:
    floor = torch.floor(x)
    return floor + (uniform01(seed ^ inner) < x - floor).to(torch.float32)


def _require_rows(name: str, tensor: torch.Tensor | None, out: int, why: str) -> torch.Tensor:
    if tensor is None or tensor.dtype != torch.float32 or tensor.shape != (out, 1):
        got = "None" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
        raise ValueError(f"expected {name} float32 [{out}, 1] for {why}, got {got}")
    return tensor


def require_base(s_base: torch.Tensor | None, out: int, rule: CounterRule) -> torch.Tensor | None:
    """s_base float32 [out, 1] where the rule rebases lazily, else None; ValueError when it is missing."""
    return _require_rows("s_base", s_base, out, "scale_rebase='lazy'") if rule.scale_rebase == "lazy" else None


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

    state uint8 [out, in] or packed [out, in/4*3]; scale, v float32 [out, 1] (v None without RMS); totals int64 [3]
    gains the counters moved, the ternary weights changed, the rows skipped. seed: the step's, uint32. index_base: the
    index of the tile's first element in the layer (row_offset*in by default), which the rounding hashes.

    s_base float32 [out, 1]: the scale that the counters are calibrated to, read and written by the lazy rebase alone.
    g_sq float32 [out, 1]: the layer's estimates for rms_mode "proxy" (`proxy_moments`), None in other modes. clock
    int64 [4] (`advance_clock_`): nothing happens where it does not fire, and lr is multiplied by its period where it
    does. cache int8 or float16 [out, in]: the layer's ternary weights, of which those that change are written.
    ValueError when s_base or g_sq is missing.
    """
    rows, n = grad_w.shape
    C, out = rule.C, state.shape[0]
    lazy = require_base(s_base, out, rule)
    given = _require_rows("g_sq", g_sq, out, "rms_mode='proxy'") if rule.rms_mode == "proxy" else None
    lr = _float32(rule.lr)
    if clock is not None:
        if clock[2] == 0:
            return
        lr = lr * clock[0].to(torch.float32)
    tile = slice(row_offset, row_offset + rows)
    t, c = (part.to(torch.float32) for part in decode_state(_codes(state[tile], n, rule.packed), C))
    s = scale[tile, 0].clone()
    step = _row_steps(
        rule,
        n,
        lr,
        (lane_sum(grad_w * grad_w), lane_sum(grad_w * t)),
        s,
        v[tile, 0] if rule.use_rms and v is not None else None,
        None if lazy is None else lazy[tile, 0],
        None if given is None else given[tile, 0],
    )

    first = row_offset * n if index_base is None else index_base
    index = first + torch.arange(rows * n).reshape(rows, n)
    inner = hash_index(index)
    pulse = grad_w
    if rule.pulse_mode == "ternary":
        pulse = pulse_of(grad_w, stream_seed(seed, STREAM_PULSE), index)
    rebased = c * step.r[:, None]
    if lazy is not None:
        rebased = _round(rebased, stream_seed(seed, STREAM_REBASE), inner)
    val = (rebased - pulse * step.k[:, None]).clamp(-4.0 * C, 4.0 * C)
    cc = _round(val, seed, inner)
    t_new, c_new = _transition(t, cc, C)

    keep = step.keep
    codes = encode_state(t_new[keep].to(torch.int16), c_new[keep].to(torch.int16), C)
    at = torch.nonzero(keep)[:, 0] + row_offset
    state[at] = pack_codes(codes) if rule.packed else codes
    scale[at, 0] = step.scale[keep]
    if step.v is not None and v is not None:
        v[at, 0] = step.v[keep]
    if lazy is not None:
        lazy[at, 0] = s[keep]
    flips = (t_new != t) & keep[:, None]
    if cache is not None:
        cache[tile][flips] = t_new[flips].to(cache.dtype)
    totals += torch.stack([(cc != c)[keep].sum(), flips.sum(), (~keep).sum()])


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
    """New codes uint8 [out, in] of one update; scale and v [out, 1] change in place (the published signature)."""
    rms_mode = "lagged" if lagged else "exact"
    rule = CounterRule(C, False, lr, lr_scale, rms_beta, rms_eps, rms_mode=rms_mode, clip=clip)
    result = codes.clone()
    counter_update_(result, scale, v, grad_w, torch.zeros(3, dtype=torch.int64), rule, seed=seed)
    return result
