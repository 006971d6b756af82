"""saved_activations(format="fp8"): 8-bit floating numbers, and what is kept where the guard refuses them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memtrain_cl.torch_device  # noqa: F401 (registers the device)
from memtrain_cl import reference, saved_activations
from memtrain_cl.device import Device
from memtrain_cl.torch_device.fallback import strict
from tests.saving_cases import ROWS, WIDTH, activation, gradient, network, saved_gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_activations_in_8_bit_floating_numbers(device: Device, dtype: torch.dtype) -> None:
    x = activation(ROWS, WIDTH, dtype=dtype)
    factor = torch.randn(ROWS, WIDTH, dtype=dtype, requires_grad=True)
    with saved_activations(format="fp8") as report:
        y = factor * x.t()
        again = factor * x.t()
    assert (report.packed, report.fallbacks, report.not_finite, report.shared) == (1, 0, 0, 1)
    assert report.bits_per_element == 8.0
    want = reference.fp8_restore(reference.fp8_cast(x.detach().t()), dtype=dtype)
    for made in (y, again):
        got = torch.autograd.grad(made, factor, torch.ones_like(made))[0]
        assert got.dtype == dtype
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_8_bits_would_not_hold_falls_back(device: Device, dtype: torch.dtype) -> None:
    """A tensor at a time: to bfloat16, to its own 16 bits, or not at all where a number is not finite or too large."""
    fine, large, tiny = (torch.randn(ROWS, WIDTH).to(dtype) * size for size in (1.0, 1e3, 1e-5))
    wrong, most = fine.clone(), fine.clone()
    wrong[3, 5] = torch.inf
    most[3, 5] = torch.finfo(dtype).max
    sources = (fine, large, tiny, wrong, most)
    factors = [torch.ones(ROWS, WIDTH, dtype=dtype, requires_grad=True) for _ in sources]
    with saved_activations(format="fp8") as report:
        products = [factor * x for factor, x in zip(factors, sources, strict=True)]
    assert (report.packed, report.fallbacks, report.not_finite) == (1, 3, 1)
    # Largest numbers of float32 are beyond bfloat16.
    each = ROWS * WIDTH
    assert report.bytes_after == (each * (1 + 2 + 2 + 4 + 4) if dtype == torch.float32 else each * (1 + 4 * 2))
    assert "1 not finite, 3 beyond 8-bit numbers" in str(report)
    for x, factor, product in zip(sources[1:], factors[1:], products[1:], strict=True):
        got = torch.autograd.grad(product.float().nan_to_num(0.0, 0.0, 0.0).sum(), factor)[0]
        kept = x if x is wrong or x is most else x.to(torch.bfloat16).to(dtype) if dtype == torch.float32 else x
        assert torch.equal(got[:3], kept[:3])


def test_a_relu_keeps_its_signs_beside_8_bit_numbers(device: Device) -> None:
    x = activation(ROWS, WIDTH) * 1e-6
    with saved_activations(format="fp8") as report:
        y = F.relu(x)
    assert (report.packed, report.fallbacks) == (1, 0)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], (x.detach() > 0).float())


def test_a_model_of_8_bit_activations(device: Device) -> None:
    """On "opencl" as on the host, and near the gradient of full activations."""
    if device.info.index:
        pytest.skip("torch differentiates on opencl:0 alone")
    trains = torch.device("opencl", 0)
    model, x = network(nn.GELU), torch.randn(ROWS, WIDTH)
    want = gradient(model, model(x).square().sum())
    on_host = saved_gradient(model, x, saved_activations(format="fp8"))
    with strict():
        there = saved_gradient(network(nn.GELU).to(trains), x.to(trains), saved_activations(format="fp8"))
    for got, other in ((on_host, want), (there, on_host)):
        assert float((got - other).norm() / other.norm()) < 0.05
    assert not torch.equal(on_host, want)
