"""saved_activations in ordinary torch models: what it takes and leaves, what comes back, what it costs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memtrain_cl.torch_device  # noqa: F401 (registers the device)
from memtrain_cl import effective_bits, saved_activations
from memtrain_cl.activations import MIN_NUMEL, MIN_ROW, SavedReport
from memtrain_cl.device import Device
from memtrain_cl.errors import NotFinite
from memtrain_cl.torch_device.fallback import strict
from tests.saving_cases import ROWS, WIDTH, activation, gradient, network, saved_gradient


@pytest.fixture
def trains(device: Device) -> torch.device:
    """The one device that torch differentiates on."""
    if device.info.index:
        pytest.skip("torch differentiates on opencl:0 alone")
    return torch.device("opencl", 0)


# ---- bytes ----


@pytest.mark.parametrize(("bits", "stored"), [(4, 4), (8, 8), (12, 16)])
def test_bytes_before_and_after(device: Device, bits: int, stored: int) -> None:
    x, weight = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, 8, requires_grad=True)
    with saved_activations(bits) as report:
        loss = (x @ weight).sum()
    assert (report.packed, report.shared, report.not_finite) == (1, 0, 0)
    assert report.bytes_before == 4 * ROWS * WIDTH
    assert report.bits_per_element == 8 * report.bytes_after / (ROWS * WIDTH) == effective_bits(stored, WIDTH)
    assert f"saved in {report.bytes_after} bytes instead of {report.bytes_before}" in str(report)
    loss.backward()
    assert float((weight.grad - x.sum(0)[:, None]).abs().max()) < 0.5 * ROWS  # type: ignore[operator]


def test_nothing_saved_costs_nothing() -> None:
    assert SavedReport().bits_per_element == 0.0


# ---- what is left as it is ----


def test_small_tensors_and_short_rows_are_left(device: Device) -> None:
    for shape, taken in (
        ((1, MIN_NUMEL - 1), 0),
        ((1, MIN_NUMEL), 1),
        ((1, MIN_NUMEL + 1), 1),
        ((MIN_NUMEL, MIN_ROW - 1), 0),
        ((MIN_NUMEL, MIN_ROW), 1),
    ):
        with saved_activations() as report:
            activation(*shape).square()
        assert (report.packed, report.left) == (taken, 1 - taken), shape
    with saved_activations(min_numel=0) as report:
        activation(1, MIN_ROW).square()
    assert report.packed == 1


def test_parameters_their_views_and_leaves_are_left(device: Device) -> None:
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    frozen = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
    leaf = torch.randn(WIDTH, WIDTH, requires_grad=True)
    x = activation(ROWS, WIDTH)
    for factor in (
        weight,
        weight.t(),
        weight.view(WIDTH // 2, 2 * WIDTH).view(WIDTH, WIDTH),
        weight.to(torch.bfloat16).float().t(),
        frozen,
        frozen.t(),
        leaf,
        leaf[:],
    ):
        with saved_activations() as report:
            y = x @ factor
        assert (report.packed, report.left) == ((1, 1) if factor.requires_grad else (0, 1))
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x, retain_graph=True)[0][0], factor.detach().sum(1))


def test_other_types_and_expanded_tensors_are_left(device: Device) -> None:
    with saved_activations() as report:
        activation(ROWS, WIDTH, dtype=torch.float64).square()
        activation(1, WIDTH).expand(ROWS, WIDTH) * torch.randn(ROWS, WIDTH)
        F.embedding(torch.randint(0, 9, (MIN_NUMEL, 4)), torch.randn(9, 4, requires_grad=True))
    assert (report.packed, report.left) == (1, 2)


def test_what_would_not_bear_it_is_left(device: Device) -> None:
    """Log-probabilities, divisors and log-sum-exps: gradients are torch's own, to the bit."""
    logits, other = (torch.randn(ROWS, WIDTH, requires_grad=True) for _ in range(2))
    target = torch.randint(0, WIDTH, (ROWS,))

    def losses() -> torch.Tensor:
        quotient = (logits * 2.0) / (other.square() + 0.1)
        return (
            F.cross_entropy(logits * 3.0, target)
            + quotient.log1p().nan_to_num(0.0).sum()
            + (other * 1).exp().sqrt().sum()
        )

    want = torch.autograd.grad(losses(), (logits, other))
    with saved_activations(2) as report:
        got = losses()
    assert report.packed == 1  # exp's result, which sqrt does not share
    grads = torch.autograd.grad(got, (logits, other))
    assert torch.equal(grads[0], want[0])
    assert bool(torch.isfinite(grads[1]).all())


