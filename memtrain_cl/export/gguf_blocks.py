"""Counter weights in GGUF's types: ternary blocks and rows of float16, written from the codes and read back.

A block is 256 weights of one row as digits t+1 in {0, 1, 2}, and the row's scale as a little-endian float16 behind
them: w = scale * (digit - 1).

    TQ2_0, 66 bytes   byte 32h+j (h < 2, j < 32) holds digits 128h+j, +32, +64, +96 in two bits each, low bits first
    TQ1_0, 54 bytes   48 bytes of five digits each: j, j+32 .. j+128 for j < 32, then 160+j, +16 .. +64 for j < 16; then
                      4 bytes of four: 240+j, +4, +8, +12. The first digit is the most significant of a number q in base
                      3 (a fifth digit is 0 where there are four), and the byte ceil(256 q / 243): the digits come out
                      of it as 3x >> 8 of x = byte, 3 byte, 9 byte ... modulo 256.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from memtrain_cl.export.codes import CHUNK, unpack_codes
from memtrain_cl.formats import LayerState, code_count

BLOCK = 256
#: float16's normal range.
SCALE_MIN, SCALE_MAX = 2.0**-14, 65504.0
_CEIL = np.array([-(-256 * q // 243) for q in range(243)], dtype=np.uint8)
_POWERS = np.array([1, 3, 9, 27, 81], dtype=np.uint8)


def row_scales(layer: LayerState) -> tuple[np.ndarray, float]:
    """(the row scales in float16 [out], the largest relative error of one). ValueError when one leaves float16's normal
    range.
    """
    scale = layer.scale
    good = (scale >= SCALE_MIN) & (scale <= SCALE_MAX)  # False for NaN too
    if not good.all():
        at = int(np.argmin(good))
        raise ValueError(f"expected row scales in 2^-14..65504, float16's normal range, got {scale[at]:g} in row {at}")
    rounded = scale.astype(np.float16)
    wide = scale.astype(np.float64)
    return rounded, float(np.max(np.abs(rounded - wide) / wide, initial=0.0))


def _digits(layer: LayerState, order: np.ndarray | None) -> Iterator[tuple[slice, np.ndarray]]:
    # (rows of the file, their digits uint8 [rows, in]), some rows at a time so that temporaries stay in the cache.
    width = 2 * layer.C - 1
    step = max(1, CHUNK // max(1, layer.state.shape[1]))
    for start in range(0, layer.out_features, step):
        rows = slice(start, min(start + step, layer.out_features))
        packed = layer.state[rows] if order is None else layer.state[order[rows]]
        codes = unpack_codes(packed.reshape(-1))
        if codes.max(initial=0) >= code_count(layer.C):
            raise ValueError(f"expected codes below {code_count(layer.C)} (C = {layer.C}), got {codes.max()}")
        digits = (codes >= width).view(np.uint8)
        digits += codes >= 2 * width
        yield rows, digits.reshape(-1, layer.in_features)


def _pack_tq2_0(digits: np.ndarray) -> np.ndarray:
    planes = digits.reshape(-1, 2, 4, 32)
    packed = planes[:, :, 3] << 2
    for plane in (2, 1):
        packed |= planes[:, :, plane]
        packed <<= 2
    packed |= planes[:, :, 0]
    return packed.reshape(-1, 64)


def _number(planes: np.ndarray) -> np.ndarray:
    # uint8 [blocks, 4 or 5, bytes] -> [blocks, bytes]: the digits' number in base 3, at most 242.
    q = planes[:, 0].copy()
    for plane in range(1, 5):
        q *= 3
        if plane < planes.shape[1]:
            q += planes[:, plane]
    byte: np.ndarray = _CEIL[q]
    return byte


def _pack_tq1_0(digits: np.ndarray) -> np.ndarray:
    blocks = digits.reshape(-1, BLOCK)
    parts = (blocks[:, :160].reshape(-1, 5, 32), blocks[:, 160:240].reshape(-1, 5, 16), blocks[:, 240:])
    return np.concatenate([_number(parts[0]), _number(parts[1]), _number(parts[2].reshape(-1, 4, 4))], axis=1)


def _unpack_tq2_0(packed: np.ndarray) -> np.ndarray:
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(4, 1)
    return (packed.reshape(-1, 2, 1, 32) >> shifts & 3).reshape(-1, BLOCK)


def _unpack_tq1_0(packed: np.ndarray) -> np.ndarray:
    parts = []
    for start, stop, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        x = packed[:, None, start:stop] * _POWERS[:count].reshape(count, 1)  # modulo 256
        parts.append((x.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(packed), -1))
    return np.concatenate(parts, axis=1)


@dataclass(frozen=True)
class TernaryType:
    """A ternary type. code_bytes: bytes of a block's digits, before its scale. pack, unpack: digits uint8 [blocks, 256]
    to those bytes and back.
    """

    code_bytes: int
    pack: Callable[[np.ndarray], np.ndarray]
    unpack: Callable[[np.ndarray], np.ndarray]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.code_bytes + 2


TERNARY = {
    "TQ2_0": TernaryType(64, _pack_tq2_0, _unpack_tq2_0),
    "TQ1_0": TernaryType(52, _pack_tq1_0, _unpack_tq1_0),
}


def encode_ternary(kind: TernaryType, layer: LayerState, scale: np.ndarray, order: np.ndarray | None) -> np.ndarray:
    """A layer in blocks, uint8 [out, in/256 * block bytes].

    Its in_features are a multiple of 256. scale: float16 [out]. order: the layer's row of each row of the file, None
    for the same. ValueError for a code that is none of C's.
    """
    blocks = layer.in_features // BLOCK
    out = np.empty((layer.out_features, blocks, kind.block_bytes), dtype=np.uint8)
    for rows, digits in _digits(layer, order):
        out[rows, :, : kind.code_bytes] = kind.pack(digits).reshape(-1, blocks, kind.code_bytes)
    ordered = scale if order is None else scale[order]
    out[:, :, kind.code_bytes :] = ordered.astype("<f2").view(np.uint8).reshape(-1, 1, 2)
    return out.reshape(layer.out_features, -1)


def encode_float16(layer: LayerState, scale: np.ndarray, order: np.ndarray | None) -> np.ndarray:
    """A layer's visible weights, float16 [out, in]: -scale, 0 (never -0) or scale. Arguments as in `encode_ternary`."""
    out = np.empty((layer.out_features, layer.in_features), dtype=np.uint16)
    bits = (scale if order is None else scale[order]).view(np.uint16)
    for rows, digits in _digits(layer, order):
        # By bits, as one table a row would be: 0 -> sign and scale, 1 -> zero, 2 -> scale.
        out[rows] = (digits != 1) * bits[rows, None]
        out[rows] |= (digits == 0).astype(np.uint16) << 15
    return out.view(np.float16)


def decode_ternary(kind: TernaryType, data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """uint8 [blocks * block bytes] -> (t int8 [blocks, 256], scale float32 [blocks]). A damaged TQ2_0 block may hold
    t = 2, which the caller refuses.
    """
    packed = data.reshape(-1, kind.block_bytes)
    digits = kind.unpack(packed[:, : kind.code_bytes])
    digits -= 1
    scale = np.ascontiguousarray(packed[:, kind.code_bytes :]).view("<f2").reshape(-1)
    return digits.view(np.int8), scale.astype(np.float32)
