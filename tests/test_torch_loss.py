"""Negative log-likelihood against torch's on the CPU, and torch's own samples of losses on the device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import memtrain_cl
from memtrain_cl.device import Device
from memtrain_cl.faults import raise_pending
from memtrain_cl.launchers.loss import nll, nll_backward, nll_each
from memtrain_cl.operand import empty_operand
from memtrain_cl.torch_device.tensor import torch_device
from tests.operands import like, operand_of, tensor_of
from tests.torch_samples import check_samples, on_device

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("weighted", [False, True])
def test_every_reduction(shaped: Device, weighted: bool, dtype: torch.dtype) -> None:
    # One target, and more than all the groups take at once.
    for images, classes, space in ((1, 1, 1), (5, 7, 3), (2300, 3, 1), (2, 3, 1100)):
        x = torch.randn(images, classes, space).to(dtype)
        target = torch.randint(0, classes, (images, space))
        if images > 1:
            target[1] = -7
        weight = torch.rand(classes).add(0.5).to(dtype) if weighted else None
        xd = x.double().requires_grad_()
        source, aims = operand_of(shaped, x, 3), operand_of(shaped, target, 1)
        weights = None if weight is None else operand_of(shaped, weight, 2)
        for reduction in ("none", "sum", "mean"):
            options = {"weight": None if weight is None else weight.double(), "ignore_index": -7}
            wanted = F.nll_loss(xd, target, reduction=reduction, **options)  # type: ignore[arg-type]
            grad = torch.randn(wanted.shape).to(dtype)
            (wanted_grad,) = torch.autograd.grad(wanted, xd, grad.double())
            total = None
            if reduction == "none":
                loss = like(shaped, x[:, 0])
                nll_each(source, aims, weights, loss, ignore=-7)
            else:
                loss, total = (empty_operand(shaped, (), source.element) for _ in range(2))
                nll(source, aims, weights, loss, total, ignore=-7, mean=reduction == "mean")
            tolerance = TOLERANCE[dtype]
            scale = float(x.double().abs().sum()) if reduction == "sum" else 1.0
            torch.testing.assert_close(
                tensor_of(loss).double(), wanted.detach(), rtol=tolerance, atol=tolerance * max(1e-1, scale * 1e-1)
            )
            grad_x = operand_of(shaped, torch.zeros_like(x))
            mean_of = total if reduction == "mean" else None
            nll_backward(operand_of(shaped, grad, 1), aims, weights, mean_of, grad_x, ignore=-7)
            torch.testing.assert_close(tensor_of(grad_x).double(), wanted_grad, rtol=2 * tolerance, atol=tolerance)


def test_a_target_that_is_no_class(shaped: Device) -> None:
    x, target = operand_of(shaped, torch.randn(3, 4, 1)), operand_of(shaped, torch.tensor([[1], [4], [0]]))
    nll_each(x, target, None, like(shaped, torch.empty(3, 1)), ignore=-100)
    with pytest.raises(IndexError, match="index 4 is out of bounds for dimension with size 4"):
        raise_pending(shaped)


def test_operands_that_do_not_fit(device: Device) -> None:
    x = operand_of(device, torch.randn(3, 4, 1))
    with pytest.raises(TypeError, match="expected target of int64, got float32"):
        nll_each(x, operand_of(device, torch.randn(3, 1)), None, like(device, torch.empty(3, 1)), ignore=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["nll_loss", "cross_entropy"])
def test_samples_of_torch(device: Device, name: str, dtype: torch.dtype) -> None:
    check_samples(device, f"nn.functional.{name}", dtype)


@pytest.mark.parametrize(
    "name",
    ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"],
)
def test_samples_of_losses_that_torch_decomposes(device: Device, name: str) -> None:
    check_samples(device, f"nn.functional.{name}", torch.float32)


def test_a_classifier_needs_no_host(device: Device) -> None:
    if torch_device(device).index != 0:
        pytest.skip("torch differentiates on opencl:0 alone")
    x, target = torch.randn(6, 9), torch.tensor([1, 2, -100, 8, 0, 3])
    with memtrain_cl.strict():
        logits = on_device(x, device).requires_grad_()
        F.cross_entropy(logits, on_device(target, device)).backward()
    reference = x.requires_grad_()
    F.cross_entropy(reference, target).backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.cpu(), reference.grad)