def test_attention_keeps_its_log_sum_exps(device: Device) -> None:
    q, k, v = (activation(2, 4, 640, 16) for _ in range(3))
    with saved_activations(8) as report:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert report.packed == 4
    assert report.left >= 1
    got = torch.autograd.grad(y.sum(), (q, k, v))
    want = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True).sum(), (q, k, v))
    for one, other in zip(got, want, strict=True):
        assert float((one - other).norm() / other.norm()) < 0.05


def test_functions_of_others_are_left_and_ours_are_taken(device: Device) -> None:
    from memtrain_cl.nn import RMSCounterLinear

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return 2 * grad * ctx.saved_tensors[0]

    x = activation(ROWS, WIDTH)
    with saved_activations() as report:
        y = Square.apply(x)  # type: ignore[no-untyped-call]
    assert (report.packed, report.left) == (0, 1)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], 2 * x)
    with saved_activations() as report:
        RMSCounterLinear(WIDTH, 8)(x).sum().backward()
    assert report.packed == 1


# ---- what comes back ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "arrange",
    [
        lambda x: x,
        lambda x: x.view(4, 16, WIDTH),
        lambda x: x.view(4, 16, 4, 16).transpose(1, 2),
        lambda x: x.t(),
        lambda x: x[::2],
        lambda x: x.view(4, 16, WIDTH).permute(1, 2, 0),
    ],
    ids=["plain", "view", "heads", "transposed", "rows", "permuted"],
)
def test_shape_and_type_are_restored(device: Device, dtype: torch.dtype, arrange: Callable[..., Any]) -> None:
    x = arrange(activation(ROWS, WIDTH, dtype=dtype))
    factor = torch.randn(x.shape, dtype=dtype, requires_grad=True)
    with saved_activations(8, min_numel=1) as report:
        y = factor * x
    assert report.packed == 1
    got = torch.autograd.grad(y, factor, torch.ones_like(y))[0]
    assert (got.dtype, got.shape) == (dtype, x.shape)
    assert float((got - x.detach()).abs().max()) < 0.05


def test_a_graph_that_is_kept_gives_the_same_again(device: Device) -> None:
    model, x = network(), torch.randn(ROWS, WIDTH)
    with saved_activations(seed=2):
        loss = model(x).square().sum()
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_change_in_place_of_what_was_left_is_noticed(device: Device) -> None:
    x, small = activation(ROWS, WIDTH), activation(4, 4)
    with saved_activations():
        y = x.square().sum() + small.square().sum()
    want = 2 * small.detach()
    with torch.no_grad():
        x.zero_()  # saved in other memory: the gradient is that of what was saved
    assert torch.equal(torch.autograd.grad(y, small, retain_graph=True)[0], want)
    with torch.no_grad():
        small.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, small)


def test_rows_that_are_not_finite_are_kept_in_full(device: Device) -> None:
    model = nn.Linear(WIDTH, 8)
    x = torch.randn(ROWS, WIDTH)
    x[5, 5] = torch.inf
    with saved_activations() as report:
        y = model(x)
    assert (report.packed, report.not_finite) == (0, 1)
    assert report.bytes_after == report.bytes_before
    weights = torch.rand(ROWS, 8)
    weights[5] = 0.0
    got = torch.autograd.grad(y, model.weight, weights)[0]
    assert torch.equal(got[:, 6:], (weights.t() @ x)[:, 6:])
    assert bool(got[:, 5].isnan().all())


# ---- stored once ----


def test_a_tensor_saved_again_is_stored_once(device: Device) -> None:
    x = activation(4, ROWS, WIDTH)
    layers = [nn.Linear(WIDTH, 8) for _ in range(3)]
    with saved_activations() as report:
        y = torch.stack([layer(x).sum() for layer in layers]).sum() + (x * 2.0).sum() + x.square().sum()
    # Linear layers save a view [4 * ROWS, WIDTH] of it.
    assert (report.packed, report.shared) == (1, 3)
    assert report.bytes_before == 4 * x.numel()
    first, *others = torch.autograd.grad(y, [layer.weight for layer in layers])
    assert all(torch.equal(first, other) for other in others)


