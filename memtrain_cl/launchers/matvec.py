"""Launchers of kernels/matvec.cl: a matrix times a vector, and the sum of a product's parts with its epilogue."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from memtrain_cl.array import DeviceArray
from memtrain_cl.device import Device
from memtrain_cl.operand import Operand, empty_operand
from memtrain_cl.program import Kernel, get_kernel
from memtrain_cl.tuning import BLOCKS_PER_UNIT, ceil_div, groups_share_rows, matvec_shape


@dataclass(frozen=True)
class Epilogue:
    """out = alpha * sum + beta * add. strides: those of add between batch items, rows and columns."""

    add: Operand | None
    strides: tuple[int, int, int]
    alpha: float
    beta: float

    @property
    def needed(self) -> bool:
        """Whether it changes the sum."""
        return self.add is not None or self.alpha != 1.0

    def arguments(self, out: Operand) -> tuple[Any, ...]:
        """The kernel's arguments; none where it is not needed. out: any operand, named where nothing is added."""
        if not self.needed:
            return ()
        add = out if self.add is None else self.add
        places = (add.offset, *self.strides)
        beta = 0.0 if self.add is None else self.beta
        return (add, *map(np.uint64, places), np.float32(self.alpha), np.float32(beta))


NOTHING = Epilogue(None, (0, 0, 0), 1.0, 1.0)


@dataclass(frozen=True)
class Plan:
    """A kernel, its launch sizes and the arguments that a geometry decides; `parts` results a batch item."""

    kernel: Kernel
    global_size: tuple[int, ...]
    local_size: tuple[int, ...] | None
    arguments: tuple[Any, ...]
    parts: int


def gate_arguments(gate: DeviceArray | None) -> tuple[DeviceArray, ...]:
    """A gated kernel's argument for its gate; none where there is none."""
    return () if gate is None else (gate,)


@functools.lru_cache(maxsize=4096)
def _matvec_plan(
    device: Device,
    rows: bool,
    in_type: str,
    out_type: str,
    sizes: tuple[int, int, int],
    steps: tuple[int, int, int],
    epilogue: bool,
    gated: bool,
) -> Plan:
    batch, M, K = sizes
    lda, a_z, x_z = steps
    shape = matvec_shape(device.info, rows, M, K, batch)
    split = shape.splits > 1
    kernel = get_kernel(
        device,
        "matvec",
        "matvec",
        GPU=shape.gpu,
        MATRIX="rows" if rows else "columns",
        IN_TYPE=in_type,
        OUT_TYPE="float32" if split else out_type,
        EPILOGUE=int(epilogue and not split),
        LANES=shape.lanes,
        GATE=int(gated),
    )
    arguments = (
        *map(np.uint64, (a_z, x_z, M)),
        *map(np.uint32, (M, K, lda, shape.per, shape.k_per, shape.splits)),
    )
    return Plan(kernel, shape.global_size, shape.local_size, arguments, shape.splits)


def matvec(
    a: Operand,
    x: Operand,
    out: Operand,
    sizes: tuple[int, int, int],
    steps: tuple[int, int, int],
    *,
    rows: bool,
    epilogue: Epilogue = NOTHING,
    gate: DeviceArray | None = None,
) -> None:
    """out[z, m] = sum_k a[z, m, k] * x[z, k], and the epilogue with m as its row.

    sizes: (batch, M, K).   steps: the stride between rows of k (rows) or of m (columns) of a, and a's and x's between
    batch items; the other stride of a and that of x are 1. out is contiguous. gate: as in `matmul`.
    """
    device = out.array.device
    plan = _matvec_plan(device, rows, a.element, out.element, sizes, steps, epilogue.needed, gate is not None)
    split = plan.parts > 1
    target = empty_operand(device, (sizes[0] * plan.parts, sizes[1]), "float32") if split else out
    extra = (*(() if split else epilogue.arguments(out)), *gate_arguments(gate))
    starts = (np.uint64(a.offset), np.uint64(x.offset), np.uint64(target.offset))
    plan.kernel(plan.global_size, plan.local_size, a, x, target, *extra, *starts, *plan.arguments)
    if split:
        sum_parts(target, out, sizes[0], sizes[1], 1, plan.parts, epilogue, gate)


def sum_parts(
    parts: Operand,
    out: Operand,
    batch: int,
    M: int,
    N: int,
    splits: int,
    epilogue: Epilogue = NOTHING,
    gate: DeviceArray | None = None,
) -> None:
    """out [batch, M, N] from parts float32 [batch*splits, M, N], summed in their order, and the epilogue.

    gate: as in `matmul`.
    """
    device = out.array.device
    kernel = get_kernel(
        device,
        "matvec",
        "sum_parts",
        GPU=0,
        MATRIX="rows",
        IN_TYPE="float32",
        OUT_TYPE=out.element,
        EPILOGUE=int(epilogue.needed),
        LANES=1,
        GATE=int(gate is not None),
    )
    size = M * N
    per = 1 if groups_share_rows(device.info) else ceil_div(size, device.info.compute_units * BLOCKS_PER_UNIT)
    arguments = (np.uint64(out.offset), np.uint32(M), np.uint32(N), np.uint64(per), np.uint32(splits))
    kernel((ceil_div(size, per), batch), None, parts, out, *epilogue.arguments(out), *gate_arguments(gate), *arguments)
