"""Tensors of any shape, strides and contents through public functions; the acceptance run tries more of them."""

from __future__ import annotations

import pytest

from bench.hostile import SUBJECTS, sweep
from memtrain_cl.device import Device


@pytest.mark.parametrize("name", list(SUBJECTS))
def test_any_tensor_is_answered(device: Device, name: str) -> None:
    assert sweep(name, 50) == ""