def test_changed_in_place_it_is_stored_again(device: Device) -> None:
    x = torch.randn(ROWS, WIDTH)
    one, two = (torch.ones(ROWS, WIDTH, requires_grad=True) for _ in range(2))
    with saved_activations(8) as report:
        first = one * x
        x.mul_(-3.0)
        second = two * x
    assert (report.packed, report.shared) == (2, 0)
    was = torch.autograd.grad(first.sum(), one)[0]
    now = torch.autograd.grad(second.sum(), two)[0]
    assert float((now + 3.0 * was).abs().max()) < 0.2


def test_memory_of_a_dead_tensor_is_nobodys(device: Device) -> None:
    factor = torch.ones(ROWS, WIDTH, requires_grad=True)
    memory = np.empty((ROWS, WIDTH), np.float32)
    kept = []
    with saved_activations(8) as report:
        for value in range(3):
            memory.fill(value + 1)
            kept.append(factor * torch.from_numpy(memory))
    assert (report.packed, report.shared) == (3, 0)
    for value, y in enumerate(kept):
        assert torch.autograd.grad(y.sum(), factor)[0].mean() == pytest.approx(value + 1.0, rel=0.02)


def test_data_put_under_a_tensor_is_seen(device: Device) -> None:
    x, factor = torch.ones(ROWS, WIDTH), torch.ones(ROWS, WIDTH, requires_grad=True)
    with saved_activations(8) as report:
        first = factor * x
        x.data = torch.full((ROWS, WIDTH), 5.0)
        second = factor * x
    assert (report.packed, report.shared) == (2, 0)
    assert torch.autograd.grad((second - first).sum(), factor)[0].mean() == pytest.approx(4.0, rel=0.02)


def test_codes_go_with_their_graph(device: Device) -> None:
    saver = saved_activations()
    with saver:
        stored = saver._entered[-1]._stored
        y = activation(ROWS, WIDTH).square()
        assert len(stored) == 1
        del y
        gc.collect()
        assert len(stored) == 0


# ---- chance ----


def test_equal_tensors_are_rounded_apart(device: Device) -> None:
    x = torch.rand(ROWS, WIDTH)
    factors = [torch.ones(ROWS, WIDTH, requires_grad=True) for _ in range(2)]
    with saved_activations(4) as report:
        y = sum((factor * x.clone()).sum() for factor in factors)
    y.backward()  # type: ignore[union-attr]
    assert report.packed == 2
    assert not torch.equal(factors[0].grad, factors[1].grad)  # type: ignore[arg-type]


def test_seeds_and_steps(device: Device) -> None:
    model, x = network(), torch.randn(ROWS, WIDTH)
    saver = saved_activations(seed=5)
    first, second = saved_gradient(model, x, saver), saved_gradient(model, x, saver)
    assert not torch.equal(first, second)
    again = saved_activations(seed=5)
    assert torch.equal(saved_gradient(model, x, again), first)
    assert torch.equal(saved_gradient(model, x, again), second)
    assert not torch.equal(saved_gradient(model, x, saved_activations(seed=6)), first)


@pytest.mark.parametrize("act", [nn.ReLU, nn.Identity])
def test_gradients_keep_their_mean(device: Device, act: type[nn.Module]) -> None:
    model, x = network(act), torch.randn(ROWS, WIDTH)
    want = gradient(model, model(x).sum())
    saver, count = saved_activations(3), 60

    def draw() -> torch.Tensor:
        with saver:
            y = model(x)
        return gradient(model, y.sum())

    drawn = torch.stack([draw() for _ in range(count)])
    error = drawn.mean(0) - want
    # In units of what the mean of so many is expected to be off by: near 1 without a bias, about 8 with a ReLU's signs
    # lost.
    expected = (drawn.var(0) / count).sum().sqrt()
    assert float(error.norm() / expected) < 1.2


# ---- hooks of others, checkpoints ----


