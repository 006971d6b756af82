"""The memory bill: by formula, forecast on shapes, and measured; the last two agree."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memtrain_cl import memory_report, saved_activations, training_budget
from memtrain_cl.device import Device
from memtrain_cl.lm.bill import ACTIVATIONS, forecast, largest
from memtrain_cl.lm.config import ModelConfig
from memtrain_cl.lm.model import CausalLM
from memtrain_cl.nn.memory import POOLS

GOLDEN = json.loads((Path(__file__).parent / "golden" / "counter.json").read_text())["training_budget"]
SMALL = ModelConfig(layers=3, dim=64, heads=4, seq=64)
BATCH = 4


class Run:
    """A model, its optimizer, and a step as the trainer takes it."""

    def __init__(self, config: ModelConfig, activations: str, place: torch.device) -> None:
        torch.manual_seed(0)
        self.model = CausalLM(config).to(place)
        self.model.gradient_checkpointing = activations == "recompute"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.tokens = torch.randint(256, (BATCH, config.seq + 1)).to(place)
        self.saver = saved_activations(int(activations)) if activations in ("8", "4") else None

    def loss(self) -> Tensor:
        if self.saver is None:
            return self._forward()
        with self.saver:
            return self._forward()

    def _forward(self) -> Tensor:
        logits = self.model(self.tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())

    def report(self) -> Any:
        for _ in range(2):
            report = memory_report(self.model, self.optimizer, loss_of=self.loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return report


def near(one: int, other: int, within: float) -> bool:
    return abs(one - other) <= within * max(one, other)


@pytest.mark.parametrize(
    ("linear", "activations"),
    [("dense", "fp"), ("dense", "recompute"), ("counter", "fp"), ("counter", "4"), ("counter", "recompute")],
)
def test_forecast_and_measurement_agree(device: Device, linear: str, activations: str) -> None:
    config = replace(SMALL, linear=linear)
    measured = Run(config, activations, torch.device("opencl:0")).report().pools
    bill = forecast(config, BATCH, activations, info=device.info)
    for pool in ("weights and state", "gradients", "optimizer"):
        assert near(measured[pool], bill.pools[pool], 0.001), pool
    assert near(measured["activations"], bill.pools["activations"], 0.01)
    # What other kernels than products work on besides is the device's own matter.
    assert near(measured["peak"], bill.peak, 0.15)


@pytest.mark.parametrize("activations", ["fp", "recompute"])
def test_on_the_host_too(activations: str) -> None:
    config = replace(SMALL, linear="dense")
    measured = Run(config, activations, torch.device("cpu")).report().pools
    bill = forecast(config, BATCH, activations, fused_norms=False)
    for pool in POOLS[:4]:
        assert near(measured[pool], bill.pools[pool], 0.01), pool
    assert near(measured["peak"], bill.peak, 0.05)


def test_the_report_has_five_pools_and_says_them() -> None:
    run = Run(replace(SMALL, linear="dense"), "fp", torch.device("cpu"))
    assert memory_report(run.model).pools == {}
    report = run.report()
    assert tuple(report.pools) == (*POOLS, "peak")
    assert report.pools["weights and state"] == report.totals["model"]
    assert report.pools["gradients"] == report.totals["parameters"]
    assert report.pools["optimizer"] == report.totals["optimizer"]
    assert sum(report.pools[name] for name in POOLS) >= report.pools["peak"]
    assert str(report).splitlines()[-1].startswith("peak ")


def test_the_widest_model_that_fits() -> None:
    for linear, activations in (("dense", "fp"), ("counter", "recompute")):
        config = replace(SMALL, linear=linear, dim=16, layers=1)
        limit = forecast(replace(config, dim=72, hidden=0), BATCH, activations).peak
        found = largest(config, BATCH, activations, limit)
        assert found is not None
        assert found[0].dim == 72
        assert found[1].peak == limit
        below = largest(config, BATCH, activations, limit - 1)
        assert below is not None
        assert below[0].dim == 64
    assert largest(replace(SMALL, linear="dense"), BATCH, "fp", 1000) is None


def test_published_budget() -> None:
    for row, golden in zip(training_budget(), GOLDEN, strict=True):
        for name, value in golden.items():
            got = getattr(row, name)
            assert got == (pytest.approx(value, rel=1e-12) if isinstance(value, float) else value)
    # 2 + 2 + 12 bytes a parameter, against 0.75 a linear weight, 8 a row and 2 an embedding weight.
    shape: dict[str, Any] = {"layers": 2, "d_model": 64, "vocab": 100, "batch": 2, "seq": 8, "misc_gib": 0.0}
    linear, embedding, rows, gib = 12 * 2 * 64**2, 6400, 12 * 2 * 64, 2**30
    dense, counter, bound = training_budget(**shape)
    assert dense.persistent_gib + dense.grad_gib + dense.optim_gib == pytest.approx(16 * (linear + embedding) / gib)
    assert counter.persistent_gib == pytest.approx((0.75 * linear + 8 * rows + 2 * embedding) / gib)
    assert bound.persistent_gib == pytest.approx((math.log2(3) / 8 * linear + 2 * embedding) / gib)
    one = 2 * 8 * 64 * 6
    assert dense.acts_gib == pytest.approx(2 * one * 2 / gib)
    assert counter.acts_gib == pytest.approx(one * 0.5 / gib)
    untied = training_budget(**shape, tied_lm_head=False, anchor_every=1, baseline_policy="selective_half")
    assert untied[1].persistent_gib - counter.persistent_gib == pytest.approx(2 * embedding / gib)
    assert untied[1].acts_gib == pytest.approx(3 * one * 0.5 / gib)
    assert untied[0].acts_gib == pytest.approx(one * 2 / gib)
    assert training_budget(**shape, counter_policy="none_lower_bound")[1].acts_gib == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 0}, "expected layers as an integer >= 1, got 0"),
        ({"counter_policy": "some"}, "expected counter_policy as one of store_all"),
        ({"state_bits": math.nan}, "expected state_bits as a finite number"),
        ({"anchor_every": 0}, "expected anchor_every as an integer"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        training_budget(**options)
    with pytest.raises(ValueError, match="expected activations as one of fp, 8, 4, recompute, got '2'"):
        forecast(SMALL, 1, "2")
    assert ACTIVATIONS[0] == "fp"
