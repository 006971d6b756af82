"""Norm kernels against torch's on the CPU: both shapes of the kernels, and torch's own samples on the device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from memtrain_cl.device import Device
from memtrain_cl.launchers.channel_norm import Planes, backward, backward_sums, inverse_deviation, moments, normalize
from memtrain_cl.launchers.norm import column_sums, norm, norm_backward
from memtrain_cl.operand import Operand, empty_operand
from memtrain_cl.torch_device.tensor import torch_device
from tests.operands import like, operand_of, tensor_of
from tests.torch_samples import check_samples, on_device

#: Roundings of float32 sums of some thousand terms, and of results stored in sixteen bits.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_near(got: Operand, wanted: torch.Tensor | None, tolerance: float, what: str) -> None:
    """Errors relative to the largest element: sums cancel."""
    assert wanted is not None
    values = tensor_of(got).double()
    assert values.shape == wanted.shape
    if values.numel():
        error = float((values - wanted.detach()).abs().max() / (wanted.detach().abs().max() + 0.1))
        assert error < tolerance, f"{what}: {error}"


def leaf(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.double().requires_grad_()


def check(
    device: Device, rows: int, n: int, *, rms: bool, dtype: torch.dtype = torch.float32, weights: str = "float32"
) -> None:
    """Forward and backward of one norm; weights: their element, "" for a norm without."""
    x, grad = (torch.randn(rows, n) + 2).to(dtype), torch.randn(rows, n).to(dtype)
    wtype = getattr(torch, weights) if weights else dtype
    weight = torch.randn(n).to(wtype) if weights else None
    bias = torch.randn(n).to(wtype) if weights and not rms else None
    xd, wd, bd = leaf(x), leaf(weight), leaf(bias)
    assert xd is not None
    eps = 1e-3
    wanted = F.rms_norm(xd, (n,), wd, eps) if rms else F.layer_norm(xd, (n,), wd, bd, eps)
    wanted.backward(grad.double())

    y, rstd = like(device, x), empty_operand(device, (rows,), "float32")
    mean = None if rms else empty_operand(device, (rows,), "float32")
    w = None if weight is None else operand_of(device, weight, 4)
    b = None if bias is None else operand_of(device, bias, 1)
    norm(operand_of(device, x, 3), w, b, y, mean, rstd, n=n, eps=eps)
    assert_near(y, wanted, TOLERANCE[dtype], "y")
    grad_x = like(device, x)
    grad_w = None if weight is None else like(device, weight)
    grad_b = None if bias is None else like(device, bias)
    norm_backward(operand_of(device, grad, 8), operand_of(device, x), mean, rstd, w, grad_x, grad_w, grad_b, n=n)
    assert_near(grad_x, xd.grad, TOLERANCE[dtype], "grad_x")
    for got, leaf_ in ((grad_w, wd), (grad_b, bd)):
        if got is not None and leaf_ is not None:
            assert_near(got, leaf_.grad, TOLERANCE[wtype], "grad of weight or bias")


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("n", [3, 8, 33, 257, 1028, 8193])
def test_rows(shaped: Device, n: int, rms: bool) -> None:
    check(shaped, 5, n, rms=rms)


@pytest.mark.parametrize("rms", [False, True])
def test_many_rows_for_each_part(shaped: Device, rms: bool) -> None:
    # More rows than items, so that each adds up several; and rows of one element.
    check(shaped, 4099, 33, rms=rms)
    check(shaped, 5, 1, rms=rms)
    check(shaped, 37, 33, rms=rms, weights="")


@pytest.mark.parametrize(("dtype", "weights"), [(torch.float16, "float16"), (torch.bfloat16, "float32")])
def test_rows_of_sixteen_bits(shaped: Device, dtype: torch.dtype, weights: str) -> None:
    check(shaped, 5, 33 if weights == "float16" else 36, rms=False, dtype=dtype, weights=weights)


def test_a_large_mean_does_not_cancel(shaped: Device) -> None:
    x = torch.randn(3, 1030) * 1e-2 + 100
    y, mean, rstd = like(shaped, x), empty_operand(shaped, (3,), "float32"), empty_operand(shaped, (3,), "float32")
    norm(operand_of(shaped, x), None, None, y, mean, rstd, n=1030, eps=0.0)
    torch.testing.assert_close(tensor_of(y).double(), F.layer_norm(x.double(), (1030,), eps=0.0), rtol=1e-2, atol=1e-2)


def test_the_same_sums_again(shaped: Device) -> None:
    parts = torch.randn(37, 2, 21)
    first, second = (empty_operand(shaped, (21,), "float32") for _ in range(2))
    source = operand_of(shaped, parts, 3)
    results = []
    for _ in range(2):
        column_sums(source, first, second)
        results.append((tensor_of(first), tensor_of(second)))
    for i, got in enumerate(results[0]):
        torch.testing.assert_close(got, parts[:, i].sum(0), rtol=1e-5, atol=1e-5)
        assert torch.equal(got, results[1][i])
    column_sums(source, None, second)
    assert torch.equal(tensor_of(second), results[0][1])


def test_operands_that_do_not_fit(device: Device) -> None:
    x = operand_of(device, torch.randn(3, 4))
    rstd = empty_operand(device, (3,), "float32")
    y = like(device, torch.empty(3, 4))
    with pytest.raises(ValueError, match="expected weight or bias contiguous, 4 elements of float32"):
        norm(x, operand_of(device, torch.randn(3)), None, y, None, rstd, n=4, eps=0.0)
    with pytest.raises(ValueError, match="expected y contiguous, 12 elements of float32"):
        norm(x, None, None, like(device, torch.empty(3, 4), "float16"), None, rstd, n=4, eps=0.0)
    with pytest.raises(ValueError, match="expected no gradient of a bias"):
        norm_backward(x, x, None, rstd, None, y, None, operand_of(device, torch.randn(4)), n=4)
    with pytest.raises(ValueError, match="expected grad_y contiguous, 12 elements"):
        norm_backward(operand_of(device, torch.randn(3, 3)), x, None, rstd, None, y, None, None, n=4)


# ---- norms by channels ----


def check_channels(
    device: Device, shape: tuple[int, int, int], groups: int, dtype: torch.dtype = torch.float32
) -> None:
    """Group norm, or batch norm in training for groups = 0, of [images, channels, space]."""
    x, grad = (torch.randn(shape) + 1).to(dtype), torch.randn(shape).to(dtype)
    weight, bias = torch.randn(shape[1]), torch.randn(shape[1])
    running = torch.rand(shape[1]), torch.rand(shape[1])
    xd, wd, bd = leaf(x), leaf(weight), leaf(bias)
    assert xd is not None
    assert wd is not None
    assert bd is not None
    kept = running[0].double(), running[1].double()
    wanted = F.group_norm(xd, groups, wd, bd, 1e-3) if groups else F.batch_norm(xd, *kept, wd, bd, True, 0.3, 1e-3)
    wanted.backward(grad.double())

    planes = Planes(*shape, groups)
    mean, rstd = (empty_operand(device, (planes.statistics,), "float32") for _ in range(2))
    source, w, b = operand_of(device, x, 3), operand_of(device, weight, 1), operand_of(device, bias, 2)
    moving = operand_of(device, running[0], 1), operand_of(device, running[1], 2)
    moments(source, planes, mean, rstd, eps=1e-3, running=None if groups else moving, momentum=0.3)
    y, grad_x, upstream = like(device, x), like(device, x), operand_of(device, grad, 4)
    normalize(source, planes, mean, rstd, w, b, y)
    tolerance = TOLERANCE[dtype]
    assert_near(y, wanted, tolerance, "y")
    for got, value in zip(moving, kept if not groups else running, strict=True):
        assert_near(got, value, 4e-6, "running")
    sums = backward_sums(upstream, source, planes, mean, rstd)
    backward(upstream, source, planes, mean, rstd, w, sums, grad_x)
    assert_near(grad_x, xd.grad, tolerance, "grad_x")
    grad_w, grad_b = like(device, weight), like(device, bias)
    column_sums(sums, grad_w, grad_b)
    assert_near(grad_w, wd.grad, 4e-6, "grad_weight")
    assert_near(grad_b, bd.grad, 4e-6, "grad_bias")


@pytest.mark.parametrize("groups", [0, 1, 3])
def test_channels(shaped: Device, groups: int) -> None:
    for shape in ((3, 6, 35), (2, 6, 1), (70, 3, 3)):
        check_channels(shaped, shape, groups)


def test_channels_of_sixteen_bits_and_long_ones(shaped: Device) -> None:
    check_channels(shaped, (3, 6, 35), 2, torch.bfloat16)
    check_channels(shaped, (2, 2, 5003), 0)


def test_statistics_that_do_not_depend_on_x(shaped: Device) -> None:
    x, grad, variance = torch.randn(2, 3, 5), torch.randn(2, 3, 5), torch.rand(3) + 0.5
    planes, zeros = Planes(2, 3, 5), operand_of(shaped, torch.zeros(3))
    rstd, grad_x = empty_operand(shaped, (3,), "float32"), like(shaped, x)
    inverse_deviation(operand_of(shaped, variance, 2), rstd, eps=1e-3)
    factor = 1 / (variance + 1e-3).sqrt()
    torch.testing.assert_close(tensor_of(rstd), factor)
    backward(operand_of(shaped, grad), operand_of(shaped, x), planes, zeros, rstd, None, None, grad_x)
    torch.testing.assert_close(tensor_of(grad_x), grad * factor[:, None])


# ---- the torch device ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"])
def test_samples_of_torch(device: Device, name: str, dtype: torch.dtype) -> None:
    # torch makes float64 statistics of a batch without elements, which the device does not hold.
    check_samples(
        device,
        f"nn.functional.{name}",
        dtype,
        skip=(lambda sample: sample.input.numel() == 0) if name == "batch_norm" else None,
    )


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_moves_its_statistics(device: Device, training: bool) -> None:
    results = []
    for home in (None, device):
        torch.manual_seed(0)
        module = torch.nn.BatchNorm2d(3).train(training)
        module.get_buffer("running_mean").uniform_()
        module.get_buffer("running_var").uniform_(0.5, 2)
        x = torch.randn(2, 3, 4, 5)
        if home is not None:
            module, x = module.to(torch_device(home)), on_device(x, home)
        y = module(x)
        results.append([y, module.running_mean, module.running_var, module.num_batches_tracked])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other.detach().cpu(), one.detach())


def test_rms_norm_is_one_operation_and_differentiable_twice(device: Device) -> None:
    if torch_device(device).index != 0:
        pytest.skip("torch differentiates on opencl:0 alone")
    results = []
    for home in (None, device):
        torch.manual_seed(0)
        x, w = torch.randn(3, 8), torch.randn(8)
        if home is not None:
            x, w = on_device(x, home), on_device(w, home)
        x.requires_grad_()
        y = F.rms_norm(x, (8,), w)
        if home is not None:
            assert "FusedRmsNorm" in type(y.grad_fn).__name__
        (once,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        (twice,) = torch.autograd.grad((once * once).sum(), x)
        results.append((once.detach().cpu(), twice.cpu()))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


def test_errors_are_those_of_torch(device: Device) -> None:
    x = on_device(torch.randn(3, 8), device)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        F.layer_norm(x, (9,))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        F.rms_norm(x, (9,))
    with pytest.raises(RuntimeError, match="divisible"):
        F.group_norm(x, 3)
