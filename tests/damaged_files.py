"""Small whole files of each format, what may be done to them, and how what a reader makes of that is judged.

The suite tries a few corruptions of each; `python -m bench.acceptance files` tries 500.
"""

from __future__ import annotations

import io
import json
import struct
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from memtrain_cl.errors import CorruptFile
from memtrain_cl.export.checkpoint import read_checkpoint
from memtrain_cl.export.mncc import PARTS, MnccLayer, read_mncc
from memtrain_cl.export.motifcl import MAGIC_1, read_motifcl, read_mt, write_mt
from memtrain_cl.export.npz import read_npz, write_npz
from memtrain_cl.export.optimizer import read_optimizer, save_optimizer
from memtrain_cl.export.packed import EngineFile, read_engine, write_engine
from memtrain_cl.formats import LayerState
from memtrain_cl.lm.checkpoint import load_checkpoint, save_checkpoint
from memtrain_cl.lm.config import TrainConfig
from tests.export_cases import (
    GOLDEN,
    assert_same_layer,
    assert_same_tensor,
    golden_layer,
    less_memory_than,
    random_layer,
    small_model,
)

#: Numbers that sizes and offsets are replaced by.
NUMBERS = (0, 1, 2, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1)


@dataclass(frozen=True)
class Kind:
    """A format. write: a whole file at a path.   read: what its reader makes of one.   check: AssertionError unless
    that is what the file, given too, declares.   refused: what it may raise.
    """

    write: Callable[[Path], None]
    read: Callable[[Path], Any]
    check: Callable[[Any, bytes], None]
    refused: tuple[type[Exception], ...] = (CorruptFile,)


def assert_unchanged(engine: EngineFile, _: bytes = b"") -> None:
    layers, tensors, model = small_model()
    assert engine.layers.keys() == layers.keys()
    assert engine.tensors.keys() == tensors.keys()
    assert engine.model == model
    for name, layer in layers.items():
        assert_same_layer(engine.layers[name], layer)
    for name, tensor in tensors.items():
        assert_same_tensor(engine.tensors[name], tensor)


def _write_mt_1(path: Path) -> None:
    write_mt(path, np.arange(6, dtype=np.float32).reshape(2, 3))
    data = path.read_bytes()
    path.write_bytes(MAGIC_1 + data[8:44] + data[64:])


def _check_mt(array: np.ndarray, data: bytes) -> None:
    # There is no sum in this format: what passes has a payload of the right size behind a sound header.
    ndim = int.from_bytes(data[12:20], "little")
    assert array.shape == struct.unpack_from(f"<{ndim}q", data, 20)
    assert data.endswith(array.tobytes())


def _read_motifcl(path: Path) -> LayerState:
    """The golden layer's three files with one of them, the state, in the place of the damaged one."""
    with tempfile.TemporaryDirectory() as folder:
        for suffix in ("scale", "v"):
            (Path(folder) / f"l_{suffix}.mt").write_bytes(bytes.fromhex(GOLDEN[f"{suffix}.mt"]))
        (Path(folder) / "l_state.mt").write_bytes(path.read_bytes())
        try:
            return read_motifcl(folder, "l", 11)
        except CorruptFile as fault:
            raise CorruptFile(f"{path}: {str(fault).partition(': ')[2]}") from fault


def _check_layer(layer: LayerState, _: bytes) -> None:
    assert layer.scale.tolist() == golden_layer().scale.tolist()
    assert layer.state.shape == (2, layer.in_features // 4 * 3)


def _write_mncc(path: Path) -> None:
    path.write_bytes(bytes.fromhex(GOLDEN["layer.mncc"]))


def _check_mncc(layers: dict[str, MnccLayer], data: bytes) -> None:
    sizes = [12 + sum(getattr(layer, part).nbytes for part in PARTS) for layer in layers.values()]
    assert sum(sizes) + sum(16 + len(name.encode()) - 4 for name in layers) <= len(data)
    for layer in layers.values():
        assert layer.t.shape == layer.c.shape == (layer.out_features, layer.in_features)
        assert layer.scale.shape == (layer.out_features, layer.in_features // layer.group)
        assert np.isfinite(layer.weights(0, layer.out_features)).all()


def _check_layers(layers: dict[str, LayerState], data: bytes) -> None:
    assert sum(layer.state.nbytes for layer in layers.values()) <= len(data)


def _write_published(path: Path) -> None:
    scale = torch.tensor(GOLDEN["scale"])[:, None]
    codes = torch.tensor(GOLDEN["codes"], dtype=torch.uint8)
    torch.save({"l.state": codes, "l.scale": scale, "l.v": scale, "n": torch.arange(6).reshape(2, 3).T}, path)


def _write_checkpoint(path: Path) -> None:
    state = {
        "step": 3,
        "corpus": "0",
        "model": {"w": torch.arange(4.0)},
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(4)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95)}]},
        "torch_rng": torch.zeros(8, dtype=torch.uint8),
    }
    save_checkpoint(path, TrainConfig(), state)


