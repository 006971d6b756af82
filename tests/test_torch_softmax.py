"""Softmax kernels against torch's on the CPU: both shapes of the kernels, and torch's own samples on the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from memtrain_cl.device import Device
from memtrain_cl.launchers.softmax import softmax, softmax_backward
from tests.operands import like, operand_of, tensor_of
from tests.torch_samples import check_samples, on_device

#: One below, on and above a vector, a work-item's and a group's registers, and what no group holds.
LENGTHS = (1, 3, 8, 33, 64, 257, 1028, 8193)
#: A few roundings of float32 beside what the type of the result rounds.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def reference(log: bool) -> Callable[..., torch.Tensor]:
    return torch.log_softmax if log else torch.softmax


def check(device: Device, shape: tuple[int, ...], dim: int, dtype: torch.dtype, log: bool) -> None:
    x, grad = (torch.randn(shape) * 3).to(dtype), torch.randn(shape).to(dtype)
    wanted_from = x.double().requires_grad_()
    wanted = reference(log)(wanted_from, dim)
    y = like(device, x)
    softmax(operand_of(device, x, 3), y, dim, log=log)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(tensor_of(y).double(), wanted.detach(), rtol=tolerance, atol=tolerance)

    # The backward of what was stored, not of what was rounded.
    stored = wanted.detach().to(dtype)
    g, v = grad.double(), stored.double()
    grad_wanted = g - v.exp() * g.sum(dim, keepdim=True) if log else v * (g - (g * v).sum(dim, keepdim=True))
    grad_x = like(device, x)
    softmax_backward(operand_of(device, grad, 4), operand_of(device, stored, 1), grad_x, dim, log=log)
    # The sum over the row is of float32: its error grows with what is summed.
    atol = tolerance + 1e-7 * float(g.abs().sum(dim).max() if g.numel() else 0)
    torch.testing.assert_close(tensor_of(grad_x).double(), grad_wanted, rtol=tolerance, atol=atol)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_rows(shaped: Device, length: int, log: bool) -> None:
    check(shaped, (5, length), -1, torch.float32, log)


@pytest.mark.parametrize(("dtype", "log"), [(torch.float16, False), (torch.bfloat16, True)])
def test_rows_of_sixteen_bits(shaped: Device, dtype: torch.dtype, log: bool) -> None:
    for length in (33, 64):
        check(shaped, (5, length), -1, dtype, log)


@pytest.mark.parametrize("log", [False, True])
def test_more_rows_than_a_group_takes_and_other_dimensions(shaped: Device, log: bool) -> None:
    for shape, dim in (((67, 33), 1), ((3, 5, 7), 1), ((9, 70), 0), ((), 0), ((3, 0), 1), ((0, 3), 0)):
        check(shaped, shape, dim, torch.float32, log)


@pytest.mark.parametrize("length", [5, 64, 8193])
def test_rows_that_hold_no_numbers(shaped: Device, length: int) -> None:
    inf = float("inf")
    x = torch.randn(6, length)
    x[0] = -inf
    x[1, : length // 2] = -inf
    x[2, -1] = inf
    x[3, length // 2] = float("nan")
    x[4] = torch.finfo(torch.float32).min
    x[5, 0] = -1e30
    for log in (False, True):
        y = like(shaped, x)
        softmax(operand_of(shaped, x), y, -1, log=log)
        torch.testing.assert_close(tensor_of(y), reference(log)(x, -1), equal_nan=True, rtol=2e-6, atol=1e-6)
    y = like(shaped, x)
    softmax(operand_of(shaped, x), y, -1, log=False, safe=True)
    safe = torch.softmax(x, -1)
    safe[0] = 0
    torch.testing.assert_close(tensor_of(y), safe, equal_nan=True, rtol=2e-6, atol=1e-6)


def test_the_result_may_be_wider(shaped: Device) -> None:
    x = torch.randn(3, 20).half()
    y = like(shaped, x, "float32")
    softmax(operand_of(shaped, x), y, 1, log=False)
    torch.testing.assert_close(tensor_of(y), x.float().softmax(1), rtol=2e-6, atol=1e-7)


def test_operands_that_do_not_fit(device: Device) -> None:
    x = operand_of(device, torch.randn(3, 4))
    with pytest.raises(ValueError, match=r"expected out contiguous of shape \[3, 4\]"):
        softmax(x, like(device, torch.empty(4, 3)), 0, log=False)
    with pytest.raises(TypeError, match="expected out of float32 or float16 or bfloat16, got int64"):
        softmax(x, like(device, torch.empty(3, 4), "int64"), 0, log=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "nn.functional.softmin"])
def test_samples_of_torch(device: Device, name: str, dtype: torch.dtype) -> None:
    check_samples(device, name, dtype)


def test_safe_softmax_and_errors(device: Device) -> None:
    x = torch.randn(3, 4)
    x[1] = -float("inf")
    both = [torch.ops.aten._safe_softmax(value, -1).cpu() for value in (x, on_device(x, device))]
    torch.testing.assert_close(both[1], both[0])
    for wrong in (5, -3):
        with pytest.raises(IndexError, match="Dimension out of range"):
            on_device(x, device).softmax(wrong)
