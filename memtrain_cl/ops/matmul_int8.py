"""Launchers of kernels/matmul_int8.cl: exact products of int8 operands, and a counter layer's three products by them.

Signatures, formulas and results are those of `memtrain_cl.reference.matmul_int8`, byte for byte on every device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from memtrain_cl.array import DeviceArray
from memtrain_cl.bridge import Crossing
from memtrain_cl.device import Device
from memtrain_cl.formats import INT8_CHUNK, check_c
from memtrain_cl.homes import pooled
from memtrain_cl.inline_assembly import note_inline_assembly
from memtrain_cl.operand import Operand
from memtrain_cl.ops.cache import require_cache
from memtrain_cl.ops.launch import ready_device, require_layer, require_seed, require_tensor, require_together
from memtrain_cl.ops.stochastic import launch_quantize
from memtrain_cl.ops.ternary import launch_ternary
from memtrain_cl.program import Kernel, get_kernel
from memtrain_cl.tuning import flat_shape
from memtrain_cl.tuning_cores import CHUNK
from memtrain_cl.tuning_int8 import NOTHING, Int8Shape, int8_shape

#: The longest sum of codes by ternary weights that int32 holds, rounded down to a power of two.
TERNARY_LONGEST = 1 << 24


@dataclass(frozen=True)
class Codes:
    """An operand of a product: int8 [rows, length], from element `start` of `array` on, rows `lead` apart.

    scale: float32, a number a row, from `first` on; None for 1.   ternary: no code is beyond -1, 0 and 1.
    """

    array: DeviceArray
    rows: int
    length: int
    lead: int
    start: int = 0
    scale: DeviceArray | None = None
    first: int = 0
    ternary: bool = False

    def begins_on(self, size: int) -> bool:
        """Whether every row begins on so many bytes, a power of two."""
        return self.array.alignment >= size and self.lead % size == self.start % size == 0


@functools.lru_cache(maxsize=1024)
def _plan(device: Device, sizes: tuple[int, int, int], ternary: bool, chunks: bool) -> tuple[Kernel, Int8Shape]:
    shape = int8_shape(device.info, *sizes, ternary=ternary, chunks=chunks)
    return get_kernel(device, "matmul_int8", "matmul_int8", NAME="matmul_int8", **shape.constants), shape


def _gate_arguments(gate: DeviceArray | None, instead: DeviceArray) -> tuple[Any, ...]:
    return instead if gate is None else gate, np.uint32(gate is not None)


def launch_int8_product(
    device: Device, a: Codes, b: Codes, out: DeviceArray, *, gate: DeviceArray | None = None
) -> Any:
    """Enqueue out [M, N] = the product of a [M, K] and b [N, K]: int32 where neither has a scale, else float32, by a's
    scales or by both. Nothing waits; the launch's event. gate: a layer's clock, at whose rest nothing is done.
    """
    M, N, K = a.rows, b.rows, a.length
    longest = TERNARY_LONGEST if b.ternary else INT8_CHUNK
    if b.length != K or not 0 < K <= longest or (b.scale is not None and a.scale is None):
        raise ValueError(f"expected two operands of one length up to {longest}, got {K} and {b.length}")
    note_inline_assembly(device)
    kernel, shape = _plan(device, (M, N, K), b.ternary, a.begins_on(CHUNK) and b.begins_on(CHUNK))
    factors = (a.scale or out, b.scale or out, out, np.uint32((a.scale is not None) + (b.scale is not None)))
    starts = (np.uint64(value) for value in (a.start, b.start, a.first))
    own = shape.arguments(words=a.begins_on(4) and b.begins_on(4), pairs=N % 2 == 0 and out.alignment >= 8)
    counts = (np.uint32(value) for value in (M, N, K, a.lead, b.lead, *own))
    operands = (a.array, b.array, *factors, *_gate_arguments(gate, out))
    return kernel(shape.global_size, shape.local_size, *operands, *starts, *counts)


def _quantized(
    device: Device, x: DeviceArray, *, by_row: bool, seed: int | None, multiplier: DeviceArray | None = None
) -> Codes:
    """Codes of x float32 [M, N] a row, or a column and transposed."""
    M, N = x.shape
    rows, length = (M, N) if by_row else (N, M)
    codes, scale = pooled(device, (rows, length), np.int8), pooled(device, (rows,), np.float32)
    launch_quantize(
        device,
        Operand(x, (M, N), (N, 1), 0, "float32", contiguous=True),
        codes,
        scale,
        outer=M if by_row else 1,
        length=length,
        inner=1 if by_row else N,
        bits=8,
        seed=seed,
        transposed=not by_row,
        multiplier=multiplier,
    )
    return Codes(codes, rows, length, length, scale=scale)


def _ternary(
    device: Device, state: DeviceArray, rows: int, n: int, *, C: int, packed: bool, transposed: bool = False
) -> DeviceArray:
    """The layer's ternary weights, decoded to memory that the next product may use again."""
    t = pooled(device, (n, rows) if transposed else (rows, n), np.int8)
    launch_ternary(device, state, t, rows, n, C=C, packed=packed, transposed=transposed)
    return t


