"""Launchers of kernels/attention.cl: attention forward and backward without a [T, S] tensor.

    s = scale * q k^T + mask,  p = softmax(s),  out = (p * dropped) v

query [B, H, T, D], key [B, G, S, D], value [B, G, S, V], G a divisor of H: query head h meets key head h // (H / G).
One element for all three, float32, float16 or bfloat16, computed in float32. Strides are free but for the last
dimension, whose elements are neighbours. A mask is bool (True: may be seen), float32, float16 or bfloat16 and
broadcasts to [B, H, T, S]. causal: query i sees keys j <= i. A query that sees nothing gets zeros, and logsumexp
infinity.

Dropout hashes (seed, element of [B, H, T, S]): the backward makes the same choices again from the same seed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memtrain_cl.device import Device
from memtrain_cl.errors import UnsupportedDevice
from memtrain_cl.operand import Operand, empty_operand
from memtrain_cl.program import Kernel, get_kernel
from memtrain_cl.runtimes import import_pyopencl
from memtrain_cl.tuning import SIZE_LIMIT, ceil_div, flat_shape, groups_share_rows

ELEMENTS = ("float32", "float16", "bfloat16")
LOG2E = 1.0 / math.log(2.0)
#: Items of a group of the GPU shape, and the rows that it keeps.
GROUP, GROUP_ROWS = 128, 64
#: Columns of a result that such a group holds in registers, and of each of two results.
MOST_COLUMNS, BOTH_COLUMNS = 128, 64
#: The constants of kernels/attention.cl where a kernel does not use them.
PLAIN = {"MASK": "", "DROPOUT": 0, "GPU": 0, "HEAD": 0, "ROWS": 0, "WIDE": 8, "SLICE": 32, "DEPTH": 16, "ALIGNED": 0}


@dataclass(frozen=True)
class AttentionShape:
    """How one launch runs: template constants and sizes."""

    constants: dict[str, Any]
    global_size: tuple[int, ...]
    local_size: tuple[int, ...]


def attention_in_groups(device: Device) -> bool:
    """Whether attention takes its GPU shape: tiles of 24 KiB at least wait in local memory."""
    info = device.info
    return groups_share_rows(info) and info.max_work_group_size >= GROUP and info.local_mem_bytes >= 24 << 10


def attention_shape(device: Device, rows: int, outer: int, columns: int, head: int, *, aligned: bool) -> AttentionShape:
    """The shape for `outer` matrices of `rows` rows that stay, results of `columns`, heads of at most `head`."""
    if not attention_in_groups(device):
        # Few sizes of private arrays, since each is a program to build; blocks whose rows stay in the cache.
        head = max(1, ceil_div(head, 32)) * 32
        wide = 16 if device.info.native_vector_width >= 16 else 8
        constants = {**PLAIN, "HEAD": head, "ROWS": 96 if head <= 64 else 48, "WIDE": wide}
        return AttentionShape(constants, (outer * ceil_div(rows, 2 * wide),), (1,))
    slices = max(1, ceil_div(columns, MOST_COLUMNS))
    width = max(1, ceil_div(ceil_div(columns, slices), 32)) * 32
    # Drivers that offer just 32 KiB may keep some for themselves; tiles 32 deep fill that much.
    depth = 32 if device.info.local_mem_bytes > 32 << 10 else 16
    constants = {**PLAIN, "GPU": 1, "SLICE": width, "DEPTH": depth, "ALIGNED": int(aligned)}
    blocks = outer * ceil_div(rows, GROUP_ROWS)
    return AttentionShape(constants, (blocks * GROUP, slices), (GROUP, 1))


@functools.lru_cache(maxsize=4096)
def _place(offset: int, strides: tuple[int, ...]) -> Any:
    """An operand's first element and its strides of B, H and rows, as a kernel takes them."""
    return import_pyopencl().cltypes.make_ulong4(offset, *strides[:3])[()]


@functools.lru_cache(maxsize=4096)
def _sizes(*sizes: int) -> Any:
    return import_pyopencl().cltypes.make_uint8(*sizes)[()]


def _threshold(dropout_p: float) -> tuple[np.uint32, np.float32]:
    """What the kernels compare 24 random bits with, and what a kept probability is multiplied with."""
    return np.uint32(math.ceil(dropout_p * 2**24)), np.float32(1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0)


