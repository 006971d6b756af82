"""The options of the counter update on devices: lazy rebase, ternary pulse, estimated moments, clock, cache."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch

import memtrain_cl.torch_device  # noqa: F401 (registers the device)
from memtrain_cl import ops, reference
from memtrain_cl.device import Device, use_device
from memtrain_cl.formats import STREAM_PULSE, STREAM_REBASE, stream_seed
from memtrain_cl.torch_device.fallback import strict
from tests.counter_modes import BYTES, PACKED, ROWS, assert_equal, extras, moments, whole, whole_numbers
from tests.test_counter_update import EXACT_STEPS, codes_of, layer_of, rule_of
from tests.test_golden_counter import GOLDEN

# ---- lazy rebase ----


def test_the_lazy_rebase_rounds_the_counters_to_the_scale(shaped: Device) -> None:
    rule, n, seed = rule_of(mode="lazy", lr_scale=0.0), 64, 12345
    c = torch.arange(ROWS * n).reshape(ROWS, n) % 11 - 5
    layer = layer_of((c + 31).to(torch.uint8), rule)
    s_base = layer.scale * torch.linspace(0.4, 1.9, ROWS)[:, None]
    wanted = c * (s_base / layer.scale)
    inner = reference.hash_u32(torch.arange(ROWS * n)).reshape(ROWS, n)
    u = reference.uniform01(stream_seed(seed, STREAM_REBASE) ^ inner)
    rounded = wanted.floor() + (u < wanted - wanted.floor())
    scale = layer.scale.clone()
    layer.update(torch.zeros(ROWS, n), rule, seed=seed, s_base=s_base)
    assert torch.equal(codes_of(layer, rule, n), (rounded + 31).to(torch.uint8))
    assert torch.equal(s_base, scale)
    assert torch.equal(layer.scale, scale)
    assert layer.totals.tolist() == [int((rounded != c).sum()), 0, 0], "counted against what was stored"
    again = layer.clone()
    again.update(torch.zeros(ROWS, n), rule, seed=seed + 1, s_base=s_base)
    assert torch.equal(again.state, layer.state), "counters that fit the scale stay"


def test_a_lazy_step_lags_the_scale_by_one(device: Device) -> None:
    layer = whole({"mode": "lazy"}, 64)
    before = layer.copy()
    layer.step(ops, torch.randn(ROWS, 64))
    assert torch.equal(layer.tensors["s_base"], before.tensors["scale"])
    assert not torch.equal(layer.tensors["scale"], before.tensors["scale"])


def test_an_eager_step_leaves_the_base_alone(device: Device) -> None:
    for room in (ops, reference):
        layer = whole({"mode": "exact"}, 68)
        base = layer.tensors["s_base"].clone()
        layer.step(room, torch.randn(ROWS, 68))
        assert torch.equal(layer.tensors["s_base"], base)


# ---- ternary pulse ----


def test_the_pulse_of_an_update_is_the_public_estimate(shaped: Device) -> None:
    # Rows of a largest magnitude of 3 move their counters by 3 or not at all.
    rule, n, seed = rule_of(mode="ternary", **EXACT_STEPS), 68, 99
    grad = torch.randn(ROWS, n)
    grad = grad / grad.abs().amax(1, keepdim=True) * 2.9
    grad[torch.arange(ROWS), torch.arange(ROWS) * 9] = torch.tensor([3.0, -3.0]).repeat(ROWS)[:ROWS]
    grad[2] = 0.0
    layer = layer_of(torch.full((ROWS, n), 31, dtype=torch.uint8), rule, torch.full((ROWS, 1), 11 / 8))
    layer.update(grad, rule, seed=seed)
    pulse = reference.ternary_gradient_unbiased(grad, stream_seed(seed, STREAM_PULSE))
    assert set(pulse.unique().tolist()) == {-3.0, 0.0, 3.0}
    assert torch.equal(codes_of(layer, rule, n), (31 - pulse).to(torch.uint8))


def test_the_scale_learns_from_the_gradient_not_from_the_pulse(device: Device) -> None:
    grad = torch.randn(ROWS, 64)
    ends = []
    for mode in ("exact", "ternary"):
        torch.manual_seed(3)
        ends.append(whole({"mode": mode}, 64).step(reference, grad).tensors)
    assert torch.equal(ends[0]["scale"], ends[1]["scale"])
    assert torch.equal(ends[0]["v"], ends[1]["v"])
    assert not torch.equal(ends[0]["state"], ends[1]["state"])


def test_the_ternary_estimate() -> None:
    g = torch.randn(5, 300)
    g[1] = 0.0
    g[2, 7] = math.nan
    g[3, 9] = -math.inf
    pulse = reference.ternary_gradient_unbiased(g, 5)
    assert not pulse[1].any()
    assert bool(pulse[2:4].isnan().all()), "what is not finite is not silently zero"
    for row in (0, 4):
        assert set(pulse[row].abs().unique().tolist()) == {0.0, float(g[row].abs().max())}
        assert bool((pulse[row] * g[row] >= 0).all())
    assert torch.equal(pulse[[0, 1, 4]], reference.ternary_gradient_unbiased(g, 5)[[0, 1, 4]])
    assert not torch.equal(pulse[0], reference.ternary_gradient_unbiased(g, 6)[0])
    assert not torch.equal(reference.ternary_gradient_unbiased(g)[0], reference.ternary_gradient_unbiased(g)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_ternary_estimate_keeps_types_and_shapes(dtype: torch.dtype) -> None:
    for shape in ((), (0,), (3, 0), (4,), (2, 3, 5)):
        g = torch.randn(shape).to(dtype)
        pulse = reference.ternary_gradient_unbiased(g)
        assert (pulse.shape, pulse.dtype) == (g.shape, dtype)
    with pytest.raises(TypeError, match=r"expected g as a tensor of floats, got torch\.int32"):
        reference.ternary_gradient_unbiased(torch.ones(3, dtype=torch.int32))


# ---- estimated moments ----


def test_estimated_moments_take_the_place_of_the_mean_square(device: Device) -> None:
    grad = torch.randn(ROWS, 68)
    torch.manual_seed(4)
    exact = whole({"mode": "clip"}, 68)
    torch.manual_seed(4)
    proxy = whole({"mode": "proxy_clip"}, 68)
    g_sq = reference.row_statistics(exact.tensors["state"], grad, C=11, packed=True)[:, :1] / 68
    assert_equal(proxy.step(ops, grad, g_sq=g_sq), exact.step(reference, grad))


@pytest.mark.parametrize("limit", [128, 64, 1])
def test_moments_on_small_devices(device: Device, limit: int) -> None:
    small = device.with_capabilities(type="gpu", max_work_group_size=limit, compute_units=1)
    x, grad_out = torch.randn(70, 1100), torch.randn(70, 21)
    with use_device(small):
        assert torch.equal(ops.proxy_moments(grad_out, x), reference.proxy_moments(grad_out, x))


def test_moments_of_nothing_and_of_no_number(shaped: Device) -> None:
    for tokens, out, n in ((0, 3, 4), (5, 3, 0), (5, 0, 4)):
        x, grad_out = torch.ones(tokens, n), torch.ones(tokens, out)
        for room in (ops, reference):
            assert torch.equal(room.proxy_moments(grad_out, x), torch.zeros(out, 1))
    x, grad_out = torch.randn(9, 5), torch.randn(9, 4)
    grad_out[3, 1] = math.nan
    grad_out[4, 2] = math.inf
    found = ops.proxy_moments(grad_out, x)
    assert found.isfinite().tolist() == [[True], [False], [False], [True]]
    x[0, 0] = math.nan
    assert bool(ops.proxy_moments(grad_out, x).isnan().all())


# ---- rows left alone, tiles ----


def test_rows_that_cannot_be_updated_are_left_alone_and_counted(shaped: Device) -> None:
    layer = whole(PACKED, 68, rows=11)
    g_sq = moments(11)
    g_sq[0], g_sq[1], g_sq[2] = math.nan, math.inf, -1.0
    layer.tensors["s_base"][3], layer.tensors["scale"][4] = math.inf, 0.0
    layer.tensors["s_base"][5], layer.tensors["scale"][6] = math.nan, math.inf
    grad = torch.randn(11, 68)
    grad[7, 60] = math.nan
    before = layer.copy()
    after = layer.copy().step(ops, grad, g_sq=g_sq)
    other = layer.copy().step(reference, grad, g_sq=g_sq)
    bad = [0, 1, 2, 3, 4, 5, 7]
    assert int(after.tensors["totals"][2]) == len(bad)
    for name in ("state", "scale", "v", "s_base", "cache"):
        left, right = after.tensors[name], before.tensors[name]
        assert torch.equal(left[bad].nan_to_num(-1.0), right[bad].nan_to_num(-1.0)), name
        assert torch.equal(left.nan_to_num(-1.0), other.tensors[name].nan_to_num(-1.0)), name
    assert not torch.equal(after.tensors["state"][[8, 9, 10]], before.tensors["state"][[8, 9, 10]])


@pytest.mark.parametrize(("options", "n"), [(PACKED, 68), (BYTES, 67)])
@pytest.mark.parametrize("height", [1, 3])
def test_tiles_make_the_whole(shaped: Device, options: dict[str, Any], n: int, height: int) -> None:
    start = whole(options, n)
    grad, more = torch.randn(ROWS, n), extras(start)
    tiled = start.copy()
    for row in range(0, ROWS, height):
        tiled.step(ops, grad[row : row + height], row_offset=row, **more)
    assert_equal(tiled, start.copy().step(ops, grad, **more))
    assert_equal(tiled, start.copy().step(reference, grad, **more))


# ---- clock ----


@pytest.mark.parametrize("room", [ops, reference])
def test_periods_are_the_published_ones(device: Device, room: ModuleType) -> None:
    weights = 10**7
    for rate, period in GOLDEN["decimation_period"].items():
        clock, totals = torch.tensor([3, 0, 1, 50]), torch.tensor([9, 50 + round(float(rate) * weights), 0])
        room.observe_clock_(clock, totals, weights)
        assert clock.tolist() == [period, 0, 1, 50], rate


@pytest.mark.parametrize("room", [ops, reference])
def test_a_clock_that_does_not_fire_stays_and_nothing_is_observed(device: Device, room: ModuleType) -> None:
    clock, totals = torch.tensor([1, 0, 0, 0]), torch.tensor([1, 5, 0])
    seen = []
    for period in (1, 4, None, None, None, 2, None):
        room.advance_clock_(clock, totals)
        seen.append(clock.tolist())
        if period is not None:
            flips = {1: 2, 2: 1, 4: 0}[period]
            totals[1] += flips
            room.observe_clock_(clock, totals, {1: 1000, 2: 5000, 4: 99999}[period] if flips else 1)
            clock[0] = period
        else:
            before = clock.clone()
            room.observe_clock_(clock, totals, 1)
            assert torch.equal(clock, before)
    assert [(period, since, fire) for period, since, fire, _ in seen] == [
        (1, 0, 1),
        (1, 0, 1),
        (4, 1, 0),
        (4, 2, 0),
        (4, 3, 0),
        (4, 0, 1),
        (2, 1, 0),
    ]
    assert [before for *_, before in seen] == [5, 7, 7, 7, 7, 7, 7]


def test_a_step_between_updates_changes_nothing(shaped: Device) -> None:
    start = whole(PACKED, 68)
    start.tensors["clock"][2] = 0
    for room in (ops, reference):
        assert_equal(start.copy().step(room, torch.randn(ROWS, 68), **extras(start)), start)


def test_an_update_makes_up_for_the_steps_before_it(shaped: Device) -> None:
    slow = whole(PACKED, 68, period=4)
    fast = slow.copy()
    fast.rule = rule_of(**PACKED, lr=4 * slow.rule.lr)
    fast.tensors["clock"][0] = 1
    grad, more = torch.randn(ROWS, 68), extras(slow)
    slow.step(ops, grad, **more)
    fast.step(reference, grad, **more)
    slow.tensors["clock"][0] = 1
    assert_equal(slow, fast)


@pytest.mark.parametrize("tile_rows", [0, 1, 3])
def test_a_decimated_layer_keeps_time(shaped: Device, tile_rows: int) -> None:
    """Steps of a layer that comes to rest: both rooms skip the same ones, and every input gradient is made."""
    ours = whole(BYTES, 67, lr=1e-6, lr_scale=0.0)
    theirs = ours.copy()
    fired = []
    for step in range(11):
        x, grad_out = whole_numbers(5, 67), whole_numbers(5, ROWS)
        before = ours.copy()
        made = ours.backward(ops, x, grad_out, seed=step, tile_rows=tile_rows)
        wanted = theirs.backward(reference, x, grad_out, seed=step)
        torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-4)
        assert_equal(ours, theirs)
        fired.append(int(ours.tensors["clock"][2]))
        if not fired[-1]:
            for name in ("state", "scale", "v", "s_base", "totals", "cache"):
                assert torch.equal(ours.tensors[name], before.tensors[name]), name
    # The first step rounds counters to another scale and flips weights; from the second on nothing is left to flip.
    assert [step for step, fires in enumerate(fired) if fires] == [0, 1, 9]


# ---- cache ----


@pytest.mark.parametrize("cache", ["int8", "float16"])
def test_products_from_the_cache_are_those_from_the_codes(shaped: Device, cache: str) -> None:
    layer = whole(BYTES, 67, cache=cache)
    state, scale, values = (layer.tensors[name] for name in ("state", "scale", "cache"))
    x, grad_out = torch.randn(5, 67), torch.randn(5, ROWS)
    coding = {"C": 8, "packed": False}
    for room in (ops, reference):
        made = [room.counter_forward(x, state, scale, **coding, cache=it) for it in (None, values)]
        assert torch.equal(*made)
        made = [room.counter_grad_input(grad_out, state, scale, 67, **coding, cache=it) for it in (None, values)]
        assert torch.equal(*made)


@pytest.mark.parametrize(("options", "n"), [(PACKED, 68), (BYTES, 67)])
def test_the_cache_follows_the_codes(shaped: Device, options: dict[str, Any], n: int) -> None:
    layer = whole(options, n)
    first = layer.tensors["cache"].clone()
    for seed in range(4):
        layer.step(ops, torch.randn(ROWS, n), seed=seed, **extras(layer))
    fresh = torch.empty_like(first)
    ops.refresh_cache_(fresh, layer.tensors["state"], C=layer.rule.C, packed=layer.rule.packed)
    assert torch.equal(layer.tensors["cache"], fresh)
    assert torch.equal(fresh, reference.decode_state(layer.codes(), layer.rule.C)[0].to(fresh.dtype))
    assert not torch.equal(first, fresh)
    bits = fresh.view(torch.int16 if fresh.dtype == torch.float16 else torch.int8)
    assert not bits[fresh == 0].any(), "no zero has a sign"


def test_a_cache_of_nothing(device: Device) -> None:
    for room in (ops, reference):
        room.refresh_cache_(torch.empty(0, 4, dtype=torch.int8), torch.empty(0, 3, dtype=torch.uint8), C=8, packed=True)


# ---- a layer's backward ----


@pytest.mark.parametrize("needs_grad_input", [True, False])
def test_backward_with_every_option(shaped: Device, needs_grad_input: bool) -> None:
    start = whole(PACKED, 68)
    x, grad_out = whole_numbers(6, 68), whole_numbers(6, ROWS)
    ends = [start.copy(), start.copy(), start.copy()]
    want = ends[0].backward(reference, x, grad_out, needs_grad_input=needs_grad_input)
    for end, tile_rows in zip(ends[1:], (0, 3), strict=True):
        got = end.backward(ops, x, grad_out, needs_grad_input=needs_grad_input, tile_rows=tile_rows)
        assert_equal(end, ends[0])
        assert (got is None) == (want is None)
        if got is not None:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert not torch.equal(ends[0].tensors["state"], start.tensors["state"])
    assert torch.equal(ends[0].tensors["s_base"], start.tensors["scale"])


def test_backward_of_no_tokens_is_no_step(device: Device) -> None:
    start = whole(PACKED, 68)
    for room in (ops, reference):
        after = start.copy()
        grad_x = after.backward(room, torch.empty(0, 68), torch.empty(0, ROWS))
        assert grad_x.shape == (0, 68)
        assert_equal(after, start)


def test_backward_without_an_update_wants_no_base(device: Device) -> None:
    start = whole(PACKED, 68)
    x, grad_out = whole_numbers(6, 68), whole_numbers(6, ROWS)
    made = []
    for room in (ops, reference):
        after = start.copy()
        tensors = [after.tensors[name] for name in ("state", "scale", "v", "totals")]
        made.append(room.counter_backward_(x, grad_out, *tensors, start.rule, seed=None))
        assert_equal(after, start)
    torch.testing.assert_close(*made, rtol=1e-5, atol=1e-5)


def test_backward_on_a_device_with_memory_of_its_own(discrete: Device) -> None:
    ours = whole(PACKED, 68)
    theirs = ours.copy()
    x, grad_out = whole_numbers(6, 68), whole_numbers(6, ROWS)
    ours.backward(ops, x, grad_out)
    theirs.backward(reference, x, grad_out)
    assert_equal(ours, theirs)


def test_backward_of_tensors_on_opencl(device: Device) -> None:
    place = torch.device("opencl", device.info.index)
    host = whole(PACKED, 68)
    there = host.copy(place)
    with strict():
        for step in range(3):
            x, grad_out = whole_numbers(6, 68), whole_numbers(6, ROWS)
            made = there.backward(ops, x.to(place), grad_out.to(place), seed=step)
            torch.testing.assert_close(made.cpu(), host.backward(reference, x, grad_out, seed=step))
    assert made.device == place
    assert_equal(there, host)
