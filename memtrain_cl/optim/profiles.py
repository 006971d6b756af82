"""Sorted profiles of tensors: the largest values as they are, of the others their order and a fitted distribution.

Whole tensor (block_size 0)   the `top_k` largest magnitudes are stored with their places. The other n_tail values, the
    tail, are stored as the places that they have in ascending order and a family fitted to them (float64, on the host):
    the i-th comes back as quantile((i + 0.5) / n_tail). The receipt is the Kolmogorov-Smirnov distance of the tail from
    the fit. Bytes: 4k + k*index + n_tail*index + 64 + 4, an index being the smallest of uint8, 16, 32, 64 for n places.

Blocks (block_size 1..256)    of the codec of `memtrain_cl.reference.profile`: a byte an element, its rank within its
    block, and a mean and a scale a block; one family, in the form that is standardised, is fitted to what all blocks'
    values are as (x - mean)/scale, and its quantiles make the table of 256 that gives values back. Sorting, statistics
    and distances are the device's; the host fits to 4096 of the sorted values. The distribution function is taken
    straight between 32769 places in -16..16, beyond which no value of a block of 256 lies; what this adds to the
    distance is below 1e-4 for the families of `memtrain_cl.optim.families`. The receipt is that distance and the
    relative error ||decoded - x|| / ||x|| below 0.3, since of blocks unlike each other the distance alone says little.
    Zeros come back as zeros; of a tensor without negative numbers, what is not zero as at least a 16th of its block's
    mean. Bytes: n + 8 a block + 1024 for the table, 64 + 4, and (4 + index)*k.

A receipt that is refused leaves the tensor dense, in float32, and is kept.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from memtrain_cl.optim.families import SAMPLE, Gaussian, TailFamily, Values, family_of, order_statistics

#: The largest relative error of a profile of blocks.
RELATIVE_ERROR_LIMIT = 0.3
#: Elements of a block where none is given, on devices.
BLOCK_SIZE = 256
#: The places in which a distribution function is tabled: cells, first and last.
CURVE_CELLS, CURVE_START, CURVE_STOP = 1 << 15, -16.0, 16.0
#: Bytes that a fitted family, and a distance, count for.
FAMILY_BYTES, DISTANCE_BYTES = 64, 4

_INDEX_TYPES = ((1 << 8, torch.uint8), (1 << 16, torch.uint16), (1 << 32, torch.uint32))


def index_dtype(n: int) -> torch.dtype:
    """The smallest unsigned type that numbers n places."""
    return next((dtype for places, dtype in _INDEX_TYPES if n <= places), torch.uint64)


@dataclass(frozen=True)
class SortedProfileEncoding:
    """A tensor as `fit_sorted_profile` stores it; `reconstruct` gives it back.

    shape: of the tensor.   top_k_values: float32 [k].   top_k_indices: their flat places.   tail_distribution: the
    fitted family, None where there was nothing to fit.   permutation_indices: flat places of the tail in ascending
    order, of a whole tensor's profile.   goodness_of_fit: the distance of the tail from the fit, 1.0 without one.
    used_dense_fallback: whether dense_values, float32, hold the tensor instead.   n_tail: values in the tail.
    block_size: 0 of a whole tensor.   codes uint8, mean_scale float32 [blocks, 2], table float32 [256]: of blocks.
    relative_error: ||decoded - x|| / ||x||, of blocks; 0.0 of a whole tensor, for which it is not judged.
    positive: whether no value is negative, and none comes back so.
    """

    shape: tuple[int, ...]
    top_k_values: torch.Tensor
    top_k_indices: torch.Tensor
    tail_distribution: TailFamily | None
    permutation_indices: torch.Tensor | None
    goodness_of_fit: float
    used_dense_fallback: bool
    dense_values: torch.Tensor | None
    n_tail: int
    block_size: int = 0
    codes: torch.Tensor | None = None
    mean_scale: torch.Tensor | None = None
    table: torch.Tensor | None = None
    relative_error: float = 0.0
    positive: bool = False

    def nbytes(self) -> int:
        """Bytes that it takes."""
        if self.dense_values is not None:
            return self.dense_values.nbytes
        parts = (self.top_k_values, self.top_k_indices, self.permutation_indices)
        blocks = (self.codes, self.mean_scale, self.table)
        held = sum(part.nbytes for part in (*parts, *blocks) if part is not None)
        return held + FAMILY_BYTES + DISTANCE_BYTES


@dataclass(frozen=True)
class AnomalyReport:
    """What `detect_anomaly` found."""

    ks_statistic: float
    reference_goodness_of_fit: float
    is_anomaly: bool


# ---- what is asked of callers ----


def default_ops() -> ModuleType:
    """The launchers, imported on first use."""
    from memtrain_cl import ops

    return ops


def require_values(name: str, tensor: Any) -> torch.Tensor:
    """The tensor, detached; TypeError unless it is a dense one of floating numbers, ValueError for float64 numbers that
    float32 does not hold.
    """
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.layout is not torch.strided:
        got = f"{tensor.dtype}, {tensor.layout}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"expected {name} as a dense tensor of floating numbers, got {got}")
    if tensor.dtype == torch.float64:
        beyond = tensor.isfinite() & tensor.to(torch.float32).isinf()
        if bool(beyond.any()):
            raise ValueError(f"expected {name} of numbers that float32 holds, got {float(tensor[beyond][0])!r}")
    return tensor.detach()


def require_whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """The value as an int; ValueError unless a whole number from least to most."""
    wrong = isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least
    if wrong or (most is not None and value > most):
        raise ValueError(
            f"expected {name} as an integer {f'{least}..{most}' if most else f'>= {least}'}, got {value!r}"
        )
    return int(value)


def require_share(name: str, value: Any) -> float:
    """The value as a float; ValueError unless a number >= 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ValueError(f"expected {name} as a number >= 0, got {value!r}")
    return float(value)


