"""Launchers of kernels/matmul.cl: products that decode a counter weight on its way in, a layer's whole backward, and
dense products of strided operands.

Signatures and formulas of the counter products are those of `memtrain_cl.reference.matmul`; float32 sums differ in
their order, so results are compared with a tolerance. The order follows from the shapes and the device: equal calls,
equal bytes.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from memtrain_cl.array import DeviceArray
from memtrain_cl.bridge import Crossing
from memtrain_cl.device import Device
from memtrain_cl.elements import ELEMENTS
from memtrain_cl.formats import CounterRule, check_c
from memtrain_cl.operand import Operand, empty_operand
from memtrain_cl.ops.counter import launch_update, require_update, rows_aligned
from memtrain_cl.ops.launch import ready_device, require_layer, require_tensor, require_together
from memtrain_cl.ops.matvec import NOTHING, Epilogue, Plan, matvec, sum_parts
from memtrain_cl.program import get_kernel
from memtrain_cl.tuning import MatmulShape, ceil_div, matmul_shape, packs


def _launch(
    device: Device,
    left: DeviceArray,
    state: DeviceArray,
    kind: str,
    scale: DeviceArray,
    out: DeviceArray,
    n: int,
    *,
    C: int,
    packed: bool,
) -> Any:
    """Enqueue out [M, N] = left [M, K] @ the decoded weight; kind: "counter" or "counter_t". The launch's event.

    n: weights of a row of the state.
    """
    (M, K), N = left.shape, out.shape[1]
    shape = matmul_shape(device.info, M, N, K, decodes=True)
    kernel = get_kernel(
        device,
        "matmul",
        "matmul",
        LEFT="rows",
        RIGHT=kind,
        LEFT_TYPE="float32",
        RIGHT_TYPE="float32",
        OUT_TYPE="float32",
        C=C,
        PACKED=int(packed),
        ALIGNED=int(rows_aligned(left, K) and shape.gpu),
        EPILOGUE=0,
        TILED=0,
        **shape.constants,
    )
    starts = (np.uint64(0),) * 6
    sizes = (np.uint32(value) for value in (M, N, K, K, n, shape.per, shape.columns, shape.k_per, shape.splits))
    return kernel(shape.global_size, shape.local_size, left, state, scale, out, *starts, *sizes)


def launch_forward(
    device: Device, x: DeviceArray, state: DeviceArray, scale: DeviceArray, y: DeviceArray, *, C: int, packed: bool
) -> Any:
    """Enqueue y = x @ (scale*t)^T; nothing waits. The launch's event."""
    return _launch(device, x, state, "counter_t", scale, y, x.shape[1], C=C, packed=packed)


def launch_grad_input(
    device: Device,
    grad_out: DeviceArray,
    state: DeviceArray,
    scale: DeviceArray,
    grad_x: DeviceArray,
    *,
    C: int,
    packed: bool,
) -> Any:
    """Enqueue grad_x = grad_out @ (scale*t); nothing waits. The launch's event."""
    return _launch(device, grad_out, state, "counter", scale, grad_x, grad_x.shape[1], C=C, packed=packed)


def launch_grad_weight(grad_out: DeviceArray, x: DeviceArray, tile: DeviceArray, row_offset: int) -> None:
    """Enqueue the tile of grad_out^T @ x that begins at row_offset; nothing waits."""
    (m, out), n, rows = grad_out.shape, x.shape[1], tile.shape[0]
    left = Operand(grad_out, (rows, m), (1, out), row_offset, "float32")
    matmul(left, Operand(x, (m, n), (n, 1), 0, "float32"), Operand(tile, (rows, n), (n, 1), 0, "float32"))


def counter_forward(x: torch.Tensor, state: torch.Tensor, scale: torch.Tensor, *, C: int, packed: bool) -> torch.Tensor:
    """y = x @ (scale*t)^T: float32 [M, in] -> float32 [M, out]; the weight is decoded inside the product."""
    C = check_c(C, packed=packed)
    require_tensor("x", x, torch.float32, (None, None))
    out, _ = require_layer(state, scale, x.shape[1], packed=packed)
    require_together(x=x, state=state)
    if x.numel() == 0 or out == 0:
        return torch.zeros((x.shape[0], out), device=x.device)
    device = ready_device(x)
    with Crossing(device, x) as cross:
        y, target = cross.output((x.shape[0], out))
        launch_forward(device, cross.read(x), cross.read(state), cross.read(scale), target, C=C, packed=packed)
    return y


