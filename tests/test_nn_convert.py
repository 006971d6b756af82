"""Counter layers from dense weights and linears, whole models, and where their memory goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memtrain_cl import CounterLinearWithBias, memory_report, reference, swap_linears_to_counter
from memtrain_cl.device import Device
from memtrain_cl.nn import CompactCounterLinear, PackedRMSCounterLinear, RMSCounterLinear
from tests.layer_cases import IN, KINDS, MAIN, OUT, assert_same, buffers, make, train
from tests.nn_cases import room_of

OPS: dict[str, Any] = {"ops": reference}


# ---- one layer ----


@pytest.mark.parametrize("kind", MAIN)
def test_from_dense_is_the_published_conversion(kind: str) -> None:
    cls, preset = KINDS[kind]
    weight = torch.randn(OUT, IN)
    layer = cls.from_dense(weight, threshold_ratio=0.5, lr=0.3, **preset, **OPS)
    scale, t, c = reference.weight_to_counter_state(weight, layer.C, 0.5)
    assert (layer.in_features, layer.out_features, layer.lr, layer.step) == (IN, OUT, 0.3, 0)
    assert torch.equal(layer.scale, scale)
    assert torch.equal(layer.codes(), reference.encode_state(t, c, layer.C))
    latent = layer.scale * (t + c / layer.C)
    assert float((latent - weight).abs().max()) < float(weight.abs().max())
    if kind != "compact":
        assert torch.equal(layer.s_base, scale)
        assert not layer.v.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_other_types_and_layouts(dtype: torch.dtype) -> None:
    weight = torch.randn(IN, OUT, dtype=dtype).t()
    layer = PackedRMSCounterLinear.from_dense(weight, **OPS)
    plain = PackedRMSCounterLinear.from_dense(weight.float().contiguous(), **OPS)
    assert_same(buffers(layer), buffers(plain))
    assert layer.scale.dtype == torch.float32


def test_weights_of_zero_and_refusals_that_change_nothing() -> None:
    layer = make(**OPS)
    before = buffers(layer)
    faults: list[tuple[Any, str]] = [
        (torch.randn(OUT, IN + 4), r"expected a weight \[12, 20\], got \[12, 24\]"),
        (torch.randn(OUT), r"\[out, in\], got torch.float32 \[12\]"),
        (torch.ones(OUT, IN, dtype=torch.int32), "floating-point tensor"),
        (torch.full((OUT, IN), float("nan")), "finite weight"),
        (None, "got NoneType"),
    ]
    for weight, message in faults:
        with pytest.raises(ValueError, match=message):
            layer.load_dense_weight(weight)
    for ratio in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="threshold_ratio"):
            layer.load_dense_weight(torch.randn(OUT, IN), ratio)
    assert_same(buffers(layer), before)
    layer.load_dense_weight(torch.zeros(OUT, IN))
    assert not layer.dense_weight().any()
    assert torch.equal(layer.scale, torch.full((OUT, 1), 1e-5))


def test_counter_state_there_and_back(device: Device) -> None:
    layer, twin = make(), make()
    train(layer, 3)
    t, c = reference.decode_state(layer.codes(), layer.C)
    train(twin, 2)
    for shape in ((OUT, 1), (OUT,)):
        twin.load_counter_state(layer.scale.reshape(shape), t.to(torch.int8), c)
        assert torch.equal(twin.state, layer.state)
        assert torch.equal(twin.dense_weight(), layer.dense_weight())
        assert torch.equal(twin.s_base, layer.scale)
        assert not twin.v.any()
    assert twin.step == 2
    before = buffers(twin)
    faults: list[tuple[tuple[Any, Any, Any], str]] = [
        ((layer.scale, t[:-1], c), r"expected t as integers \[12, 20\]"),
        ((layer.scale, t, c.float()), "expected c as integers"),
        ((layer.scale[:3], t, c), r"expected scale \[12, 1\], got \[3, 1\]"),
        ((-layer.scale, t, c), "scale as finite numbers > 0"),
        ((layer.scale * float("inf"), t, c), "scale as finite numbers > 0"),
        ((layer.scale, t * 2, c), r"t in -1\.\.1"),
        ((layer.scale, t, c + 30), r"c in -10\.\.10"),
    ]
    for state, message in faults:
        with pytest.raises(ValueError, match=message):
            twin.load_counter_state(*state)
    assert_same(buffers(twin), before)


def test_loading_weights_ends_what_was_under_way() -> None:
    layer = make(accumulate=2, **OPS)
    train(layer)
    pending = layer(torch.randn(2, IN)).sum()
    layer.load_dense_weight(torch.randn(OUT, IN))
    assert "accumulated" not in layer.state_dict()
    before = buffers(layer)
    with pytest.raises(RuntimeError, match="weights of this counter layer have changed since this forward"):
        pending.backward()
    assert_same(buffers(layer), before)


# ---- linears ----


def test_a_linear_becomes_a_layer() -> None:
    linear = nn.Linear(IN, OUT, bias=False).eval()
    layer = PackedRMSCounterLinear.from_linear(linear, **OPS)
    assert not layer.training
    assert torch.equal(layer.codes(), PackedRMSCounterLinear.from_dense(linear.weight, **OPS).codes())
    with pytest.raises(ValueError, match="without bias"):
        PackedRMSCounterLinear.from_linear(nn.Linear(IN, OUT), **OPS)
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Linear, got Conv2d"):
        PackedRMSCounterLinear.from_linear(nn.Conv2d(1, 1, 1), **OPS)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_is_kept_and_trained(dtype: torch.dtype) -> None:
    linear = nn.Linear(IN, OUT).to(dtype)
    with_bias = CounterLinearWithBias.from_linear(linear, kind="counter_packed", lr=0.1, **OPS)
    assert isinstance(with_bias.counter, PackedRMSCounterLinear)
    assert [name for name, _ in with_bias.named_parameters()] == ["bias"]
    assert {"bias", "counter.state", "counter.scale"} <= with_bias.state_dict().keys()
    assert (with_bias.in_features, with_bias.out_features, with_bias.bias.dtype) == (IN, OUT, dtype)
    x = torch.randn(3, 2, IN, dtype=dtype)
    y = with_bias(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y, with_bias.counter.eval()(x) + linear.bias)
    y.sum().backward()
    assert with_bias.bias.grad is not None
    assert torch.equal(with_bias.bias.grad, torch.full((OUT,), 6.0, dtype=dtype))
    assert with_bias.counter.step == 1
    with pytest.raises(ValueError, match="expected a linear with bias"):
        CounterLinearWithBias.from_linear(nn.Linear(IN, OUT, bias=False), **OPS)
    with pytest.raises(ValueError, match=r"expected a bias \[12\], got \[3\]"):
        CounterLinearWithBias(make(**OPS), torch.zeros(3))


# ---- models ----


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.body = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8, bias=False))
        self.again = self.body[2]
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(self.embed(tokens)))
        return logits


def test_swapping_a_models_linears() -> None:
    model: Any = Model()
    old = {name: parameter.clone() for name, parameter in model.named_parameters()}
    report = swap_linears_to_counter(model, kind="counter_packed", C=11, lr=0.1, **OPS)
    assert report.swapped == ["again", "body.0", "body.2"] or report.swapped == ["body.0", "body.2", "again"]
    assert sorted(report.skipped) == ["attention.out_proj", "head"]
    assert report.coeffs == 2 * 96
    assert "3 linears became counters of 192 weights; 2 were left" in str(report)
    assert isinstance(model.body[0], CounterLinearWithBias)
    assert isinstance(model.body[2], PackedRMSCounterLinear)
    assert model.again is model.body[2]
    assert (model.body[2].C, model.body[2].lr) == (11, 0.1)
    assert torch.equal(model.body[0].bias, old["body.0.bias"])
    assert model.head.weight is model.embed.weight
    model(torch.arange(6)).square().sum().backward()
    assert model.body[2].step == model.body[0].counter.step == 1


def test_a_model_on_the_device_is_swapped_there(device: Device) -> None:
    room = room_of("opencl", device)
    host, there = Model(), Model()
    there.load_state_dict(host.state_dict())
    there.to(room.place)
    for model in (host, there):
        torch.manual_seed(3)
        swap_linears_to_counter(model, kind="counter_packed", C=11, skip="again")
    assert all(tensor.device == room.place for tensor in [*there.parameters(), *there.buffers()])
    for name, value in host.state_dict().items():
        assert torch.equal(there.state_dict()[name].cpu(), value), name


def test_what_is_left_alone() -> None:
    for skip, left in (("body.0", ["body.0"]), (["0", "again"], ["again", "body.0"]), (lambda n: "2" in n, ["body.2"])):
        report = swap_linears_to_counter(Model(), skip=skip, **OPS)
        assert set(left) <= set(report.skipped)
        assert not set(left) & set(report.swapped)
    model: Any = Model()
    swap_linears_to_counter(model, kind=CompactCounterLinear, keep_bias=False, **OPS)
    assert type(model.body[0]) is CompactCounterLinear


def test_a_swap_that_cannot_be_changes_nothing() -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(6, 8))
    old = list(model)
    with pytest.raises(ValueError, match="1: expected in_features divisible by 4"):
        swap_linears_to_counter(model, kind="counter_packed", **OPS)
    with pytest.raises(ValueError, match="expected kind as"):
        swap_linears_to_counter(model, kind="dense", **OPS)
    with pytest.raises(ValueError, match="expected C as an integer"):
        swap_linears_to_counter(model, C=99, **OPS)
    with pytest.raises(TypeError, match="rms_betta"):
        swap_linears_to_counter(model, rms_betta=0.9, **OPS)
    with torch.no_grad():
        model[1].weight[0, 0] = float("inf")
    with pytest.raises(ValueError, match="1: expected a finite weight"):
        swap_linears_to_counter(model, **OPS)
    assert list(model) == old
    with pytest.raises(ValueError, match="from_linear makes a layer of it"):
        swap_linears_to_counter(nn.Linear(4, 4), **OPS)


# ---- memory ----


def test_bytes_are_those_that_are_held() -> None:
    model: Any = nn.Sequential(
        make(in_features=64, out_features=32, accumulate=3, rms_mode="proxy", **OPS),
        nn.Linear(32, 8),
        nn.BatchNorm1d(8),
        RMSCounterLinear(8, 4, decimate_updates=True, cache_mode="fp16", **OPS),
    )
    claimed = memory_report(model)
    assert claimed.layers["0"] == {
        "state": 32 * 48,
        "scale": 128,
        "v": 128,
        "s_base": 128,
        "counts": 24,
        "cache": 0,
        "accumulation": 4 * 64 * 32 + 4 * 32,
    }
    assert claimed.layers["3"]["counts"] == 24 + 32
    assert claimed.layers["3"]["cache"] == 2 * 8 * 4
    assert claimed.totals["parameters"] == 4 * (32 * 8 + 8 + 16)
    assert claimed.totals["buffers"] == 4 * 16 + 8
    layers = sum(sum(parts.values()) for parts in claimed.layers.values())
    assert claimed.totals["counter_layers"] == layers
    assert claimed.totals["model"] == layers + claimed.totals["parameters"] + claimed.totals["buffers"]
    assert "accumulation" in str(claimed)
    train(model[0], 2, width=64)
    assert memory_report(model) == claimed
    held = model[0]._sum
    assert held.nbytes == claimed.layers["0"]["accumulation"]


def test_a_shared_layer_counts_once() -> None:
    layer = make(**OPS)
    assert memory_report(nn.ModuleList([layer, layer])).layers.keys() == {"0"}
    assert memory_report(layer).layers.keys() == {""}
