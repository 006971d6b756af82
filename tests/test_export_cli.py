"""`memtrain-cl inspect`, `export` and `import` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memtrain_cl
from memtrain_cl.cli import main
from memtrain_cl.cli.per_layer import per_layer
from memtrain_cl.export.codes import unpack_codes
from memtrain_cl.export.motifcl import read_motifcl, write_motifcl, write_mt
from memtrain_cl.export.packed import read_engine, write_engine
from memtrain_cl.export.per_layer import value_for
from tests.export_cases import GOLDEN, golden_layer, small_model
from tests.gguf_cases import model_file


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    write_engine(path, *small_model())
    return path


def test_inspect_json(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(model), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["format"] == "engine 1"
    assert told["bytes"] == model.stat().st_size
    assert told["created_by"] == memtrain_cl.__version__
    assert told["model"]["dim"] == 8
    tensors = {tensor["name"]: tensor for tensor in told["tensors"]}
    assert tensors["norm"] == {"name": "norm", "dtype": "BF16", "shape": [2, 2], "bytes": 8}
    assert tensors["blocks.0.up.state"] == {"name": "blocks.0.up.state", "dtype": "U8", "shape": [4, 6], "bytes": 24}
    layer = next(layer for layer in told["layers"] if layer["name"] == "blocks.0.attn.q")
    t = np.array(GOLDEN["t"])
    assert (layer["out_features"], layer["in_features"], layer["C"], layer["step"]) == (2, 8, 11, 0)
    assert [layer[name] for name in ("minus", "zero", "plus")] == [(t == value).mean() for value in (-1, 0, 1)]
    assert layer["bytes"] == 12 + 8 + 8
    assert layer["bits_per_weight"] == 8 * 28 / 16
    counters = told["counters"]
    assert counters["weights"] == 16 + 32 + 4
    assert counters["bytes"] == 28 + (24 + 3 * 16) + (3 + 2 * 4)
    assert counters["C"] is None
    assert counters["minus"] + counters["zero"] + counters["plus"] == pytest.approx(1)


def test_inspect_tables(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(model)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(
        f"engine 1, {model.stat().st_size:,} bytes, written by memtrain_cl {memtrain_cl.__version__}"
    )
    cells = [line.split() for line in lines]
    row = ["blocks.0.attn.q", "PackedRMSCounterLinear", "2", "8", "11", "0", "28", "14.000", "50.0%", "43.8%", "6.2%"]
    assert row in cells
    assert ["norm", "BF16", "[2,", "2]", "8"] in cells
    assert any(line.startswith("all ") for line in lines)


def test_inspect_orders_numbers_as_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["b.1.x", "b.2.x", "b.10.a", "b.10.x", "c"]
    write_engine(tmp_path / "m", {name: golden_layer() for name in reversed(names)}, {}, {})
    assert main(["inspect", str(tmp_path / "m"), "--json"]) == 0
    assert [layer["name"] for layer in json.loads(capsys.readouterr().out)["layers"]] == names


def test_inspect_shows_names_without_obeying_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_engine(tmp_path / "m", {"[red]\x1b[2J": golden_layer()}, {"[/]\n": np.zeros(1)}, {"\x07": "\x1b"})
    assert main(["inspect", str(tmp_path / "m")]) == 0
    shown = capsys.readouterr().out
    assert "[red]\\x1b[2J.scale" in shown
    assert "[/]\\n" in shown
    assert shown.replace("\n", "").isprintable()


def test_inspect_motifcl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_motifcl(tmp_path / "out", {"l": golden_layer()})
    assert main(["inspect", str(tmp_path / "out" / "l_state.mt"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["format"] == "MotifCL 2"
    assert told["tensors"] == [{"name": "l_state", "dtype": "U8", "shape": [12], "bytes": 12}]
    assert (told["layers"][0]["weights"], told["layers"][0]["bits_per_weight"], told["layers"][0]["plus"]) == (
        16,
        6,
        None,
    )
    assert main(["inspect", str(tmp_path / "out" / "l_state.mt")]) == 0
    assert "pass --C" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "out" / "l_state.mt"), "--C", "11"]) == 0
    assert "50.0%" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "out" / "l_scale.mt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == []


def test_export_motifcl(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = model.parent / "out"
    assert main(["export", str(model), "--to", "motifcl", "--out", str(out)]) == 0
    assert "9 files" in capsys.readouterr().out
    for suffix in ("state", "scale", "v"):
        assert (out / f"blocks.0.attn.q_{suffix}.mt").read_bytes() == bytes.fromhex(GOLDEN[f"{suffix}.mt"])
    assert read_motifcl(out, "blocks.0.up", 8).out_features == 4
    assert main(["export", str(model), "--to", "motifcl", "--out", str(out)]) == 2
    assert "expected an empty or a new folder" in capsys.readouterr().err
    assert main(["export", str(model), "--to", "motifcl", "--out", str(out), "--force"]) == 0


def inspected(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["inspect", str(path), "--json", *options]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_every_format_of_counter_layers_and_back(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Export, inspect, import: codes stay, and what the format holds beside them."""
    layers, *_ = small_model()
    shares = [inspected(model, capsys)["counters"][name] for name in ("weights", "minus", "zero", "plus")]
    radix = ["--C", "11", "--C", "blocks.0.up=8", "--C", "comp*=2"]
    for target, format_, told, options in [
        ("npz", "NumPy archive", [], []),
        ("mncc", "MNCC 1", [], []),
        ("motifcl", "MotifCL folder", radix, radix),
        ("engine", "engine 1", [], None),
    ]:
        out, back = model.parent / target, model.parent / f"{target}.safetensors"
        assert main(["export", str(model), "--to", target, "--out", str(out)]) == 0
        assert f"in {out}" in capsys.readouterr().out
        summary = inspected(out, capsys, *told)
        assert summary["format"] == format_
        counters = summary["counters"]
        assert [counters[name] for name in ("weights", "minus", "zero", "plus")] == pytest.approx(shares)
        if options is None:
            assert out.read_bytes() == model.read_bytes()
            continue
        assert main(["import", str(out), "--from", target, "--out", str(back), "--seed", "7", *options]) == 0
        assert "layers: 3, ordinary tensors: 0" in capsys.readouterr().out
        read = read_engine(back).layers
        assert read.keys() == layers.keys()
        assert len({layer.seed for layer in read.values()}) == 3
        for name, layer in layers.items():
            assert read[name].C == layer.C
            assert read[name].state.tobytes() == layer.state.tobytes()
            assert read[name].scale.tobytes() == layer.scale.tobytes()
            if target != "mncc" and layer.v is not None:
                held = read[name].v
                assert held is not None
                assert held.tobytes() == layer.v.tobytes()


