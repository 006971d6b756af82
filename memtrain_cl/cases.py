"""The one table of cases: which shapes and options each `__kernel` is checked and timed with.

Those of the kernels behind torch's device "opencl" are in cases_aten.py.

It lies in the package, not in tests/, because `memtrain-cl verify` ships with the package and checks a user's device
with the same table that the tests and the benches use. It imports no torch. A bench makes larger cases with the
constructors below, so that bytes and operations are counted in one place; a test fails when a `__kernel` has no case.

Shapes cross the borders of the kernels' blocks: vectors of 8, groups of 4, lanes of 1024, work-groups of 32..256 items,
tiles of 6, 16, 64, 96, 128 and 256.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memtrain_cl._resources import kernels_dir
from memtrain_cl.case import Case
from memtrain_cl.cases_adam import adam_cases
from memtrain_cl.cases_aten import aten_cases
from memtrain_cl.cases_automagic import automagic_cases
from memtrain_cl.cases_blockwise import blockwise_cases
from memtrain_cl.cases_engine import engine_cases
from memtrain_cl.cases_fp8 import fp8_cases
from memtrain_cl.cases_hadamard import hadamard_cases
from memtrain_cl.cases_int8 import int8_cases
from memtrain_cl.cases_profile import profile_cases
from memtrain_cl.cases_stochastic import stochastic_cases
from memtrain_cl.formats import CounterRule, check_c, state_row_bytes
from memtrain_cl.program import expand_includes

#: What differs between the ways to update; see `memtrain_cl.formats.CounterRule`.
MODES: Mapping[str, Mapping[str, Any]] = {
    "exact": {},
    "lagged": {"rms_mode": "lagged"},
    "clip": {"clip": 0.5},
    "lagged_clip": {"rms_mode": "lagged", "clip": 0.5},
    "no_rms": {"use_rms": False},
    "no_rms_clip": {"use_rms": False, "clip": 0.5},
    "clipped_scale": {"use_rms": False, "clipped_scale": True},
    "clipped_scale_clip": {"use_rms": False, "clip": 0.5, "clipped_scale": True},
    "clipped_scale_ternary": {"use_rms": False, "clip": 0.5, "clipped_scale": True, "pulse_mode": "ternary"},
    "lazy": {"scale_rebase": "lazy"},
    "lagged_lazy_clip": {"rms_mode": "lagged", "scale_rebase": "lazy", "clip": 0.5},
    "ternary": {"pulse_mode": "ternary"},
    "proxy_clip": {"rms_mode": "proxy", "clip": 0.5},
    "proxy_lazy_ternary": {"rms_mode": "proxy", "scale_rebase": "lazy", "pulse_mode": "ternary"},
}
#: Bytes of a weight in a cache.
CACHE_BYTES = {"int8": 1, "float16": 2}
#: Largest error of a product's element, relative to the sum of the magnitudes of its terms.
PRODUCT_TOLERANCE = 1e-5


def make_rule(options: Mapping[str, Any]) -> CounterRule:
    """The constants of an update for a case's C, packed and mode."""
    return CounterRule(options["C"], options["packed"], lr=0.3, lr_scale=0.1, **MODES[options["mode"]])


def _state_bytes(rows: int, columns: int, C: int, packed: bool) -> int:
    check_c(C, packed=packed)
    return rows * state_row_bytes(columns, packed=packed)


