"""The kernels that decode a token at a time, against float64; cases: `memtrain_cl.cases_engine`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from memtrain_cl.array import DeviceArray, from_numpy
from memtrain_cl.case import Case
from memtrain_cl.comparison import Comparison, generator
from memtrain_cl.device import get_device
from memtrain_cl.formats import code_count
from memtrain_cl.launchers.counter_matvec import Norm, counter_matvec
from memtrain_cl.launchers.token_attention import Cache, rotate_rows, token_attention

_EPS = 1e-5


def _compare(got: DeviceArray, want: np.ndarray, magnitude: np.ndarray, tolerance: float) -> Comparison:
    """The error of an element is relative to the magnitude of what it is made of."""
    with np.errstate(invalid="ignore"):
        error = np.abs(got.numpy().reshape(want.shape) - want) / np.maximum(magnitude, np.finfo(np.float64).tiny)
    error = np.nan_to_num(error, nan=np.inf)
    return Comparison(float(error.max(initial=0.0)), int((error > tolerance).sum()))


def _packed(codes: np.ndarray) -> np.ndarray:
    """uint8 [rows, columns] -> [rows, columns/4*3], as the layout is defined."""
    four = codes.astype(np.uint32).reshape(codes.shape[0], -1, 4)
    number = four[..., 0] | four[..., 1] << 6 | four[..., 2] << 12 | four[..., 3] << 18
    return np.stack([number & 255, number >> 8 & 255, number >> 16], -1).astype(np.uint8).reshape(codes.shape[0], -1)


def _chance(case: Case) -> np.random.Generator:
    return np.random.default_rng(generator(case).initial_seed())


def check_counter_matvec(case: Case) -> Comparison:
    """counter_matvec with what is fused into it."""
    chance, device = _chance(case), get_device()
    rows, columns, C = case.shape["rows"], case.shape["columns"], case.options["C"]
    norm, add, gated = (case.options[name] for name in ("norm", "add", "gated"))
    codes = chance.integers(0, code_count(C), ((1 + gated) * rows, columns), dtype=np.uint8)
    scale, x, g, more = (
        chance.standard_normal(size).astype(np.float32) for size in (len(codes), columns, columns, rows)
    )
    scale = (np.exp(scale) / np.sqrt(columns)).astype(np.float32)
    out = from_numpy(device, np.full(rows, np.nan, np.float32))
    state, scales, inputs, weight, added = (from_numpy(device, each) for each in (_packed(codes), scale, x, g, more))
    counter_matvec(
        state,
        scales,
        inputs,
        out,
        C=C,
        norm=Norm(weight, _EPS) if norm else None,
        add=added if add else None,
        gated=gated,
    )
    t = codes.astype(np.float64) // (2 * C - 1) - 1
    wide = x.astype(np.float64)
    if norm:
        wide = wide / np.sqrt(np.mean(wide * wide) + _EPS) * g
    y, terms = (
        scale.astype(np.float64) * (weights @ numbers) for weights, numbers in ((t, wide), (np.abs(t), np.abs(wide)))
    )
    if gated:
        opened = y[:rows] / (1 + np.exp(-y[:rows]))
        # By the rule of products; the slope of silu is 1.1 at most.
        terms = 1.1 * terms[:rows] * np.abs(y[rows:]) + np.abs(opened) * (terms[rows:] + np.abs(y[rows:]))
        y = opened * y[rows:]
    if add:
        y, terms = y + more, terms + np.abs(more)
    return _compare(out, y, terms, case.tolerance)


def _turned(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """x [..., head] by angles [..., head/2]."""
    first, second = np.split(x, 2, axis=-1)
    cosine, sine = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def check_token(case: Case) -> Comparison:
    """rotate_rows and token_attention: the cache, of which nothing but the new positions is written, and the result."""
    chance, device = _chance(case), get_device()
    heads, head, start, tokens = (case.shape[name] for name in ("heads", "head", "start", "tokens"))
    end = start + tokens
    capacity = end + 2
    rows = chance.standard_normal((tokens, 3, heads, head)).astype(np.float32)
    # No numbers where nothing may be read.
    keys, values = (np.full((heads, capacity, head), np.nan, np.float32) for _ in range(2))
    keys[:, :start], values[:, :start] = chance.standard_normal((2, heads, start, head))
    angles = chance.uniform(-3, 3, (capacity, head // 2))
    table = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
    scores = np.full((heads, capacity), np.nan, np.float32)
    given, cache = (
        from_numpy(device, rows),
        Cache(*(from_numpy(device, each) for each in (keys, values, table, scores))),
    )
    wide = rows.astype(np.float64)
    query, key = _turned(wide[:, 0], angles[start:end, None]), _turned(wide[:, 1], angles[start:end, None])
    keys[:, start:end], values[:, start:end] = key.swapaxes(0, 1), rows[:, 2].swapaxes(0, 1)
    sizes = np.full(query.shape, np.abs(rows).max())
    if case.op == "rotate_rows":
        rotate_rows(given, cache, start, tokens)
        made = np.concatenate([query[:, None], wide[:, 1:]], axis=1)
        total = _compare(given, made, np.abs(rows).max() + np.abs(made), case.tolerance)
    else:
        out = from_numpy(device, np.full((heads, head), np.nan, np.float32))
        token_attention(given, cache, start, out)
        seen = values[:, :end].astype(np.float64)
        levels = np.einsum(
            "hd,hpd->hp", query[0], np.concatenate([keys[:, :start].astype(np.float64), key.swapaxes(0, 1)], 1)
        )
        weights = np.exp((levels - levels.max(1, keepdims=True)) / np.sqrt(head))
        weights /= weights.sum(1, keepdims=True)
        # An error of a score is one of its probability, relative to that.
        terms = np.einsum("hp,hpd->hd", weights * (1 + np.abs(levels)), np.abs(seen))
        total = _compare(out, np.einsum("hp,hpd->hd", weights, seen), terms, case.tolerance)
    for array, want in ((cache.keys, keys), (cache.values, values)):
        found = array.numpy()
        kept = np.ones(capacity, bool)
        kept[start:end] = False
        untouched = found[:, kept].view(np.uint32) == want[:, kept].view(np.uint32)
        total += Comparison(0.0, int((~untouched).sum()))
        new = from_numpy(device, found[:, start:end].swapaxes(0, 1))
        total += _compare(new, want[:, start:end].swapaxes(0, 1), sizes, case.tolerance)
    return total


CHECKS: dict[str, Callable[[Case], Comparison]] = {
    "counter_matvec": check_counter_matvec,
    "rotate_rows": check_token,
    "token_attention": check_token,
}
