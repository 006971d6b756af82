"""What profiles and compressed moments must answer, for sweeps of hostile tensors (hostile.py).

Profiles of blocks are compared with the oracle's bytes; what comes back from an encoding with what its receipt allows.
"""

from __future__ import annotations

import math

import torch

from memtrain_cl import ops, reference
from memtrain_cl.optim import (
    CompressedOptimizerState,
    compress_moment,
    decompress_moment,
    detect_anomaly,
    fit_sorted_profile,
    reconstruct,
)
from memtrain_cl.optim.profiles import RELATIVE_ERROR_LIMIT, normal_table

#: Sizes of a block that a device takes in shapes of its own.
BLOCK_SIZES = (1, 7, 16, 256)


def _same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal bytes; a NaN equals every other."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    if not got.is_floating_point():
        return torch.equal(got, want)
    nan = torch.tensor(math.nan)
    ours, theirs = (torch.where(x.isnan(), nan, x).view(torch.int32) for x in (got, want))
    return torch.equal(ours, theirs)


def judge_codes(x: torch.Tensor, block_size: int, positive: bool) -> str:
    """What is wrong with a profile of blocks; "" where nothing is."""
    coded, want = (room.encode_profile(x, block_size) for room in (ops, reference))
    if not all(_same(a, b) for a, b in zip(coded, want, strict=True)):
        return "codes are not the oracle's"
    table = normal_table(torch.device("cpu"))
    back, oracle = (room.decode_profile(*want, table, block_size, positive=positive) for room in (ops, reference))
    if not _same(back, oracle):
        return "numbers are not the oracle's"
    if not _same(*(room.pool_profile(x, want[1], block_size) for room in (ops, reference))):
        return "standardised numbers are not the oracle's"
    zero = x.to(torch.float32).abs() < 2.0**-126
    finite = bool(torch.isfinite(x).all())
    return "a zero did not come back" if finite and bool(back[zero].any()) else ""


def _error(got: torch.Tensor, x: torch.Tensor) -> float:
    """||got - x|| / ||x||, 0 where both are zero."""
    apart, whole = (got.double() - x.double()).norm(), x.double().norm()
    return float(apart / whole) if float(whole) else float(apart)


def judge_encoding(x: torch.Tensor, method: str, family: str, block_size: int, top_k: int) -> str:
    """What is wrong with the encodings of x; "" where nothing is."""
    exact = x.to(torch.float32)
    made = compress_moment(x, method, tail_family=family, int8_block_size=max(1, block_size), min_size_for_g4=8)
    back = decompress_moment(made)
    if back.shape != x.shape or back.dtype != torch.float32:
        return f"expected {list(x.shape)}, got {list(back.shape)} of {back.dtype}"
    if made.method == "dense" and not _same(back, exact):
        return "dense numbers differ"
    if made.method == "int8" and _error(back, exact) > 0.5 * (1 + 1e-3):
        return f"an error of {_error(back, exact)} passed the receipt of int8"
    profile = fit_sorted_profile(x, top_k, family, 0.2, block_size=block_size)
    back = reconstruct(profile)
    if back.shape != x.shape or not 0 <= profile.goodness_of_fit <= 1:
        return f"expected {list(x.shape)} and a distance in 0..1, got {profile}"
    if profile.used_dense_fallback:
        return "" if _same(back, exact) else "dense numbers differ"
    if block_size and _error(back, exact) > RELATIVE_ERROR_LIMIT * (1 + 1e-3):
        return f"an error of {_error(back, exact)} passed the receipt of blocks"
    return "" if bool(torch.isfinite(back).all()) else "an accepted profile gives what is not finite"


def judge_anomaly(x: torch.Tensor, family: str, block_size: int, top_k: int) -> str:
    """What is wrong with what is said of x beside its own profile, and of half of it; "" where nothing is."""
    profile = fit_sorted_profile(x, top_k, family, 0.2, block_size=block_size)
    if profile.tail_distribution is None:
        return ""
    own, half = (detect_anomaly(it, profile) for it in (x, x.reshape(-1)[::2]))
    if not all(0 <= it.ks_statistic <= 1 for it in (own, half)):
        return f"expected distances in 0..1, got {own} and {half}"
    if not bool(torch.isfinite(x).all()):
        return "" if own.ks_statistic == 1 else f"expected a tensor that is not finite at distance 1, got {own}"
    same = own.ks_statistic == own.reference_goodness_of_fit == profile.goodness_of_fit
    return "" if same and not own.is_anomaly else f"expected a tensor to be as its own profile, got {own}"


def judge_state(x: torch.Tensor, method: str, block_size: int) -> str:
    """What is wrong with moments x and x^2 that are held compressed; "" where nothing is."""
    m, v = x.to(torch.float32), x.to(torch.float32).square()
    state = CompressedOptimizerState(x.shape, method, int8_block_size=max(1, block_size), min_size_for_g4=8)
    state.set(x, v)
    back_m, back_v = state.get()
    for got, want in ((back_m, m), (back_v, v)):
        if got.shape != x.shape or got.dtype != torch.float32:
            return f"expected float32 {list(x.shape)}, got {got.dtype} {list(got.shape)}"
        if bool(torch.isfinite(want).all()) != bool(torch.isfinite(got).all()):
            return f"expected what is finite to stay so, got {got} of {want}"
    lost = (v >= 2.0**-120) & (back_v == 0)
    return f"{int(lost.sum())} positive numbers came back as zero" if bool(lost.any()) else ""