def test_nested_the_innermost_counts(device: Device) -> None:
    outer, inner = saved_activations(4), saved_activations(8)
    with outer as first:
        activation(ROWS, WIDTH).square()
        with inner as second:
            activation(ROWS, WIDTH).square()
            with inner as third:
                activation(ROWS, WIDTH).square()
        activation(ROWS, WIDTH).square()
    assert [report.packed for report in (first, second, third)] == [2, 1, 1]
    assert third.bits_per_element > first.bits_per_element
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t), outer as fourth:
        activation(ROWS, WIDTH).square()
    assert fourth.packed == 1
    torch.randn(ROWS, WIDTH, requires_grad=True).square()
    assert fourth.packed == 1


def test_an_error_inside_leaves_nothing_behind(device: Device) -> None:
    saver = saved_activations()
    with pytest.raises(KeyError), saver as report:
        raise KeyError
    activation(ROWS, WIDTH).square()
    assert (report.packed, report.left) == (0, 0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_around_a_checkpoint_its_inputs_stay_in_full(device: Device, reentrant: bool) -> None:
    model, before = network(nn.Tanh), nn.Linear(WIDTH, WIDTH)
    both = nn.ModuleList([model, before])
    x = torch.randn(ROWS, WIDTH)
    want = gradient(both, model(before(x)).square().sum())
    with saved_activations(2) as report:
        y = checkpoint(model, before(x), use_reentrant=reentrant)
    got = gradient(both, y.square().sum())
    # The first layer's input alone is rounded: everything else is recomputed from what it was.
    assert report.packed == 1
    part = sum(p.numel() for p in model.parameters())
    assert torch.equal(got[:part], want[:part])
    assert not torch.equal(got[part:], want[part:])


def test_within_a_checkpoint_it_is_refused(device: Device) -> None:
    model, x = network(), activation(ROWS, WIDTH)
    ran = []

    def region(x: torch.Tensor) -> torch.Tensor:
        with saved_activations():
            ran.append(1)
            return model(x)  # type: ignore[no-any-return]

    with pytest.raises(RuntimeError, match="inside a region of torch"):
        checkpoint(region, x, use_reentrant=False)
    assert not ran
    # Hooks are no obstacle to this one's recompute.
    checkpoint(region, x, use_reentrant=True).sum().backward()
    assert len(ran) == 2


# ---- on the device ----


def test_a_model_on_opencl(trains: torch.device) -> None:
    model, x = network(nn.GELU), torch.randn(ROWS, WIDTH)
    want = saved_gradient(model, x, saved_activations(4, seed=3))
    model.to(trains)
    with strict():
        with saved_activations(4, seed=3) as report:
            y = model(x.to(trains))
        got = gradient(model, y.square().sum())
    assert report.packed == 5
    assert report.bits_per_element == effective_bits(4, WIDTH)
    assert float((got - want).norm() / want.norm()) < 0.05


def test_sharing_on_opencl(trains: torch.device) -> None:
    x = torch.randn(ROWS, WIDTH, device=trains)
    one, two = (torch.ones(ROWS, WIDTH, device=trains, requires_grad=True) for _ in range(2))
    with saved_activations(8) as report:
        first = (one * x).sum() + (two * x).sum()
        x.mul_(-3.0)
        second = (one * x).sum()
        x.data = torch.zeros(ROWS, WIDTH, device=trains)
        third = (one * x).sum()
    assert (report.packed, report.shared) == (3, 1)
    grads = [torch.autograd.grad(y, one)[0].cpu() for y in (first, second, third)]
    assert float((grads[1] + 3 * grads[0]).abs().max()) < 0.2
    assert not grads[2].any()


def test_errors_on_opencl(trains: torch.device) -> None:
    x, small = torch.randn(ROWS, WIDTH, device=trains), torch.ones(4, 4, device=trains, requires_grad=True)
    x[3, 4] = torch.inf
    factor = torch.ones(ROWS, WIDTH, device=trains, requires_grad=True)
    with saved_activations():
        factor * x
        with pytest.raises(NotFinite, match="in row 3"):
            factor.detach().cpu()
        part = small * 1
        y = part.square().sum()
    with torch.no_grad():
        part.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


# ---- refusals ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 1}, r"bits as an integer in 2\.\.15"),
        ({"seed": -1}, r"a seed in 0\.\.2\^32-1"),
        ({"min_numel": 1.5}, "min_numel as an integer"),
        ({"format": "fp4"}, "format as one of int, fp8, got 'fp4'"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        saved_activations(**options)
