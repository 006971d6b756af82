"""NumPy's view of counter codes and of their packed states, in bounded memory. (The device's codec is
kernels/_code6.cl.)

A code is (t+1)*(2C-1) + (c + C-1), with t in {-1, 0, 1} and c in {-(C-1) .. C-1}.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memtrain_cl.formats import code_count, packed_row_bytes

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


def pack_codes(codes: np.ndarray) -> np.ndarray:
    """uint8 [out, in], codes below 64 -> uint8 [out, in/4*3]. ValueError unless in is a multiple of 4."""
    rows, columns = codes.shape
    packed = np.empty((rows, packed_row_bytes(columns)), dtype=np.uint8)
    triples, quads = packed.reshape(-1, 3), np.ascontiguousarray(codes).reshape(-1, 4)
    step = CHUNK // 3
    for start in range(0, len(quads), step):
        c0, c1, c2, c3 = quads[start : start + step].T
        part = triples[start : start + step]
        part[:, 0] = c0 | c1 << 6
        part[:, 1] = c1 >> 2 | c2 << 4
        part[:, 2] = c2 >> 4 | c3 << 2
    return packed


def code_tables(C: int) -> tuple[np.ndarray, np.ndarray]:
    """(t, c) of every code below 3(2C-1), int8 [3(2C-1)]: table[codes] splits codes."""
    t, c = np.divmod(np.arange(code_count(C)), 2 * C - 1)
    return (t - 1).astype(np.int8), (c - (C - 1)).astype(np.int8)


def join_codes(t: np.ndarray, c: np.ndarray, C: int) -> np.ndarray:
    """The codes, uint8, of t in {-1, 0, 1} and c in {-(C-1) .. C-1}, int8 of one shape."""
    # In uint8, where whatever wraps on the way comes back: a code is below 256.
    return (t + np.int8(1)).view(np.uint8) * np.uint8(2 * C - 1) + (c.view(np.uint8) + np.uint8(C - 1))


def code_chunks(state: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The codes of a packed state in pieces of bounded size: (flat index of the first, uint8 codes)."""
    # Rows are whole triples, so the flat bytes can be cut at any multiple of 3; the index counts codes.
    flat = state.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        yield start // 3 * 4, unpack_codes(flat[start : start + CHUNK])


def code_histogram(state: np.ndarray) -> np.ndarray:
    """How often each of the 64 codes occurs in a packed state: int64 [64]."""
    counts = np.zeros(64, dtype=np.int64)
    for _, codes in code_chunks(state):
        counts += np.bincount(codes, minlength=64)
    return counts


def first_bad_code(state: np.ndarray, C: int) -> tuple[int, int] | None:
    """(flat index, code) of the first code that is no state of a counter with carry radix C, or None."""
    for start, codes in code_chunks(state):
        bad = first_above(codes, code_count(C) - 1)
        if bad:
            return start + bad[0], bad[1]
    return None


def first_above(values: np.ndarray, highest: int) -> tuple[int, int] | None:
    """(flat index, value) of the first of some integers that is above `highest`, or None."""
    if not values.size or values.max() <= highest:
        return None
    at = int(np.argmax(values > highest))
    return at, int(values.reshape(-1)[at])


def ternary_counts(state: np.ndarray, C: int) -> tuple[int, int, int]:
    """How many visible weights are -1, 0, +1 (codes are taken to be below 3(2C-1))."""
    counts = code_histogram(state)
    width = 2 * C - 1
    return int(counts[:width].sum()), int(counts[width : 2 * width].sum()), int(counts[2 * width : 3 * width].sum())
