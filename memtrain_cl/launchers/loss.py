"""Launchers of kernels/loss.cl: negative log-likelihood of int64 targets, forward and backward.

x is [images, classes, space] of float32, float16 or bfloat16, computed in float32; target int64 [images, space]; weight
[classes] of any of these or None for weights of 1. Everything is contiguous. A target that is neither `ignore` nor a
class reports a fault (memtrain_cl/faults.py) and counts as ignored.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from memtrain_cl.faults import faults_of
from memtrain_cl.launchers.rows import FLOATING, require_rows
from memtrain_cl.operand import Operand, empty_operand, place_of
from memtrain_cl.program import Kernel, get_kernel
from memtrain_cl.tuning import BLOCKS_PER_UNIT, ceil_div, groups_share_rows

#: Work-items of a GPU's group, and groups at most, that add losses.
GROUP = 256
MOST_GROUPS = 256


def _require(x: Operand, target: Operand, weight: Operand | None) -> tuple[int, int, int]:
    require_rows("x", x, x.shape, FLOATING)
    images, classes, space = x.shape
    require_rows("target", target, (images, space), ("int64",))
    if weight is not None:
        require_rows("weight", weight, (classes,), FLOATING)
    return images, classes, space


def _kernel(x: Operand, weight: Operand | None, name: str) -> tuple[Kernel, int]:
    gpu = groups_share_rows(x.device.info)
    group = min(GROUP, x.device.info.max_work_group_size) if gpu else 1
    group = 1 << group.bit_length() - 1
    constants = {"GPU": int(gpu), "GROUP": group, "X": x.element, "W": weight.element if weight else ""}
    return get_kernel(x.device, "loss", name, **constants), group


def _sources(x: Operand, target: Operand, weight: Operand | None) -> tuple[Any, ...]:
    return *x.place, *target.place, *place_of(weight, x)


def nll_each(x: Operand, target: Operand, weight: Operand | None, loss: Operand, *, ignore: int) -> Any:
    """loss[image, place] = -weight[t]*x[image, t, place], t the target there, 0 where t = ignore; the event or None."""
    images, classes, space = _require(x, target, weight)
    require_rows("loss", loss, (images, space), (x.element,))
    if loss.size == 0:
        return None
    kernel, _ = _kernel(x, weight, "nll_each")
    return kernel(
        (images * space,),
        None,
        *_sources(x, target, weight),
        *loss.place,
        np.uint32(classes),
        np.uint64(space),
        np.int64(ignore),
        faults_of(x.device),
    )


def nll(
    x: Operand, target: Operand, weight: Operand | None, loss: Operand, total: Operand, *, ignore: int, mean: bool
) -> Any:
    """loss [] = the sum of -weight[t]*x[image, t, place] over all targets t but `ignore`, total [] = that of weight[t].

    mean: loss is divided by total (NaN where that is 0). The last launch's event; there must be a target.
    """
    _, classes, space = _require(x, target, weight)
    for name, number in (("loss", loss), ("total", total)):
        require_rows(name, number, (), (x.element,))
    kernel, group = _kernel(x, weight, "nll_parts")
    most = MOST_GROUPS if group > 1 else x.device.info.compute_units * BLOCKS_PER_UNIT
    groups = min(ceil_div(target.size, group), most)
    parts = empty_operand(x.device, (groups, 2), "float32")
    kernel(
        (groups * group,),
        (group,),
        *_sources(x, target, weight),
        parts,
        np.uint32(classes),
        np.uint64(space),
        np.uint64(target.size),
        np.int64(ignore),
        faults_of(x.device),
    )
    adding, _ = _kernel(x, weight, "nll_total")
    return adding(
        (group,),
        (group,),
        parts,
        *loss.place,
        *total.place,
        np.uint32(groups),
        np.uint32(mean),
    )


def nll_backward(
    grad_y: Operand,
    target: Operand,
    weight: Operand | None,
    total: Operand | None,
    grad_x: Operand,
    *,
    ignore: int,
) -> Any:
    """grad_x[image, t, place] = -weight[t]*grad_y (/ total) with the target t there; the launch's event or None.

    grad_x [images, classes, space] must hold zeros before. grad_y: [] for a sum or mean, else [images, space]. total:
    of a mean's forward, else None.
    """
    images, classes, space = _require(grad_x, target, weight)
    each = bool(grad_y.shape)
    require_rows("grad_y", grad_y, (images, space) if each else (), (grad_x.element,))
    if target.size == 0:
        return None
    kernel, _ = _kernel(grad_x, weight, "nll_backward")
    totals = total or grad_y
    return kernel(
        (images * space,),
        None,
        *grad_y.place,
        np.uint64(each),
        *target.place,
        weight or grad_x,
        np.uint64(weight.offset if weight else 0),
        *totals.place,
        *grad_x.place,
        np.uint32(classes),
        np.uint64(space),
        np.int64(ignore),
        np.uint32(total is not None),
    )
