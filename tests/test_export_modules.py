"""Torch modules to engine files and back: exported bytes are the live state, and training goes on bit for bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memtrain_cl.reference
from memtrain_cl.export.container import RawTensor, Tensor
from memtrain_cl.export.packed import EngineFile, export_model, load_into, read_engine, verify_export
from memtrain_cl.nn import (
    CompactCounterLinear,
    PackedRMSCounterLinear,
    RMSCounterLinear,
    layer_from_state,
    layer_state,
)
from tests.export_cases import assert_same_layer

KINDS = (CompactCounterLinear, RMSCounterLinear, PackedRMSCounterLinear)


class Small(nn.Module):
    """An embedding, one layer of each kind, a bfloat16 parameter and an integer buffer."""

    def __init__(self, ops: Any, seed: int, C: int = 11, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(
            kind(8, width if kind is RMSCounterLinear else 8, C=C, ops=ops) for kind in KINDS[:2]
        )
        self.head = PackedRMSCounterLinear(width, 12, C=C, lr=0.1, ops=ops)
        self.gain = nn.Parameter(torch.randn(width).bfloat16())
        self.register_buffer("count", torch.tensor(seed))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        out: torch.Tensor = self.head(hidden * self.gain.float())
        return out


def train(model: Small, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        random = torch.Generator().manual_seed(step)
        out = model(torch.randint(0, 16, (2, 5), generator=random))
        out.backward(torch.randn(out.shape, generator=random))


@pytest.fixture(params=["reference", pytest.param("opencl", marks=pytest.mark.device)])
def ops(request: pytest.FixtureRequest) -> Any:
    return memtrain_cl.reference if request.param == "reference" else None


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_model(ours: nn.Module, theirs: dict[str, torch.Tensor]) -> None:
    assert ours.state_dict().keys() == theirs.keys()
    for name, value in ours.state_dict().items():
        assert value.dtype == theirs[name].dtype, name
        assert torch.equal(value, theirs[name]), name


def test_exported_bytes_are_the_live_state(tmp_path: Path, ops: Any) -> None:
    model = Small(ops, 1)
    train(model, 3)
    path = tmp_path / "m.safetensors"
    export_model(model, path, {"width": 8})
    assert verify_export(model, path) == []
    engine = read_engine(path)
    assert engine.layers.keys() == {"layers.0", "layers.1", "head"}
    assert engine.tensors.keys() == {"embed.weight", "gain", "count"}
    assert engine.model == {"width": 8}
    for name, kind in (("layers.0", KINDS[0]), ("layers.1", KINDS[1]), ("head", KINDS[2])):
        layer = model.get_submodule(name)
        assert type(layer) is kind
        stored = engine.layers[name]
        assert (stored.kind, stored.step, stored.seed) == (kind.__name__, 3, layer.seed)
        assert stored.state.tobytes() == layer.packed_state().numpy().tobytes()
        assert stored.scale.tobytes() == layer.scale.numpy().tobytes()
    again = tmp_path / "again"
    export_model(model, again, {"width": 8})
    assert again.read_bytes() == path.read_bytes()


def test_a_loaded_model_continues_bit_for_bit(tmp_path: Path, ops: Any) -> None:
    model = Small(ops, 1)
    train(model, 3)
    export_model(model, tmp_path / "m", {})
    other = Small(ops, 2)
    load_into(other, read_engine(tmp_path / "m"))
    assert verify_export(other, tmp_path / "m") == []
    assert_same_model(other, snapshot(model))
    before = snapshot(model)
    for one in (model, other):
        train(one, 4, start=3)
    assert_same_model(other, snapshot(model))
    assert not torch.equal(model.head.state, before["head.state"])
    assert model.head.step == other.head.step == 7


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_made_from_the_file_continues_bit_for_bit(
    tmp_path: Path, ops: Any, kind: type[CompactCounterLinear]
) -> None:
    options: dict[str, Any] = {"C": 9, "lr": 0.3, "local_grad_clip": 0.5, "tile_rows": 2}
    if kind is not CompactCounterLinear:
        options |= {"rms_mode": "lagged", "rms_beta": 0.8}
    torch.manual_seed(4)
    layer = kind(8, 5, **options, ops=ops)
    x, grad = torch.randn(3, 8), torch.randn(3, 5)
    layer(x).backward(grad)
    export_model(layer, tmp_path / "m", {})
    stored = read_engine(tmp_path / "m").layers[""]
    made = layer_from_state(stored, ops=ops)
    assert type(made) is kind
    assert made.hyper() == layer.hyper()
    for one in (layer, made):
        for _ in range(3):
            one(x).backward(grad)
    assert_same_layer(layer_state(made), layer_state(layer))
    assert layer_state(layer).state.tobytes() != stored.state.tobytes()


def test_differences_are_named(tmp_path: Path) -> None:
    model = Small(memtrain_cl.reference, 1)
    export_model(model, tmp_path / "m", {})
    with torch.no_grad():
        model.gain[0] += 1
        model.head.scale[2] *= 2
        model.head.step += 1
    model.register_buffer("new", torch.zeros(1))
    del model.count
    assert sorted(verify_export(model, tmp_path / "m")) == ["count", "gain", "head.scale", "head.step", "new"]
    model = Small(memtrain_cl.reference, 1)
    train(model, 1)
    different = verify_export(model, tmp_path / "m")
    assert {"head.state", "head.scale", "head.v", "head.step", "layers.0.state", "layers.1.v"} <= set(different)
    assert not {"embed.weight", "gain", "count"} & set(different)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: Small(memtrain_cl.reference, 2, C=10), r"'layers\.0'.*C.*10.*11"),
        (lambda: Small(memtrain_cl.reference, 2, width=12), r"'layers\.1'.*12.*8"),
        (
            lambda: Small(memtrain_cl.reference, 2).double(),
            r"'embed\.weight': expected torch\.float64 .* got torch\.float32",
        ),
        (lambda: nn.ModuleDict({"head": nn.Linear(8, 12)}), "layer 'head' in the file only"),
        (lambda: without(Small(memtrain_cl.reference, 2), "count"), "tensor 'count' in the file only"),
        (lambda: resized(Small(memtrain_cl.reference, 2)), r"'gain'.*\[9\].*\[8\]"),
    ],
)
def test_a_module_that_does_not_fit_is_refused_and_unchanged(tmp_path: Path, other: Any, message: str) -> None:
    export_model(Small(memtrain_cl.reference, 1), tmp_path / "m", {})
    module = other()
    before = snapshot(module)
    with pytest.raises(ValueError, match=message):
        load_into(module, read_engine(tmp_path / "m"))
    assert_same_model(module, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": "fast"}, r"'head': expected lr .* got 'fast' in the file"),
        ({"rms_mode": "mean"}, "'head': expected rms_mode"),
        ({"tile_rows": -1}, "'head': expected tile_rows"),
        ({"pulse": 1}, r"'head': expected options of .* got \['pulse'\]"),
    ],
)
def test_options_that_a_layer_does_not_take_are_refused(options: dict[str, Any], message: str) -> None:
    model, other = Small(memtrain_cl.reference, 1), Small(memtrain_cl.reference, 2)
    layers = {
        name: layer_state(layer) for name, layer in model.named_modules() if isinstance(layer, CompactCounterLinear)
    }
    layers["head"] = dataclasses.replace(layers["head"], hyper={**layers["head"].hyper, **options})
    tensors: dict[str, Tensor] = {"embed.weight": np.zeros((16, 8), np.float32), "count": np.array(1)}
    tensors["gain"] = RawTensor("BF16", (8,), np.zeros(16, np.uint8))
    before, chance = snapshot(other), torch.random.get_rng_state()
    with pytest.raises(ValueError, match=message):
        load_into(other, EngineFile(layers, tensors, {}, ""))
    assert_same_model(other, before)
    assert torch.equal(torch.random.get_rng_state(), chance)


def without(model: Small, name: str) -> Small:
    delattr(model, name)
    return model


def resized(model: Small) -> Small:
    model.gain = nn.Parameter(torch.zeros(9, dtype=torch.bfloat16))
    return model


def test_what_cannot_be_exported_is_named_and_leaves_no_file(tmp_path: Path) -> None:
    wide = nn.ModuleDict({"a": RMSCounterLinear(8, 4, C=20, ops=memtrain_cl.reference)})
    odd = nn.ModuleDict({"a": RMSCounterLinear(6, 4, C=8, ops=memtrain_cl.reference)})
    broken = Small(memtrain_cl.reference, 1)
    with torch.no_grad():
        broken.head.scale[3] = float("nan")
    sparse = nn.Module()
    sparse.register_buffer("s", torch.eye(2).to_sparse())
    for module, message in ((wide, "C"), (odd, "4"), (broken, r"'head\.scale'.*nan"), (sparse, "'s'.*dense")):
        with pytest.raises(ValueError, match=message):
            export_model(module, tmp_path / "m", {})
    assert list(tmp_path.iterdir()) == []


def test_a_conjugate_is_written_as_the_numbers_that_it_is(tmp_path: Path) -> None:
    module = nn.Module()
    module.register_buffer("z", torch.tensor([1 + 2j, -3j]).conj())
    export_model(module, tmp_path / "m", {})
    assert np.asarray(read_engine(tmp_path / "m").tensors["z"]).tolist() == [1 - 2j, 3j]


def test_tied_and_shared_tensors_come_back(tmp_path: Path) -> None:
    def tied(seed: int) -> nn.ModuleDict:
        torch.manual_seed(seed)
        embed, out = nn.Embedding(4, 8), nn.Linear(8, 4, bias=False)
        out.weight = embed.weight
        model = nn.ModuleDict({"embed": embed, "out": out})
        model["first"] = model["second"] = PackedRMSCounterLinear(8, 8, C=11, ops=memtrain_cl.reference)
        return model

    model, other = tied(1), tied(2)
    export_model(model, tmp_path / "m", {})
    load_into(other, read_engine(tmp_path / "m"))
    assert verify_export(other, tmp_path / "m") == []
    assert_same_model(other, snapshot(model))
    assert other["out"].weight is other["embed"].weight