def counter_grad_input(
    grad_out: torch.Tensor, state: torch.Tensor, scale: torch.Tensor, in_features: int, *, C: int, packed: bool
) -> torch.Tensor:
    """grad_x = grad_out @ (scale*t): float32 [M, out] -> float32 [M, in]."""
    C = check_c(C, packed=packed)
    out, n = require_layer(state, scale, in_features, packed=packed)
    require_tensor("grad_out", grad_out, torch.float32, (None, out))
    require_together(grad_out=grad_out, state=state)
    if grad_out.numel() == 0 or n == 0:
        return torch.zeros((grad_out.shape[0], n), device=grad_out.device)
    device = ready_device(grad_out)
    with Crossing(device, grad_out) as cross:
        grad_x, target = cross.output((grad_out.shape[0], n))
        launch_grad_input(
            device, cross.read(grad_out), cross.read(state), cross.read(scale), target, C=C, packed=packed
        )
    return grad_x


def grad_weight(grad_out: torch.Tensor, x: torch.Tensor, row_offset: int = 0, rows: int | None = None) -> torch.Tensor:
    """grad_w float32 [R, in]: rows row_offset .. row_offset+R of grad_out^T @ x (to the end by default)."""
    require_tensor("x", x, torch.float32, (None, None))
    require_tensor("grad_out", grad_out, torch.float32, (x.shape[0], None))
    out = grad_out.shape[1]
    count = out - row_offset if rows is None else rows
    if not (0 <= row_offset <= out and 0 <= count <= out - row_offset):
        raise ValueError(f"expected rows {row_offset}..{row_offset + count} within {out}")
    require_together(grad_out=grad_out, x=x)
    if count * x.shape[1] == 0 or x.shape[0] == 0:
        return torch.zeros((count, x.shape[1]), device=x.device)
    device = ready_device(x)
    with Crossing(device, x) as cross:
        grad_w, target = cross.output((count, x.shape[1]))
        launch_grad_weight(cross.read(grad_out), cross.read(x), target, row_offset)
    return grad_w


def counter_backward_(
    x: torch.Tensor,
    grad_out: torch.Tensor,
    state: torch.Tensor,
    scale: torch.Tensor,
    v: torch.Tensor | None,
    totals: torch.Tensor,
    rule: CounterRule,
    *,
    seed: int | None,
    needs_grad_input: bool = True,
    tile_rows: int = 0,
) -> torch.Tensor | None:
    """A layer's whole backward: grad_x by the old weight (None when not needed), then the update in place.

    x [M, in], grad_out [M, out], float32. seed None: no update. The gradient of the weight exists on the device alone,
    at most [tile_rows, in] of it (0: the whole), and is gone when the call returns.
    """
    require_tensor("x", x, torch.float32, (None, None))
    m, n = x.shape
    out, _ = require_layer(state, scale, n, packed=rule.packed)
    require_tensor("grad_out", grad_out, torch.float32, (m, out))
    if seed is not None:
        require_update(state, scale, v, totals, n, rule, seed)
    require_together(x=x, grad_out=grad_out, state=state)
    if m * n * out == 0:
        return torch.zeros((m, n), device=x.device) if needs_grad_input else None
    device = ready_device(x)
    with Crossing(device, x) as cross:
        outgoing = cross.read(grad_out)
        codes, scales = (
            (cross.read(state), cross.read(scale)) if seed is None else (cross.update(state), cross.update(scale))
        )
        grad_x = None
        if needs_grad_input:
            grad_x, incoming = cross.output((m, n))
            launch_grad_input(device, outgoing, codes, scales, incoming, C=rule.C, packed=rule.packed)
        if seed is not None:
            moments = scales if v is None else cross.update(v)
            inputs, counts = cross.read(x), cross.update(totals)
            step = tile_rows or out
            scratch = cross.scratch((min(step, out), n), np.float32)
            for row in range(0, out, step):
                # The queue runs in order, so one scratch serves all tiles.
                tile = scratch.rows(min(step, out - row))
                launch_grad_weight(outgoing, inputs, tile, row)
                launch_update(
                    device, codes, scales, moments, tile, counts, rule, seed=seed, row_offset=row, index_base=row * n
                )
    return grad_x


#: Items of the third dimension that every driver launches at once, and row lengths that kernels count in 32 bits.
_BATCH_LIMIT, _LENGTH_LIMIT = 65535, 1 << 32
#: Batches above this are enough work without splitting K.
_SPLIT_LIMIT = 1024


