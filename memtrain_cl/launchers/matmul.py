"""Dense products of strided operands by kernels/matmul.cl; those with counter weights are in matmul_counter.py.

The order of the float32 sums follows from the shapes and the device: equal calls, equal bytes.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np

from memtrain_cl.array import DeviceArray
from memtrain_cl.device import Device, DeviceInfo
from memtrain_cl.elements import ELEMENTS
from memtrain_cl.inline_assembly import note_inline_assembly
from memtrain_cl.launchers.matvec import NOTHING, Epilogue, Plan, gate_arguments, matvec, sum_parts
from memtrain_cl.operand import Operand, empty_operand
from memtrain_cl.program import get_kernel
from memtrain_cl.tuning import MatmulShape, ceil_div, groups_share_rows, matmul_shape, packs
from memtrain_cl.tuning_cores import CHUNK, core_shape

#: Items of the third dimension that every driver launches at once, rows that as many groups of the second have at
#: least, and row lengths that kernels count in 32 bits.
_BATCH_LIMIT, _ROW_LIMIT, _LENGTH_LIMIT = 65535, 65535 * 64, 1 << 32
#: Types, of both operands and the result, that tensor cores multiply with float32 sums.
_OF_CORES = frozenset((element,) * 3 for element in ("float16", "bfloat16"))
#: Lengths of which tensor cores' kernels count bytes in 32 bits.
_CORE_LIMIT = 1 << 30
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
    flags: tuple[bool, bool, bool, bool, bool],
) -> Plan:
    aligned, epilogue, tiled, gated, cores = flags
    batch, M, N, K = sizes
    if cores:
        shape = core_shape(device.info, M, N, K, batch)
    else:
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
        GATE=int(gated),
        **shape.constants,
    )
    counts = (M, N, K, left[1], right[1], shape.per, shape.columns, shape.k_per, shape.splits)
    arguments = (*map(np.uint64, (*between, M * N)), *map(np.uint32, counts))
    return Plan(kernel, shape.global_size, shape.local_size, arguments, shape.splits)


@functools.lru_cache(maxsize=1024)
def _packing(device: Device, sizes: tuple[int, int, int, int], left: int, right: int) -> tuple[bool, bool, MatmulShape]:
    """`_packing_on` of a device, which says faster than its capabilities that it is the same one."""
    return _packing_on(device.info, sizes, left, right)


def _packing_on(
    info: DeviceInfo, sizes: tuple[int, int, int, int], left: int, right: int
) -> tuple[bool, bool, MatmulShape]:
    """(whether the left and the right operand are packed before, how the product runs). left, right: their leads."""
    batch, M, N, K = sizes
    shape = matmul_shape(info, M, N, K, batch, may_split=batch <= _SPLIT_LIMIT)
    return *packs(shape, M, N, K, left, right), shape


def _packed_elements(shape: MatmulShape, length: int, K: int, tiles: bool) -> tuple[int, int, int]:
    """Of an operand of `length` rows or columns: (tiles or panels along it, those along K, their elements)."""
    along, deep = ceil_div(length, shape.tile_rows if tiles else shape.panel), ceil_div(K, shape.tile_k)
    return along, deep, along * (deep * shape.block if tiles else K * shape.panel)


@functools.lru_cache(maxsize=1024)
def workspace_bytes(info: DeviceInfo, sizes: tuple[int, int, int, int], left: int, right: int) -> int:
    """Bytes that `matmul` takes on such a device beside float32 operands and the result.

    sizes: (batch, M, N, K).   left, right: the strides of the operands' last two dimensions that are not 1. The few
    sums of products with one row or one column are not counted.
    """
    batch, M, N, K = sizes
    if min(sizes) == 0 or min(M, N) == 1:
        return 0
    batch = min(batch, _BATCH_LIMIT)
    tiled, panels, shape = _packing_on(info, (batch, M, N, K), left, right)
    parts = batch * shape.splits * M * N if shape.splits > 1 else 0
    packed = [_packed_elements(shape, M, K, tiles=True)[2]] if tiled else []
    packed += [_packed_elements(shape, N, K, tiles=False)[2]] if panels else []
    return 4 * (parts + batch * sum(packed))


def _pack(
    device: Device,
    x: Operand,
    shape: MatmulShape,
    sizes: tuple[int, int, int],
    layout: dict[str, str],
    lead: int,
    gate: DeviceArray | None,
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
        GATE=int(gate is not None),
        **constants,
        **shape.constants,
    )
    along, deep, each = _packed_elements(shape, length, K, tiles)
    packed = empty_operand(device, (batch * each,), "float32")
    places = (np.uint64(x.offset), np.uint64(x.strides[0] if len(x.shape) == 3 else 0))
    kernel(
        (along, deep, batch), (1, 1, 1), x, packed, *gate_arguments(gate), *places, *map(np.uint32, (length, K, lead))
    )
    return packed, each


def _whole(size: int, operand: Operand, lead: int, step: int) -> bool:
    """Whether every row begins on a multiple of `size` bytes, as wide loads want it."""
    elements = size // ELEMENTS[operand.element].itemsize
    return operand.array.alignment >= size and operand.offset % elements == lead % elements == step % elements == 0


def _on_cores(device: Device, types: tuple[str, str, str]) -> bool:
    """Whether products of these types run on tensor cores."""
    if types not in _OF_CORES or not device.info.inline_ptx or not groups_share_rows(device.info):
        return False
    note_inline_assembly(device)
    return bool(device.info.tensor_cores)


def matmul(
    a: Operand,
    b: Operand,
    out: Operand,
    *,
    add: Operand | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    gate: DeviceArray | None = None,
) -> None:
    """out = alpha * (a @ b) + beta * add, with float32 sums rounded once.

    a [..., M, K], b [..., K, N], out [..., M, N]; at most one batch dimension, of equal size in all three (stride 0 to
    repeat an item). float32, float16 or bfloat16 each. a and b have a unit stride in one of their last two dimensions;
    out is contiguous and shares no memory with the others. add broadcasts to out's shape, has out's type and any
    strides; it is not read where beta is 0. K = 0 gives beta * add. gate: a layer's clock (int64 [4]) by which nothing
    is computed in a step that does not fire. ValueError for shapes and strides that are not so.
    """
    if not (
        a.shape[:-2] == b.shape[:-2] == out.shape[:-2]
        and len(out.shape) in (2, 3)
        and a.shape[-1] == b.shape[-2]
        and (a.shape[-2], b.shape[-1]) == out.shape[-2:]
    ):
        raise ValueError(f"expected [.., M, K] @ [.., K, N] -> [.., M, N], got {a.shape} @ {b.shape} -> {out.shape}")
    if out.size == 0:
        return
    # Of no elements, whatever strides they have.
    a, b = (x.viewed(x.shape) if x.size == 0 else x for x in (a, b))
    M, K = a.shape[-2:]
    N = b.shape[-1]
    batch = out.shape[0] if len(out.shape) == 3 else 1
    left = matrix_layout(M, K, *a.strides[-2:])
    right = matrix_layout(K, N, *b.strides[-2:])
    if left is None or right is None or not out.contiguous:
        raise ValueError(f"expected a unit stride in a and b, and a contiguous out, got {a} @ {b} -> {out}")
    if batch > _BATCH_LIMIT:
        for first in range(0, batch, _BATCH_LIMIT):
            pieces = [_items(x, first, min(_BATCH_LIMIT, batch - first)) for x in (a, b, out)]
            some = None if add is None else _items(add, first, min(_BATCH_LIMIT, batch - first))
            matmul(*pieces, add=some, alpha=alpha, beta=beta, gate=gate)
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
            matvec(matrix, x, out, (batch, count, K), (lead, *steps), rows=rows, epilogue=epilogue, gate=gate)
            return
    if M > _ROW_LIMIT:
        for item, first in itertools.product(range(batch), range(0, M, _ROW_LIMIT)):
            count = min(_ROW_LIMIT, M - first)
            x, y, result = (_items(operand, item, 1) for operand in (a, b, out))
            some = None if add is None else _rows(_items(add, item, 1), first, count)
            matmul(_rows(x, first, count), y, _rows(result, first, count), add=some, alpha=alpha, beta=beta, gate=gate)
        return
    sizes, kind = (batch, M, N, K), ("dense" if right[0] else "dense_t", right[1])
    tiled, panels, shape = _packing(device, sizes, left[1], kind[1])
    if panels:
        b, b_z = _pack(device, b, shape, (batch, N, K), {"RIGHT": kind[0]}, kind[1], gate)
        kind = ("panels", K)
    if tiled:
        a, a_z = _pack(device, a, shape, (batch, M, K), {"LEFT": "rows" if left[0] else "columns"}, left[1], gate)
        left = (left[0], ceil_div(K, shape.tile_k))
    fours = 4 * ELEMENTS[a.element].itemsize, 4 * ELEMENTS[b.element].itemsize
    aligned = _whole(fours[0], a, left[1], a_z) and _whole(fours[1], b, kind[1], b_z)
    types = (a.element, b.element, out.element)
    cores = (
        _on_cores(device, types)
        and gate is None
        and 0 < K < _CORE_LIMIT > N
        and _whole(CHUNK, a, left[1], a_z)
        and _whole(CHUNK, b, kind[1], b_z)
    )
    flags = (aligned, epilogue.needed, tiled, gate is not None, cores)
    plan = _plan(device, sizes, left, kind, types, (a_z, b_z), flags)
    split = plan.parts > 1
    target = empty_operand(device, (batch * plan.parts, M, N), "float32") if split else out
    extra = (*(() if split else epilogue.arguments(out)), *gate_arguments(gate))
    starts = (np.uint64(a.offset), np.uint64(b.offset), np.uint64(target.offset))
    plan.kernel(plan.global_size, plan.local_size, a, b, target, *extra, *starts, *plan.arguments)
    if split:
        sum_parts(target, out, batch, M, N, plan.parts, epilogue, gate)


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


def _rows(operand: Operand, first: int, count: int) -> Operand:
    """`count` rows from the first on; the operand itself where one row, or none, stands for all."""
    if len(operand.shape) < 2 or operand.shape[-2] == 1:
        return operand
    shape = (*operand.shape[:-2], count, operand.shape[-1])
    return operand.viewed(shape, operand.strides, operand.offset + first * operand.strides[-2])


def _items(operand: Operand, first: int, count: int) -> Operand:
    """`count` batch items from the first on; the operand itself where it repeats for all."""
    if len(operand.shape) < 3 or operand.shape[0] == 1:
        return operand
    offset = operand.offset + first * operand.strides[0]
    return operand.viewed((count, *operand.shape[1:]), operand.strides, offset)
