"""Launchers of kernels/token_attention.cl: keys and values of new tokens into a cache, and attention of one token.

rows float32 [T, 3, heads, head]: query, key and value of each token. keys, values float32 [heads, capacity, head].
angles float32 [positions, head/2, 2]: cosine and sine by which the pairs (i, i + head/2) of a position turn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from memtrain_cl.array import DeviceArray
from memtrain_cl.device import Device
from memtrain_cl.program import Kernel, Launch, get_kernel
from memtrain_cl.tuning import flat_shape, power_of_two_at_least, spreads_wide

#: Items of a group of the GPU shape.
GROUP = 128


@dataclass(frozen=True)
class Cache:
    """Where a block keeps keys and values [heads, capacity, head] of the positions so far; angles: see the module.

    scores: [heads, capacity], room for the probabilities of one token.
    """

    keys: DeviceArray
    values: DeviceArray
    angles: DeviceArray
    scores: DeviceArray

    def __post_init__(self) -> None:
        heads, capacity, head = self.keys.shape
        fits = self.angles.shape[0] >= capacity and self.angles.shape[1:] == (head // 2, 2) and head % 2 == 0
        same = self.values.shape == self.keys.shape and self.scores.shape == (heads, capacity)
        if not (fits and same):
            shapes = [array.shape for array in (self.keys, self.values, self.angles, self.scores)]
            raise ValueError(f"expected one cache of keys and values, its angles and its scores, got {shapes}")


@functools.lru_cache(maxsize=256)
def _kernel(device: Device, name: str, head: int) -> tuple[Kernel, int]:
    """The kernel, and the items of a group that takes a head."""
    group = GROUP if spreads_wide(device.info, GROUP) else 1
    widths = (4, 2) if group > 1 else (8, 4, 2)
    wide = next(width for width in widths if head % width == 0)
    columns = min(group, power_of_two_at_least(head // wide))
    return get_kernel(device, "token_attention", name, HEAD=head, GROUP=group, WIDE=wide, COLUMNS=columns), group


def _require_rows(rows: DeviceArray, tokens: int, cache: Cache, start: int) -> None:
    heads, capacity, head = cache.keys.shape
    if rows.size != tokens * 3 * heads * head or not 0 <= start <= capacity - tokens:
        raise ValueError(
            f"expected [{tokens}, 3, {heads}, {head}] for positions within {capacity}, got {rows.shape} from {start} on"
        )


def rotate_rows(rows: DeviceArray, cache: Cache, start: int, tokens: int) -> Any:
    """Turn the queries of `rows` in place; its keys, turned, and its values go to positions start .. start + tokens of
    the cache. The launch's event, None where there is no token.
    """
    _require_rows(rows, tokens, cache, start)
    heads, capacity, head = cache.keys.shape
    if tokens == 0:
        return None
    device = rows.device
    kernel, _ = _kernel(device, "rotate_rows", head)
    pairs = tokens * heads * (head // 2)
    size, per = flat_shape(device.info, pairs)
    sizes = (*map(np.uint32, (start, heads, capacity)), np.uint64(pairs), np.uint64(per))
    return kernel(size, None, rows, cache.angles, cache.keys, cache.values, *sizes)


def prepare_token_attention(rows: DeviceArray, cache: Cache, out: DeviceArray) -> Callable[[int], Any]:
    """What takes the position of a token and enqueues its attention over all positions up to its own.

    out float32 [heads, head] = softmax(q k^T / sqrt(head)) v. Its key and value, in `rows`, go to the cache.
    """
    _require_rows(rows, 1, cache, 0)
    heads, capacity, head = cache.keys.shape
    if out.size != heads * head:
        raise ValueError(f"expected room for [{heads}, {head}], got {out.shape}")
    kernel, group = _kernel(rows.device, "token_attention", head)
    arrays = (rows, cache.angles, cache.keys, cache.values, cache.scores, out)
    sizes = (np.uint32(heads), np.uint32(capacity), np.float32(1.0 / math.sqrt(head)))
    launch = Launch(kernel, (heads * group,), (group,), *arrays, *sizes)

    def attend(position: int) -> Any:
        if not 0 <= position < capacity:
            raise ValueError(f"expected a position in 0..{capacity - 1}, got {position}")
        return launch(np.uint32(position))

    return attend


def token_attention(rows: DeviceArray, cache: Cache, position: int, out: DeviceArray) -> Any:
    """Enqueue what `prepare_token_attention` prepares; the launch's event."""
    return prepare_token_attention(rows, cache, out)(position)