# ---- fits ----


def _fitted(family: TailFamily, values: Values) -> TailFamily | None:
    """The fitted family; None where it cannot hold the values, or would give some back beyond float32's range."""
    try:
        fitted: TailFamily = family.fit(values)
    except ValueError:
        return None
    ends = fitted.quantile(np.array([0.5, len(values) - 0.5]) / len(values))
    with np.errstate(over="ignore"):
        given_back = np.asarray(ends, dtype=np.float32)
    return fitted if np.isfinite(given_back).all() and np.isfinite(fitted.cdf(ends)).all() else None


def ks_distance(ordered: Values, fitted: TailFamily | None) -> float:
    """The Kolmogorov-Smirnov distance of sorted values from a distribution; 1.0 without one."""
    if fitted is None:
        return 1.0
    height = np.asarray(fitted.cdf(ordered), dtype=np.float64)
    steps = np.arange(len(ordered) + 1) / len(ordered)
    return float(np.maximum(steps[1:] - height, height - steps[:-1]).max())


def _table(fitted: TailFamily) -> torch.Tensor:
    """float32 [256]: by code the quantile of a standardised family; the first stands for nothing."""
    with np.errstate(over="ignore"):
        quantiles = np.asarray(fitted.quantile((np.arange(1, 256) - 0.5) / 255), dtype=np.float32)
    return torch.from_numpy(np.concatenate([np.zeros(1, np.float32), quantiles]))


def _curve(fitted: TailFamily) -> torch.Tensor:
    """float32 [cells + 1]: the distribution function of a standardised family at the tabled places."""
    places = np.linspace(CURVE_START, CURVE_STOP, CURVE_CELLS + 1)
    return torch.from_numpy(np.asarray(fitted.cdf(places), dtype=np.float32))


@functools.cache
def normal_table(device: torch.device) -> torch.Tensor:
    """The table of the standard normal distribution, float32 [256], on a device."""
    return _table(Gaussian()).to(device)


@functools.cache
def _normal_curve(device: torch.device) -> torch.Tensor:
    return _curve(Gaussian()).to(device)


def profile_fits(
    tensor: torch.Tensor,
    *,
    block_size: int = BLOCK_SIZE,
    gof_threshold: float = 0.05,
    positive: bool = False,
    ops: ModuleType | None = None,
) -> bool:
    """Whether a profile of blocks with the standard normal distribution's table gives the tensor back.

    The distance of its standardised values is at most gof_threshold, and the relative error below 0.3. Waits for the
    device. positive: see `ops.decode_profile`.
    """
    x, ops = require_values("tensor", tensor), ops or default_ops()
    codes, mean_scale = ops.encode_profile(x, block_size)
    pooled = ops.pool_profile(x, mean_scale, block_size)
    distance, _ = ops.profile_distance(pooled, _normal_curve(x.device), CURVE_START, CURVE_STOP)
    table = normal_table(x.device)
    if distance > gof_threshold:
        return False
    return bool(ops.profile_error(x, codes, mean_scale, table, block_size, positive=positive) < RELATIVE_ERROR_LIMIT)


# ---- encodings ----


