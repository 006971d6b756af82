"""Launchers of kernels/channel_norm.cl: group norm and batch norm over [images, channels, space], and their backwards.

x, y and their gradients are of one element, float32, float16 or bfloat16, contiguous; weight and bias [channels] of any
of these; mean and rstd float32, one for each statistic: [images*groups] of a group norm, [channels] of a batch norm.
Everything is computed in float32 and summed in a fixed order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from memtrain_cl.device import Device
from memtrain_cl.launchers.rows import FLOATING, RowShape, aligned_rows, require_rows, row_shape
from memtrain_cl.operand import Operand, empty_operand, place_of
from memtrain_cl.program import Kernel, get_kernel
from memtrain_cl.tuning import power_of_two_at_least

#: Elements from which on a row is shared by as many work-items as can.
_LONG = 1 << 20


@dataclass(frozen=True)
class Planes:
    """[images, channels, space], and what shares a mean: `groups` groups of an image's channels, or (0) a channel."""

    images: int
    channels: int
    space: int
    groups: int = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """images, channels, space."""
        return self.images, self.channels, self.space

    @property
    def statistics(self) -> int:
        """How many means there are."""
        return self.images * self.groups if self.groups else self.channels

    @property
    def per_statistic(self) -> int:
        """Neighbouring planes that share a mean."""
        return self.channels // self.groups if self.groups else 1

    @property
    def count(self) -> int:
        """Elements that share a mean."""
        return self.images * self.channels * self.space // self.statistics


@dataclass(frozen=True)
class _Plan:
    kernel: Kernel
    shape: RowShape
    #: n, rows, per, and of kernels over stretches also across, segments, row_stride, segment_stride.
    sizes: tuple[np.generic, ...]


