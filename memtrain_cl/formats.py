"""Frozen descriptions of the packed layouts: bits, shapes, bytes, bounds. Imports no torch and nothing of ours.

Counter codes
    A weight is the pair (t, c) with t in {-1, 0, +1} and c in {-(C-1) .. C-1}; its code is
    ``(t+1)*(2C-1) + (c + C-1)``, an integer in ``0 .. 3(2C-1)-1`` kept in uint8. Codes of 6 bits (C <= 11) pack four
    into three bytes, little end first: the 24-bit little-endian number ``c0 | c1<<6 | c2<<12 | c3<<18``.

Codes of rows in few bits
    A row of numbers is a scale and integers in ``-levels .. levels``, levels = 2^(bits-1) - 1, bits from 2 to 15: int8
    to 8 bits, int16 beyond. Codes of at most 4 bits pack two into a byte, ``lo | hi<<4``, each as code + 8; the last
    of an odd count has the code -8 beside it.

8-bit floating numbers
    A byte: sign, exponent, mantissa, as torch's float8_e4m3fn (4 and 3 bits, no infinity, one NaN a sign) and
    float8_e5m2 (5 and 2 bits, as IEEE 754 has it).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

C_DEFAULT = 8
C_MAX_PACKED = 11
C_MAX_UNPACKED = 43

#: Bounds that keep (lr/denom)*(C/scale) finite in float32, so that a zero gradient always gives a zero tick.
LR_MAX = 1e6
RMS_EPS_MIN = 1e-12

#: Values of the options of the update rule.
RMS_MODES = ("exact", "lagged", "proxy")
SCALE_REBASES = ("eager", "lazy")
PULSE_MODES = ("direct", "ternary")

#: Steps between the updates of a layer that decimates them.
DECIMATION_PERIODS = (1, 2, 4, 8)

#: The uses of chance in one step of a counter layer, each a stream of random numbers of its own. The rounding of the
#: counters uses the step's seed itself.
STREAM_REBASE, STREAM_PULSE, STREAM_INPUT, STREAM_GRAD_OUTPUT = 1, 2, 3, 4
#: Of ours: grad_out quantised by token for grad_input, and an input that was saved in few bits quantised once more.
STREAM_GRAD_INPUT, STREAM_SAVED_INPUT = 5, 6

#: The longest sum of products of int8 codes that int32 is sure to hold; longer ones are summed in chunks.
INT8_CHUNK = 131_072

#: Virtual lanes of the one summation order (element j is summed in lane j mod LANES, then the lanes are halved).
LANES = 1024


def check_c(C: Any, *, packed: bool) -> int:
    """The carry radix as an int; ValueError that says which range holds (1..11 packed, 1..43 as uint8 codes)."""
    highest = C_MAX_PACKED if packed else C_MAX_UNPACKED
    if isinstance(C, bool) or not isinstance(C, numbers.Integral) or not 1 <= int(C) <= highest:
        storage = "6-bit storage" if packed else "uint8 storage"
        raise ValueError(f"expected C as an integer in 1..{highest} for {storage}, got {C!r}")
    return int(C)


def is_normal(value: float) -> bool:
    """Whether a number, also an integer of any size, is positive and, rounded to float32, neither subnormal nor
    infinite.
    """
    return 2.0**-126 <= value < 2.0**128 * (1 - 2.0**-25)


def hash_number(number: int) -> int:
    """hash_u32 of a host's integer, taken modulo 2^32: the seed of a step from that of its layer plus its number."""
    x = number & 0xFFFFFFFF
    x = ((x ^ x >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ x >> 15) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ x >> 16


def stream_seed(seed: int, stream: int) -> int:
    """The seed of a stream of random numbers in a step: the step's own for 0, else hash_u32(seed + n*0x9e3779b9)."""
    return seed if stream == 0 else hash_number(seed + stream * 0x9E3779B9)


def step_seed(seed: int, step: int, stream: int) -> int:
    """The seed of a stream in a step of an optimizer, of a tensor whose own seed is `seed`; uint32."""
    return stream_seed(hash_number(seed ^ hash_number(step)), stream)


def code_count(C: int) -> int:
    """Number of codes in use, 3(2C-1)."""
    return 3 * (2 * C - 1)


def packed_row_bytes(in_features: int) -> int:
    """Bytes of one packed row of in_features codes (ValueError unless in_features is a multiple of 4)."""
    if in_features % 4:
        raise ValueError(f"expected in_features divisible by 4 for 6-bit packing, got {in_features}")
    return in_features // 4 * 3


def state_row_bytes(in_features: int, *, packed: bool) -> int:
    """Bytes of one row of counter state in either storage."""
    return packed_row_bytes(in_features) if packed else in_features


def check_bits(bits: Any) -> int:
    """The bits of a code as an int; ValueError unless an integer in 2..15."""
    if isinstance(bits, bool) or not isinstance(bits, numbers.Integral) or not 2 <= int(bits) <= 15:
        raise ValueError(f"expected bits as an integer in 2..15, got {bits!r}")
    return int(bits)


def code_levels(bits: int) -> int:
    """The largest code of so many bits, 2^(bits-1) - 1."""
    return (1 << bits - 1) - 1


#: Lengths of blocks that are rotated by a regular Hadamard matrix on a device.
ROTATIONS = (1, 4, 16, 64, 256)


def largest_pow4_divisor(d: int) -> int:
    """The largest power of 4 that divides d, an integer >= 1 (ValueError otherwise)."""
    if isinstance(d, bool) or not isinstance(d, numbers.Integral) or int(d) < 1:
        raise ValueError(f"expected d as an integer >= 1, got {d!r}")
    power = 1
    while int(d) % (4 * power) == 0:
        power *= 4
    return power


def row_length(shape: Sequence[int]) -> int:
    """Elements of a row where a tensor is seen as rows [shape[0], numel/shape[0]]; 1 of a number, and of no rows."""
    return math.prod(shape[1:]) or 1


def row_rotation(columns: int) -> int:
    """The blocks in which rows of so many elements are rotated: min(256, largest power of 4); 1, none, below 16."""
    rot = min(ROTATIONS[-1], largest_pow4_divisor(columns))
    return rot if rot >= 16 else 1


def check_rotation(rot: Any, columns: int | None = None, *, largest: int | None = ROTATIONS[-1]) -> int:
    """rot as an int; ValueError unless it is a power of 4 up to `largest` and divides `columns` (None: any)."""
    whole = isinstance(rot, numbers.Integral) and not isinstance(rot, bool) and int(rot) >= 1
    if not whole or largest_pow4_divisor(int(rot)) != int(rot) or (largest is not None and int(rot) > largest):
        known = "a power of 4" if largest is None else f"one of {', '.join(map(str, ROTATIONS))}"
        raise ValueError(f"expected rot as {known}, got {rot!r}")
    if columns is not None and columns % int(rot):
        raise ValueError(f"expected rows that rot={rot} divides, got rows of {columns}")
    return int(rot)


def effective_bits(bits: float, row_len: int, scale_bits: float = 16) -> float:
    """Bits an element costs with its share of the row's scale: bits + scale_bits/row_len."""
    return bits + scale_bits / row_len


@dataclass(frozen=True)
class Fp8Format:
    """An 8-bit floating type by torch's name. mantissa: its bits. bias: of the exponent. largest: its largest number.

    largest_code, beyond_code: the codes of that and of what lies beyond, the NaN of e4m3fn and the infinity of e5m2.
    """

    name: str
    mantissa: int
    bias: int
    largest: float
    largest_code: int
    beyond_code: int


#: Those that can be cast to.
FP8_FORMATS = {
    form.name: form
    for form in (
        Fp8Format("float8_e4m3fn", 3, 7, 448.0, 0x7E, 0x7F),
        Fp8Format("float8_e5m2", 2, 15, 57344.0, 0x7B, 0x7C),
    )
}
#: The code of every NaN, its sign aside.
FP8_NAN = 0x7F


def check_fp8(dtype: Any) -> Fp8Format:
    """The 8-bit floating type of a name or of torch's type; ValueError names those that there are."""
    form = FP8_FORMATS.get(str(dtype).removeprefix("torch."))
    if form is None:
        raise ValueError(f"expected fp8_dtype as one of {', '.join(FP8_FORMATS)}, got {dtype!r}")
    return form


@dataclass(frozen=True)
class LayerState:
    """One counter layer as NumPy arrays: what an exporter needs and an importer gives back.

    state: uint8 [out, in/4*3], packed 6-bit codes.   scale, v, s_base: float32 [out]; v and s_base are None in a layer
    without row moments.   hyper: the constructor's options.   seed, step: the position in the rounding stream.
    kind: the layer class's name.   clock: of a layer that decimates updates, the period and the steps since the last.
    """

    in_features: int
    out_features: int
    C: int
    state: np.ndarray
    scale: np.ndarray
    v: np.ndarray | None
    s_base: np.ndarray | None
    hyper: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    step: int = 0
    kind: str = "PackedRMSCounterLinear"
    clock: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        check_c(self.C, packed=True)
        if self.out_features < 0 or self.in_features < 0:
            raise ValueError(f"expected sizes >= 0, got out {self.out_features}, in {self.in_features}")
        expected = (self.out_features, packed_row_bytes(self.in_features))
        if self.state.dtype != np.uint8 or self.state.shape != expected:
            raise ValueError(f"expected state uint8 {expected}, got {self.state.dtype} {self.state.shape}")
        for name in ("scale", "v", "s_base"):
            row = getattr(self, name)
            if row is None and name != "scale":
                continue
            if row.dtype != np.float32 or row.shape != (self.out_features,):
                raise ValueError(f"expected {name} float32 ({self.out_features},), got {row.dtype} {row.shape}")
        if self.clock is not None and not (self.clock[0] in DECIMATION_PERIODS and 0 <= self.clock[1] < 1 << 63):
            raise ValueError(f"expected clock as a period of {DECIMATION_PERIODS} and a number, got {self.clock}")


@dataclass(frozen=True)
class CounterRule:
    """The constants of one counter update (see `memtrain_cl.reference.counter` for the equations).

    C: carry radix.   packed: 6-bit storage.   lr, lr_scale: step sizes of counter and row scale.   rms_beta, rms_eps:
    decay and floor of the row moment.   use_rms: False leaves the gradient unnormalised.   rms_mode: "exact"
    normalises by the fresh moment, "lagged" by the previous one, "proxy" by a fresh moment of estimated squares.
    scale_rebase: "eager" rebases the counters as the scale moves, "lazy" at the next update.   pulse_mode: "direct"
    uses the gradient, "ternary" an unbiased ternary estimate of it.   clip: bound of the row norm, 0 for none.
    clipped_scale: the scale learns from the clipped gradient (the layer without row moments).
    """

    C: int
    packed: bool
    lr: float
    lr_scale: float
    rms_beta: float = 0.9
    rms_eps: float = 1e-3
    use_rms: bool = True
    rms_mode: str = "exact"
    scale_rebase: str = "eager"
    pulse_mode: str = "direct"
    clip: float = 0.0
    clipped_scale: bool = False

    def __post_init__(self) -> None:
        check_c(self.C, packed=self.packed)
        for name, known in (
            ("rms_mode", RMS_MODES),
            ("scale_rebase", SCALE_REBASES),
            ("pulse_mode", PULSE_MODES),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"expected {name} as one of {', '.join(known)}, got {getattr(self, name)!r}")
        for name in ("lr", "lr_scale"):
            value = getattr(self, name)
            if not (isinstance(value, numbers.Real) and 0.0 <= float(value) <= LR_MAX):
                raise ValueError(f"expected {name} as a finite number 0..{LR_MAX:g}, got {value!r}")
        if not (isinstance(self.clip, numbers.Real) and 0.0 <= self.clip < float("inf")):
            raise ValueError(f"expected clip as a finite number >= 0, got {self.clip!r}")
        if not (isinstance(self.rms_beta, numbers.Real) and 0.0 <= self.rms_beta < 1.0):
            raise ValueError(f"expected rms_beta in [0, 1), got {self.rms_beta!r}")
        if not (isinstance(self.rms_eps, numbers.Real) and RMS_EPS_MIN <= self.rms_eps < float("inf")):
            raise ValueError(f"expected rms_eps as a finite number >= {RMS_EPS_MIN:g}, got {self.rms_eps!r}")