def _write_optimizer(path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(3)
    optimizer.step()
    save_optimizer(optimizer, path)


def _check_optimizer(state: dict[str, Any], _: bytes) -> None:
    assert state["state"][0]["momentum_buffer"].tolist() == [1, 1, 1]
    assert state["param_groups"][0]["lr"] == 0.1


def _check_checkpoint(found: tuple[Any, dict[str, Any]], data: bytes) -> None:
    """A whole configuration, and tensors that the file had room for."""
    config, state = found
    assert type(config).from_json(state["config"]) == config
    assert state["step"] >= 0
    tensors = [value for value in state["model"].values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) <= len(data)


KINDS = {
    "engine": Kind(lambda path: write_engine(path, *small_model()), read_engine, assert_unchanged),
    "mapped engine": Kind(
        lambda path: write_engine(path, *small_model()), lambda path: read_engine(path, mapped=True), assert_unchanged
    ),
    "MotifCL 1": Kind(_write_mt_1, read_mt, _check_mt),
    "MotifCL 2": Kind(lambda path: write_mt(path, np.arange(6, dtype=np.uint8).reshape(2, 3)), read_mt, _check_mt),
    "MotifCL layer": Kind(lambda path: write_mt(path, golden_layer().state.reshape(-1)), _read_motifcl, _check_layer),
    "MNCC": Kind(_write_mncc, read_mncc, _check_mncc),
    "npz": Kind(
        lambda path: write_npz(path, {"a": golden_layer(), "b.c": random_layer(1, 3, 4, 5)}), read_npz, _check_layers
    ),
    # A changed pickle whose checksum is right may be another state_dict, with other names or without layers.
    "checkpoint": Kind(
        _write_published,
        lambda path: read_checkpoint(path, C=11, in_features=8),
        lambda engine, data: _check_layers(dict(engine.layers), data),
        (CorruptFile, ValueError),
    ),
    "training checkpoint": Kind(_write_checkpoint, load_checkpoint, _check_checkpoint),
    "optimizer": Kind(_write_optimizer, read_optimizer, _check_optimizer),
}


@cache
def whole(kind: str) -> bytes:
    """The bytes of a whole file, read once, so that what its reader imports counts for no corruption."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "whole"
        KINDS[kind].write(path)
        KINDS[kind].check(KINDS[kind].read(path), path.read_bytes())
        return path.read_bytes()


def corrupted(data: bytes, draw: Callable[[st.SearchStrategy[Any]], Any]) -> bytes:
    """The file with bytes replaced, put in, left out, exchanged, or overwritten by a number that may be a size; of an
    archive also one member so, with the checksum that it has then, and of safetensors a part of the header.
    """
    if data.startswith(b"PK") and draw(st.booleans()):
        return _rezipped(data, draw)
    if data[8:9] == b"{" and draw(st.integers(0, 3)) == 0:
        return _header_changed(data, draw)
    broken = bytearray(data)
    at = draw(st.integers(0, len(data) - 1))
    how = draw(st.sampled_from(["replace", "insert", "delete", "swap", "number", "cut"]))
    if how == "replace":
        broken[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
    elif how == "insert":
        broken[at:at] = draw(st.binary(min_size=1, max_size=9))
    elif how == "delete":
        del broken[at : at + draw(st.integers(1, 64))]
    elif how == "swap":
        other = draw(st.integers(0, len(data) - 1))
        broken[at], broken[other] = broken[other], broken[at]
    elif how == "number":
        width = draw(st.sampled_from([2, 4, 8]))
        broken[at : at + width] = (draw(st.sampled_from(NUMBERS)) % 256**width).to_bytes(width, "little")
    else:
        del broken[at:]
    return bytes(broken)


def _rezipped(data: bytes, draw: Callable[[st.SearchStrategy[Any]], Any]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w") as new:
        members = old.infolist()
        # The pickle, where there is one, is the richest.
        pickles = [member for member in members if member.filename.endswith(".pkl")]
        chosen = draw(st.sampled_from([*members, *pickles * len(members)]))
        for member in members:
            content = old.read(member)
            new.writestr(member.filename, corrupted(content, draw) if member is chosen and content else content)
    return file.getvalue()


def _header_changed(data: bytes, draw: Callable[[st.SearchStrategy[Any]], Any]) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = draw(st.sampled_from(sorted(header.keys() - {"__metadata__"})))
    values = st.one_of(st.none(), st.integers(-(2**65), 2**65), st.floats(), st.text(), st.lists(st.integers()))
    header[name][draw(st.sampled_from(["dtype", "shape", "data_offsets"]))] = draw(values)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def judge(kind: str, data: bytes) -> bool:
    """Whether a file loads. AssertionError unless it is refused in a sentence, or loads as it declares; and when much
    more is allocated than it holds.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged"
        path.write_bytes(data)
        with less_memory_than(2_000_000 + 40 * len(data)):
            try:
                found = KINDS[kind].read(path)
            except KINDS[kind].refused as fault:
                assert_sentence(fault, path)
                return False
        KINDS[kind].check(found, data)
        return True


def assert_sentence(fault: Exception, path: Path) -> None:
    """The message names the file, what was expected and what was got, and can be printed."""
    message = str(fault)
    assert "expected" in message
    assert len(message) < 600
    if isinstance(fault, CorruptFile):
        assert message.startswith(f"{path}: ")
        assert message.isprintable()
