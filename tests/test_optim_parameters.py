"""Which parameters the optimizers take: those with memory of their own, whole, on one device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memtrain_cl.torch_device  # noqa: F401 (registers the device)
from memtrain_cl import Automagic, CompressedAdam, compress_moment, detect_anomaly, fit_sorted_profile
from memtrain_cl.device import Device

OPTIMIZERS = (CompressedAdam, Automagic)
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS)


@each_optimizer
def test_two_parameters_in_one_memory_are_refused(place: torch.device, make: Any) -> None:
    for home in (torch.device("cpu"), place):
        whole = torch.ones(12, device=home)
        first, second, third = nn.Parameter(whole[:8]), nn.Parameter(whole[4:]), nn.Parameter(whole[8:])
        with pytest.raises(ValueError, match=r"memory of their own, got \[8\] and \[8\] in the same"):
            make([first, second])
        optimizer = make([first, third])
        with pytest.raises(ValueError, match="memory of their own"):
            optimizer.add_param_group({"params": [("second", second)]})
        assert len(optimizer.param_groups) == 1
        assert optimizer.param_groups[0]["params"] == [first, third]


@each_optimizer
def test_neighbours_and_columns_of_one_tensor_are_taken(device: Device, make: Any) -> None:
    whole = torch.ones(4, 6)
    columns = [nn.Parameter(whole[:, place]) for place in range(3)]
    empty = [nn.Parameter(torch.empty(0)) for _ in range(2)]
    assert len(make([*columns, *empty]).param_groups[0]["params"]) == 5


@each_optimizer
def test_distributed_tensors_are_refused(make: Any) -> None:
    shard = nn.Parameter(torch.ones(3))
    shard.device_mesh = SimpleNamespace()  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="on one device whole, got a DTensor"):
        make([shard])


@each_optimizer
def test_sparse_parameters_are_refused(make: Any) -> None:
    with pytest.raises(TypeError, match=r"dense parameters, got one of layout torch\.sparse_coo"):
        make([nn.Parameter(torch.eye(3).to_sparse())])


@pytest.mark.parametrize("take", [compress_moment, fit_sorted_profile, detect_anomaly])
def test_numbers_beyond_float32_are_refused(take: Any) -> None:
    x = torch.full((64,), 1e300, dtype=torch.float64)
    with pytest.raises(ValueError, match="that float32 holds, got 1e"):
        take(*[x] * (2 if take is detect_anomaly else 1))
