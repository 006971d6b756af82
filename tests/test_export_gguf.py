"""GGUF of a whole model: what the package gguf reads back, codes that survive exactly, and what is refused."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from memtrain_cl.export.gguf import KINDS, GgufReport, Kind, read_gguf, write_gguf
from memtrain_cl.export.llama import LlamaShape
from memtrain_cl.export.packed import EngineFile, write_engine
from memtrain_cl.formats import LayerState
from tests.export_cases import random_layer
from tests.gguf_cases import codes_of, model_file

BITS = {"tq2_0": 66 * 8 / 256, "tq1_0": 54 * 8 / 256, "f16": 16}
Q = "model.layers.1.self_attn.q_proj"


def turned(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp wants them: of each head 0, half, 1, half + 1 ... (one row after the other)."""
    width = len(rows) // heads
    return np.stack([rows[h * width + i // 2 + i % 2 * (width // 2)] for h in range(heads) for i in range(width)])


def written(path: Path, file: EngineFile, kind: Kind) -> tuple[GgufReport, dict[str, Any]]:
    report = write_gguf(path, file, kind)
    return report, {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("C", [1, 8, 11])
@pytest.mark.parametrize("kind", KINDS)
def test_the_package_reads_it_and_codes_are_exact(tmp_path: Path, kind: Kind, C: int) -> None:
    file = model_file(C=C)
    report, theirs = written(tmp_path / "m.gguf", file, kind)
    ours = read_gguf(tmp_path / "m.gguf")
    assert [*theirs] == [*ours.tensors] == [tensor.name for tensor in report.tensors]
    assert report.bytes == (tmp_path / "m.gguf").stat().st_size
    assert report.warnings == ()
    worst = 0.0
    for told in report.tensors:
        tensor = theirs[told.name]
        assert tensor.tensor_type.name == told.type == ours.tensors[told.name].type
        assert tuple(tensor.shape)[::-1] == told.shape == ours.tensors[told.name].shape
        assert tensor.n_bytes == told.bytes == ours.tensors[told.name].nbytes
        assert tensor.data.tobytes() == ours.data(told.name).tobytes()
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(values, ours.values(told.name))
        layer = file.layers.get(told.source.removesuffix(".weight"))
        if layer is None:
            exact = file.tensors[told.source]
            assert isinstance(exact, np.ndarray)
            assert told.type == ("F32" if exact.ndim == 1 else "F16")
            assert np.array_equal(values, exact.astype(np.float16) if exact.ndim == 2 else exact)
            continue
        assert told.type == kind.upper()
        assert told.bytes == layer.out_features * layer.in_features * BITS[kind] / 8
        t, scale = codes_of(layer), layer.scale.astype(np.float16)
        if told.name.endswith(("attn_q.weight", "attn_k.weight")):
            t, scale = turned(t, 4), turned(scale, 4)
        assert np.array_equal(values, t * scale[:, None].astype(np.float32))
        worst = max(worst, float(np.max(np.abs(layer.scale.astype(np.float16) / layer.scale.astype(float) - 1))))
        if kind != "f16":
            ternary = ours.ternary(told.name)
            assert np.array_equal(ternary.codes, t)
            assert np.array_equal(ternary.scale, scale.astype(np.float32))
    assert report.scale_error == pytest.approx(worst)
    assert 1e-5 < worst <= 2**-11


def test_keys_of_the_model_and_its_bytes(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", model_file(), "tq2_0")
    theirs = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "m.gguf").fields.items()}
    ours = read_gguf(tmp_path / "m.gguf").metadata
    for key, value in ours.items():
        assert np.array_equal(np.asarray(value), np.asarray(theirs[key])), key
    expected = {
        "general.architecture": "llama",
        "general.file_type": 37,
        "llama.vocab_size": 256,
        "llama.context_length": 32,
        "llama.embedding_length": 256,
        "llama.block_count": 2,
        "llama.feed_forward_length": 512,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 4,
        "llama.rope.dimension_count": 64,
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
        "tokenizer.ggml.model": "rwkv",
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
    }
    assert {key: ours[key] for key in expected} == expected
    tokens = ours["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    quoted = ["b" + ('"%s"' if token == "'" else "'%s'") % token for token in tokens]
    assert [ast.literal_eval(token) for token in quoted] == [bytes([byte]) for byte in range(256)]


def test_attention_of_turned_rows_is_the_same() -> None:
    heads, width, length = 3, 8, 5
    random = np.random.default_rng(1)
    weights = random.standard_normal((2, heads * width, 16))
    x = random.standard_normal((length, 16))
    angles = np.outer(np.arange(length), 10000.0 ** (-np.arange(0, width, 2) / width))[:, None]

    def rotate(y: np.ndarray, first: slice, second: slice) -> np.ndarray:
        out = np.empty_like(y)
        out[..., first] = y[..., first] * np.cos(angles) - y[..., second] * np.sin(angles)
        out[..., second] = y[..., second] * np.cos(angles) + y[..., first] * np.sin(angles)
        return out

    halves, neighbours = [], []
    for weight in weights:
        halves.append(rotate((x @ weight.T).reshape(length, heads, width), slice(0, 4), slice(4, 8)))
        y = (x @ turned(weight, heads).T).reshape(length, heads, width)
        neighbours.append(rotate(y, slice(0, None, 2), slice(1, None, 2)))
    scores = [np.einsum("ihd,jhd->hij", query, key) for query, key in (halves, neighbours)]
    assert np.allclose(*scores)


def test_rows_that_blocks_do_not_divide_are_float16_and_named(tmp_path: Path) -> None:
    file = model_file(layers=1, hidden=704)
    report, theirs = written(tmp_path / "m.gguf", file, "tq2_0")
    assert theirs["blk.0.ffn_down.weight"].tensor_type.name == "F16"
    assert theirs["blk.0.ffn_up.weight"].tensor_type.name == "TQ2_0"
    (warning,) = report.warnings
    assert "F16 instead of TQ2_0" in warning
    assert warning.endswith("rows of 704: model.layers.0.mlp.down_proj.weight")
    down = file.layers["model.layers.0.mlp.down_proj"]
    expected = codes_of(down) * down.scale.astype(np.float16).astype(np.float32)[:, None]
    assert np.array_equal(theirs["blk.0.ffn_down.weight"].data, expected)
    assert not np.signbit(theirs["blk.0.ffn_down.weight"].data[codes_of(down) == 0]).any()


def test_widths_that_no_block_divides_and_weights_that_are_not_ternary(tmp_path: Path) -> None:
    file = model_file(layers=1, dim=16, heads=2, hidden=5460)
    report, theirs = written(tmp_path / "m.gguf", file, "tq1_0")
    assert {tensor.tensor_type.name for tensor in theirs.values()} == {"F16", "F32"}
    assert [warning.partition(":")[0].rpartition("rows of ")[2] for warning in report.warnings] == ["16", "5460"]
    assert ", ".join(report.warnings).count("_proj.weight") == 7
    assert report.scale_error > 0
    dense = model_file("dense", layers=1)
    report, theirs = written(tmp_path / "d.gguf", dense, "tq2_0")
    (warning,) = report.warnings
    assert "dense weights, which are not ternary: model.layers.0.self_attn.q_proj.weight, " in warning
    assert (warning.count("_proj.weight"), report.scale_error) == (7, 0)
    for name, source in (("attn_k", "self_attn.k_proj"), ("ffn_down", "mlp.down_proj")):
        exact = dense.tensors[f"model.layers.0.{source}.weight"]
        assert isinstance(exact, np.ndarray)
        exact = turned(exact, 4) if name == "attn_k" else exact
        assert np.array_equal(theirs[f"blk.0.{name}.weight"].data, exact.astype(np.float16))
    assert write_gguf(tmp_path / "d.gguf", dense, "f16").warnings == ()


def changed(file: EngineFile, name: str, values: Any) -> EngineFile:
    """The model with another scale of layer `name`, or another tensor of that name."""
    if name in file.layers:
        layer = file.layers[name]
        scale = layer.scale.copy()
        scale[7] = values
        return dataclasses.replace(file, layers={**file.layers, name: dataclasses.replace(layer, scale=scale)})
    tensor = np.array(file.tensors[name])
    tensor.flat[7] = values
    return dataclasses.replace(file, tensors={**file.tensors, name: tensor})


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_the_types_lack_are_refused(tmp_path: Path, kind: Kind) -> None:
    file, path = model_file(), tmp_path / "m.gguf"
    for value in (7e4, 65504.1, 6.1e-5, 1e-30, np.inf, np.nan):
        with pytest.raises(ValueError, match=rf"'{Q}\.scale'.*2\^-14\.\.65504.*got {value:g} in row 7"):
            write_gguf(path, changed(file, Q, value), kind)
        assert list(tmp_path.iterdir()) == []
    for name, value in (
        ("model.embed_tokens.weight", 65520.0),
        ("lm_head.weight", np.nan),
        ("model.norm.weight", -np.inf),
    ):
        with pytest.raises(ValueError, match=f"'{name}': expected finite values within float.*got {value:g}"):
            write_gguf(path, changed(file, name, value), kind)
        assert list(tmp_path.iterdir()) == []
    odd = dataclasses.replace(file.layers[Q], C=2)
    with pytest.raises(ValueError, match=rf"'{Q}\.weight': expected codes below 9 \(C = 2\), got"):
        write_gguf(path, dataclasses.replace(file, layers={**file.layers, Q: odd}), kind)
    assert list(tmp_path.iterdir()) == []
    write_gguf(path, changed(file, Q, 65504), kind)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="finite"):
        write_gguf(path, changed(file, "model.norm.weight", np.nan), kind)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    write_gguf(path, changed(file, Q, 2.0**-14), kind)
    write_gguf(path, changed(file, "model.norm.weight", 1e38), kind)


def without(part: Any, name: str) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key != name}


def test_what_is_no_model_of_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = model_file(layers=1)
    down = "model.layers.0.mlp.down_proj"

    def model(**changes: Any) -> EngineFile:
        return dataclasses.replace(file, model={**file.model, **changes})

    def parts(layers: Any = file.layers, tensors: Any = file.tensors) -> EngineFile:
        return dataclasses.replace(file, layers=layers, tensors=tensors)

    norm = file.tensors["model.norm.weight"]
    cases = [
        (model(architecture=None), "architecture None"),
        (model(layers=0), "layers in 1"),
        (model(layers=True), "layers in 1"),
        (model(layers=10**9), "9000000003 parts"),
        (model(dim=254), r"dim of heads"),
        (model(heads=256), r"even width"),
        (model(rope_theta=float("nan")), "rope_theta as a positive number"),
        (model(rope_theta=1e300), "rope_theta as a positive number within float32"),
        (model(rope_theta=10**400), "rope_theta as a positive number within float32"),
        (model(norm_eps="x"), "norm_eps"),
        (model(hidden=256), r"expected \(out, in\) = \(256, 256\), got \(512, 256\)"),
        (model_file(layers=1, vocab=300), "vocabulary of 256 bytes, got vocab=300"),
        (parts(without(file.layers, down)), "12 parts of a model of 1 blocks, got 11"),
        (parts(without(file.layers, down), {**file.tensors, "x": norm}), f"'{down}.weight': expected F32.*got none"),
        (parts({**without(file.layers, down), "x": random_layer(0, 256, 512, 8)}), f"'{down}.weight'.*got none"),
        (
            parts(tensors={**file.tensors, "model.norm.weight": np.zeros(256)}),
            r"'model.norm.weight': expected F32 \[256\], got F64 \[256\]",
        ),
    ]
    for engine, message in cases:
        with pytest.raises(ValueError, match=message):
            write_gguf(tmp_path / "m.gguf", engine, "tq2_0")
    with pytest.raises(ValueError, match="kind of tq2_0, tq1_0, f16, got 'q4_0'"):
        write_gguf(tmp_path / "m.gguf", file, "q4_0")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"pip install 'memtrain-cl\[gguf\]'"):
        write_gguf(tmp_path / "m.gguf", file, "tq2_0")
    assert list(tmp_path.iterdir()) == []


def test_equal_models_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_gguf(tmp_path / name, model_file(layers=1), "tq2_0")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_memory_stays_near_one_tensor(tmp_path: Path) -> None:
    file = model_file(layers=1)
    name = "model.layers.0.mlp.up_proj"
    wide = LlamaShape(1, 256, 4, 2**15, 32, 256, 1e4, 1e-5)
    layers = {n.removesuffix(".weight"): random_layer(0, *size, 11) for n, size in wide.linears().items()}
    file = EngineFile(layers, file.tensors, {**file.model, "hidden": 2**15}, "0")
    layer: LayerState = layers[name]
    tracemalloc.start()
    try:
        report = write_gguf(tmp_path / "m", file, "f16")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert report.bytes > 3 * 2 * layer.out_features * layer.in_features
    assert peak < 0.6 * report.bytes


def test_needs_no_torch(tmp_path: Path) -> None:
    file = model_file(layers=1)
    write_engine(tmp_path / "m", file.layers, file.tensors, file.model)
    code = (
        "import sys; from memtrain_cl.export.packed import read_engine; from memtrain_cl.export.gguf import *;"
        "write_gguf(sys.argv[2], read_engine(sys.argv[1]), 'tq1_0'); read_gguf(sys.argv[2]);"
        "assert not {'torch', 'pyopencl'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "m", tmp_path / "m.gguf"], check=True)
    assert read_gguf(tmp_path / "m.gguf").metadata["general.file_type"] == 36
