"""The engine file: its bytes, its round trip, and what it refuses to write."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

import memtrain_cl
from memtrain_cl.errors import CorruptFile
from memtrain_cl.export.container import DTYPES, RawTensor, Tensor
from memtrain_cl.export.packed import EngineReader, read_engine, write_engine
from memtrain_cl.formats import LayerState
from tests.export_cases import GOLDEN, assert_same_layer, assert_same_tensor, golden_layer, random_layer, small_model


def test_everything_comes_back(tmp_path: Path) -> None:
    layers, tensors, model = small_model()
    write_engine(tmp_path / "m.safetensors", layers, tensors, model)
    engine = read_engine(tmp_path / "m.safetensors")
    assert engine.layers.keys() == layers.keys()
    for name, layer in layers.items():
        assert_same_layer(engine.layers[name], layer)
    assert engine.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same_tensor(engine.tensors[name], tensor)
    assert engine.model == model
    assert engine.created_by == memtrain_cl.__version__


def test_the_library_reads_it_and_the_state_is_the_live_bytes(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    layers, tensors, model = small_model()
    write_engine(path, layers, tensors, model)
    with safe_open(path, "numpy") as file:
        for name, layer in layers.items():
            state, scale, v = (file.get_tensor(f"{name}.{suffix}") for suffix in ("state", "scale", "v"))
            assert state.dtype == np.uint8
            assert (state == layer.state).all()
            assert (scale == layer.scale).all()
            assert (v == (0 if layer.v is None else layer.v)).all()
        assert "blocks.0.up.s_base" in file.keys()  # noqa: SIM118 - safe_open is no mapping
        assert "blocks.0.attn.q.s_base" not in file.keys()  # noqa: SIM118
        metadata = file.metadata()
    assert list(metadata) == ["memtrain_cl"]
    facts = json.loads(metadata["memtrain_cl"])
    assert facts["format"] == 1
    assert facts["layers"]["blocks.0.up"] == {
        "in_features": 8,
        "out_features": 4,
        "C": 8,
        "hyper": {"lr": 3e-3, "rms_mode": "exact", "use_rms": True, "tile_rows": 0},
        "seed": 2**32 - 4,
        "step": 3000,
        "kind": "RMSCounterLinear",
    }
    assert len(facts["sha256"]) == 3 * 3 + 1 + 3
    assert layers["blocks.0.attn.q"].state.tobytes() in path.read_bytes()


def backwards(part: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part[name] for name in reversed(list(part))}


def test_equal_input_gives_equal_bytes_in_any_order(tmp_path: Path) -> None:
    layers, tensors, model = small_model()
    write_engine(tmp_path / "a", layers, tensors, model)
    write_engine(tmp_path / "b", backwards(layers), backwards(tensors), backwards(model))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("code", sorted(DTYPES))
def test_every_dtype_survives(tmp_path: Path, code: str) -> None:
    name, size = DTYPES[code]
    data = np.arange(6 * size, dtype=np.uint8)
    if code == "BOOL":
        data %= 2
    tensor: Tensor = RawTensor(code, (2, 3), data)
    try:
        tensor = data.view(name).reshape(2, 3)
    except TypeError:
        assert code.startswith(("BF", "F8"))
    write_engine(tmp_path / "m", {}, {"x": tensor}, {})
    assert_same_tensor(read_engine(tmp_path / "m").tensors["x"], tensor)


def test_layouts_and_shapes_survive(tmp_path: Path) -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    tensors: dict[str, Tensor] = {
        "transposed": base.T,
        "strided": base[::2, 1::2],
        "big endian": base.astype(">f4"),
        "scalar": np.array(1.5),
        "empty": np.empty((0, 3), np.int16),
        "expanded": np.broadcast_to(np.float32(2), (2, 2)),
    }
    write_engine(tmp_path / "m", {}, tensors, {})
    read = read_engine(tmp_path / "m").tensors
    for name, tensor in tensors.items():
        ours = read[name]
        assert isinstance(ours, np.ndarray)
        assert isinstance(tensor, np.ndarray)
        assert ours.shape == tensor.shape
        assert np.array_equal(ours, tensor)
        assert ours.dtype == tensor.dtype.newbyteorder("=")


@pytest.mark.parametrize(
    "name", ["", "a.b.c", "x/y", "sp ace", "\u00e9\u4e2d\U0001f600", "__metadata__", '"quo\\te"', "a\nb", "a.state"]
)
def test_odd_layer_names(tmp_path: Path, name: str) -> None:
    layers = {name: golden_layer(), "a": random_layer(1, 2, 4, 1)}
    write_engine(tmp_path / "m", layers, {"a.": np.zeros(1), "scale.scale": np.ones(2)}, {})
    engine = read_engine(tmp_path / "m")
    assert engine.layers.keys() == layers.keys()
    assert engine.tensors.keys() == {"a.", "scale.scale"}
    assert_same_layer(engine.layers[name], layers[name])


def test_empty_layers(tmp_path: Path) -> None:
    layers = {"no rows": random_layer(0, 0, 8, 11), "no columns": random_layer(0, 2, 0, 11)}
    write_engine(tmp_path / "m", layers, {}, {})
    for name, layer in read_engine(tmp_path / "m").layers.items():
        assert_same_layer(layer, layers[name])


def changed(**changes: Any) -> LayerState:
    return dataclasses.replace(random_layer(1, 3, 8, 8), **changes)


def row(value: float) -> np.ndarray:
    return np.array([1, value, 1], dtype=np.float32)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (changed(scale=row(np.nan)), r"'l\.scale'.*finite values > 0, got nan in row 1"),
        (changed(scale=row(np.inf)), r"'l\.scale'.*got inf"),
        (changed(scale=row(0)), r"'l\.scale'.*got 0\.0"),
        (changed(scale=row(-1)), r"'l\.scale'.*got -1\.0"),
        (changed(v=row(np.nan)), r"'l\.v'.*finite values >= 0, got nan"),
        (changed(v=row(-1e-9)), r"'l\.v'.*>= 0"),
        (changed(v=row(np.inf)), r"'l\.v'.*inf"),
        (changed(s_base=row(np.nan)), r"'l\.s_base'.*nan"),
        (changed(state=np.full((3, 6), 255, np.uint8)), r"'l\.state'.*below 45 \(C = 8\), got 63 at row 0, column 0"),
        (changed(v=None), "row moments"),
        (changed(kind="CompactCounterLinear"), "row moments"),
        (changed(kind="Linear"), "kind"),
        (changed(seed=-1), "seed"),
        (changed(step=1.5), "step"),
        (changed(hyper={"lr": float("nan")}), "hyper"),
        (changed(hyper={"lr": (1, 2)}), "hyper"),
        (changed(hyper={"C": 9}), "hyper"),
        (changed(hyper={"lr": np.float32(1)}), "hyper"),
    ],
)
def test_refuses_bad_layers_and_leaves_no_file(tmp_path: Path, layer: LayerState, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_engine(tmp_path / "m", {"fine": golden_layer(), "l": layer}, {}, {})
    assert list(tmp_path.iterdir()) == []


def test_refuses_bad_tensors_and_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write_engine(path, {}, {}, {"kept": True})
    with pytest.raises(ValueError, match=r"'l\.scale' twice"):
        write_engine(path, {"l": golden_layer()}, {"l.scale": np.zeros(2)}, {})
    with pytest.raises(ValueError, match="__metadata__"):
        write_engine(path, {}, {"__metadata__": np.zeros(2)}, {})
    with pytest.raises(ValueError, match="name"):
        write_engine(path, {}, {"\ud800": np.zeros(2)}, {})
    with pytest.raises(TypeError, match=r"'x'.*dtype"):
        write_engine(path, {}, {"x": np.zeros(2, dtype="datetime64[s]")}, {})
    with pytest.raises(ValueError, match="model"):
        write_engine(path, {}, {}, {"x": {1, 2}})
    # What the reader would refuse.
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    for value in (deep, 10**400, {"\ud800": 1}):
        with pytest.raises(ValueError, match="expected JSON of unique names, finite numbers and at most 100 levels"):
            write_engine(path, {}, {}, {"x": value})
    with pytest.raises(OSError, match="No such file"):
        write_engine(tmp_path / "no" / "m", {}, {}, {})
    assert read_engine(path).model == {"kept": True}
    assert list(tmp_path.iterdir()) == [path]


def test_memory_stays_near_one_copy(tmp_path: Path) -> None:
    layer = random_layer(0, 2048, 4096, 11)  # 6 MiB of state
    tensor = np.zeros((1024, 1024), np.float32)
    size = layer.state.nbytes + tensor.nbytes
    tracemalloc.start()
    try:
        write_engine(tmp_path / "m", {"l": layer}, {"t": tensor}, {})
        written = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        engine = read_engine(tmp_path / "m")
        read = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert engine.layers["l"].state.nbytes == layer.state.nbytes
    assert written < size / 3
    assert read < 1.4 * size


def test_a_file_by_hand(tmp_path: Path) -> None:
    """The layout as it is described, its bytes laid out here and not by the writer or the safetensors library."""
    scale, v = (np.array(GOLDEN[name], "<f4").tobytes() for name in ("scale", "v"))
    tensors = {
        "l0.state": ("U8", [2, 6], bytes(GOLDEN["packed"])),
        "l0.v": ("F32", [2], v),
        "l0.scale": ("F32", [2], scale),
        "norm": ("BF16", [1, 2], b"\x80\x3f\x00\x40"),
    }
    layer = {"in_features": 8, "out_features": 2, "C": 11, "hyper": {"lr": 0.25}, "seed": 7, "step": 40}
    body = {
        "format": 1,
        "layers": {"l0": layer},
        "model": {"dim": 8},
        "created_by": "hand",
        "sha256": {name: hashlib.sha256(data).hexdigest() for name, (_, _, data) in tensors.items()},
    }
    header: dict[str, Any] = {"__metadata__": {"memtrain_cl": json.dumps(body)}}
    payload = b""
    for name, (code, shape, data) in tensors.items():
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [len(payload), len(payload) + len(data)]}
        payload += data
    text = json.dumps(header).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + payload)
    for mapped in (False, True):
        engine = read_engine(path, mapped=mapped)
        golden = dataclasses.replace(golden_layer(), hyper={"lr": 0.25}, seed=7, step=40)
        assert_same_layer(engine.layers["l0"], golden)
        assert_same_tensor(engine.tensors["norm"], RawTensor("BF16", (1, 2), np.frombuffer(tensors["norm"][2], "u1")))
        assert (engine.model, engine.created_by) == ({"dim": 8}, "hand")


def test_a_mapped_file_is_read_where_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    layer, ordinary = random_layer(0, 2048, 4096, 11), np.arange(1 << 20, dtype=np.float32)
    write_engine(path, {"l": layer}, {"t": ordinary, "empty": np.zeros(0)}, {})
    content = path.read_bytes()
    tracemalloc.start()
    try:
        engine = read_engine(path, mapped=True)
        # The codes are looked at in pieces; no tensor has memory of its own.
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()
    assert_same_layer(engine.layers["l"], layer)
    assert_same_tensor(engine.tensors["t"], ordinary)
    assert engine.tensors["empty"].shape == (0,)
    engine.layers["l"].state[:] = 0  # private to this process
    write_engine(path, {}, {}, {})
    assert_same_tensor(engine.tensors["t"], ordinary)  # the file that was replaced is still there for its readers
    assert content != path.read_bytes()


def test_a_mapped_file_of_odd_offsets_is_aligned_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_engine(path, {}, {"a": np.arange(3, dtype=np.uint8), "b": np.arange(2, dtype=np.float32)}, {})
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header["b"]["data_offsets"] == [0, 8]
    header["a"]["data_offsets"], header["b"]["data_offsets"] = [0, 3], [3, 11]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[-3:] + data[8 + length : -3])
    read = read_engine(path, mapped=True).tensors["b"]
    assert isinstance(read, np.ndarray)
    assert read.flags.aligned
    assert read.tolist() == [0, 1]


@pytest.mark.parametrize("mapped", [False, True])
def test_sums_are_compared_unless_told_otherwise(tmp_path: Path, mapped: bool) -> None:
    path = tmp_path / "m.safetensors"
    write_engine(path, {"l": golden_layer()}, {}, {})
    data = bytearray(path.read_bytes())
    at = data.index(golden_layer().state.tobytes())
    data[at] = 63  # no code of C = 11
    path.write_bytes(data)
    with EngineReader(path, mapped=mapped) as reader, pytest.raises(CorruptFile, match="sha256"):
        reader.layer("l")
    with EngineReader(path, mapped=mapped, checked=False) as reader:
        assert reader.layer("l").state[0, 0] == 63


def test_needs_neither_torch_nor_opencl(tmp_path: Path) -> None:
    write_engine(tmp_path / "m", {"l": golden_layer()}, {"t": RawTensor("BF16", (1,), np.zeros(2, np.uint8))}, {})
    code = (
        "import sys; from memtrain_cl.export.packed import read_engine; from memtrain_cl.cli import files;"
        "read_engine(sys.argv[1]); files.inspect(sys.argv[1]); assert not {'torch', 'pyopencl'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "m"], check=True, stdout=subprocess.DEVNULL)
