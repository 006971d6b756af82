"""What the tests of whole models share: the device that torch differentiates on, and runs beside the host's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

import memtrain_cl.torch_device

memtrain_cl.torch_device.require_registered()

#: torch's engine knows this one alone; MEMTRAIN_CL_DEVICE says which device it is.
HOME = torch.device("opencl:0")

Optimizers = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a test that says nothing about optimizers."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def losses(
    model: torch.nn.Module,
    loss_of: Callable[..., torch.Tensor],
    batches: Sequence[tuple[torch.Tensor, ...]],
    device: torch.device,
    optimizer: Optimizers = adamw,
    clip: Callable[[Any], Any] | None = None,
) -> torch.Tensor:
    """The losses of one step a batch, and of the model as it was before each."""
    model.to(device)
    steps = optimizer(model.parameters())
    seen = []
    for batch in batches:
        steps.zero_grad()
        loss = loss_of(model, *(x.to(device) for x in batch))
        loss.backward()
        if clip is not None:
            clip(model.parameters())
        steps.step()
        seen.append(loss.item())
    return torch.tensor(seen)


def assert_same_losses(
    build: Callable[[], torch.nn.Module],
    loss_of: Callable[..., torch.Tensor],
    batches: Sequence[tuple[torch.Tensor, ...]],
    *,
    rtol: float = 1e-3,
    **options: Any,
) -> None:
    """Ten steps or so from equal weights go the same way on the device and on the host, and somewhere."""
    runs = []
    for device in (torch.device("cpu"), HOME):
        torch.manual_seed(0)
        runs.append(losses(build(), loss_of, batches, device, **options))
    torch.testing.assert_close(runs[1], runs[0], rtol=rtol, atol=0)
    assert len(set(runs[0].tolist())) > 1
