"""Counter layers that several test files train and compare."""

from __future__ import annotations

from typing import Any

import torch

from memtrain_cl import reference
from memtrain_cl.nn import CompactCounterLinear, PackedRMSCounterLinear, RMSCounterLinear

IN, OUT = 20, 12
#: Constants that other tests build programs for, too.
KINDS: dict[str, tuple[type[CompactCounterLinear], dict[str, Any]]] = {
    "compact": (CompactCounterLinear, {"C": 8}),
    "rms": (RMSCounterLinear, {"C": 8}),
    "packed": (PackedRMSCounterLinear, {"C": 11}),
    "packed-lagged": (PackedRMSCounterLinear, {"C": 11, "rms_mode": "lagged"}),
    "packed-clip": (PackedRMSCounterLinear, {"C": 11, "local_grad_clip": 0.5}),
    "packed-no-rms": (PackedRMSCounterLinear, {"C": 11, "use_rms": False}),
}
MAIN = ["compact", "rms", "packed"]


def make(kind: str = "packed", in_features: int = IN, out_features: int = OUT, **options: Any) -> CompactCounterLinear:
    cls, preset = KINDS[kind]
    return cls(in_features, out_features, **{"lr": 0.5, "lr_scale": 0.01, **preset, **options})


def twins(kind: str, **options: Any) -> tuple[CompactCounterLinear, CompactCounterLinear]:
    """Equal layers, one on OpenCL and one on the reference."""
    layer, oracle = make(kind, **options), make(kind, ops=reference, **options)
    oracle.load_state_dict(layer.state_dict())
    return layer, oracle


def buffers(layer: CompactCounterLinear) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in layer.named_buffers()}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def train(layer: torch.nn.Module, steps: int = 1, *, start: int = 0, width: int = IN) -> None:
    """Steps on data that depends on the step's number alone."""
    for step in range(start, start + steps):
        chance = torch.Generator().manual_seed(step)
        x = torch.randn(7, width, generator=chance)
        layer(x).square().sum().backward()
