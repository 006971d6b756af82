"""Moments compressed tensor by tensor: golden values, families, receipts, the picker, anomalies, clear refusals."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import memtrain_cl.torch_device  # noqa: F401 (registers the device)
from memtrain_cl import ops, reference
from memtrain_cl.device import Device
from memtrain_cl.optim import (
    CompressedOptimizerState,
    choose_compression_method,
    compress_moment,
    decompress_moment,
    detect_anomaly,
    fit_sorted_profile,
    reconstruct,
)
from memtrain_cl.optim.families import FAMILIES, Gamma, Gaussian, Laplace, LogNormal, StudentT, TailFamily
from memtrain_cl.optim.profiles import CURVE_CELLS, CURVE_START, CURVE_STOP, index_dtype, profile_fits
from memtrain_cl.torch_device.fallback import strict

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "moments.json").read_text())


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def second_moments() -> torch.Tensor:
    """v after 50 steps of v = 0.98 v + 0.02 g^2 with g = N(0, 1) * (1 + 0.15 |t4|)."""
    chance, v = np.random.RandomState(0), np.zeros(16384)
    for _ in range(50):
        g = chance.standard_normal(16384) * (1 + 0.15 * np.abs(chance.standard_t(4, 16384)))
        v = 0.98 * v + 0.02 * g * g
    return torch.from_numpy(v).float()


def named_input(name: str) -> torch.Tensor:
    """The tensor that a line of the golden file describes."""
    chance = np.random.RandomState(0)
    if name.startswith("bimodal"):
        parts = [chance.normal(middle, 0.5, 5000) for middle in (-10, 10)]
        return torch.from_numpy(np.concatenate(parts)).float()
    if name.startswith("one 1e6 outlier"):
        x = torch.full((256,), 1e-6)
        x[100] = 1e6
        return x
    if name.startswith("normal"):
        return torch.from_numpy(chance.standard_normal(int(name.split()[1].strip(",")))).float()
    return second_moments()


# ---- golden values ----


def test_golden_profile() -> None:
    case = GOLDEN["sorted_profile_gauss"]
    x = torch.tensor(case["input"])
    made = fit_sorted_profile(x, case["top_k"], gof_threshold=case["gof_threshold"])
    assert isinstance(made.tail_distribution, Gaussian)
    assert made.top_k_indices.tolist() == case["top_k_indices"]
    assert made.top_k_values.tolist() == case["top_k_values"]
    assert made.permutation_indices is not None
    assert made.permutation_indices.tolist() == case["permutation"]
    assert made.permutation_indices.dtype == made.top_k_indices.dtype == getattr(torch, case["index_dtype"])
    assert made.tail_distribution.mu == pytest.approx(case["mu"], rel=1e-6)
    assert made.tail_distribution.sigma2 == pytest.approx(case["sigma2"], rel=1e-6)
    assert made.goodness_of_fit == pytest.approx(case["ks"], rel=1e-6)
    assert (made.used_dense_fallback, made.nbytes(), made.n_tail) == (case["fallback"], case["nbytes"], 61)
    np.testing.assert_allclose(reconstruct(made).numpy(), case["reconstructed"], rtol=1e-6, atol=1e-6)

    case = GOLDEN["sorted_profile_fallback"]
    made = fit_sorted_profile(x, 3, gof_threshold=case["gof_threshold"])
    assert made.goodness_of_fit == pytest.approx(case["ks"], rel=1e-6)
    assert (made.used_dense_fallback, made.nbytes()) == (case["fallback"], case["nbytes"])
    assert torch.equal(reconstruct(made), x)


@pytest.mark.parametrize(
    "case", GOLDEN["compress_moment"], ids=[case["name"][:24] for case in GOLDEN["compress_moment"]]
)
def test_golden_methods(device: Device, case: dict[str, Any]) -> None:
    x = named_input(case["name"])
    options = {name: case[name] for name in ("method", "min_size_for_g4", "int8_block_size") if name in case}
    for room in (ops, reference):
        made = compress_moment(x, ops=room, **options)
        assert (made.method, made.nbytes()) == (case["method_out"], case["nbytes"])
        back = decompress_moment(made, ops=room)
        assert (back.shape, back.dtype) == (x.shape, torch.float32)
        assert distance(back, x) < 0.03
        if case["method"] == "auto":
            assert choose_compression_method(x, ops=room) == case["method_out"]


# ---- families ----


@pytest.mark.parametrize(
    ("family", "draw"),
    [
        (Gaussian(), lambda chance: chance.normal(3, 2, 4000)),
        (Laplace(), lambda chance: chance.laplace(-1, 0.5, 4000)),
        (StudentT(), lambda chance: 5 + 2e-9 * chance.standard_t(3, 4000)),
        (StudentT(), lambda chance: 1e-9 * chance.standard_t(3, 4000)),
        (Gamma(), lambda chance: chance.gamma(1.5, 1e-6, 4000)),
        (Gamma(located=True), lambda chance: chance.gamma(4, 2, 4000) - 9),
        (LogNormal(), lambda chance: chance.lognormal(-8, 1.5, 4000)),
        (LogNormal(located=True), lambda chance: chance.lognormal(0, 0.4, 4000) - 3),
    ],
    ids=lambda value: repr(value)[:24] if isinstance(value, TailFamily) else "",
)
def test_a_family_finds_its_own(family: TailFamily, draw: Callable[..., Any]) -> None:
    values = draw(np.random.default_rng(1))
    fitted = family.fit(values)
    shares = np.array([0.001, 0.2, 0.5, 0.9, 0.999])
    np.testing.assert_allclose(fitted.cdf(fitted.quantile(shares)), shares, rtol=1e-6)
    expected = np.arange(1, 4001) / 4000
    assert np.abs(fitted.cdf(np.sort(values)) - expected).max() < 0.025
    # What the distance of blocks adds by reading the function off a table.
    standard = getattr(family, "standardised", lambda: family)()
    curve = standard.fit((values - values.mean()) / values.std())
    places = np.linspace(CURVE_START, CURVE_STOP, CURVE_CELLS + 1)
    between = (places[1:] + places[:-1]) / 2
    straight = (curve.cdf(places)[1:] + curve.cdf(places)[:-1]) / 2
    assert np.abs(curve.cdf(between) - straight).max() < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_family_cannot_hold_is_stored_dense(device: Device, name: str) -> None:
    cases = [torch.zeros(300), torch.full((300,), 2.5), torch.tensor([1.0, math.nan] * 150)]
    cases += [torch.tensor([1.0, math.inf] * 150), torch.tensor([3.0, -3.0] * 150), torch.tensor([7.0]), torch.empty(0)]
    cases += [torch.randn(300) * 1e-38, torch.randn(300) * 1e37, -(torch.rand(300) ** 8)]
    for x in cases:
        for block_size in (0, 64):
            made = fit_sorted_profile(x, 1, name, block_size=block_size, ops=reference)
            back = reconstruct(made, ops=reference)
            assert back.shape == x.shape
            if made.used_dense_fallback:
                assert torch.equal(back.nan_to_num(9.5), x.nan_to_num(9.5))
                assert made.nbytes() == 4 * x.numel()
            else:
                assert distance(back, x) < 0.3 or torch.equal(back, x)
    negative = fit_sorted_profile(torch.randn(5000), 0, "gamma", gof_threshold=1.0)
    assert negative.used_dense_fallback
    assert negative.goodness_of_fit == 1.0


def test_a_fit_beyond_float32_is_stored_dense() -> None:
    """Of numbers near the largest, a distribution's ends may lie beyond it, and would come back infinite."""
    x = torch.rand(5000, generator=torch.Generator().manual_seed(0)) * 3.4e38
    for name in FAMILIES:
        made = fit_sorted_profile(x, 0, name, gof_threshold=1.0)
        assert made.used_dense_fallback
        assert torch.equal(reconstruct(made), x)


