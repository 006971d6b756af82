"""linear as one node of the graph on the device "opencl"."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

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


def kept_of(layer: torch.nn.Module, x: torch.Tensor) -> list[tuple[int, ...]]:
    """The shapes of what a layer's forward keeps for backward."""
    shapes: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with memtrain_cl.strict(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    if y.requires_grad:
        y.sum().backward()
    return shapes


def test_only_what_backward_needs_is_kept() -> None:
    x = torch.randn(2, 3, 8, device=HOME)
    layer = torch.nn.Linear(8, 5, device=HOME)
    assert kept_of(layer, x) == [(2, 3, 8)]
    assert kept_of(layer, x.requires_grad_()) == [(2, 3, 8), (5, 8)]
    layer.weight.requires_grad_(False)
    assert kept_of(layer, x) == [(5, 8)]
    assert layer.bias.grad is not None
    assert kept_of(layer, x.detach()) == []
    layer.bias.requires_grad_(False)
    assert kept_of(layer, x.detach()) == []
    x.grad = None
    assert kept_of(layer, x) == [(5, 8)]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(2, 3, 8))


def test_a_weight_that_backward_does_not_need_may_change() -> None:
    layer, x = torch.nn.Linear(8, 5, device=HOME), torch.randn(3, 8, device=HOME)
    one, two = layer(x).sum(), layer(x).sum()
    one.backward()
    with torch.no_grad():
        layer.weight.add_(1.0)
    two.backward()
    through = layer(x.requires_grad_()).sum()
    with torch.no_grad():
        layer.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        through.backward()


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_who_watches_sees_the_product() -> None:
    x, weight = (torch.randn(shape, device=HOME, requires_grad=True) for shape in ((3, 8), (5, 8)))
    with FlopCounterMode(display=False) as counter:
        functional.linear(x, weight).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 3 * 5 * 8
    fixed, tangent = weight.detach(), torch.randn(3, 8, device=HOME)
    with forward_ad.dual_level():
        y = functional.linear(forward_ad.make_dual(x.detach(), tangent), fixed)
        given = forward_ad.unpack_dual(y).tangent
    assert given is not None
    torch.testing.assert_close(given, functional.linear(tangent, fixed))
    rows = torch.func.vmap(lambda row: functional.linear(row, fixed))(x.detach())
    torch.testing.assert_close(rows, functional.linear(x, weight).detach())
    of_one = torch.func.grad(lambda w: functional.linear(x.detach(), w).sum())(fixed)
    torch.testing.assert_close(of_one, x.detach().sum(0).expand(5, 8))
    ones = torch.ones(2, 3, 5, device=HOME)
    (batched,) = torch.autograd.grad(functional.linear(x, weight), weight, ones, is_grads_batched=True)
    torch.testing.assert_close(batched, x.detach().sum(0).expand(2, 5, 8))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_is_no_node(mode: type) -> None:
    x, weight = torch.randn(3, 8, device=HOME), torch.randn(5, 8, device=HOME, requires_grad=True)
    expected = functional.linear(x.cpu(), weight.detach().cpu())
    with memtrain_cl.strict(), mode():
        y = functional.linear(x, weight)
    assert y.grad_fn is None
    torch.testing.assert_close(y.cpu(), expected)


@pytest.mark.parametrize("bias", [(5,), (1, 5), (3, 5), (3, 1), (2, 3, 5)], ids=str)
def test_a_bias_of_any_shape_gets_its_gradient(bias: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn((2, 3, 8)[3 - max(2, len(bias)) :]), torch.randn(5, 8), torch.randn(bias)]
    for got, want in zip(gradients(tensors, HOME), gradients(tensors, "cpu"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shapes", [((2, 3, 8), (8,)), ((8,), (8,)), ((3, 0), (5, 0)), ((3, 8), (0, 8))], ids=str)
def test_vectors_and_nothing(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    if len(shapes[1]) == 2:
        tensors.append(torch.randn(shapes[1][0]))
    for got, want in zip(gradients(tensors, HOME), gradients(tensors, "cpu"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)], ids=str)
def test_products_of_no_rows_have_gradients(shape: tuple[int, ...]) -> None:
    x, weight = (torch.randn(size, device=HOME, requires_grad=True) for size in (shape, (5, 8)))
    (x @ weight.t()).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape
    assert weight.grad is not None
    assert not weight.grad.any()


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


def test_gradients_of_gradients_inside_a_backward() -> None:
    """Under hooks that keep copies, which no checkpoint made."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, 8), torch.randn(5, 8)

    def inner(place: torch.device | str) -> torch.Tensor:
        rows, matrix = (tensor.to(place).requires_grad_() for tensor in (x, weight))
        found: list[torch.Tensor] = []

        def hook(grad: torch.Tensor) -> None:
            copies = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.detach().clone(), lambda kept: kept)
            with torch.enable_grad(), copies:
                z = functional.linear(rows, matrix).square().sum()
                (once,) = torch.autograd.grad(z, rows, create_graph=True)
                found.extend(torch.autograd.grad(once.sum(), matrix))

        outer = torch.ones(2, device=place, requires_grad=True) * 2
        outer.register_hook(hook)
        outer.sum().backward()
        return found[0].cpu()

    torch.testing.assert_close(inner(HOME), inner("cpu"), rtol=1e-4, atol=1e-4)
