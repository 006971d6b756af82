"""`memtrain-cl inspect` and `memtrain-cl export` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import memtrain_cl
from memtrain_cl.cli import main
from memtrain_cl.export.motifcl import read_motifcl, write_motifcl, write_mt
from memtrain_cl.export.packed import write_engine
from tests.export_cases import GOLDEN, golden_layer, small_model


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


def test_bad_input_is_one_sentence_and_exit_code_2(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = model.parent
    cut = folder / "cut.safetensors"
    cut.write_bytes(model.read_bytes()[:-1])
    write_engine(folder / "none.safetensors", {}, {"x": np.zeros(1)}, {})
    write_mt(folder / "state.mt", np.full(3, 255, np.uint8))
    before = sorted(path.name for path in folder.iterdir())
    out = ["--to", "motifcl", "--out", str(folder / "out")]
    for arguments, message in [
        (["inspect", str(folder / "missing")], "missing"),
        (["inspect", str(folder)], "expected a file"),
        (["inspect", str(cut)], "cut.safetensors: tensor compact.state: data_offsets: expected"),
        (["inspect", str(model), "--C", "8"], "engine file says its own"),
        (["inspect", str(folder / "state.mt"), "--C", "11"], "codes below 63"),
        (["inspect", str(folder / "state.mt"), "--C", "12"], "1..11"),
        (["export", str(cut), *out], "cut.safetensors: tensor compact.state: data_offsets: expected"),
        (["export", str(folder / "missing"), *out], "missing"),
        (["export", str(folder / "none.safetensors"), *out], "without any"),
        (["export", str(model), "--to", "gif", "--out", str(folder / "out")], "motifcl"),
        (["export", str(model), "--to", "motifcl", "--out", str(model)], "m.safetensors"),
    ]:
        assert main(arguments) == 2, arguments
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("memtrain-cl: ")
        assert message in printed.err
        assert printed.err.count("\n") == 1
    assert sorted(path.name for path in folder.iterdir()) == before