@dataclass(frozen=True)
class _Call:
    """What all launches of one attention share, checked."""

    device: Device
    element: str
    batch: int
    sizes: tuple[int, int, int, int, int, int]
    causal: bool
    scale: float
    mask: Operand | None
    dropout_p: float
    seed: int

    def kernel(self, name: str, columns: int, *operands: Operand) -> tuple[Kernel, AttentionShape]:
        return _planned(
            self.device,
            name,
            self.element,
            "" if self.mask is None else self.mask.element,
            self.dropout_p > 0.0,
            all(_aligned(operand) for operand in operands),
            self.batch,
            self.sizes,
            columns,
        )

    def mask_args(self) -> tuple[Any, ...]:
        mask = self.mask
        return () if mask is None else (mask, _place(mask.offset, mask.strides), np.uint64(mask.strides[3]))

    def tail(self, *scales: float) -> tuple[Any, ...]:
        dropout = () if self.dropout_p == 0.0 else (np.uint32(self.seed), *_threshold(self.dropout_p))
        return _sizes(*self.sizes, self.causal, 0), *map(np.float32, scales), *dropout


def _aligned(operand: Operand) -> bool:
    """Whether every row begins on four elements."""
    quads = operand.offset % 4 == 0 and all(stride % 4 == 0 for stride in operand.strides[:3])
    return quads and operand.array.alignment >= 16


