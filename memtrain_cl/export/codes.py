"""NumPy's view of packed counter states, in bounded memory. (The device's codec is kernels/_code6.cl.)"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memtrain_cl.formats import code_count

#: Packed bytes handled at a time; a multiple of 3. Four times as many bytes of temporaries are alive.
CHUNK = 3 * 2**17


def unpack_codes(packed: np.ndarray) -> np.ndarray:
    """uint8 [n/4*3] -> uint8 [n]: the 24-bit little-endian number c0 | c1<<6 | c2<<12 | c3<<18 back into codes."""
    triples = packed.reshape(-1, 3)
    p0, p1, p2 = triples[:, 0], triples[:, 1], triples[:, 2]
    codes = np.empty((len(triples), 4), dtype=np.uint8)
    codes[:, 0] = p0 & 63
    codes[:, 1] = p0 >> 6 | (p1 & 15) << 2
    codes[:, 2] = p1 >> 4 | (p2 & 3) << 4
    codes[:, 3] = p2 >> 2
    return codes.reshape(-1)


def _chunks(state: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    # Rows are whole triples, so the flat bytes can be cut at any multiple of 3; the index counts codes.
    flat = state.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        yield start // 3 * 4, unpack_codes(flat[start : start + CHUNK])


def code_histogram(state: np.ndarray) -> np.ndarray:
    """How often each of the 64 codes occurs in a packed state: int64 [64]."""
    counts = np.zeros(64, dtype=np.int64)
    for _, codes in _chunks(state):
        counts += np.bincount(codes, minlength=64)
    return counts


def first_bad_code(state: np.ndarray, C: int) -> tuple[int, int] | None:
    """(flat index, code) of the first code that is no state of a counter with carry radix C, or None."""
    limit = code_count(C)
    for start, codes in _chunks(state):
        if codes.size and codes.max() >= limit:
            at = int(np.argmax(codes >= limit))
            return start + at, int(codes[at])
    return None


def ternary_counts(state: np.ndarray, C: int) -> tuple[int, int, int]:
    """How many visible weights are -1, 0, +1 (codes are taken to be below 3(2C-1))."""
    counts = code_histogram(state)
    width = 2 * C - 1
    return int(counts[:width].sum()), int(counts[width : 2 * width].sum()), int(counts[2 * width : 3 * width].sum())