def codec_case(op: str, rows: int, columns: int, *, small: bool = False) -> Case:
    """pack_codes or unpack_codes of [rows, columns]."""
    count = rows * columns
    return Case("codec", op, op, {"rows": rows, "columns": columns}, bytes_moved=count + count // 4 * 3, small=small)


def row_case(op: str, rows: int, columns: int, C: int, packed: bool, *, small: bool = False) -> Case:
    """decode_dense or row_statistics of [rows, columns]."""
    state = _state_bytes(rows, columns, C, packed)
    # Both read the codes and pass one float32 matrix; beside it, one number a row comes in or two go out.
    beside = 4 * rows if op == "decode_dense" else 8 * rows
    per_element = 5 if op == "decode_dense" else 8
    return Case(
        "codec" if op == "decode_dense" else "counter",
        op,
        op,
        {"rows": rows, "columns": columns},
        {"C": C, "packed": packed},
        bytes_moved=state + 4 * rows * columns + beside,
        flops=per_element * rows * columns,
        small=small,
    )


def update_case(
    rows: int,
    columns: int,
    C: int = 11,
    packed: bool = True,
    mode: str = "exact",
    *,
    index_base: int = 0,
    clock: bool = False,
    cache: str = "",
    tokens: int = 0,
    small: bool = False,
) -> Case:
    """counter_update_ of a whole layer [rows, columns]; index_base: the index of its first element.

    tokens: those from which counter_update_from_io_ forms the gradient, 0 where it is given.   clock: whether there is
    one.   cache: "int8" or "float16" for one. What it takes to write to it is not counted: hardly any weight changes.
    """
    state = _state_bytes(rows, columns, C, packed)
    rule = make_rule({"C": C, "packed": packed, "mode": mode})
    # Row moments and bases of counters are read and written, estimated moments read.
    beside = 8 * (rule.use_rms + (rule.scale_rebase == "lazy")) + 4 * (rule.rms_mode == "proxy")
    options = {"C": C, "packed": packed, "mode": mode}
    return Case(
        "counter",
        "counter_update",
        "counter_update_from_io_" if tokens else "counter_update_",
        {"tokens": tokens, "rows": rows, "columns": columns} if tokens else {"rows": rows, "columns": columns},
        options
        | ({"index_base": index_base} if index_base else {})
        | ({"clock": True} if clock else {})
        | ({"cache": cache} if cache else {}),
        bytes_moved=2 * state + 4 * (tokens * (rows + columns) or rows * columns) + 8 * rows + beside * rows,
        flops=(36 + 2 * tokens) * rows * columns,
        small=small,
    )


def advance_case(period: int, since: int) -> Case:
    """advance_clock_ of a clock as it stands."""
    sizes = {"period": period, "since": since}
    return Case("clock", "advance_clock", "advance_clock_", sizes, bytes_moved=72, flops=0, small=True)


def observe_case(flips: int, weights: int, fire: int = 1) -> Case:
    """observe_clock_ after an update that changed `flips` of the `weights` of a layer."""
    sizes = {"flips": flips, "weights": weights, "fire": fire}
    return Case("clock", "observe_clock", "observe_clock_", sizes, bytes_moved=48, flops=0, small=True)


def moments_case(tokens: int, rows: int, columns: int, *, small: bool = False) -> Case:
    """proxy_moments of a layer [rows, columns] and `tokens` inputs."""
    values = tokens * (rows + columns)
    return Case(
        "proxy",
        "proxy_moments",
        "proxy_moments",
        {"tokens": tokens, "rows": rows, "columns": columns},
        bytes_moved=4 * values + 4 * rows,
        flops=2 * values,
        small=small,
        also=(("proxy", "square_lanes"),),
    )


def refresh_case(rows: int, columns: int, C: int, packed: bool, cache: str, *, small: bool = False) -> Case:
    """refresh_cache_ of a layer [rows, columns] into "int8" or "float16"."""
    return Case(
        "ternary" if cache == "int8" else "codec",
        "decode_ternary" if cache == "int8" else "decode_half",
        "refresh_cache_",
        {"rows": rows, "columns": columns},
        {"C": C, "packed": packed, "cache": cache},
        bytes_moved=_state_bytes(rows, columns, C, packed) + CACHE_BYTES[cache] * rows * columns,
        flops=4 * rows * columns,
        small=small,
    )


def product_case(
    op: str, tokens: int, rows: int, columns: int, packed: bool, *, cache: str = "", small: bool = False
) -> Case:
    """counter_forward, counter_grad_input or grad_weight of a layer [rows, columns] and `tokens` inputs.

    cache: "int8" or "float16" for ternary weights at hand.
    """
    C = 11 if packed else 8
    inputs, outputs, weights = 4 * tokens * columns, 4 * tokens * rows, 4 * rows * columns
    if op != "grad_weight":
        coded = _state_bytes(rows, columns, C, packed)
        weights = (CACHE_BYTES[cache] * rows * columns if cache else coded) + 4 * rows
    return Case(
        "matmul",
        "matmul",
        op,
        {"tokens": tokens, "rows": rows, "columns": columns},
        {} if op == "grad_weight" else {"C": C, "packed": packed} | ({"cache": cache} if cache else {}),
        bytes_moved=inputs + outputs + weights,
        flops=2 * tokens * rows * columns,
        tolerance=PRODUCT_TOLERANCE,
        small=small,
    )


def backward_case(
    tokens: int,
    rows: int,
    columns: int,
    C: int = 11,
    packed: bool = True,
    mode: str = "proxy_lazy_ternary",
    *,
    cache: str = "int8",
    fires: bool = True,
    tile_rows: int = 0,
    small: bool = False,
) -> Case:
    """counter_backward_ of a layer [rows, columns] with a clock and a cache, in a step that fires or does not."""
    options = {"C": C, "packed": packed, "mode": mode, "cache": cache, "fires": fires, "tile_rows": tile_rows}
    products = 2 if fires else 1
    return Case(
        "matmul",
        "matmul",
        "counter_backward_",
        {"tokens": tokens, "rows": rows, "columns": columns},
        options,
        bytes_moved=4 * products * tokens * (rows + columns) + 2 * _state_bytes(rows, columns, C, packed),
        flops=2 * products * tokens * rows * columns,
        small=small,
    )


def _codec_cases() -> list[Case]:
    cases = []
    for op in ("pack_codes", "unpack_codes"):
        cases += [codec_case(op, 1, columns) for columns in (4, 8, 12, 60, 64, 68, 1020, 1024, 1028)]
        cases += [codec_case(op, 37, 44, small=True), codec_case(op, 5, 64, small=True), codec_case(op, 129, 256)]
    return cases


def _row_cases() -> list[Case]:
    cases = []
    for op in ("decode_dense", "row_statistics"):
        cases += [row_case(op, 3, columns, 11, True) for columns in (4, 8, 12, 512, 1028, 2048, 8196)]
        cases += [row_case(op, 3, columns, 8, False) for columns in (1, 2, 3, 5, 7, 67, 1025)]
        cases += [row_case(op, 5, 68, 1, True), row_case(op, 5, 67, 43, False)]
        cases += [row_case(op, 37, 68, 11, True), row_case(op, 37, 67, 8, False)]
        cases += [row_case(op, 9, 12, 11, True, small=True), row_case(op, 9, 13, 8, False, small=True)]
    return cases


def _update_cases() -> list[Case]:
    # Each set of constants is a program to build, which takes longer than its launches (a dozen seconds for the GPU
    # shape on llvmpipe): sizes are cheap, sets are not. The shape that a device does not choose runs these sets alone.
    modes: dict[str, dict[str, Any]] = {
        "exact": {},
        "lagged_clip": {},
        "clipped_scale_clip": {},
        "clipped_scale_ternary": {},
        "proxy_lazy_ternary": {"clock": True, "cache": "int8"},
    }
    cases = [update_case(11, 68, mode=mode, **more) for mode, more in modes.items()]
    cases += [update_case(9, 68, 1), update_case(11, 67, 8, False), update_case(9, 67, 43, False)]
    cases += [update_case(37, columns) for columns in (4, 8, 12)]
    cases += [update_case(37, columns, 8, False) for columns in (1, 2, 3, 5, 7, 8, 9)]
    cases += [update_case(3, columns) for columns in (512, 1028, 2048)]
    cases += [update_case(3, 1025, 8, False), update_case(2, 8196), update_case(1, 12288)]
    # The index passes 2^32 inside a row, between rows, and lies beyond.
    cases += [update_case(9, 68, index_base=(1 << 32) - base) for base in (100, 136)]
    cases += [update_case(9, 67, 8, False, index_base=(1 << 32) - base) for base in (100, 134)]
    cases += [update_case(9, 68, index_base=(5 << 32) + 12), update_case(3, 1028, index_base=(1 << 32) - 1500)]
    cases += [update_case(9, 12, mode=mode, **more, small=True) for mode, more in modes.items()]
    cases += [update_case(9, 13, 8, False, small=True)]
    cases += [update_case(2, 1028, index_base=(1 << 32) - 1500, small=True), update_case(2, 1029, 8, False, small=True)]
    lazy: dict[str, Any] = {"mode": "lagged_lazy_clip", "cache": "float16"}
    cases += [update_case(11, columns, 8, False, **lazy) for columns in (1, 7, 67)]
    cases += [update_case(9, 67, 8, False, **lazy, index_base=(1 << 32) - 100)]
    cases += [update_case(9, 13, 8, False, **lazy, small=True)]
    cases += [
        update_case(11, 1028, mode="proxy_lazy_ternary", **modes["proxy_lazy_ternary"], index_base=(1 << 32) - 1500)
    ]

    more = [update_case(11, 68, mode=mode) for mode in MODES if mode not in modes]
    more += [update_case(11, 67, 8, False, "clipped_scale_clip"), update_case(9, 68, 2), update_case(9, 68, 8)]
    more += [update_case(9, 67, C, False) for C in (1, 2, 11)]
    more += [update_case(9, 12, 1, **modes["proxy_lazy_ternary"], mode="proxy_lazy_ternary")]
    more += [update_case(9, 67, 43, False, **lazy)]
    more += [update_case(3, border + step) for border in (512, 1024, 2048, 4096) for step in (-4, 0, 4)]
    more += [update_case(3, columns, 8, False) for columns in (1023, 4097)]
    names = {case.name for case in cases}
    return cases + [replace(case, native_only=True) for case in more if case.name not in names]


def _product_cases() -> list[Case]:
    # (tokens, rows, columns): one below, on and above the tiles' sizes, in each place.
    edges = [(1, 1, 4), (5, 15, 8), (6, 16, 16), (7, 17, 20), (63, 64, 68), (65, 63, 64), (64, 65, 60)]
    edges += [(95, 129, 252), (96, 97, 256), (97, 128, 260), (128, 96, 132), (129, 257, 100), (255, 127, 124)]
    unpacked_edges = [(1, 1, 1), (5, 15, 3), (7, 17, 19), (65, 63, 66), (129, 130, 131)]
    cases = []
    for op in ("counter_forward", "counter_grad_input", "grad_weight"):
        cases += [product_case(op, *sizes, packed=True) for sizes in edges]
        cases += [product_case(op, *sizes, packed=False) for sizes in unpacked_edges]
        cases += [product_case(op, 7, 18, 20, True, small=True), product_case(op, 7, 18, 19, False, small=True)]
    for op in ("counter_forward", "counter_grad_input"):
        for cache in CACHE_BYTES:
            cases += [product_case(op, *sizes, packed=False, cache=cache) for sizes in unpacked_edges]
            cases += [product_case(op, 7, 18, 19, False, cache=cache, small=True)]
        cases += [product_case(op, *edges[7], packed=False, cache="int8")]
    return cases


def _refresh_cases() -> list[Case]:
    cases = [refresh_case(3, columns, 11, True, "float16") for columns in (4, 68, 1028)]
    cases += [refresh_case(3, columns, 8, False, "float16") for columns in (1, 2, 3, 67)]
    cases += [refresh_case(9, 12, 11, True, cache, small=True) for cache in CACHE_BYTES]
    return [*cases, refresh_case(9, 13, 8, False, "float16", small=True), refresh_case(9, 67, 8, False, "int8")]


def _from_io_cases() -> list[Case]:
    # One below and above the rows that are formed at a time, a block of tokens, and the 1024 lanes.
    cases = [update_case(13, 68, tokens=7), update_case(5, 67, 43, False, tokens=65), update_case(17, 2052, tokens=3)]
    cases += [update_case(7, 1028, mode="proxy_lazy_ternary", clock=True, cache="int8", tokens=130)]
    return [*cases, update_case(9, 12, tokens=5, small=True), update_case(9, 13, 8, False, tokens=5, small=True)]


def _clock_cases() -> list[Case]:
    cases = [advance_case(period, since) for period, since in ((1, 0), (2, 0), (2, 1), (8, 6), (8, 7), (2, 7))]
    # On the borders of the rates, beside them, and beyond 32 bits.
    edges = [(1001, 10**6), (1000, 10**6), (101, 10**6), (100, 10**6), (11, 10**6), (10, 10**6), (0, 1)]
    edges += [(2**33 + 1, 2**33 * 1000), (2**33, 2**33 * 1000)]
    cases += [*(observe_case(*edge) for edge in edges), observe_case(1001, 10**6, fire=0)]
    # Whole, by one row, which are products with a vector, and with many tokens, whose sums are of parts.
    for fires in (True, False):
        cases += [backward_case(7, 9, 12, fires=fires, tile_rows=tile_rows) for tile_rows in (0, 1)]
        cases += [backward_case(1030, 9, 12, fires=fires), backward_case(65, 130, 68, fires=fires)]
        lazy: dict[str, Any] = {"mode": "lagged_lazy_clip", "cache": "float16", "fires": fires}
        cases += [backward_case(7, 9, 67, 8, False, **lazy, tile_rows=4)]
        cases += [backward_case(3, 5, 13, 8, False, **lazy, small=True)]
    return cases


def _moments_cases() -> list[Case]:
    # Vectors of 8 columns and lanes of 1024, of tokens and of elements; rows ahead of 64 to 256.
    sizes = [(1, 1, 1), (7, 9, 13), (33, 40, 5), (1023, 8, 3), (1024, 7, 4), (1025, 17, 20), (2049, 9, 7)]
    sizes += [(5, 130, 1638), (90, 300, 3000)]
    return [moments_case(*size) for size in sizes] + [moments_case(5, 9, 13, small=True)]


def _probe_cases() -> list[Case]:
    n = 1 << 16
    return [Case("probe", "arithmetic_probe", "faults", {"operands": n}, bytes_moved=24 * n, flops=5 * n, small=True)]


CASES: tuple[Case, ...] = (
    *_codec_cases(),
    *_row_cases(),
    *_update_cases(),
    *_from_io_cases(),
    *_clock_cases(),
    *_moments_cases(),
    *_product_cases(),
    *_refresh_cases(),
    *_probe_cases(),
    *int8_cases(),
    *stochastic_cases(),
    *profile_cases(),
    *blockwise_cases(),
    *adam_cases(),
    *fp8_cases(),
    *hadamard_cases(),
    *automagic_cases(),
    *engine_cases(),
    *aten_cases(),
)

#: Kernels that a template names by a constant of its own, and the names that it then makes.
_NAMED_BY_TEMPLATE = {
    "PROFILE_KERNEL": ("encode_profile", "decode_profile", "standardize_profile", "profile_errors"),
    "HADAMARD_KERNEL": ("rotate_blocks", "decode_rotated_rows"),
    "attention_KERNEL": ("attention_grad_key", "attention_grad_value", "attention_grad_key_value"),
    "ROWS_KERNEL": ("quantize_rows", "absmax_rows", "scaled_rows", "dequantize_rows"),
    "COLUMNS_KERNEL": ("absmax_columns", "scaled_columns", "dequantize_columns"),
}


def declared_kernels() -> list[tuple[str, str]]:
    """(file, kernel) of every `__kernel` in the kernel files, in the order of the files' names."""
    pattern = re.compile(r"__kernel\b[^;{}]*?\bvoid\s+(\w+)\s*\(")
    expression = re.compile(r"\$\{([^{}]*)\}")
    found: dict[tuple[str, str], None] = {}
    for path in sorted(kernels_dir().glob("*.cl")):
        if not path.name.startswith("_"):
            # What stands between __kernel and the name may be an expression of the template's.
            text = expression.sub(r"\1", expand_includes(path))
            for name in pattern.findall(text):
                found.update(((path.stem, made), None) for made in _NAMED_BY_TEMPLATE.get(name, (name,)))
    return list(found)


def cases_of(file: str, kernel: str, *, native: bool = True, small: bool = False) -> list[Case]:
    """The cases that run one kernel; for a simulator only small ones, in a shape not the device's own fewer."""
    own = [case for case in CASES if (file, kernel) in ((case.file, case.kernel), *case.also)]
    return [case for case in own if (case.small or not small) and (native or not case.native_only)]