@functools.lru_cache(maxsize=4096)
def _planned(
    device: Device,
    name: str,
    element: str,
    mask: str,
    dropout: bool,
    aligned: bool,
    batch: int,
    sizes: tuple[int, int, int, int, int, int],
    columns: int,
) -> tuple[Kernel, AttentionShape]:
    T, S, D, V, H, share = sizes
    keys = name.startswith("grad_key") or name == "grad_value"
    rows, outer = (S, batch * (H // share)) if keys else (T, batch * H)
    shape = attention_shape(device, rows, outer, columns, max(D, V), aligned=aligned)
    kinds = {"KERNEL": name, "TYPE": element, "MASK": mask, "DROPOUT": int(dropout)}
    return get_kernel(device, "attention", f"attention_{name}", **{**shape.constants, **kinds}), shape


def _checked(
    query: Operand,
    key: Operand,
    value: Operand,
    mask: Operand | None,
    scale: float | None,
    causal: bool,
    dropout_p: float,
    seed: int,
) -> _Call:
    if any(len(operand.shape) != 4 for operand in (query, key, value)):
        raise ValueError(f"expected query, key and value of 4 dimensions, got {query}, {key}, {value}")
    B, H, T, D = query.shape
    G, S, V = key.shape[1], key.shape[2], value.shape[3]
    if key.shape != (B, G, S, D) or value.shape != (B, G, S, V) or (G == 0 or H % G if H else G):
        raise ValueError(f"expected key [B, G, S, D] and value [B, G, S, V] for {query}, got {key}, {value}")
    if query.element not in ELEMENTS or not query.element == key.element == value.element:
        raise TypeError(f"expected one floating element, got {query.element}, {key.element}, {value.element}")
    require_rows(query, key, value)
    if max(T, S, D, V, B * H) >= SIZE_LIMIT:
        raise UnsupportedDevice(f"expected sizes below 2^31, got {query}, {key}, {value}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"expected dropout_p between 0 and 1, got {dropout_p}")
    if mask is not None:
        if mask.element not in (*ELEMENTS, "bool"):
            raise TypeError(f"expected a mask of bool or a floating element, got {mask.element}")
        mask = expanded(mask, (B, H, T, S))
    factor = (1.0 / math.sqrt(D) if D else 1.0) if scale is None else scale
    sizes = (T, S, D, V, H, H // G if G else 1)
    return _Call(query.device, query.element, B, sizes, causal, factor, mask, dropout_p, seed)


def require_rows(*operands: Operand) -> None:
    """ValueError unless the elements of each operand's rows are neighbours."""
    for operand in operands:
        if operand.shape[-1] > 1 and operand.strides[-1] != 1:
            raise ValueError(f"expected neighbours along the last dimension, got {operand}")


def expanded(operand: Operand, shape: Sequence[int]) -> Operand:
    """The operand broadcast to `shape`, with strides of 0; ValueError where it does not broadcast."""
    missing = len(shape) - len(operand.shape)
    own = (1,) * missing + operand.shape
    if missing < 0 or any(size not in (1, wanted) for size, wanted in zip(own, shape, strict=True)):
        raise ValueError(f"expected a mask that broadcasts to {list(shape)}, got {operand}")
    strides = (0,) * missing + operand.strides
    return operand.viewed(
        shape, [0 if size == 1 else stride for size, stride in zip(own, strides, strict=True)], operand.offset
    )


def attention(
    query: Operand,
    key: Operand,
    value: Operand,
    mask: Operand | None,
    out: Operand,
    logsumexp: Operand,
    *,
    scale: float | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
    seed: int = 0,
) -> Any:
    """out [B, H, T, V] and logsumexp float32 [B, H, T] (contiguous); the launch's event, None where there is no row.

    scale: 1/sqrt(D) by default. ValueError, TypeError for other shapes and elements than the module's.
    """
    call = _checked(query, key, value, mask, scale, causal, dropout_p, seed)
    _require(logsumexp, query.shape[:3], "float32")
    _require(out, (*query.shape[:3], value.shape[3]), query.element)
    if logsumexp.size == 0:
        return None
    kernel, shape = call.kernel("forward", value.shape[3], query, key, value)
    return kernel(
        shape.global_size,
        shape.local_size,
        *_placed(query, key, value),
        *call.mask_args(),
        *_placed(out),
        logsumexp,
        *call.tail(call.scale * LOG2E),
    )


def attention_backward(
    grad_out: Operand,
    query: Operand,
    key: Operand,
    value: Operand,
    mask: Operand | None,
    out: Operand,
    logsumexp: Operand,
    grads: tuple[Operand | None, Operand | None, Operand | None],
    *,
    scale: float | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
    seed: int = 0,
) -> Any:
    """Fill grads: those of query, key and value, each of its operand's shape, or None where it is not needed;
    the last launch's event, None where there was none.

    out and logsumexp are what `attention` made of the same arguments; grad_out has out's shape.
    """
    call = _checked(query, key, value, mask, scale, causal, dropout_p, seed)
    grad_q, grad_k, grad_v = grads
    _require(logsumexp, query.shape[:3], "float32")
    for operand, shape in (
        (grad_out, (*query.shape[:3], value.shape[3])),
        (out, (*query.shape[:3], value.shape[3])),
        (grad_q, query.shape),
        (grad_k, key.shape),
        (grad_v, value.shape),
    ):
        if operand is not None:
            _require(operand, shape, query.element)
    delta = empty_operand(call.device, logsumexp.shape, "float32")
    if delta.size and (grad_q is not None or grad_k is not None):
        kernel = get_kernel(call.device, "attention", "attention_delta", KERNEL="delta", TYPE=call.element, **PLAIN)
        kernel((delta.size,), None, *_placed(grad_out, out), delta, call.tail()[0])
    shared = (*_placed(query, key, value), *call.mask_args(), *_placed(grad_out), logsumexp, delta)
    tail = call.tail(call.scale, call.scale * LOG2E)
    D, V = query.shape[3], value.shape[3]
    last = None
    for name, columns, targets in _backward_launches(call.device, D, V, grad_q, grad_k, grad_v):
        if targets[0].size or targets[-1].size:
            kernel, shape_of = call.kernel(name, columns, query, key, value, grad_out)
            last = kernel(shape_of.global_size, shape_of.local_size, *shared, *_placed(*targets), *tail)
    return last


def _backward_launches(
    device: Device, D: int, V: int, grad_q: Operand | None, grad_k: Operand | None, grad_v: Operand | None
) -> list[tuple[str, int, tuple[Operand, ...]]]:
    """(kernel, columns of its result, results): the gradients of key and value in one launch where registers allow."""
    launches: list[tuple[str, int, tuple[Operand, ...]]] = []
    if grad_q is not None:
        launches.append(("grad_query", D, (grad_q,)))
    if grad_k is not None and grad_v is not None and (max(D, V) <= BOTH_COLUMNS or not attention_in_groups(device)):
        launches.append(("grad_key_value", max(D, V), (grad_k, grad_v)))
        return launches
    if grad_k is not None:
        launches.append(("grad_key", D, (grad_k,)))
    if grad_v is not None:
        launches.append(("grad_value", V, (grad_v,)))
    return launches


def dropped(out: Operand, *, dropout_p: float, seed: int) -> Any:
    """Fill contiguous float32 out [B, H, T, S] with what `attention` multiplies probabilities with: 0 or 1/(1 - p)."""
    _require(out, out.shape, "float32")
    if not out.contiguous:
        raise ValueError(f"expected a contiguous result, got {out}")
    if out.size == 0:
        return None
    size, per = flat_shape(out.device.info, out.size)
    kernel = get_kernel(out.device, "attention", "attention_dropout", KERNEL="dropout", TYPE="float32", **PLAIN)
    return kernel(
        size,
        None,
        *out.place,
        np.uint64(out.size),
        np.uint64(per),
        np.uint32(seed),
        *_threshold(dropout_p),
    )


def _placed(*operands: Operand) -> list[Any]:
    return [part for operand in operands for part in (operand, _place(operand.offset, operand.strides[:3]))]


def _require(operand: Operand, shape: Sequence[int], element: str) -> None:
    if operand.shape != tuple(shape) or operand.element != element:
        raise ValueError(f"expected {element} of shape {list(shape)}, got {operand}")
    require_rows(operand)
