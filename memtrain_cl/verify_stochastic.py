"""Rows in few bits against the torch reference, byte for byte; the cases are `memtrain_cl.cases_stochastic`'s."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from memtrain_cl import ops, reference
from memtrain_cl.case import Case
from memtrain_cl.comparison import Comparison, compare_exact, generator

Tensors = tuple[torch.Tensor, ...]


def numbers(case: Case, rows: int, columns: int, chance: torch.Generator, *, finite: bool) -> torch.Tensor:
    """[rows, columns] of magnitudes from 1e-4 to 1 by row; from eight rows on, some of them are hard ones."""
    x = torch.randn(rows, columns, generator=chance) * 10.0 ** (-4.0 * torch.rand(rows, 1, generator=chance))
    if rows >= 8:
        x[0] = 0.0
        x[1] *= 1e-38 / x[1].abs().max()  # subnormal, all of them or nearly
        x[2, ::2] *= 1e-36
        x[3] *= 1e37
        x[4] = 0.5 * x[4].sign()
        if not finite:
            x[5, columns // 2] = math.nan
            x[6, columns - 1] = -math.inf
    return x.to(getattr(torch, case.options.get("element", "float32")))


def _all(got: Tensors, want: Tensors) -> Comparison:
    return sum((compare_exact(a, b) for a, b in zip(got, want, strict=True)), Comparison())


def check_quantize(case: Case) -> Comparison:
    """quantize_int8: every byte of codes and scales."""
    chance = generator(case)
    x = numbers(case, case.shape["rows"], case.shape["columns"], chance, finite=False)
    dim = case.options["dim"]
    multiplier = torch.rand(x.shape[dim], generator=chance) * 3 if case.options.get("multiplied") else None
    seed = None if case.options.get("half_even") else int(torch.randint(0, 1 << 32, (), generator=chance))
    got, want = (
        room.quantize_int8(
            x,
            dim=dim,
            seed=seed,
            transposed=case.options.get("transposed", False),
            multiplier=multiplier,
            index_base=case.options.get("index_base", 0),
        )
        for room in (ops, reference)
    )
    return _all(got, want)


def _codes(case: Case) -> tuple[torch.Tensor, int]:
    chance = generator(case)
    outer, length, inner = (case.shape[name] for name in ("outer", "length", "inner"))
    x = numbers(case, outer * length, inner, chance, finite=False).reshape(outer, length, inner)
    return x, int(torch.randint(0, 1 << 32, (), generator=chance))


def check_codes(case: Case) -> Comparison:
    """quantize_codes: every byte of codes and scales."""
    x, seed = _codes(case)
    got, want = (room.quantize_codes(x, case.options["bits"], 1, seed=seed) for room in (ops, reference))
    return _all(got, want)


def check_dequantize(case: Case) -> Comparison:
    """dequantize_codes: every byte of the numbers."""
    x, seed = _codes(case)
    codes, scale = reference.quantize_codes(x, case.options["bits"], 1, seed=seed)
    return compare_exact(*(room.dequantize_codes(codes, scale).nan_to_num(7.0) for room in (ops, reference)))


def check_save(case: Case) -> Comparison:
    """save_rows: every byte of codes and scales."""
    chance = generator(case)
    x = numbers(case, case.shape["rows"], case.shape["columns"], chance, finite=True)
    seed = int(torch.randint(0, 1 << 32, (), generator=chance))
    got, want = (room.save_rows(x, case.options["bits"], seed=seed) for room in (ops, reference))
    return _all(got, want)


def check_restore(case: Case) -> Comparison:
    """restore_rows: every byte of the numbers."""
    chance = generator(case)
    x = numbers(case, case.shape["rows"], case.shape["columns"], chance, finite=True)
    bits = case.options["bits"]
    saved = reference.save_rows(x, bits, seed=5)
    return compare_exact(*(room.restore_rows(*saved, bits, x.shape, dtype=x.dtype) for room in (ops, reference)))


def check_nibbles(case: Case) -> Comparison:
    """pack_int4 and unpack_int4: bytes."""
    n = case.shape["n"]
    codes = torch.randint(-8, 8, (n,), generator=generator(case), dtype=torch.int8)
    if case.op == "pack_int4":
        return compare_exact(ops.pack_int4(codes), reference.pack_int4(codes))
    packed = reference.pack_int4(codes)
    return compare_exact(ops.unpack_int4(packed, n), codes)


CHECKS: dict[str, Callable[[Case], Comparison]] = {
    "quantize_int8": check_quantize,
    "quantize_codes": check_codes,
    "dequantize_codes": check_dequantize,
    "save_rows": check_save,
    "restore_rows": check_restore,
    "pack_int4": check_nibbles,
    "unpack_int4": check_nibbles,
}
