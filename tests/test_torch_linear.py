"""linear and its derivative as single operations of the device "opencl"."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import memtrain_cl
from tests.torch_home import HOME

pytestmark = pytest.mark.device

SHAPES = [(8,), (4, 8), (2, 3, 8), (2, 3, 4, 8), (0, 8), (2, 0, 8)]


def gradients(
    tensors: list[torch.Tensor], place: torch.device | str, *, transposed: bool = False
) -> list[torch.Tensor]:
    """The result, its gradients, and the gradients of those, on the host."""
    given = [tensor.detach().to(place).requires_grad_() for tensor in tensors]
    x, weight, *bias = given
    # In another order in memory, as attention hands its result over.
    x = x.transpose(0, 1) if transposed else x
    y = functional.linear(x, weight, *bias)
    once = torch.autograd.grad((y * y).sum(), given, create_graph=True)
    twice = torch.autograd.grad(torch.stack([(grad * grad).sum() for grad in once]).sum(), given)
    return [tensor.detach().cpu() for tensor in (y, *once, *twice)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_it_and_its_gradients_agree_with_the_host(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(shape), torch.randn(5, 8), *([torch.randn(5)] if bias else [])]
    for got, expected in zip(gradients(tensors, HOME), gradients(tensors, "cpu"), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_rows_that_lie_in_another_order() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(3, 4, 8), torch.randn(5, 8), torch.randn(5)]
    expected = gradients(tensors, "cpu", transposed=True)
    for got, want in zip(gradients(tensors, HOME, transposed=True), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_torch_sees_one_function_that_keeps_its_operands() -> None:
    x, weight = (
        torch.randn(2, 3, 8, device=HOME, requires_grad=True),
        torch.randn(5, 8, device=HOME, requires_grad=True),
    )
    with memtrain_cl.strict():
        y = functional.linear(x, weight)
        assert y.grad_fn is not None
        assert y.grad_fn.name() == "LinearBackward0"
        assert y.grad_fn._saved_input is x  # type: ignore[attr-defined]
        assert y.grad_fn._saved_weight is weight  # type: ignore[attr-defined]
        y.sum().backward()


def test_a_frozen_weight_gets_no_gradient() -> None:
    layer = torch.nn.Linear(8, 5, device=HOME).requires_grad_(False)
    x = torch.randn(3, 8, device=HOME, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(3, 8))
    assert layer.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types_are_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(4, 40).to(dtype), torch.randn(6, 40).to(dtype), torch.randn(6).to(dtype)
    got = functional.linear(x.to(HOME), weight.to(HOME), bias.to(HOME))
    expected = functional.linear(x.float(), weight.float(), bias.float())
    assert got.dtype == dtype
    torch.testing.assert_close(got.cpu().float(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.filterwarnings("ignore::memtrain_cl.torch_device.fallback.FallbackWarning")
def test_whole_numbers_and_vectors_go_by_way_of_smaller_operations() -> None:
    ones = torch.ones(2, 3, dtype=torch.int64, device=HOME)
    assert functional.linear(ones, ones).tolist() == [[3, 3], [3, 3]]
    x, weight = torch.randn(2, 3, 8), torch.randn(8)
    got = functional.linear(x.to(HOME), weight.to(HOME))
    torch.testing.assert_close(got.cpu(), functional.linear(x, weight))


def test_what_it_refuses() -> None:
    x = torch.ones(2, 3, device=HOME)
    with pytest.raises(RuntimeError, match=r"reduction dim|shapes"):
        functional.linear(x, torch.ones(2, 4, device=HOME))
    with pytest.raises(RuntimeError, match="same device"):
        functional.linear(x, torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="same dtype"):
        functional.linear(x, torch.ones(2, 3, device=HOME).bfloat16())
