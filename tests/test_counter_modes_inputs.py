"""Options of the counter update that do not fit are refused before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from memtrain_cl import ops, reference
from memtrain_cl.device import Device
from tests.counter_modes import PACKED, ROWS, Whole, assert_equal, extras, moments, whole

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no base": ({"s_base": None}, "expected s_base for scale_rebase='lazy', got None"),
    "base of another shape": ({"s_base": torch.ones(ROWS)}, r"expected s_base of shape \[7, 1\]"),
    "base of another type": ({"s_base": torch.ones(ROWS, 1).double()}, "expected s_base of dtype torch.float32"),
    "clock of another shape": ({"clock": torch.ones(3, dtype=torch.int64)}, r"expected clock of shape \[4\]"),
    "clock of another type": ({"clock": torch.ones(4)}, "expected clock of dtype torch.int64"),
    "cache of another shape": ({"cache": torch.ones(ROWS, 4, dtype=torch.int8)}, r"expected cache of shape \[7, 68\]"),
    "cache of another type": ({"cache": torch.ones(ROWS, 68)}, "expected cache of dtype torch.int8 or torch.float16"),
    "cache that is none": ({"cache": [1]}, "expected cache as a torch tensor, got list"),
}
WRONG_MOMENTS = {
    "none": (None, "expected g_sq for rms_mode='proxy', got None"),
    "of another shape": (torch.ones(1, ROWS), r"expected g_sq of shape \[7, 1\]"),
    "of another type": (torch.ones(ROWS, 1).half(), "expected g_sq of dtype torch.float32"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_options_change_nothing(device: Device, what: str) -> None:
    change, message = WRONG[what]
    start = whole(PACKED, 68)
    ways: list[Callable[[Whole], Any]] = [
        lambda layer: layer.step(ops, torch.randn(ROWS, 68), **extras(start)),
        lambda layer: layer.backward(ops, torch.randn(3, 68), torch.randn(3, ROWS)),
    ]
    for way in ways:
        after = start.copy()
        after.tensors.update(change)
        with pytest.raises((ValueError, TypeError), match=message):
            way(after)
        after.tensors.update({name: start.tensors[name] for name in change})
        assert_equal(after, start)


@pytest.mark.parametrize("what", WRONG_MOMENTS)
def test_wrong_moments_change_nothing(device: Device, what: str) -> None:
    g_sq, message = WRONG_MOMENTS[what]
    start = whole(PACKED, 68)
    after = start.copy()
    with pytest.raises((ValueError, TypeError), match=message):
        after.step(ops, torch.randn(ROWS, 68), g_sq=g_sq)
    assert_equal(after, start)


def test_moments_that_nobody_asked_for_are_refused(device: Device) -> None:
    start = whole({"mode": "exact"}, 68)
    after = start.copy()
    with pytest.raises(ValueError, match="expected g_sq for rms_mode='proxy' alone, got it for 'exact'"):
        after.step(ops, torch.randn(ROWS, 68), g_sq=moments())
    assert_equal(after, start)


def test_the_reference_refuses_what_is_missing() -> None:
    start = whole(PACKED, 68)
    after = start.copy()
    after.tensors["s_base"] = None  # type: ignore[assignment]
    x, grad_out = torch.randn(3, 68), torch.randn(3, ROWS)
    with pytest.raises(ValueError, match=r"expected s_base float32 \[7, 1\] for scale_rebase='lazy', got None"):
        after.backward(reference, x, grad_out)
    after.tensors["s_base"] = start.tensors["s_base"].clone()
    with pytest.raises(ValueError, match=r"expected g_sq float32 \[7, 1\] for rms_mode='proxy', got None"):
        after.step(reference, torch.randn(ROWS, 68))
    assert_equal(after, start)


@pytest.mark.parametrize("weights", [-1, True, 2.0, None, 1 << 63])
def test_clocks_of_other_layers_are_refused(device: Device, weights: Any) -> None:
    clock, totals = torch.tensor([1, 0, 1, 0]), torch.tensor([0, 5, 0])
    with pytest.raises(ValueError, match=r"expected weights as an integer in 0\.\.2\^62"):
        ops.observe_clock_(clock, totals, weights)
    with pytest.raises(ValueError, match=r"expected totals of shape \[3\]"):
        ops.advance_clock_(clock, torch.zeros(4, dtype=torch.int64))
    assert clock.tolist() == [1, 0, 1, 0]


def test_caches_of_other_layers_are_refused(device: Device) -> None:
    state = torch.zeros(3, 6, dtype=torch.uint8)
    for cache, message in (
        (torch.zeros(3, 4, dtype=torch.int8), r"expected state of shape \[3, 3\]"),
        (torch.zeros(3, 8), "expected cache of dtype torch.int8 or torch.float16, got torch.float32"),
        (torch.zeros(24, dtype=torch.int8), "expected cache of shape"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            ops.refresh_cache_(cache, state, C=8, packed=True)
    x, scale, wide = torch.ones(2, 8), torch.ones(3, 1), torch.zeros(3, 9, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"expected cache of shape \[3, 8\]"):
        ops.counter_forward(x, state, scale, C=8, packed=True, cache=wide)
    with pytest.raises(ValueError, match=r"expected cache of shape \[3, 8\]"):
        ops.counter_grad_input(torch.ones(2, 3), state, scale, 8, C=8, packed=True, cache=wide)