def matrix_layout(rows: int, columns: int, row_step: int, column_step: int) -> tuple[bool, int] | None:
    """(whether rows lie without gaps, else columns do; the other stride), None where neither does."""
    if column_step == 1 or columns == 1:
        lead, along_rows = (row_step if rows > 1 else max(columns, 1)), True
    elif row_step == 1 or rows == 1:
        lead, along_rows = column_step, False
    else:
        return None
    return (along_rows, lead) if lead < _LENGTH_LIMIT else None


@functools.lru_cache(maxsize=4096)
def _plan(
    device: Device,
    sizes: tuple[int, int, int, int],
    left: tuple[bool, int],
    right: tuple[str, int],
    types: tuple[str, str, str],
    between: tuple[int, int],
    flags: tuple[bool, bool, bool],
) -> Plan:
    aligned, epilogue, tiled = flags
    batch, M, N, K = sizes
    shape = matmul_shape(device.info, M, N, K, batch, may_split=batch <= _SPLIT_LIMIT)
    split = shape.splits > 1
    kernel = get_kernel(
        device,
        "matmul",
        "matmul",
        LEFT="rows" if left[0] else "columns",
        RIGHT=right[0],
        LEFT_TYPE=types[0],
        RIGHT_TYPE=types[1],
        OUT_TYPE="float32" if split else types[2],
        C=1,
        PACKED=1,
        ALIGNED=int(aligned and shape.gpu),
        EPILOGUE=int(epilogue and not split),
        TILED=int(tiled),
        **shape.constants,
    )
    counts = (M, N, K, left[1], right[1], shape.per, shape.columns, shape.k_per, shape.splits)
    arguments = (*map(np.uint64, (*between, M * N)), *map(np.uint32, counts))
    return Plan(kernel, shape.global_size, shape.local_size, arguments, shape.splits)


@functools.lru_cache(maxsize=1024)
def _packing(
    device: Device, sizes: tuple[int, int, int, int], left: tuple[bool, int], right: tuple[str, int]
) -> tuple[bool, bool, MatmulShape]:
    batch, M, N, K = sizes
    shape = matmul_shape(device.info, M, N, K, batch, may_split=batch <= _SPLIT_LIMIT)
    return *packs(shape, M, N, K, left[1], right[1]), shape


def _pack(
    device: Device, x: Operand, shape: MatmulShape, sizes: tuple[int, int, int], layout: dict[str, str], lead: int
) -> tuple[Operand, int]:
    """An operand packed as floats, and the elements of each batch item.

    sizes: (batch, M or N, K).   layout: LEFT or RIGHT, as in kernels/matmul.cl; the other operand is not there.
    """
    batch, length, K = sizes
    tiles = "LEFT" in layout
    constants = {"LEFT": "", "RIGHT": "", **layout}
    kernel = get_kernel(
        device,
        "matmul",
        "pack_tiles" if tiles else "pack_panels",
        LEFT_TYPE=x.element,
        RIGHT_TYPE=x.element,
        OUT_TYPE="float32",
        C=1,
        PACKED=1,
        ALIGNED=0,
        EPILOGUE=0,
        TILED=0,
        **constants,
        **shape.constants,
    )
    along, deep = ceil_div(length, shape.tile_rows if tiles else shape.panel), ceil_div(K, shape.tile_k)
    each = along * (deep * shape.block if tiles else K * shape.panel)
    packed = empty_operand(device, (batch * each,), "float32")
    places = (np.uint64(x.offset), np.uint64(x.strides[0] if len(x.shape) == 3 else 0))
    kernel((along, deep, batch), (1, 1, 1), x, packed, *places, *map(np.uint32, (length, K, lead)))
    return packed, each


def _whole_fours(operand: Operand, lead: int, step: int) -> bool:
    """Whether every row begins on four whole elements, as wide loads want it."""
    bytes_of_four = 4 * ELEMENTS[operand.element].itemsize
    return operand.array.alignment >= bytes_of_four and operand.offset % 4 == lead % 4 == step % 4 == 0


