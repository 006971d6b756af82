"""Counter layers as torch modules: values, gradients, their own update, and what they refuse."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

from memtrain_cl import reference
from memtrain_cl.array import DeviceArray, empty
from memtrain_cl.device import Device
from memtrain_cl.nn import CompactCounterLinear, PackedRMSCounterLinear, RMSCounterLinear
from tests.layer_cases import IN, KINDS, MAIN, OUT, assert_same, buffers, make, train, twins

# ---- construction ----


@pytest.mark.parametrize("kind", MAIN)
def test_a_new_layer(kind: str) -> None:
    layer = make(kind, 400, 300, init_gain=2.0, ops=reference)
    t, c = reference.decode_state(layer.codes(), layer.C)
    assert not c.any()
    shares = [float((t == value).float().mean()) for value in (-1, 0, 1)]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.01)
    assert torch.equal(layer.scale, torch.full((300, 1), 2.0 * (3 / 800) ** 0.5))
    assert (layer.in_features, layer.out_features, layer.step) == (400, 300, 0)
    assert not list(layer.parameters())
    for name, buffer in layer.named_buffers():
        if name in ("v", "s_base"):
            assert torch.equal(buffer, torch.zeros(300, 1) if name == "v" else layer.scale)


def test_chance_is_ruled_by_torchs_seed_and_differs_between_layers() -> None:
    torch.manual_seed(5)
    first, second = make(ops=reference), make(ops=reference)
    torch.manual_seed(5)
    again = make(ops=reference)
    assert first.seed == again.seed
    assert torch.equal(first.state, again.state)
    assert first.seed != second.seed


def test_equal_layers_in_one_step_round_differently(device: Device) -> None:
    first, second = make(), make()
    second.state.copy_(first.state)
    gradient = torch.randn(OUT, IN)
    for layer in (first, second):
        layer.apply_update_from_grad_w(gradient)
    assert torch.equal(first.scale, second.scale)
    assert not torch.equal(first.state, second.state)


OUT_OF_RANGE: list[tuple[str, list[Any], str]] = [
    ("in_features", [0, -4, 2.0, "8", True], "in_features as an integer >= 1"),
    ("out_features", [0, -4, 2.0, None], "out_features as an integer >= 1"),
    ("C", [0, 12, 2.5, None, True], r"C as an integer in 1\.\.11"),
    ("lr", [-0.1, 2e6, float("nan"), float("inf"), "0.1"], r"lr as a finite number 0\.\.1e\+06"),
    ("lr_scale", [-0.1, float("nan")], r"lr_scale as a finite number 0\.\.1e\+06"),
    ("init_gain", [0.0, -1.0, float("inf"), None], "init_gain as a finite number > 0"),
    ("tile_rows", [-1, 1.5, True], "tile_rows as an integer >= 0"),
    ("local_grad_clip", [-1.0, float("nan")], "clip as a finite number >= 0"),
    ("rms_beta", [1.0, -0.1, float("nan")], r"rms_beta in \[0, 1\)"),
    ("rms_eps", [0.0, -1.0, 1e-38, float("inf")], "rms_eps as a finite number >= 1e-12"),
    ("use_rms", [0, None, "yes"], "use_rms as True or False"),
    ("rms_mode", ["mean", "", None], "rms_mode as one of exact, lagged, proxy"),
    ("scale_rebase", ["never", None], "scale_rebase as one of eager, lazy"),
    ("pulse_mode", ["pulse", None], "pulse_mode as one of direct, ternary"),
    ("act_save_bits", [1, 16, -4, 4.0, True, None], r"act_save_bits as 0 or an integer in 2\.\.15"),
    ("decimate_updates", [1, None], "decimate_updates as True or False"),
    ("cache_mode", ["int4", None], "cache_mode as one of none, int8, fp16"),
    ("cache_patch", ["some", None], "cache_patch as one of full, flip"),
    ("update_compute", ["fp16", None], "update_compute as one of fp, int8"),
    ("forward_compute", ["fp16", None], "forward_compute as one of fp, int8"),
    ("accumulate", [0, -1, 2.0, True, None], "accumulate as an integer >= 1"),
    ("reuse", [1, None], "reuse as True or False"),
    ("update_from_io", [1, "auto"], "update_from_io as True, False or None"),
]


@pytest.mark.parametrize(("name", "value", "message"), [(n, v, m) for n, values, m in OUT_OF_RANGE for v in values])
def test_options_out_of_range_are_refused(name: str, value: Any, message: str) -> None:
    options = {"in_features": IN, "out_features": OUT, "C": 11, name: value}
    with pytest.raises(ValueError, match=f"expected {message}"):
        PackedRMSCounterLinear(**options)


def test_widths_and_options_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="divisible by 4 for 6-bit packing, got 6"):
        PackedRMSCounterLinear(6, 4)
    assert RMSCounterLinear(6, 4, C=43).state.shape == (4, 6)
    with pytest.raises(ValueError, match=r"1\.\.43"):
        RMSCounterLinear(6, 4, C=44)
    with pytest.raises(TypeError, match="rms_beta"):
        CompactCounterLinear(6, 4, rms_beta=0.9)  # type: ignore[call-arg]


def test_a_wrong_option_is_refused_when_it_is_assigned() -> None:
    layer = make(ops=reference)
    before = layer.hyper()
    for name, value in (("accumulate", 0), ("cache_mode", "fp8"), ("decimate_updates", 2), ("rms_mode", "")):
        with pytest.raises(ValueError, match=f"expected {name}"):
            setattr(layer, name, value)
    assert layer.hyper() == before


def test_assigned_rates_are_checked_before_the_forward(device: Device) -> None:
    layer = make()
    layer.lr = -1.0
    with pytest.raises(ValueError, match="lr as a finite"):
        layer(torch.randn(2, IN))


# ---- values ----


@pytest.mark.parametrize("kind", MAIN)
def test_values_and_gradients(device: Device, kind: str) -> None:
    layer = make(kind)
    weight = layer.dense_weight().clone()
    assert torch.equal(weight, layer.scale * layer.visible_ternary())
    x = torch.randn(3, 5, IN, requires_grad=True)
    y = layer(x)
    torch.testing.assert_close(y, x.detach() @ weight.t(), rtol=1e-5, atol=1e-6)
    grad_out = torch.randn_like(y)
    y.backward(grad_out)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, grad_out @ weight, rtol=1e-5, atol=1e-6)
    assert not torch.equal(layer.dense_weight(), weight), "grad_x came from the old weight, and there is a new one"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs(device: Device, dtype: torch.dtype) -> None:
    layer = make()
    weight = layer.dense_weight()
    x = torch.randn(4, IN).to(dtype).requires_grad_()
    y = layer(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y, (x.detach().float() @ weight.t()).to(dtype), rtol=1e-2, atol=1e-2)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert layer.step == 1
    assert layer.dense_weight(dtype).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.int64, torch.bool, torch.complex64])
def test_other_inputs_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"expected x as a tensor of float32, float16 or bfloat16, got {dtype}"):
        make()(torch.ones(2, IN).to(dtype))


@pytest.mark.parametrize("shape", [(2, IN + 1), (IN, 2), (), (0,)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"expected x of shape \[\.\.\., {IN}\]"):
        make()(torch.ones(shape))
    with pytest.raises(TypeError, match="got ndarray"):
        make()(np.ones((2, IN), np.float32))


@pytest.mark.parametrize("shape", [(0, IN), (3, 0, IN)])
def test_no_tokens(device: Device, shape: tuple[int, ...]) -> None:
    layer = make()
    before = buffers(layer)
    x = torch.randn(shape, requires_grad=True)
    y = layer(x)
    assert y.shape == (*shape[:-1], OUT)
    y.sum().backward()
    assert_same(buffers(layer), before)


def test_one_token_and_strided_tokens(device: Device) -> None:
    layer = make().eval()
    x = torch.randn(6, IN)
    y = layer(x)
    torch.testing.assert_close(layer(x[0]), y[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(layer(x.t().contiguous().t()), y)
    assert torch.equal(layer(torch.stack([x, x], 1)[:, 0]), y)
    assert torch.equal(layer(x[:1].expand(6, IN)), layer(x[:1].repeat(6, 1)))


# ---- updates ----


@pytest.mark.parametrize("kind", list(KINDS))
def test_equal_gradients_make_equal_bytes(device: Device, kind: str) -> None:
    layer, oracle = twins(kind)
    for _ in range(4):
        gradient = torch.randn(OUT, IN)
        gradient[3, 0] = float("inf")
        for each in (layer, oracle):
            each.apply_update_from_grad_w(gradient)
        assert_same(buffers(layer), buffers(oracle))
    assert layer.step == oracle.step == 4
    assert int(layer.skipped_updates) == 4


@pytest.mark.parametrize("kind", MAIN)
def test_training_follows_the_reference(device: Device, kind: str) -> None:
    # Products sum in another order, so a counter may now and then land a quantum aside.
    layer, oracle = twins(kind)
    for each in (layer, oracle):
        train(each, 5)
    assert float((layer.codes() != oracle.codes()).float().mean()) <= 0.02
    torch.testing.assert_close(layer.scale, oracle.scale, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("kind", MAIN)
def test_training_moves_weights(device: Device, kind: str) -> None:
    layer = make(kind)
    before = layer.dense_weight().clone()
    train(layer, 20)
    assert layer.step == 20
    assert int(layer.update_events) > 20 * OUT
    assert 0 < int(layer.weight_flips) < int(layer.update_events)
    assert float((layer.dense_weight() != before).float().mean()) > 0.1


def test_the_first_layer_of_a_model_learns(device: Device) -> None:
    model = torch.nn.Sequential(make(), torch.nn.ReLU(), make(in_features=OUT, out_features=4))
    before = [buffers(layer) for layer in (model[0], model[2])]  # type: ignore[arg-type]
    x = torch.randn(5, IN)
    model(x).square().sum().backward()
    for layer, old in zip((model[0], model[2]), before, strict=True):
        assert not torch.equal(buffers(layer)["state"], old["state"])  # type: ignore[arg-type]
    assert not x.requires_grad
    assert x.grad is None


@pytest.mark.parametrize("stop", ["eval", "update_enabled", "no_grad", "inference_mode"])
def test_what_stops_updates(device: Device, stop: str) -> None:
    layer = make()
    before = buffers(layer)
    x = torch.randn(5, IN, requires_grad=True)
    if stop in ("no_grad", "inference_mode"):
        with getattr(torch, stop)():
            y = layer(x)
        assert not y.requires_grad
    else:
        if stop == "eval":
            layer.eval()
        else:
            layer.update_enabled = False
        for _ in range(2):  # neither guarded nor counted
            y = layer(x)
        y.sum().backward()
        assert x.grad is not None
    assert layer.step == 0
    assert_same(buffers(layer), before)


def test_learning_rate_is_read_at_each_step(device: Device) -> None:
    layer, oracle = twins("packed")
    for lr in (0.5, 0.0, 2.0):
        gradient = torch.randn(OUT, IN)
        for each in (layer, oracle):
            each.lr = lr
            each.apply_update_from_grad_w(gradient)
        assert_same(buffers(layer), buffers(oracle))


@pytest.mark.parametrize("kind", ["compact", "packed"])
@pytest.mark.parametrize("tile_rows", [1, 5, 12, 100])
def test_tiles_make_the_same_bytes(device: Device, kind: str, tile_rows: int) -> None:
    layer = make(kind)
    # Rows so few may have their gradient formed inside the update, whose sums have another order.
    tiled = make(kind, tile_rows=tile_rows, update_from_io=False)
    tiled.load_state_dict(layer.state_dict())
    for each in (layer, tiled):
        train(each, 3)
    assert_same(buffers(layer), buffers(tiled))


def test_rows_without_a_finite_gradient_are_counted(device: Device) -> None:
    layer = make()
    before = buffers(layer)
    y = layer(torch.randn(5, IN))
    grad_out = torch.randn_like(y)
    grad_out[2, 4] = float("nan")
    y.backward(grad_out)
    assert int(layer.skipped_updates) == 1
    assert layer.step == 1
    changed = (layer.state != before["state"]).any(1)
    assert not changed[4]
    assert int(changed.sum()) == OUT - 1


# ---- guards ----


def test_a_second_forward_before_the_backward_is_refused(device: Device) -> None:
    layer = make()
    x = torch.randn(5, IN)
    y = layer(x)
    before = buffers(layer)
    with pytest.raises(RuntimeError, match="used again in training before the backward"):
        layer(x)
    assert_same(buffers(layer), before)
    with torch.no_grad():
        layer(x)
    y.sum().backward()
    layer(x).sum().backward()
    assert layer.step == 2


def test_a_dropped_graph_no_longer_counts(device: Device) -> None:
    layer = make()
    x = torch.randn(5, IN)
    y = layer(x)
    del y
    y = layer(x)
    loss = y.sum()
    del y
    with pytest.raises(RuntimeError, match="used again"):
        layer(x)
    del loss
    layer(x).sum().backward()
    assert layer.step == 1


def test_a_second_backward_is_refused(device: Device) -> None:
    layer = make()
    loss = layer(torch.randn(5, IN)).sum()
    loss.backward(retain_graph=True)
    after = buffers(layer)
    with pytest.raises(RuntimeError, match="already been updated by a backward"):
        loss.backward()
    assert_same(buffers(layer), after)
    assert layer.step == 1
    frozen = make().eval()
    loss = frozen(torch.randn(5, IN, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


# ---- memory ----


def living(kind: type) -> dict[int, Any]:
    """Every living object of the kind. By type(), since some objects answer isinstance() with a warning."""
    gc.collect()
    return {id(thing): thing for thing in gc.get_objects() if issubclass(type(thing), kind)}


@pytest.mark.parametrize("tile_rows", [0, 32])
def test_no_dense_weight_or_gradient_survives_a_step(
    device: Device, tile_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, columns = 256, 512
    tile_bytes = 4 * columns * (tile_rows or rows)
    layer = make(in_features=columns, out_features=rows, tile_rows=tile_rows)
    allocated: list[int] = []

    def record(*args: Any) -> DeviceArray:
        array = empty(*args)
        allocated.append(array.nbytes)
        return array

    monkeypatch.setattr("memtrain_cl.bridge.empty", record)
    tensors, arrays = living(torch.Tensor).keys(), living(DeviceArray).keys()
    train(layer, 2, width=columns)
    if device.info.unified_memory:
        # One scratch a step: the gradient's tile. Elsewhere activations and state travel through such arrays too.
        assert allocated == [tile_bytes] * 2
    else:
        assert tile_bytes in allocated
        assert max(allocated) <= max(tile_bytes, layer.state.nbytes)
    kept = [tensor for key, tensor in living(torch.Tensor).items() if key not in tensors]
    assert [tensor.shape for tensor in kept if tensor.is_floating_point() and tensor.nbytes >= tile_bytes] == []
    held = [array for key, array in living(DeviceArray).items() if key not in arrays]
    assert [array.shape for array in held if array.nbytes > layer.state.nbytes] == []


def test_bytes_of_persistent_state() -> None:
    layer = make(in_features=512, out_features=256)
    saved = {name: tensor.nbytes for name, tensor in layer.published_state_dict().items()}
    assert saved["state"] == 256 * 512 * 3 // 4
    assert sum(saved.values()) == 256 * 512 * 3 // 4 + 12 * 256
    everything = sum(tensor.nbytes for tensor in layer.buffers())
    assert everything - sum(saved.values()) == 24, "three totals a layer"
    compact = make("compact", in_features=512, out_features=256)
    assert sum(tensor.nbytes for tensor in compact.published_state_dict().values()) == 256 * 512 + 4 * 256


# ---- learning ----


def test_a_ternary_teacher_is_recovered(device: Device) -> None:
    width, out = 32, 16
    layer = make(in_features=width, out_features=out, lr=0.1, lr_scale=0.0)
    teacher = torch.randint(-1, 2, (out, width)).float()
    target = layer.scale * teacher
    start = float((layer.visible_ternary() == teacher).float().mean())
    for _ in range(120):
        x = torch.randn(32, width)
        (layer(x) - x @ target.t()).square().mean().backward()
    found = float((layer.visible_ternary() == teacher).float().mean())
    assert start < 0.5
    assert found > 0.97, found
