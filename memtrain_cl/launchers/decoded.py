"""Launchers of products that decode a counter weight on its way: kernels/matmul.cl, or of one row counter_matvec.cl."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from memtrain_cl.array import DeviceArray
from memtrain_cl.device import Device
from memtrain_cl.launchers.counter_matvec import counter_matvec
from memtrain_cl.launchers.matmul import matmul
from memtrain_cl.launchers.matvec import Plan
from memtrain_cl.operand import Operand
from memtrain_cl.program import get_kernel
from memtrain_cl.tuning import matmul_shape

#: The templates' names of a cache's types.
_NAMES = {np.dtype(np.int8): "int8", np.dtype(np.float16): "float16"}


def cache_element(cache: DeviceArray | None) -> str:
    """The element type of a cache as kernels name it, "" where there is none."""
    return "" if cache is None else _NAMES[cache.dtype]


def rows_aligned(array: DeviceArray, columns: int) -> bool:
    """Whether every row of a float32 matrix begins on 16 bytes."""
    return array.alignment >= 16 and columns % 4 == 0


@functools.lru_cache(maxsize=1024)
def _plan(
    device: Device, sizes: tuple[int, int, int], n: int, by_column: bool, coding: tuple[str, int, bool], whole: bool
) -> Plan:
    """sizes: (M, N, K).   coding: (the cache's element or "", C, packed).   whole: the left's rows are of whole fours
    and begin on 16 bytes.
    """
    M, N, K = sizes
    element, C, packed = coding
    # A cache has neither radix nor packing: one program for all.
    kind, codes = ("cached", {"C": 1, "PACKED": 0}) if element else ("counter", {"C": C, "PACKED": int(packed)})
    shape = matmul_shape(device.info, M, N, K, decodes=True)
    kernel = get_kernel(
        device,
        "matmul",
        "matmul",
        LEFT="rows",
        RIGHT=f"{kind}_t" if by_column else kind,
        LEFT_TYPE="float32",
        RIGHT_TYPE=element or "float32",
        OUT_TYPE="float32",
        ALIGNED=int(whole and shape.gpu),
        EPILOGUE=0,
        TILED=0,
        GATE=0,
        **codes,
        **shape.constants,
    )
    starts = (np.uint64(0),) * 6
    counts = map(np.uint32, (M, N, K, K, n, shape.per, shape.columns, shape.k_per, shape.splits))
    return Plan(kernel, shape.global_size, shape.local_size, (*starts, *counts), shape.splits)


def _launch(
    device: Device,
    left: DeviceArray,
    state: DeviceArray,
    by_column: bool,
    scale: DeviceArray,
    out: DeviceArray,
    n: int,
    *,
    C: int,
    packed: bool,
    cache: DeviceArray | None,
) -> Any:
    """Enqueue out [M, N] = left [M, K] @ the decoded weight, by_column its transpose. The launch's event.

    n: weights of a row of the state. cache: t [out, in], read in place of the state.
    """
    (M, K), N = left.shape, out.shape[1]
    plan = _plan(device, (M, N, K), n, by_column, (cache_element(cache), C, packed), rows_aligned(left, K))
    weights = state if cache is None else cache
    return plan.kernel(plan.global_size, plan.local_size, left, weights, scale, out, *plan.arguments)


def launch_forward(
    device: Device,
    x: DeviceArray,
    state: DeviceArray,
    scale: DeviceArray,
    y: DeviceArray,
    *,
    C: int,
    packed: bool,
    cache: DeviceArray | None = None,
) -> Any:
    """Enqueue y = x @ (scale*t)^T; nothing waits. The launch's event."""
    if x.shape[0] == 1 and packed and cache is None and min(array.alignment for array in (x, scale, y)) >= 16:
        return counter_matvec(state, scale, x, y, C=C)
    return _launch(device, x, state, True, scale, y, x.shape[1], C=C, packed=packed, cache=cache)


def launch_grad_input(
    device: Device,
    grad_out: DeviceArray,
    state: DeviceArray,
    scale: DeviceArray,
    grad_x: DeviceArray,
    *,
    C: int,
    packed: bool,
    cache: DeviceArray | None = None,
) -> Any:
    """Enqueue grad_x = grad_out @ (scale*t); nothing waits. The launch's event."""
    return _launch(device, grad_out, state, False, scale, grad_x, grad_x.shape[1], C=C, packed=packed, cache=cache)


def launch_grad_weight(
    grad_out: DeviceArray, x: DeviceArray, tile: DeviceArray, row_offset: int, *, gate: DeviceArray | None = None
) -> None:
    """Enqueue the tile of grad_out^T @ x that begins at row_offset; nothing waits. gate: as in `matmul`."""
    (m, out), n, rows = grad_out.shape, x.shape[1], tile.shape[0]
    left = Operand(grad_out, (rows, m), (1, out), row_offset, "float32")
    right, out_tile = Operand(x, (m, n), (n, 1), 0, "float32"), Operand(tile, (rows, n), (n, 1), 0, "float32")
    matmul(left, right, out_tile, gate=gate)
