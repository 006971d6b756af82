"""torch's own samples of an operation, run on the device and on the CPU: results and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

import memtrain_cl.torch_device
from memtrain_cl.device import Device
from memtrain_cl.torch_device.tensor import torch_device
from tests.torch_op_db import op_db, sample_inputs

memtrain_cl.torch_device.require_registered()

#: A few roundings: of float32 sums of some dozen terms, and of results stored in eight bits.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def on_device(tensor: torch.Tensor, device: Device) -> torch.Tensor:
    """The same values and strides on the device."""
    return tensor.detach().to(torch_device(device))


def _leaf(tensor: torch.Tensor, device: Device | None, *, differentiable: bool) -> torch.Tensor:
    if device is not None:
        twin = on_device(tensor, device)
    else:
        twin = tensor.detach().double() if tensor.is_floating_point() else tensor.clone()
    return twin.requires_grad_(differentiable and tensor.requires_grad and tensor.is_floating_point())


def _run(op: Any, sample: Any, device: Device | None, *, differentiable: bool) -> tuple[list[Any], list[Any]]:
    """(results, gradients of what requires them) on the device, or for None in float64 on the CPU."""
    flat, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    leaves = [
        _leaf(value, device, differentiable=differentiable) if isinstance(value, torch.Tensor) else value
        for value in flat
    ]
    first, args, kwargs = tree_unflatten(leaves, spec)
    out, _ = tree_flatten(op(first, *args, **kwargs))
    out = [value for value in out if isinstance(value, torch.Tensor)]
    asked = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    ends = [value for value in out if value.requires_grad]
    grads: list[Any] = []
    if asked and ends:
        # The same upstream gradients on both sides, not constant.
        seeds = [torch.cos(torch.arange(end.numel())).reshape(end.shape).to(end.dtype) for end in ends]
        grads = list(
            torch.autograd.grad(
                ends, asked, [seed.to(end.device) for seed, end in zip(seeds, ends, strict=True)], allow_unused=True
            )
        )
    return out, grads


def check_samples(
    device: Device, name: str, dtype: torch.dtype, *, variant: str = "", skip: Callable[[Any], bool] | None = None
) -> None:
    """Compare torch's samples of the operation `name`, but those to skip; gradients where torch has them (opencl:0)."""
    op = next(op for op in op_db if op.name == name and op.variant_test_name == variant)
    differentiable = torch_device(device).index == 0 and dtype in op.backward_dtypes
    samples = list(sample_inputs(op, dtype, requires_grad=differentiable))
    assert samples
    for sample in samples:
        if skip is not None and skip(sample):
            continue
        wanted, got = (_run(op, sample, home, differentiable=differentiable) for home in (None, device))
        for part in (0, 1):
            _compare(got[part], wanted[part], dtype, f"{name} {sample}")


def _compare(got: list[Any], wanted: list[Any], dtype: torch.dtype, what: str) -> None:
    assert len(got) == len(wanted), what
    tolerance = TOLERANCE[dtype]
    for one, other in zip(got, wanted, strict=True):
        if other is None:
            assert one is None, what
            continue
        assert one.device.type == "opencl", what
        assert one.dtype == (dtype if other.is_floating_point() else other.dtype), what
        other = other.detach()
        finite = other[other.isfinite()].abs() if other.is_floating_point() else other
        scale = float(finite.max()) if finite.numel() and other.is_floating_point() else 1.0
        torch.testing.assert_close(
            one.detach().cpu().to(other.dtype),
            other,
            rtol=tolerance,
            atol=tolerance * max(1.0, scale),
            equal_nan=True,
            msg=lambda text: f"{what}: {text}",
        )