def launch_forward_int8(
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
    """Enqueue y = `counter_forward_int8` of x; nothing waits. The last launch's event."""
    n, out = x.shape[1], y.shape[1]
    if cache is not None and cache.dtype == np.int8:
        t = cache
    else:
        t = _ternary(device, state, out, n, C=C, packed=packed)
    weight = Codes(t, out, n, n, scale=scale, ternary=True)
    return launch_int8_product(device, _quantized(device, x, by_row=True, seed=None), weight, y)


def launch_grad_input_int8(
    device: Device,
    grad_out: DeviceArray,
    state: DeviceArray,
    scale: DeviceArray,
    grad_x: DeviceArray,
    *,
    C: int,
    packed: bool,
    seed: int,
) -> Any:
    """Enqueue grad_x = `counter_grad_input_int8` of grad_out; nothing waits. The last launch's event."""
    out, n = grad_out.shape[1], grad_x.shape[1]
    z = _quantized(device, grad_out, by_row=True, seed=seed, multiplier=scale)
    t = _ternary(device, state, out, n, C=C, packed=packed, transposed=True)
    return launch_int8_product(device, z, Codes(t, n, out, out, ternary=True), grad_x)


@dataclass(frozen=True)
class GradientCodes:
    """What the gradient of a weight is made of: grad_out and x as codes by column, each column a row."""

    grad_out: Codes
    x: Codes


def launch_gradient_codes(
    device: Device, grad_out: DeviceArray, x: DeviceArray, *, seed_grad: int, seed_input: int
) -> GradientCodes:
    """Enqueue the codes of grad_out float32 [M, out] and x float32 [M, in], once for all tiles of the gradient."""
    return GradientCodes(
        _quantized(device, grad_out, by_row=False, seed=seed_grad), _quantized(device, x, by_row=False, seed=seed_input)
    )


def launch_grad_weight_int8(
    device: Device,
    codes: GradientCodes,
    tile: DeviceArray,
    row_offset: int,
    *,
    chunk: int = INT8_CHUNK,
    gate: DeviceArray | None = None,
) -> Any:
    """Enqueue rows row_offset .. of the gradient as `tile` float32 [R, in]; nothing waits. The last launch's event."""
    rows, n = tile.shape
    whole_a, whole_b = codes.grad_out, codes.x
    tokens = whole_a.length
    chunks = [(first, min(chunk, tokens - first)) for first in range(0, tokens, chunk)]
    several = len(chunks) > 1
    event = None
    sums = pooled(device, (rows, n), np.int32) if several else tile
    for first, length in chunks:
        a_scale, b_scale = (None, None) if several else (whole_a.scale, whole_b.scale)
        a = Codes(whole_a.array, rows, length, tokens, row_offset * tokens + first, a_scale, row_offset)
        b = Codes(whole_b.array, n, length, tokens, first, b_scale)
        event = launch_int8_product(device, a, b, sums, gate=gate)
        if several:
            global_size, per = flat_shape(device.info, rows * n)
            kernel = get_kernel(device, "matmul_int8", "add_chunk", NAME="add_chunk", **NOTHING)
            factors = (whole_a.scale, whole_b.scale, tile, *_gate_arguments(gate, tile), np.uint64(row_offset))
            counts = (np.uint64(rows * n), np.uint32(n), np.uint64(per))
            ends = (np.uint32(first == 0), np.uint32(first + length == tokens))
            event = kernel(global_size, None, sums, *factors, *counts, *ends)
    return event


def int8_product(
    a: torch.Tensor, b: torch.Tensor, row: torch.Tensor | None = None, col: torch.Tensor | None = None
) -> torch.Tensor:
    """a @ b^T of a int8 [M, K] and b int8 [N, K], no code below -127: int32 [M, N], exact.

    With row float32 [M]: float32(sum) * row[m]; with col float32 [N] too: float32(sum) * (row[m] * col[n]), each
    operation rounded once. ValueError beyond 131,072 elements of K, where int32 could not hold a sum.
    """
    require_tensor("a", a, torch.int8, (None, None))
    require_tensor("b", b, torch.int8, (None, a.shape[1]))
    (M, K), N = a.shape, b.shape[0]
    if row is not None:
        require_tensor("row", row, torch.float32, (M,))
    if col is not None:
        if row is None:
            raise ValueError("expected row beside col, got col alone")
        require_tensor("col", col, torch.float32, (N,))
    require_together(a=a, b=b, row=row, col=col)
    if K > INT8_CHUNK:
        raise ValueError(f"expected at most {INT8_CHUNK} columns, got {K}")
    dtype = torch.int32 if row is None else torch.float32
    if M * N * K == 0:
        return torch.zeros((M, N), dtype=dtype, device=a.device)
    device = ready_device(a)
    with Crossing(device, a) as cross:
        result, out = cross.output((M, N), dtype)
        launch_int8_product(
            device,
            Codes(cross.read(a), M, K, K, scale=None if row is None else cross.read(row)),
            Codes(cross.read(b), N, K, K, scale=None if col is None else cross.read(col)),
            out,
        )
    return result


def counter_forward_int8(
    x: torch.Tensor,
    state: torch.Tensor,
    scale: torch.Tensor,
    *,
    C: int,
    packed: bool,
    cache: torch.Tensor | None = None,
) -> torch.Tensor:
    """y float32 [M, out] of x float32 [M, in]: codes of x a token, half to even, times the ternary weight.

    cache int8 [out, in]: the weight, already decoded; one of float16 is of no use here, and does no harm.
    """
    C = check_c(C, packed=packed)
    require_tensor("x", x, torch.float32, (None, None))
    out, n = require_layer(state, scale, x.shape[1], packed=packed)
    if cache is not None:
        require_cache(cache, out, n)
    require_together(x=x, state=state, cache=cache)
    if x.numel() == 0 or out == 0:
        return torch.zeros((x.shape[0], out), device=x.device)
    device = ready_device(x)
    with Crossing(device, x) as cross:
        y, target = cross.output((x.shape[0], out))
        launch_forward_int8(
            device,
            cross.read(x),
            cross.read(state),
            cross.read(scale),
            target,
            C=C,
            packed=packed,
            cache=None if cache is None else cross.read(cache),
        )
    return y


def counter_grad_input_int8(
    grad_out: torch.Tensor,
    state: torch.Tensor,
    scale: torch.Tensor,
    in_features: int,
    *,
    C: int,
    packed: bool,
    seed: int,
    cache: torch.Tensor | None = None,
) -> torch.Tensor:
    """grad_x float32 [M, in] of grad_out float32 [M, out]: codes of grad_out * scale a token, stochastic, times the
    ternary weight. seed: that of the stream. A cache, which lies the other way, is checked and not used.
    """
    C = check_c(C, packed=packed)
    out, n = require_layer(state, scale, in_features, packed=packed)
    require_tensor("grad_out", grad_out, torch.float32, (None, out))
    require_seed("seed", seed)
    if cache is not None:
        require_cache(cache, out, n)
    require_together(grad_out=grad_out, state=state, cache=cache)
    if grad_out.numel() == 0 or n == 0:
        return torch.zeros((grad_out.shape[0], n), device=grad_out.device)
    device = ready_device(grad_out)
    with Crossing(device, grad_out) as cross:
        grad_x, target = cross.output((grad_out.shape[0], n))
        arrays = (cross.read(grad_out), cross.read(state), cross.read(scale))
        launch_grad_input_int8(device, *arrays, target, C=C, packed=packed, seed=seed)
    return grad_x


def _rows_of_tile(out: int, row_offset: int, rows: int | None, chunk: int) -> int:
    """The rows of a tile of a gradient of `out` rows, once it lies within it and the chunk is possible."""
    if not 0 < chunk <= INT8_CHUNK:
        raise ValueError(f"expected a chunk of 1..{INT8_CHUNK} tokens, got {chunk}")
    count = out - row_offset if rows is None else rows
    if not (0 <= row_offset <= out and 0 <= count <= out - row_offset):
        raise ValueError(f"expected rows {row_offset}..{row_offset + count} within {out}")
    return count


def grad_weight_int8(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    row_offset: int = 0,
    rows: int | None = None,
    *,
    seed_grad: int,
    seed_input: int,
    chunk: int = INT8_CHUNK,
) -> torch.Tensor:
    """grad_w float32 [R, in]: rows row_offset .. row_offset+R of grad_out^T @ x (to the end by default), by stochastic
    codes of the columns of both. seeds: those of the streams. chunk: tokens whose sum is exact, a part of the result's
    definition; up to its default.
    """
    require_tensor("x", x, torch.float32, (None, None))
    require_tensor("grad_out", grad_out, torch.float32, (x.shape[0], None))
    require_seed("seed_grad", seed_grad)
    require_seed("seed_input", seed_input)
    count = _rows_of_tile(grad_out.shape[1], row_offset, rows, chunk)
    require_together(grad_out=grad_out, x=x)
    if count * x.numel() == 0:
        return torch.zeros((count, x.shape[1]), device=x.device)
    device = ready_device(x)
    with Crossing(device, x) as cross:
        grad_w, target = cross.output((count, x.shape[1]))
        codes = launch_gradient_codes(
            device, cross.read(grad_out), cross.read(x), seed_grad=seed_grad, seed_input=seed_input
        )
        launch_grad_weight_int8(device, codes, target, row_offset, chunk=chunk)
    return grad_w


def grad_weight_of_codes(
    grad_codes: torch.Tensor,
    grad_scale: torch.Tensor,
    x_codes: torch.Tensor,
    x_scale: torch.Tensor,
    row_offset: int = 0,
    rows: int | None = None,
    *,
    chunk: int = INT8_CHUNK,
) -> torch.Tensor:
    """`grad_weight_int8` from codes made once for many tiles, by ``quantize_int8(..., dim=0, transposed=True)``: int8
    [out, M] of grad_out and [in, M] of x, their scales float32 [out] and [in].
    """
    require_tensor("grad_codes", grad_codes, torch.int8, (None, None))
    out, m = grad_codes.shape
    require_tensor("x_codes", x_codes, torch.int8, (None, m))
    n = x_codes.shape[0]
    require_tensor("grad_scale", grad_scale, torch.float32, (out,))
    require_tensor("x_scale", x_scale, torch.float32, (n,))
    count = _rows_of_tile(out, row_offset, rows, chunk)
    require_together(grad_codes=grad_codes, grad_scale=grad_scale, x_codes=x_codes, x_scale=x_scale)
    if count * n * m == 0:
        return torch.zeros((count, n), device=x_codes.device)
    device = ready_device(x_codes)
    with Crossing(device, x_codes) as cross:
        grad_w, target = cross.output((count, n))
        codes = GradientCodes(
            Codes(cross.read(grad_codes), out, m, m, scale=cross.read(grad_scale)),
            Codes(cross.read(x_codes), n, m, m, scale=cross.read(x_scale)),
        )
        launch_grad_weight_int8(device, codes, target, row_offset, chunk=chunk)
    return grad_w
