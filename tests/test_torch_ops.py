"""torch's own op samples on each device, in strict mode: the first few of every op that has a kernel.

`python -m tests.opdb` runs all samples. Gradients are compared on opencl:0, where torch differentiates.
"""

from __future__ import annotations

import pytest
import torch

from memtrain_cl.device import Device
from memtrain_cl.torch_device.tensor import torch_device
from tests.opdb import INCOMPARABLE, is_held, op_infos, run_op, to_device
from tests.opdb_ops import BFLOAT16, FLOAT32

#: Samples of an op: each geometry and each type is a program to build.
SAMPLES = 3


def check(device: Device, names: tuple[str, ...], name: str, dtype: torch.dtype) -> None:
    if device.info.index and names.index(name) % 8:
        pytest.skip("every eighth op on devices that are not opencl:0; make platforms makes each device that")
    info = op_infos().get(name)
    if info is None or not info.supports_dtype(dtype, "cpu"):
        pytest.skip(f"torch {torch.__version__} has no samples of it")
    outcome = run_op(info, torch_device(device), dtype, SAMPLES)
    assert outcome.status == "ok", f"{outcome.status}: {outcome.detail}"
    assert outcome.samples


@pytest.mark.parametrize("name", FLOAT32)
def test_samples_in_float32(device: Device, name: str) -> None:
    check(device, FLOAT32, name, torch.float32)


@pytest.mark.parametrize("name", BFLOAT16[::16])
def test_samples_in_bfloat16(device: Device, name: str) -> None:
    check(device, BFLOAT16, name, torch.bfloat16)


def test_lists_are_of_ops_that_can_be_compared() -> None:
    names = set(op_infos())
    assert set(BFLOAT16) <= set(FLOAT32) <= names
    assert not set(FLOAT32) & set(INCOMPARABLE)
    assert len(set(FLOAT32)) == len(FLOAT32)


def test_samples_keep_their_geometry(device: Device) -> None:
    base = torch.arange(24.0)
    view = base[2:20:3].view(2, 3).t()
    moved, names = to_device((view, ["cpu", "mean"]), torch_device(device))
    assert moved.stride() == view.stride()
    assert moved.storage_offset() == view.storage_offset()
    assert torch.equal(moved.cpu(), view)
    assert names == [torch_device(device), "mean"]
    assert is_held((view, torch.bfloat16))
    assert not is_held(view.double())
    assert not is_held(torch.float64)
    assert not is_held(view.to_sparse())


def test_a_wrong_result_is_seen(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    info = op_infos()["sigmoid"]
    monkeypatch.setattr(info, "op", lambda x: torch.sigmoid(x) + (1e-2 if x.device.type == "opencl" else 0))
    assert run_op(info, torch_device(device), torch.float32, 2).status == "wrong"
    monkeypatch.setattr(info, "op", torch.special.bessel_j0)
    assert run_op(info, torch_device(device), torch.float32, 2, forward=True).status == "host"
    monkeypatch.setattr(info, "op", lambda x: x.no_such_method())
    assert run_op(info, torch_device(device), torch.float32, 2).status == "error"