def test_inspect_says_what_a_file_leaves_unsaid(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = model.parent / "out"
    write_motifcl(out, small_model()[0])
    assert main(["inspect", str(out), "--C", "comp*=2"]) == 0
    shown = capsys.readouterr().out
    assert "pass --C" in shown
    row = next(line.split() for line in shown.splitlines() if line.startswith("compact"))
    assert row[1:6] == ["-", "1", "4", "2", "-"]
    counters = inspected(out, capsys)["counters"]
    assert (counters["weights"], counters["C"], counters["plus"]) == (52, None, None)


def test_published_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "c.pt", tmp_path / "m.safetensors"
    codes = torch.tensor(GOLDEN["codes"], dtype=torch.uint8)
    scale, v = (torch.tensor(GOLDEN[name])[:, None] for name in ("scale", "v"))
    packed = torch.tensor(GOLDEN["packed"], dtype=torch.uint8).reshape(2, 6)
    torch.save({"a.state": codes, "a.scale": scale, "b.state": packed, "b.scale": scale, "b.v": v, "n": v}, path)
    told = inspected(path, capsys)
    assert (told["format"], told["counters"]["weights"], told["counters"]["plus"]) == ("PyTorch checkpoint", 0, None)
    assert {"name": "n", "dtype": "F32", "shape": [2, 1], "bytes": 8} in told["tensors"]
    told = inspected(path, capsys, "--C", "11", "--in-features", "b=8")
    assert told["counters"]["weights"] == 32
    assert told["counters"]["plus"] == 1 / 16
    assert told["hint"] == ""
    command = ["import", str(path), "--from", "checkpoint", "--out", str(out), "--C", "11"]
    assert main(command) == 2
    assert "6 columns are 6 codes or 8 packed ones" in capsys.readouterr().err
    assert not out.exists()
    assert main([*command, "--in-features", "8"]) == 0
    read = read_engine(out)
    assert {layer.state.tobytes() for layer in read.layers.values()} == {bytes(GOLDEN["packed"])}
    assert read.tensors.keys() == {"n"}


def test_groups_are_imported_dense_or_with_their_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "m.mncc", tmp_path / "m.safetensors"
    path.write_bytes(bytes.fromhex(GOLDEN["layer.mncc"]))
    assert inspected(path, capsys)["layers"][0]["kind"] == "groups of 8"
    command = ["import", str(path), "--from", "mncc", "--out", str(out)]
    assert main(command) == 0
    assert "dense weights, counters left out" in capsys.readouterr().out
    weight = read_engine(out).tensors["l0.wq.weight"]
    assert main([*command, "--row-scales", "--force"]) == 0
    shown = capsys.readouterr().out
    engine = read_engine(out)
    layer = engine.layers["l0.wq"]
    t = np.array(unpack_codes(layer.state)).reshape(2, 8) // 21 - 1.0
    error = np.asarray(weight) - layer.scale[:, None] * t
    assert "other weights, one scale a row" in shown
    assert f"{np.linalg.norm(error) / np.linalg.norm(np.asarray(weight)):.3g}" in shown
    assert f"{np.abs(error).max():.3g}" in shown


def test_gguf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "m.safetensors", tmp_path / "m.gguf"
    file = model_file(hidden=320)
    write_engine(path, file.layers, file.tensors, file.model)
    assert main(["export", str(path), "--to", "gguf:tq2_0", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "largest relative error of a row scale in float16" in printed.out
    assert "blocks of 256 do not divide rows of 320" in printed.err
    told = inspected(out, capsys)
    assert told["format"] == "GGUF 3"
    assert {layer["kind"] for layer in told["layers"]} == {"TQ2_0"}
    assert told["counters"]["bits_per_weight"] == 66 * 8 / 256
    assert told["model"]["general.architecture"] == "llama"
    assert main(["inspect", str(out)]) == 0
    assert main(["export", str(path), "--to", "gguf:f16", "--out", str(out)]) == 2
    assert main(["export", str(path), "--to", "gguf:f16", "--out", str(out), "--force"]) == 0
    assert inspected(out, capsys)["layers"] == []


def test_the_last_pattern_that_matches_a_layer_counts() -> None:
    wanted = per_layer("--C", ["11", "blocks.*=8", "a=b=2", "blocks.3.*=5"])
    assert wanted == {"*": 11, "blocks.*": 8, "a=b": 2, "blocks.3.*": 5}
    assert [value_for(name, wanted) for name in ("x", "blocks.1.q", "blocks.3.q", "a=b")] == [11, 8, 5, 2]
    assert value_for("x", {"y": 1}) is None
    assert value_for("x", 7) == 7
    assert per_layer("--C", None) is None


def test_bad_input_is_one_sentence_and_exit_code_2(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = model.parent
    cut = folder / "cut.safetensors"
    cut.write_bytes(model.read_bytes()[:-1])
    write_engine(folder / "none.safetensors", {}, {"x": np.zeros(1)}, {})
    write_mt(folder / "state.mt", np.full(3, 255, np.uint8))
    write_motifcl(folder / "layers", {"a": golden_layer()})
    row = torch.ones(2, 1)
    torch.save({"a.state": torch.tensor(GOLDEN["codes"], dtype=torch.uint8), "a.scale": row}, folder / "c.pt")
    (folder / "empty").mkdir()
    before = sorted(path.name for path in folder.iterdir())
    new = ["--out", str(folder / "new")]
    out = ["--to", "motifcl", "--out", str(folder / "out")]
    for arguments, message in [
        (["inspect", str(folder / "missing")], "missing"),
        (["inspect", str(folder)], "expected a file"),
        (["inspect", str(cut)], "cut.safetensors: tensor compact.state: data_offsets: expected"),
        (["inspect", str(model), "--C", "8"], "expected C only for MotifCL states and PyTorch checkpoints"),
        (["inspect", str(model), "--in-features", "8"], "expected in_features only for PyTorch checkpoints"),
        (["inspect", str(model), "--C", "x"], "expected --C as N or PATTERN=N, got 'x'"),
        (["inspect", str(folder / "state.mt"), "--C", "11"], "codes below 63"),
        (["inspect", str(folder / "state.mt"), "--C", "12"], "1..11"),
        # A misspelled name would leave a layer with another C.
        (["inspect", str(folder / "state.mt"), "--C", "b=11"], "expected C by patterns that match a layer, got 'b'"),
        (["inspect", str(folder / "layers"), "--C", "11", "--C", "b*=2"], "got 'b*', which matches none"),
        (["inspect", str(folder / "c.pt"), "--in-features", "b=8"], "expected in_features by patterns"),
        (["import", str(folder / "layers"), "--from", "motifcl", "--C", "11", "--C", "b=2", *new], "got 'b', which"),
        (["import", str(folder / "c.pt"), "--from", "checkpoint", "--C", "11", "--C", "b=2", *new], "got 'b', which"),
        (["export", str(cut), *out], "cut.safetensors: tensor compact.state: data_offsets: expected"),
        (["export", str(folder / "missing"), *out], "missing"),
        (["export", str(folder / "none.safetensors"), *out], "without any"),
        (["export", str(model), "--to", "gif", "--out", str(folder / "out")], "motifcl"),
        (["export", str(model), "--to", "npz", "--out", str(model)], "expected a new file (or --force)"),
        (["export", str(folder), *out], "expected a folder of memtrain-cl train"),
        (["export", str(model), "--to", "mncc", "--out", str(folder / "no" / "m")], "No such file"),
        (["import", str(model), "--from", "npz", "--out", str(model)], "expected a new file (or --force)"),
        (["import", str(model), "--from", "npz", *new], "zip directory"),
        (["import", str(model), "--from", "mncc", *new], "magic"),
        (["import", str(model), "--from", "checkpoint", *new], "zip directory"),
        (["import", str(folder / "empty"), "--from", "motifcl", *new], "a file without any"),
        (["import", str(model), "--from", "npz", "--C", "3", *new], "--C only beside --from checkpoint or motifcl"),
        (["import", str(model), "--from", "motifcl", "--row-scales", *new], "--row-scales only beside --from mncc"),
        (["import", str(model), "--from", "npz", "--in-features", "3", *new], "--in-features only beside"),
        (
            ["import", str(folder / "empty"), "--from", "motifcl", "--seed", "-1", *new],
            "expected seed as an integer in",
        ),
        (["export", str(model), "--to", "motifcl", "--out", str(model)], "m.safetensors"),
    ]:
        assert main(arguments) == 2, arguments
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("memtrain-cl: ")
        assert message in printed.err
        assert printed.err.count("\n") == 1
    assert sorted(path.name for path in folder.iterdir()) == before