def fit_sorted_profile(
    tensor: torch.Tensor,
    top_k: int = 0,
    tail_family: TailFamily | str | None = None,
    gof_threshold: float = 0.05,
    *,
    block_size: int | None = None,
    ops: ModuleType | None = None,
) -> SortedProfileEncoding:
    """The sorted profile of a tensor of floating numbers of any shape, or the tensor where none fits.

    top_k: largest magnitudes to store as they are, of equal ones the first.   tail_family: an object of
    `memtrain_cl.optim.families`, or its name; Gaussian by default.   gof_threshold: the largest distance that is
    accepted.   block_size: 0 for the whole tensor, which is stored on the host; 1..256 for blocks, which are stored
    where the tensor is, but for the places of the largest; None takes the whole of a host tensor, and blocks of 256
    elsewhere.   ops: the launchers, `memtrain_cl.ops` or `memtrain_cl.reference`.

    Fewer than two values in the tail, and values that are not finite, are stored dense. TypeError and ValueError for
    arguments of other types and ranges.
    """
    x = require_values("tensor", tensor)
    top_k = min(require_whole("top_k", top_k, 0), x.numel())
    gof_threshold = require_share("gof_threshold", gof_threshold)
    family = family_of(tail_family)
    if block_size is None:
        block_size = 0 if x.device.type == "cpu" else BLOCK_SIZE
    block_size = require_whole("block_size", block_size, 0, 256)
    if block_size:
        return _fit_blocks(x, top_k, family, gof_threshold, block_size, ops or default_ops())
    return _fit_whole(x, top_k, family, gof_threshold)


def _fit_whole(x: torch.Tensor, top_k: int, family: TailFamily, gof_threshold: float) -> SortedProfileEncoding:
    flat = x.to("cpu", torch.float32).reshape(-1)
    n, places = flat.numel(), index_dtype(flat.numel())
    head = flat.abs().sort(descending=True, stable=True).indices[:top_k]
    tail = torch.ones(n, dtype=torch.bool, device="cpu").index_fill_(0, head, False).nonzero()[:, 0]
    ordered, order = flat[tail].sort(stable=True)
    values = ordered.numpy().astype(np.float64)
    fitted = _fitted(family, values) if len(values) >= 2 and np.isfinite(values).all() else None
    distance = ks_distance(values, fitted)
    dense = fitted is None or distance > gof_threshold or not bool(torch.isfinite(flat).all())
    return SortedProfileEncoding(
        shape=tuple(x.shape),
        top_k_values=flat[head],
        top_k_indices=head.to(places),
        tail_distribution=fitted,
        permutation_indices=None if dense else tail[order].to(places),
        goodness_of_fit=distance,
        used_dense_fallback=dense,
        dense_values=flat.reshape(x.shape).clone() if dense else None,
        n_tail=len(values),
        positive=n > 0 and bool((flat >= 0).all()),
    )