def matmul(
    a: Operand, b: Operand, out: Operand, *, add: Operand | None = None, alpha: float = 1.0, beta: float = 1.0
) -> None:
    """out = alpha * (a @ b) + beta * add, with float32 sums rounded once.

    a [..., M, K], b [..., K, N], out [..., M, N]; at most one batch dimension, of equal size in all three (stride 0 to
    repeat an item). float32, float16 or bfloat16 each. a and b have a unit stride in one of their last two dimensions;
    out is contiguous and shares no memory with the others. add broadcasts to out's shape, has out's type and any
    strides; it is not read where beta is 0. K = 0 gives beta * add. ValueError for shapes and strides that are not so.
    """
    if not (
        a.shape[:-2] == b.shape[:-2] == out.shape[:-2]
        and len(out.shape) in (2, 3)
        and a.shape[-1] == b.shape[-2]
        and (a.shape[-2], b.shape[-1]) == out.shape[-2:]
    ):
        raise ValueError(f"expected [.., M, K] @ [.., K, N] -> [.., M, N], got {a.shape} @ {b.shape} -> {out.shape}")
    M, K = a.shape[-2:]
    N = b.shape[-1]
    batch = out.shape[0] if len(out.shape) == 3 else 1
    left = matrix_layout(M, K, *a.strides[-2:])
    right = matrix_layout(K, N, *b.strides[-2:])
    if left is None or right is None or not out.contiguous:
        raise ValueError(f"expected a unit stride in a and b, and a contiguous out, got {a} @ {b} -> {out}")
    if out.size == 0:
        return
    if batch > _BATCH_LIMIT:
        for first in range(0, batch, _BATCH_LIMIT):
            pieces = [_items(x, first, min(_BATCH_LIMIT, batch - first)) for x in (a, b, out)]
            some = None if add is None else _items(add, first, min(_BATCH_LIMIT, batch - first))
            matmul(*pieces, add=some, alpha=alpha, beta=beta)
        return
    epilogue = NOTHING if add is None and alpha == 1.0 else _epilogue(add, out.shape, alpha, beta)
    a_z, b_z = (a.strides[0], b.strides[0]) if len(out.shape) == 3 else (0, 0)
    device = out.array.device
    if min(M, N) == 1 and K:
        vector_of_columns = N == 1
        x_step = b.strides[-2] if vector_of_columns else a.strides[-1]
        if x_step == 1 or K == 1:
            if vector_of_columns:
                (rows, lead), count, matrix, x, steps = left, M, a, b, (a_z, b_z)
            else:
                # The rows of b's transpose are what the vector meets.
                (rows, lead), count, matrix, x, steps = (not right[0], right[1]), N, b, a, (b_z, a_z)
                epilogue = Epilogue(epilogue.add, (epilogue.strides[0], epilogue.strides[2], 0), alpha, beta)
            matvec(matrix, x, out, (batch, count, K), (lead, *steps), rows=rows, epilogue=epilogue)
            return
    sizes, kind = (batch, M, N, K), ("dense" if right[0] else "dense_t", right[1])
    tiled, panels, shape = _packing(device, sizes, left, kind)
    if panels:
        b, b_z = _pack(device, b, shape, (batch, N, K), {"RIGHT": kind[0]}, kind[1])
        kind = ("panels", K)
    if tiled:
        a, a_z = _pack(device, a, shape, (batch, M, K), {"LEFT": "rows" if left[0] else "columns"}, left[1])
        left = (left[0], ceil_div(K, shape.tile_k))
    aligned = _whole_fours(a, left[1], a_z) and _whole_fours(b, kind[1], b_z)
    types = (a.element, b.element, out.element)
    plan = _plan(device, sizes, left, kind, types, (a_z, b_z), (aligned, epilogue.needed, tiled))
    split = plan.parts > 1
    target = empty_operand(device, (batch * plan.parts, M, N), "float32") if split else out
    extra = () if split else epilogue.arguments(out)
    starts = (np.uint64(a.offset), np.uint64(b.offset), np.uint64(target.offset))
    plan.kernel(plan.global_size, plan.local_size, a, b, target, *extra, *starts, *plan.arguments)
    if split:
        sum_parts(target, out, batch, M, N, plan.parts, epilogue)


def _epilogue(add: Operand | None, shape: tuple[int, ...], alpha: float, beta: float) -> Epilogue:
    if add is None or beta == 0.0:
        return Epilogue(None, (0, 0, 0), alpha, 0.0)
    missing = 3 - len(add.shape)
    sizes = (1,) * (3 - len(shape)) + shape
    strides = [0] * missing + [0 if size == 1 else step for size, step in zip(add.shape, add.strides, strict=True)]
    wanted = zip((1,) * missing + add.shape, sizes, strict=True)
    if missing < 0 or any(size not in (1, want) for size, want in wanted):
        raise ValueError(f"expected add to broadcast to {shape}, got {add.shape}")
    return Epilogue(add, (strides[0], strides[1], strides[2]), alpha, beta)


def _items(operand: Operand, first: int, count: int) -> Operand:
    """`count` batch items from the first on; the operand itself where it repeats for all."""
    if len(operand.shape) < 3 or operand.shape[0] == 1:
        return operand
    offset = operand.offset + first * operand.strides[0]
    return operand.viewed((count, *operand.shape[1:]), operand.strides, offset)