def test_a_family_of_ones_own() -> None:
    class Uniform:
        def fit(self, values: Any) -> Uniform:
            self.low, self.width = values.min(), np.ptp(values)
            if self.width > 100:
                raise ValueError("too wide for me")
            return self

        def cdf(self, values: Any) -> Any:
            return np.clip((values - self.low) / self.width, 0, 1)

        def quantile(self, shares: Any) -> Any:
            return self.low + shares * self.width

    x = torch.rand(3000) + 7
    for block_size in (0, 100):
        # The ends of blocks differ, and the fit reaches from the least to the largest of them.
        made = fit_sorted_profile(x, 0, Uniform(), gof_threshold=0.15, block_size=block_size, ops=reference)
        assert not made.used_dense_fallback
        assert distance(reconstruct(made, ops=reference), x) < 0.01
        assert fit_sorted_profile(x * 1000, 0, Uniform(), block_size=0).used_dense_fallback
    for wrong in (Gaussian, "gauss", 3):
        with pytest.raises((TypeError, ValueError), match="expected a family"):
            fit_sorted_profile(x, 0, wrong)  # type: ignore[arg-type]


# ---- blocks ----


def test_blocks_take_a_byte_an_element_and_are_judged_by_both_receipts(device: Device) -> None:
    root = second_moments().sqrt()
    rows = torch.randn(64, 256) * 10.0 ** -(8 * torch.rand(64, 1))
    for x in (root, rows):
        made = fit_sorted_profile(x, block_size=256)
        assert not made.used_dense_fallback
        assert made.nbytes() == x.numel() + 8 * (x.numel() // 256) + 1024 + 68
        assert max(made.goodness_of_fit, made.relative_error / 2) < 0.05
        assert distance(reconstruct(made), x) == pytest.approx(made.relative_error, rel=1e-4)
    assert made.nbytes() / rows.numel() < 1.11
    # Two sizes within each block pass the distance of a wide family, but not the error.
    heavy = torch.distributions.StudentT(2.0).sample((20_000,))
    made = fit_sorted_profile(heavy, 0, "student_t", block_size=256)
    assert made.goodness_of_fit < 0.05
    assert made.relative_error > 0.3
    assert made.used_dense_fallback
    assert not profile_fits(heavy)
    assert profile_fits(rows)
    assert not profile_fits(torch.full((512,), math.nan))


def test_blocks_stay_where_the_tensor_is(device: Device) -> None:
    place = torch.device("opencl", device.info.index)
    x = torch.randn(3, 1000)
    x[1, 5], x[2, 700], x[0, :300] = 50.0, -60.0, 0.0
    with strict():
        made = fit_sorted_profile(x.to(place), 2)
        back = reconstruct(made)
        assert detect_anomaly(x.to(place), made).ks_statistic == made.goodness_of_fit
        assert profile_fits(x[2].to(place), gof_threshold=0.1) == profile_fits(x[2], gof_threshold=0.1)
    assert made.block_size == 256
    assert made.codes is not None
    assert back.device == made.codes.device == place
    want = fit_sorted_profile(x, 2, block_size=256, ops=reference)
    assert made.goodness_of_fit == want.goodness_of_fit
    assert made.relative_error == want.relative_error
    assert torch.equal(back.cpu(), reconstruct(want, ops=reference))
    assert torch.equal(back.cpu()[x == 0], torch.zeros(300))
    assert (float(back[1, 5]), float(back[2, 700])) == (50.0, -60.0)


def test_numbers_without_negative_ones_stay_so(device: Device) -> None:
    x = torch.randn(40, 256).abs() + 1e-6
    for block_size in (0, 256):
        made = fit_sorted_profile(x, gof_threshold=0.2, block_size=block_size)
        assert not made.used_dense_fallback
        assert float(reconstruct(made).min()) > 0


def test_index_types() -> None:
    wanted = {1: torch.uint8, 256: torch.uint8, 257: torch.uint16, 65536: torch.uint16, 65537: torch.uint32}
    assert {n: index_dtype(n) for n in wanted} == wanted
    assert (index_dtype(1 << 32), index_dtype((1 << 32) + 1)) == (torch.uint32, torch.uint64)
    x = torch.randn(300)
    made = fit_sorted_profile(x, 2, gof_threshold=0.2)
    assert made.nbytes() == 2 * 4 + 2 * 2 + 298 * 2 + 68
    assert distance(reconstruct(made), x) < 0.2


# ---- anomalies ----


@pytest.mark.parametrize("block_size", [0, 256])
def test_anomalies(device: Device, block_size: int) -> None:
    made = fit_sorted_profile(torch.randn(8192), 4, block_size=block_size)
    usual = detect_anomaly(torch.randn(8192), made)
    assert usual.reference_goodness_of_fit == made.goodness_of_fit
    assert not usual.is_anomaly
    strange = detect_anomaly(torch.randn(8192).sign() + 0.1 * torch.randn(8192), made)
    assert strange.is_anomaly
    assert strange.ks_statistic > 0.1
    r = made.goodness_of_fit
    for ratio, margin in ((2.0, 0.02), (20.0, 0.0), (0.0, 0.5)):
        report = detect_anomaly(torch.rand(8192) - 0.5, made, ratio, margin)
        assert report.is_anomaly == (report.ks_statistic > max(ratio * r, r + margin))
    broken = torch.randn(8192)
    broken[17] = math.nan
    assert detect_anomaly(broken, made).ks_statistic == 1.0
    assert detect_anomaly(torch.randn(8192) * 3, made).is_anomaly == (block_size == 0)
    with pytest.raises(ValueError, match="with a fitted distribution"):
        detect_anomaly(broken, fit_sorted_profile(torch.zeros(1)))


# ---- encodings ----


@pytest.mark.parametrize("room", [ops, reference], ids=["ops", "reference"])
def test_receipts_of_int8(device: Device, room: ModuleType) -> None:
    wide = torch.full((512,), 1e-4)
    wide[::256] = 1.0
    assert compress_moment(wide, "int8", int8_block_size=256, ops=room).method == "dense"
    kept = compress_moment(wide, "int8", int8_block_size=256, int8_flushed_fraction_threshold=1.0, ops=room)
    assert (kept.method, kept.nbytes()) == ("int8", 512 + 8)
    above = compress_moment(wide, "int8", int8_block_size=256, int8_positive=True, ops=room)
    assert above.method == "int8"
    assert float(decompress_moment(above, ops=room).min()) > 0
    for x in (torch.zeros(5), torch.empty(0), torch.randn(3, 7) * 1e-30, torch.randn(3, 7) * 1e30):
        made = compress_moment(x, "int8", ops=room)
        assert made.method == "int8"
        assert torch.allclose(decompress_moment(made, ops=room), x, rtol=0, atol=float(x.abs().sum()) / 100)
    for bad in (math.nan, math.inf):
        made = compress_moment(torch.tensor([1.0, bad]), ops=room)
        assert made.method == "dense"
        assert torch.equal(decompress_moment(made, ops=room).nan_to_num(), torch.tensor([1.0, bad]).nan_to_num())


def test_state_keeps_both_moments(device: Device) -> None:
    m, v = torch.randn(128, 64), second_moments()[:8192].reshape(128, 64) * 1e-6
    for method, most in (("auto", 0.1), ("g4", 0.1), ("int8", 0.02), ("dense", 1e-7)):
        state = CompressedOptimizerState(m.shape, method, int8_block_size=256)
        assert state.nbytes() == 0
        with pytest.raises(RuntimeError, match="set before they are read"):
            state.get()
        state.set(m, v)
        back_m, back_v = state.get(dtype=torch.float32)
        assert distance(back_m, m) < most
        assert distance(back_v, v) < most
        assert state.methods == (("g4", "g4") if method == "auto" else (method, method))
        assert (state.nbytes() < 5 * m.numel()) == (method != "dense")
    for case, methods in (("dense", ["dense", "dense"]), ("int8", ["int8", "int8"])):
        want = GOLDEN["compressed_adam"]["runs"][case]
        state = CompressedOptimizerState((16,), case, int8_block_size=8)
        state.set(torch.linspace(-1, 1, 16), torch.linspace(0, 1, 16))
        assert (list(state.methods), state.nbytes()) == (methods, want["nbytes"])
    before = state.get()
    ways: list[Callable[[Any], Any]] = [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))]
    for copied in ways:
        state = CompressedOptimizerState((16,), "int8", ops=reference)
        state.set(*before)
        twin = copied(state)
        state.set(torch.zeros(16), torch.zeros(16))
        assert all(distance(a, b) < 0.02 for a, b in zip(twin.get(), before, strict=True))
    for wrong in ((m, v), (torch.ones(16), -torch.ones(16))):
        with pytest.raises(ValueError, match=r"expected (m of shape \[16\]|v without negative)"):
            state.set(*wrong)
        assert not any(bool(part.any()) for part in state.get())


