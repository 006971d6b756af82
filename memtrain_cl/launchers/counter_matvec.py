"""Launcher of kernels/counter_matvec.cl: a packed counter weight times one vector, for decoding a token at a time."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from memtrain_cl.array import DeviceArray
from memtrain_cl.device import Device
from memtrain_cl.formats import check_c, packed_row_bytes
from memtrain_cl.program import Kernel, Launch, get_kernel
from memtrain_cl.tuning import SIZE_LIMIT
from memtrain_cl.tuning_decode import CounterMatvecShape, counter_matvec_shape


@dataclass(frozen=True)
class Norm:
    """A root-mean-square norm of the vector: weight float32 [in], eps."""

    weight: DeviceArray
    eps: float


@functools.lru_cache(maxsize=1024)
def _plan(
    device: Device, M: int, K: int, C: int, norm: bool, add: bool, gated: bool, words: bool
) -> tuple[Kernel, CounterMatvecShape, tuple[np.uint32, np.uint32, np.uint32]]:
    shape = counter_matvec_shape(device.info, M, K, gated, words=words)
    chosen = {"C": C, "NORM": int(norm), "ADD": int(add), "GATED": int(gated)}
    kernel = get_kernel(device, "counter_matvec", "counter_matvec", **chosen, **shape.constants)
    return kernel, shape, (np.uint32(M), np.uint32(K), np.uint32(shape.per))


def prepare_counter_matvec(
    state: DeviceArray,
    scale: DeviceArray,
    x: DeviceArray,
    out: DeviceArray,
    *,
    C: int,
    norm: Norm | None = None,
    add: DeviceArray | None = None,
    gated: bool = False,
) -> Launch:
    """What enqueues out = y, with y[m] = scale[m] * sum_k t[m, k] * x[k].

        norm    x is divided by the root of its mean square + eps, and multiplied by the norm's weight, before
        add     out = add + y; may be out itself
        gated   out[m] = silu(y[m]) * y[M + m] of a weight of 2M rows

    state uint8 [rows, in/4*3], scale float32 [rows], x float32 [in], out and add float32 [rows] (gated: [rows/2]), by
    their numbers of elements. ValueError for other sizes, without an element, and where numbers begin off a multiple
    of 16 bytes.
    """
    C = check_c(C, packed=True)
    M, K = out.size, x.size
    if state.size != (1 + gated) * M * packed_row_bytes(K) or scale.size != (1 + gated) * M or M >= SIZE_LIMIT:
        raise ValueError(
            f"expected a state [{(1 + gated) * M}, {K}/4*3] for {K} numbers and {M} results, got {state.shape}"
        )
    if M * K == 0:
        raise ValueError(f"expected a weight of at least one row and four columns, got [{M}, {K}]")
    if add is not None and (gated or add.size != M):
        raise ValueError(f"expected {M} numbers to add, and none to gated results, got {add.shape}")
    if norm is not None and norm.weight.size != K:
        raise ValueError(f"expected a norm of {K} numbers, got {norm.weight.shape}")
    weight = None if norm is None else norm.weight
    numbers = [array for array in (scale, x, out, add, weight) if array is not None]
    if state.dtype != np.uint8 or any(array.dtype != np.float32 or array.alignment < 16 for array in numbers):
        raise ValueError(f"expected codes of uint8 and float32 that begins on 16 bytes, got {[state, *numbers]}")
    words = state.alignment >= 4
    kernel, shape, sizes = _plan(out.device, M, K, C, norm is not None, add is not None, gated, words)
    factors = () if norm is None else (norm.weight, np.float32(norm.eps))
    added = () if add is None else (add,)
    return Launch(kernel, shape.global_size, shape.local_size, state, scale, x, *factors, *added, out, *sizes)


def counter_matvec(
    state: DeviceArray,
    scale: DeviceArray,
    x: DeviceArray,
    out: DeviceArray,
    *,
    C: int,
    norm: Norm | None = None,
    add: DeviceArray | None = None,
    gated: bool = False,
) -> Any:
    """Enqueue what `prepare_counter_matvec` prepares; the launch's event."""
    return prepare_counter_matvec(state, scale, x, out, C=C, norm=norm, add=add, gated=gated)()