def _without(x: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """A flat float32 copy of x, or x flat, with zeros in some places."""
    flat = x.reshape(-1).to(torch.float32)
    return flat.clone().index_fill_(0, head, 0.0) if head.numel() else flat


def _pooled_fit(
    pooled: torch.Tensor, family: TailFamily, ops: ModuleType
) -> tuple[TailFamily | None, torch.Tensor, float]:
    """(the fitted family, its table on the host, its distance) of sorted standardised values, NaN behind all others."""
    family = getattr(family, "standardised", lambda: family)()
    curve = _normal_curve(pooled.device)
    distance, count = ops.profile_distance(pooled, curve, CURVE_START, CURVE_STOP)
    if count < 2:
        # Nothing but zeros and blocks of equal numbers, which come back as they were.
        return Gaussian(), normal_table(torch.device("cpu")), distance
    places = order_statistics(np.arange(count, dtype=np.float64), SAMPLE).astype(np.int64)
    sample = pooled[torch.from_numpy(places).to(pooled.device)].cpu().numpy().astype(np.float64)
    fitted = _fitted(family, sample)
    if fitted is None:
        return None, normal_table(torch.device("cpu")), 1.0
    distance, _ = ops.profile_distance(pooled, _curve(fitted).to(pooled.device), CURVE_START, CURVE_STOP)
    return fitted, _table(fitted), distance


def _fit_blocks(
    x: torch.Tensor, top_k: int, family: TailFamily, gof_threshold: float, block_size: int, ops: ModuleType
) -> SortedProfileEncoding:
    n = x.numel()
    flat = x.reshape(-1).to(torch.float32)
    head = flat.abs().sort(descending=True, stable=True).indices[:top_k] if top_k else torch.empty(0, dtype=torch.int64)
    head = head.to(x.device)
    tail = _without(x, head)
    codes, mean_scale = ops.encode_profile(tail, block_size)
    fitted, table, distance = None, normal_table(torch.device("cpu")), 1.0
    error = float("nan")
    positive = n > 0 and bool((flat >= 0).all())
    if n - top_k >= 2:
        fitted, table, distance = _pooled_fit(ops.pool_profile(tail, mean_scale, block_size), family, ops)
        error = ops.profile_error(tail, codes, mean_scale, table.to(x.device), block_size, positive=positive)
    dense = fitted is None or not (distance <= gof_threshold and error < RELATIVE_ERROR_LIMIT)
    dense = dense or not bool(torch.isfinite(flat[head]).all())
    return SortedProfileEncoding(
        shape=tuple(x.shape),
        top_k_values=flat[head],
        top_k_indices=head.cpu().to(index_dtype(n)),
        tail_distribution=fitted,
        permutation_indices=None,
        goodness_of_fit=distance,
        used_dense_fallback=dense,
        dense_values=flat.reshape(x.shape).clone() if dense else None,
        n_tail=n - top_k,
        block_size=block_size,
        codes=None if dense else codes,
        mean_scale=None if dense else mean_scale,
        table=None if dense else table.to(x.device),
        relative_error=error,
        positive=positive,
    )


def reconstruct(encoding: SortedProfileEncoding, *, ops: ModuleType | None = None) -> torch.Tensor:
    """float32 of the tensor's shape, where the encoding is; of a dense one the values, copied.

    ops: the launchers, as `fit_sorted_profile` takes them.
    """
    if not isinstance(encoding, SortedProfileEncoding):
        raise TypeError(f"expected a SortedProfileEncoding, got {type(encoding).__name__}")
    if encoding.dense_values is not None:
        return encoding.dense_values.clone()
    head = encoding.top_k_indices.to(torch.int64)
    if encoding.block_size:
        codes, mean_scale, table = encoding.codes, encoding.mean_scale, encoding.table
        positive = encoding.positive
        flat: torch.Tensor = (ops or default_ops()).decode_profile(
            codes, mean_scale, table, encoding.block_size, positive=positive
        )
    else:
        flat = _whole_values(encoding)
    if head.numel():
        flat.index_copy_(0, head.to(flat.device), encoding.top_k_values)
    return flat.reshape(encoding.shape)


def _whole_values(encoding: SortedProfileEncoding) -> torch.Tensor:
    fitted, permutation, n = encoding.tail_distribution, encoding.permutation_indices, encoding.n_tail
    if fitted is None or permutation is None:
        raise ValueError("expected an encoding with a distribution and a permutation, or with dense values")
    values = np.asarray(fitted.quantile((np.arange(n) + 0.5) / n), dtype=np.float32)
    if encoding.positive:
        # A family that reaches below zero has numbers there that the tensor did not.
        values = np.maximum(values, np.float32(max(0.0, float(values[n // 2]) / 16)))
    flat = torch.empty(n + encoding.top_k_values.numel(), dtype=torch.float32, device="cpu")
    flat[permutation.to(torch.int64)] = torch.from_numpy(values)
    return flat


def detect_anomaly(
    tensor: torch.Tensor,
    reference: SortedProfileEncoding,
    ratio_threshold: float = 2.0,
    abs_margin: float = 0.02,
    *,
    ops: ModuleType | None = None,
) -> AnomalyReport:
    """Whether a tensor has another distribution than one whose profile is at hand.

    Its tail, without as many of its largest magnitudes as the reference stores, has the distance ks_statistic from
    the reference's fitted family; that is an anomaly above max(ratio_threshold * r, r + abs_margin), r being the
    reference's own distance. A tensor that is not finite is at distance 1. Of a profile of blocks the standardised
    values are compared, so that blocks may move and stretch. ValueError for a reference without a fitted family.
    """
    x = require_values("tensor", tensor)
    if not isinstance(reference, SortedProfileEncoding):
        raise TypeError(f"expected reference as a SortedProfileEncoding, got {type(reference).__name__}")
    fitted, own = reference.tail_distribution, reference.goodness_of_fit
    if fitted is None:
        raise ValueError("expected a reference with a fitted distribution, got one without")
    ratio_threshold = require_share("ratio_threshold", ratio_threshold)
    abs_margin = require_share("abs_margin", abs_margin)
    flat = x.reshape(-1).to(torch.float32)
    top_k = min(reference.top_k_values.numel(), flat.numel())
    order = flat.abs().sort(descending=True, stable=True).indices
    if reference.block_size:
        ops = ops or default_ops()
        tail = _without(flat, order[:top_k])
        _, mean_scale = ops.encode_profile(tail, reference.block_size)
        pooled = ops.pool_profile(tail, mean_scale, reference.block_size)
        distance = 1.0
        if bool(torch.isfinite(flat).all()):
            distance, _ = ops.profile_distance(pooled, _curve(fitted).to(x.device), CURVE_START, CURVE_STOP)
    else:
        values = np.sort(flat[order[top_k:]].cpu().numpy().astype(np.float64))
        distance = ks_distance(values, fitted) if len(values) and bool(torch.isfinite(flat).all()) else 1.0
    return AnomalyReport(distance, own, distance > max(ratio_threshold * own, own + abs_margin))