def test_every_type_and_layout_is_its_float32_copy(device: Device) -> None:
    """nbytes is what the parts hold."""
    flat = torch.randn(3, 6000, generator=torch.Generator().manual_seed(0))
    layouts = [flat[:, ::3], flat.t(), flat[0, :5000].expand(2, 5000), torch.tensor(3.0), torch.empty(0, 3)]
    for x, dtype, method, block_size in itertools.product(
        layouts, (torch.float32, torch.bfloat16, torch.float64), ("auto", "g4", "int8", "dense"), (0, 256)
    ):
        given = x.to(dtype).requires_grad_()
        made, want = (compress_moment(it, method, g4_block_size=block_size) for it in (given, given.float().clone()))
        back = decompress_moment(made)
        assert (back.shape, back.dtype, back.requires_grad) == (x.shape, torch.float32, False)
        assert (made.method, made.nbytes()) == (want.method, want.nbytes())
        assert torch.equal(back, decompress_moment(want))
        parts = made if made.g4_encoding is None else made.g4_encoding
        held = [part.untyped_storage().nbytes() for part in vars(parts).values() if isinstance(part, torch.Tensor)]
        assert made.nbytes() == sum(held) + (0 if made.g4_encoding is None else 68)


def test_another_default_device_changes_nothing(device: Device) -> None:
    x = torch.randn(5000)
    want = [decompress_moment(compress_moment(x, method)) for method in ("g4", "int8")]
    torch.set_default_device("opencl")
    try:
        found = [decompress_moment(compress_moment(x, method)) for method in ("g4", "int8")]
    finally:
        torch.set_default_device(None)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_second_moments_are_nearer_in_the_dynamic_code() -> None:
    """The relative errors of v on the published example, held as its root, in each code and size of block."""
    v = second_moments()
    wanted = {
        (2048, "linear"): 0.00722,
        (2048, "dynamic"): 0.00640,
        (256, "linear"): 0.00616,
        (256, "dynamic"): 0.00548,
    }
    for (size, code), error in wanted.items():
        options: dict[str, Any] = {"code": code, "signed": False}
        codes, scales = reference.quantize_blockwise(v.sqrt(), size, positive=True, **options)
        back = reference.dequantize_blockwise(codes, scales, size, **options).square()
        assert distance(back, v) == pytest.approx(error, abs=1e-5)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: compress_moment(x, "int4"), ValueError, "method as one of auto, g4, int8, dense, got 'int4'"),
        (lambda x: compress_moment(x.long()), TypeError, "floating numbers, got torch.int64"),
        (lambda x: compress_moment(x.tolist()), TypeError, "floating numbers, got list"),
        (lambda x: compress_moment(x.to_sparse()), TypeError, "dense tensor"),
        (lambda x: compress_moment(x, int8_block_size=0), ValueError, "int8_block_size as an integer >= 1, got 0"),
        (lambda x: compress_moment(x, min_size_for_g4=-1), ValueError, "min_size_for_g4"),
        (lambda x: compress_moment(x, "g4", g4_top_k_fraction=-0.1), ValueError, "g4_top_k_fraction"),
        (lambda x: compress_moment(x, int8_adversarial_relative_error=math.nan), ValueError, "number >= 0, got nan"),
        (lambda x: fit_sorted_profile(x, top_k=x.mean()), ValueError, "top_k as an integer >= 0"),
        (lambda x: fit_sorted_profile(x, block_size=257), ValueError, r"block_size as an integer 0\.\.256"),
        (lambda x: CompressedOptimizerState((4,), "best"), ValueError, "got 'best'"),
        (lambda x: CompressedOptimizerState((4,), int8_block_sise=3), TypeError, "int8_block_sise"),
        (lambda x: CompressedOptimizerState((4,), int8_block_size=0), ValueError, "int8_block_size"),
        (lambda x: reconstruct(x), TypeError, "SortedProfileEncoding, got Tensor"),
        (lambda x: decompress_moment(x), TypeError, "CompressedMomentEncoding, got Tensor"),
        (lambda x: detect_anomaly(x, x), TypeError, "reference as a SortedProfileEncoding"),
    ],
)
def test_wrong_input_is_refused(call: Callable[..., Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(torch.randn(20))
