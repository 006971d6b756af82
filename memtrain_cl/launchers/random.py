"""Launchers of kernels/random.cl: tensors of random numbers, dropout, and draws of categories.

A `stream` (uint32, one an operation: `torch_device.random.next_seed`) and an element's place decide its number, byte
for byte the same on every device. Operands are contiguous. float16 and bfloat16 hold the float32 numbers, rounded.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from memtrain_cl.device import Device
from memtrain_cl.faults import faults_of
from memtrain_cl.launchers.index_plan import make_plan, write_order
from memtrain_cl.operand import Operand, empty_operand
from memtrain_cl.probe import require_exact
from memtrain_cl.program import Kernel, get_kernel
from memtrain_cl.tuning import LARGEST_GROUP, SIZE_LIMIT, ceil_div, groups_share_rows, power_of_two_at_least

#: The second stream of numbers of 64 bits.
_SECOND_STREAM = 0x9E3779B9
#: A range of 2^64 is written as 0.
_ALL = 0xFFFFFFFFFFFFFFFF


@lru_cache(maxsize=1024)
def _kernel(
    device: Device, part: str, name: str, element: str, probabilities: str = "float32", wg_size: int = 1
) -> Kernel:
    require_exact(device)
    return get_kernel(
        device, "random", name, PART=part, WIDE=_width(device), T=element, P=probabilities, WG_SIZE=wg_size
    )


def _width(device: Device) -> int:
    """Elements that a work-item owns: those of a CPU's vector, or of a GPU's widest store."""
    return 4 if groups_share_rows(device.info) else 8


def _fill(out: Operand, name: str, stream: int, *arguments: Any) -> None:
    if out.size:
        _kernel(out.device, "fill", name, out.element)(
            (ceil_div(out.size, _width(out.device)),),
            None,
            *out.place,
            np.uint64(out.size),
            np.uint32(stream),
            *arguments,
        )


def uniform(out: Operand, stream: int, low: float = 0.0, high: float = 1.0) -> None:
    """low + (high - low)*u with u in [0, 1) in steps of 2^-24; low where that rounds to high. out: a floating type."""
    _fill(out, "uniform_fill", stream, np.float32(low), np.float32(high))


def normal(out: Operand, stream: int, mean: float = 0.0, std: float = 1.0) -> None:
    """mean + std*z with z = sqrt(-2 ln u) * (cos, sin)(2 pi v) for pairs (Box, Muller 1958). out: floating."""
    _fill(out, "normal_fill", stream, np.float32(mean), np.float32(std))


def exponential(out: Operand, stream: int, rate: float = 1.0) -> None:
    """-ln(u)/rate with u in (0, 1), never 0. out: a floating type."""
    _fill(out, "exponential_fill", stream, np.float32(rate))


def bernoulli(out: Operand, stream: int, p: float) -> None:
    """1 with probability p (u < p), else 0. out: any type."""
    _fill(out, "bernoulli_fill", stream, np.float32(p))


def integers(out: Operand, stream: int, low: int, high: int) -> None:
    """Whole numbers low <= x < high, floor((high - low)*b/2^64) above low for 64 random bits b. out: any type.

    ValueError unless low < high <= low + 2^64.
    """
    if not low < high <= low + (1 << 64):
        raise ValueError(f"expected low < high within 2^64, got {low} and {high}")
    second = stream ^ _SECOND_STREAM
    _fill(out, "integer_fill", stream, np.uint32(second), np.int64(low), np.uint64(high - low & _ALL))


def bernoulli_each(p: Operand, out: Operand, stream: int) -> None:
    """out[i] = 1 with probability p[i], else 0. p: a floating type, out: any, of one size."""
    if out.size:
        _kernel(out.device, "mask", "bernoulli_each", out.element, p.element)(
            (out.size,),
            None,
            *p.place,
            *out.place,
            np.uint64(out.size),
            np.uint32(stream),
        )


def dropout(x: Operand, out: Operand, mask: Operand, stream: int, p: float) -> None:
    """mask = u < 1 - p, out = mask ? x/(1 - p) : 0. x, out: one floating type; mask bool."""
    if out.size:
        keep = 1.0 - p
        _kernel(out.device, "mask", "dropout", out.element)(
            (ceil_div(out.size, _width(out.device)),),
            None,
            *x.place,
            *out.place,
            *mask.place,
            np.uint64(out.size),
            np.uint32(stream),
            np.float32(keep),
            np.float32(1.0 / keep if keep else 0.0),
        )


def dropout_backward(grad: Operand, mask: Operand, out: Operand, scale: float) -> None:
    """out = mask ? grad*scale : 0."""
    if out.size:
        _kernel(out.device, "mask", "dropout_backward", out.element)(
            (out.size,),
            None,
            *grad.place,
            *mask.place,
            *out.place,
            np.uint64(out.size),
            np.float32(scale),
        )


def draw(p: Operand, out: Operand, stream: int) -> None:
    """out[r, s] = category j with probability p[r, j]/sum of p[r]: p floating [rows, columns], out int64 [rows, draws].

    The largest p[r, j]/q[j] with exponential q is such a draw. Rows that are no probabilities are reported by the next
    `faults.raise_pending`.
    """
    rows, columns = p.shape
    draws = out.shape[1]
    if rows * draws == 0:
        return
    if rows * draws >= SIZE_LIMIT or columns >= SIZE_LIMIT:
        raise ValueError(f"expected fewer than 2^31 draws and categories, got {rows * draws} and {columns}")
    info = p.device.info
    group = 1
    if groups_share_rows(info):
        limit = 1 << (min(LARGEST_GROUP, info.max_work_group_size).bit_length() - 1)
        group = min(limit, max(32, power_of_two_at_least(columns)))
    _kernel(p.device, "draw", "draw", "int64", p.element, group)(
        (rows * draws * group,),
        (group,),
        *p.place,
        *out.place,
        faults_of(p.device),
        np.uint32(draws),
        np.uint32(columns),
        np.uint32(stream),
    )


def require_weights(p: Operand, *, positive: bool = False) -> None:
    """Let the next `faults.raise_pending` report a row of p [rows, columns] with an element that is no weight.

    A weight is finite and not negative; with `positive` not 0 either.
    """
    if p.size:
        _kernel(p.device, "draw", "require_weights", "int64", p.element)(
            (p.size,),
            None,
            *p.place,
            faults_of(p.device),
            np.uint32(p.shape[1]),
            np.int32(positive),
        )


def permutation(out: Operand, stream: int) -> None:
    """out: the numbers 0..n-1 in the order of hash(stream, i): every place's hash differs, so the order is one."""
    n = out.size
    if n == 0:
        return
    keys = empty_operand(out.device, (n,), "int64")
    _fill(keys, "hash_fill", stream)
    write_order(make_plan(keys, 1 << 32), out)


__all__ = [
    "bernoulli",
    "bernoulli_each",
    "draw",
    "dropout",
    "dropout_backward",
    "exponential",
    "integers",
    "normal",
    "permutation",
    "require_weights",
    "uniform",
]