@functools.lru_cache(maxsize=4096)
def _plan(
    device: Device, name: str, elements: tuple[str, str, str, str], rows: int, n: int, segments: int, aligned: bool
) -> _Plan:
    """rows of n elements; for segments > 0 rows of as many stretches of n, `rows` stretches apart (1: of one)."""
    shape = row_shape(device, rows, min(n * max(segments, 1), _LONG), aligned=aligned)
    constants = {key: value for key, value in shape.constants.items() if key != "HELD"}
    types = dict(zip("XWBR", elements, strict=True))
    kernel = get_kernel(device, "channel_norm", name, NAME=name, **constants, **types)
    sizes: tuple[np.generic, ...] = (np.uint32(n), np.uint32(rows), np.uint32(shape.per))
    if segments:
        lanes = shape.constants["LANES"]
        across = min(lanes, power_of_two_at_least(-(-n // 4))) if lanes > 1 else 1
        sizes += (np.uint32(across), np.uint32(segments), np.uint64(n), np.uint64(rows * n))
    return _Plan(kernel, shape, sizes)


def _element(operand: Operand | None) -> str:
    return "" if operand is None else operand.element


def _require(
    planes: Planes, same: dict[str, Operand], channels: dict[str, Operand | None], *statistics: Operand
) -> None:
    first = next(iter(same.values()))
    for name, operand in same.items():
        require_rows(name, operand, planes.shape, FLOATING if operand is first else (first.element,))
    for name, channel in channels.items():
        if channel is not None:
            require_rows(name, channel, (planes.channels,), FLOATING)
    for statistic in statistics:
        require_rows("mean and rstd", statistic, (planes.statistics,), ("float32",))


def moments(
    x: Operand,
    planes: Planes,
    mean: Operand,
    rstd: Operand,
    *,
    eps: float,
    running: tuple[Operand, Operand] | None = None,
    momentum: float = 0.0,
) -> Any:
    """mean and rstd = 1/sqrt(variance + eps) of each statistic of x [images, channels, space], written from offset 0.

    running: mean and variance [channels] of one element, which move by `momentum` towards this batch's (the variance's
    to that of a sample). The launch's event; x must not be empty.
    """
    moving = dict(zip(("running_mean", "running_var"), running or (None, None), strict=True))
    _require(planes, {"x": x}, moving, mean, rstd)
    if planes.groups:
        rows, n, segments = planes.statistics, planes.count, 1
    else:
        rows, n, segments = planes.channels, planes.space, planes.images
    elements = (x.element, "", "", _element(running[0] if running else None))
    plan = _plan(x.device, "moments", elements, rows, n, segments, aligned_rows(n, x))
    return plan.kernel(
        plan.shape.global_size,
        plan.shape.local_size,
        *x.place,
        mean,
        rstd,
        *place_of(running[0] if running else None, mean),
        *place_of(running[1] if running else None, mean),
        *plan.sizes,
        np.float32(eps),
        np.float32(momentum),
    )


def inverse_deviation(variance: Operand, rstd: Operand, *, eps: float) -> Any:
    """rstd = 1/sqrt(variance + eps), [channels]; the launch's event."""
    require_rows("variance", variance, variance.shape, FLOATING)
    require_rows("rstd", rstd, variance.shape, ("float32",))
    elements = ("float32", "", "", variance.element)
    plan = _plan(variance.device, "inverse_deviation", elements, 1, 1, 0, False)
    return plan.kernel(variance.shape, None, *variance.place, rstd, np.float32(eps))


def normalize(
    x: Operand,
    planes: Planes,
    mean: Operand,
    rstd: Operand,
    weight: Operand | None,
    bias: Operand | None,
    y: Operand,
) -> Any:
    """y = (x - mean)*rstd*weight + bias over [images, channels, space]; the launch's event."""
    _require(planes, {"x": x, "y": y}, {"weight": weight, "bias": bias}, mean, rstd)
    elements = (x.element, _element(weight), _element(bias), "")
    n = planes.space
    plan = _plan(x.device, "normalize_planes", elements, planes.images * planes.channels, n, 0, aligned_rows(n, x, y))
    return plan.kernel(
        plan.shape.global_size,
        plan.shape.local_size,
        *x.place,
        *mean.place,
        *rstd.place,
        *place_of(weight, x),
        *place_of(bias, x),
        *y.place,
        *plan.sizes,
        np.uint32(planes.per_statistic),
        np.uint32(planes.statistics),
        np.uint32(planes.channels),
    )


def backward_sums(grad_y: Operand, x: Operand, planes: Planes, mean: Operand, rstd: Operand) -> Operand:
    """sum(grad_y*xhat) and sum(grad_y) by channel: float32 [images, 2, channels], of a batch norm [1, 2, channels]."""
    _require(planes, {"grad_y": grad_y, "x": x}, {}, mean, rstd)
    n = planes.space
    if planes.groups:
        rows, segments = planes.images * planes.channels, 1
    else:
        rows, segments = planes.channels, planes.images
    sums = empty_operand(x.device, (planes.images if planes.groups else 1, 2, planes.channels), "float32")
    plan = _plan(x.device, "backward_sums", (x.element, "", "", ""), rows, n, segments, aligned_rows(n, x, grad_y))
    plan.kernel(
        plan.shape.global_size,
        plan.shape.local_size,
        *grad_y.place,
        *x.place,
        *mean.place,
        *rstd.place,
        sums,
        *plan.sizes,
        np.uint32(planes.per_statistic),
        np.uint32(planes.channels),
    )
    return sums


def backward(
    grad_y: Operand,
    x: Operand,
    planes: Planes,
    mean: Operand,
    rstd: Operand,
    weight: Operand | None,
    sums: Operand | None,
    grad_x: Operand,
) -> Any:
    """grad_x = rstd*(gw - mean(gw) - xhat*mean(gw*xhat)), gw = grad_y*weight, means over what shares a statistic.

    sums: of `backward_sums`; None where the statistics do not depend on x, which leaves grad_x = rstd*gw.
    """
    _require(planes, {"grad_y": grad_y, "x": x, "grad_x": grad_x}, {"weight": weight}, mean, rstd)
    elements = (x.element, _element(weight), "", "")
    n = planes.space
    aligned = aligned_rows(n, x, grad_y, grad_x)
    plan = _plan(x.device, "backward", elements, planes.images * planes.channels, n, 0, aligned)
    products, plain = rstd, rstd
    if sums is not None:
        products, plain = (empty_operand(x.device, (planes.statistics,), "float32") for _ in range(2))
        folding = _plan(x.device, "coefficients", elements, planes.images * planes.channels, n, 0, aligned)
        folding.kernel(
            (planes.statistics,),
            None,
            sums,
            *place_of(weight, sums),
            products,
            plain,
            np.uint32(planes.per_statistic),
            np.uint32(planes.channels),
            np.float32(planes.count),
        )
    return plan.kernel(
        plan.shape.global_size,
        plan.shape.local_size,
        *grad_y.place,
        *x.place,
        *mean.place,
        *rstd.place,
        *place_of(weight, x),
        products,
        plain,
        *grad_x.place,
        *plan.sizes,
        np.uint32(planes.per_statistic),
        np.uint32(planes.statistics),
        np.uint32(planes.channels),
        np.uint32(sums is None),
    )
