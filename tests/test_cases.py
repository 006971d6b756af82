"""The table of cases: complete, well counted, and every line of it right on every device in both kernel shapes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from memtrain_cl import cases, ops, verify
from memtrain_cl.case import Case
from memtrain_cl.cases import (
    CASES,
    MODES,
    cases_of,
    codec_case,
    declared_kernels,
    product_case,
    row_case,
    update_case,
)
from memtrain_cl.comparison import Comparison, compare_exact, compare_product, generator
from memtrain_cl.device import Device, use_device
from memtrain_cl.program import Kernel
from memtrain_cl.tuning import groups_share_rows
from memtrain_cl.verify import CHECKS, check, shapes_of
from memtrain_cl.verify_aten import CHECKS as OF_TORCH
from memtrain_cl.verify_engine import CHECKS as OF_ENGINE
from tests.large_kernels import LARGE

#: Those of the counter layers' kernels, by native_only; those of the torch device's are run by the test of launches.
COUNTER_CASES = {
    native: [pytest.param(case, id=case.name) for case in CASES if case.op in CHECKS and case.native_only == native]
    for native in (False, True)
}


@pytest.mark.parametrize(("file", "kernel"), declared_kernels())
def test_every_kernel_has_cases(file: str, kernel: str) -> None:
    assert cases_of(file, kernel), f"give {kernel} of kernels/{file}.cl a case in memtrain_cl/cases.py"
    assert kernel in LARGE or cases_of(file, kernel, small=True, native=False), (
        f"give {kernel} of kernels/{file}.cl a small case for every shape"
    )


def test_every_case_has_a_kernel_a_check_and_a_name_of_its_own() -> None:
    assert {pair for case in CASES for pair in ((case.file, case.kernel), *case.also)} == set(declared_kernels())
    assert {case.op for case in CASES} == set(CHECKS) | set(OF_TORCH)
    assert not set(CHECKS) & set(OF_TORCH)
    assert set(CHECKS) - {"faults", *OF_ENGINE} <= set(ops.__all__)
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.options.get("mode") for case in CASES} == {None, *MODES}


def test_a_kernel_without_a_case_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cases, "CASES", [case for case in CASES if "matmul" not in (case.kernel, *(name for _, name in case.also))]
    )
    assert cases_of("matmul", "matmul") == []
    assert ("matmul", "matmul") in declared_kernels()


@pytest.mark.parametrize(
    ("case", "bytes_moved", "flops"),
    [
        (codec_case("pack_codes", 2, 8), 16 + 12, 0),
        (row_case("decode_dense", 2, 8, 11, True), 12 + 2 * 4 + 64, 5 * 16),
        (row_case("row_statistics", 2, 8, 8, False), 16 + 64 + 2 * 8, 8 * 16),
        (update_case(2, 8), 2 * 12 + 64 + 2 * 2 * 4 + 2 * 2 * 4, 36 * 16),
        (update_case(2, 8, 8, False, "clipped_scale"), 2 * 16 + 64 + 2 * 2 * 4, 36 * 16),
        (product_case("counter_forward", 3, 2, 8, True), 3 * 8 * 4 + 12 + 2 * 4 + 3 * 2 * 4, 2 * 3 * 2 * 8),
        (product_case("grad_weight", 3, 2, 8, True), 3 * 8 * 4 + 3 * 2 * 4 + 2 * 8 * 4, 2 * 3 * 2 * 8),
    ],
)
def test_bytes_and_operations(case: Case, bytes_moved: int, flops: int) -> None:
    assert (case.bytes_moved, case.flops) == (bytes_moved, flops)


def test_storage_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="divisible by 4"):
        update_case(2, 7)
    with pytest.raises(ValueError, match=r"1\.\.11"):
        update_case(2, 8, C=12)


@pytest.mark.parametrize("case", COUNTER_CASES[False])
def test_kernel_agrees_with_the_reference(shaped: Device, case: Case) -> None:
    result = check(case)
    assert result.mismatches == 0, result


@pytest.mark.parametrize("case", COUNTER_CASES[True])
def test_native_kernel_agrees_with_the_reference(device: Device, case: Case) -> None:
    result = check(case)
    assert result.mismatches == 0, result


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES if case.op in OF_TORCH])
def test_cases_launch_their_kernels(device: Device, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[str, str]] = set()
    enqueue = Kernel.enqueue

    def watched(self: Kernel, *arguments: Any) -> Any:
        file, _, rest = self.label.partition(".")
        seen.add((file, rest.partition("(")[0]))
        return enqueue(self, *arguments)

    monkeypatch.setattr(Kernel, "enqueue", watched)
    # On a GPU the other shape alone packs operands.
    for twin in [device] if case.native_only and not groups_share_rows(device.info) else shapes_of(device).values():
        with use_device(twin):
            result = check(case)
            assert result.mismatches == 0, result
    assert seen >= {(case.file, case.kernel), *case.also}


# ---- what counts as a mismatch ----


def test_exact_comparison_sees_bits() -> None:
    want = torch.tensor([1.0, 0.0, math.nan, 3.0])
    assert compare_exact(want.clone(), want) == Comparison(0.0, 0)
    assert compare_exact(torch.tensor([1.0, -0.0, math.nan, 5.0]), want) == Comparison(2.0, 2)
    assert compare_exact(torch.tensor([1.0, 0.0, 7.0, 3.0]), want) == Comparison(math.inf, 1)
    codes = torch.tensor([[1, 255]], dtype=torch.uint8)
    assert compare_exact(torch.tensor([[1, 0]], dtype=torch.uint8), codes) == Comparison(255.0, 1)
    assert compare_exact(codes[:0], codes[:0]) == Comparison(0.0, 0)
    for wrong in (codes.to(torch.int16), codes[0]):
        with pytest.raises(ValueError, match=r"expected torch.uint8 \[1, 2\]"):
            compare_exact(wrong, codes)


def test_products_are_compared_relative_to_their_terms() -> None:
    left, right = torch.tensor([[1000.0, -1000.0], [1.0, 1.0]]), torch.tensor([[1.0], [1.0]])
    assert compare_product(torch.tensor([[0.0], [2.0]]), left, right, 1e-5) == Comparison(0.0, 0)
    # 0.01 beside two terms of 1000 is rounding, beside two of 1 it is not.
    assert compare_product(torch.tensor([[0.01], [2.0]]), left, right, 1e-5).mismatches == 0
    assert compare_product(torch.tensor([[0.0], [2.01]]), left, right, 1e-5).mismatches == 1
    assert compare_product(torch.tensor([[math.nan], [2.0]]), left, right, 1e-5) == Comparison(math.inf, 1)
    with pytest.raises(ValueError, match=r"expected float32 \[2, 1\]"):
        compare_product(torch.zeros(1, 2), left, right, 1e-5)


def test_hard_rows_are_in_the_gradients() -> None:
    grad = verify.gradient(9, 68, generator(update_case(9, 68)))
    squares = (grad * grad).sum(1)
    assert [bool(value) for value in torch.isfinite(squares)] == [
        False,
        False,
        True,
        True,
        False,
        True,
        True,
        True,
        True,
    ]
    assert grad[0].isnan().sum() == 1
    assert grad[1].isinf().sum() == 1
    assert not grad[2].any()
    tiny = torch.finfo(torch.float32).tiny
    assert 0 < float(grad[3].abs().max()) < tiny
    assert float(grad[4].abs().max()) < math.inf
    assert 0 < float((grad[6] * grad[6]).max()) < tiny
