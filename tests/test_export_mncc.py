"""MNCC files: golden bytes, files made by hand, layers with groups and single weights, hostile sizes."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memtrain_cl.errors import CorruptFile
from memtrain_cl.export.mncc import read_mncc, write_mncc
from memtrain_cl.export.mncc_import import import_mncc, nearest_ternary
from tests.export_cases import GOLDEN, golden_layer, less_memory_than, pack, random_layer


def by_hand(
    name: bytes = b"a",
    sizes: Any = (1, 4, 2, 8),
    perm: Any = (2, 0, 3, 1),
    t: Any = (1, -1, 0, 1),
    c: Any = (7, -7, 0, 3),
    scale: Any = (0.5, 2.0),
    salient: Any = ((1,), (9.0,)),
    count: int | None = None,
) -> bytes:
    """One layer, its bytes laid out here and not by the writer."""
    index, value = salient
    return (
        struct.pack("<I", len(name))
        + name
        + struct.pack("<4I", *sizes)
        + struct.pack(f"<{len(perm)}i", *perm)
        + struct.pack(f"<{len(t)}b", *t)
        + struct.pack(f"<{len(c)}b", *c)
        + struct.pack(f"<{len(scale)}f", *scale)
        + struct.pack("<I", len(index) if count is None else count)
        + struct.pack(f"<{len(index)}q", *index)
        + struct.pack(f"<{len(value)}f", *value)
    )


def file_of(*layers: bytes, count: int | None = None) -> bytes:
    return b"MNCC0001" + struct.pack("<I", len(layers) if count is None else count) + b"".join(layers)


def plain(**changes: Any) -> bytes:
    """A layer of one row with one scale."""
    return by_hand(**{"sizes": (1, 4, 4, 8), "scale": (0.5,), "salient": ((), ()), **changes})


def test_the_golden_file_has_a_single_weight(tmp_path: Path) -> None:
    path = tmp_path / "layer.mncc"
    path.write_bytes(bytes.fromhex(GOLDEN["layer.mncc"]))
    (layer,) = read_mncc(path).values()
    assert (layer.out_features, layer.in_features, layer.group, layer.C) == (2, 8, 8, 11)
    assert layer.t.tolist() == GOLDEN["t"]
    assert layer.c.tolist() == GOLDEN["c"]
    weights = np.array(GOLDEN["scale"], np.float32)[:, None] * np.array(GOLDEN["t"], np.float32)
    weights[1, 1] = 0.5
    engine, notes = import_mncc(path)
    assert np.array_equal(np.asarray(engine.tensors["l0.wq.weight"]), weights)
    assert engine.layers == {}
    assert [(note.layer, note.form) for note in notes] == [("l0.wq", "dense")]


def test_written_bytes_are_the_golden_ones_without_the_single_weight(tmp_path: Path) -> None:
    write_mncc(tmp_path / "a", {"l0.wq": golden_layer()})
    golden = bytes.fromhex(GOLDEN["layer.mncc"])
    assert (tmp_path / "a").read_bytes() == golden[:-16] + struct.pack("<I", 0)


def test_layers_come_back_bit_for_bit(tmp_path: Path) -> None:
    layers = {
        "b": golden_layer(),
        "\u00e9/x": random_layer(5, 70, 12, 5),
        "": random_layer(6, 1, 4, 11, "CompactCounterLinear"),
        "no rows": random_layer(7, 0, 8, 3),
    }
    write_mncc(tmp_path / "a", layers)
    engine, notes = import_mncc(tmp_path / "a", seed=3)
    assert list(engine.layers) == list(layers)
    assert {(note.form, note.relative, note.largest) for note in notes} == {("counters", 0.0, 0.0)}
    for name, layer in layers.items():
        read = engine.layers[name]
        assert (read.C, read.state.tobytes(), read.scale.tobytes()) == (
            layer.C,
            layer.state.tobytes(),
            layer.scale.tobytes(),
        )
        assert read.v is not None
        assert not read.v.any()
    assert len({layer.seed for layer in engine.layers.values()}) == 4
    write_mncc(tmp_path / "b", engine.layers)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_file_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(file_of(by_hand(), plain(name=b"\xc3\xa9")))
    read = read_mncc(path)
    assert list(read) == ["a", "\u00e9"]
    # Columns 2 and 0 have the scale 0.5, columns 3 and 1 the scale 2; weight 1 is 9 whatever its code.
    assert read["a"].weights(0, 1).tolist() == [[-0.5, 9.0, 0.5, 0.0]]
    assert read["a"].weights(0, 1, counters=True).tolist() == [[-0.5 * 1.875, 9.0, 0.5 * 1.875, 0.0]]
    engine, _ = import_mncc(path)
    layer = engine.layers["\u00e9"]
    # In the order of the original columns: t = -1, 1, 1, 0 and c = -7, 3, 7, 0 at C = 8.
    assert layer.state.tobytes() == pack(np.array([[0, 40, 44, 22]], np.uint8)).tobytes()
    assert layer.scale.tolist() == [0.5]


def test_row_scales_are_the_nearest_and_their_error_is_told(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    out, columns, group, C = 9, 16, 4, 11
    t = random.integers(-1, 2, (out, columns))
    c = random.integers(1 - C, C, (out, columns))
    scale = random.uniform(0.1, 2, (out, columns // group)).astype(np.float32)
    perm = random.permutation(columns)
    t[3] = 0
    made = by_hand(
        sizes=(out, columns, group, C),
        perm=perm,
        t=t.reshape(-1),
        c=c.reshape(-1),
        scale=scale.reshape(-1),
        salient=((5, 40), (0.25, -3.0)),
    )
    path = tmp_path / "a"
    path.write_bytes(file_of(made))
    engine, (note,) = import_mncc(path, row_scales=True)
    wanted = np.zeros((out, columns))
    wanted[:, perm] = np.repeat(scale, group, axis=1) * t
    wanted.reshape(-1)[[5, 40]] = 0.25, -3.0
    layer = engine.layers["a"]
    width = 2 * C - 1
    quads = layer.state.reshape(-1, 3).astype(int)
    number = quads[:, 0] | quads[:, 1] << 8 | quads[:, 2] << 16
    codes = (number[:, None] >> np.arange(0, 24, 6) & 63).reshape(out, columns)
    got = layer.scale[:, None] * (codes // width - 1.0)
    assert note.form == "row scales"
    assert note.relative == pytest.approx(np.linalg.norm(wanted - got) / np.linalg.norm(wanted), rel=1e-6)
    assert note.largest == pytest.approx(np.abs(wanted - got).max(), rel=1e-6)
    assert 0.1 < note.relative < 0.7
    assert layer.scale[3] == np.float32(1e-5)
    # The counters hold what is missing, as far as they reach.
    latent = np.zeros((out, columns))
    latent[:, perm] = np.repeat(scale, group, axis=1) * (t + c / C)
    latent.reshape(-1)[[5, 40]] = 0.25, -3.0
    held = np.clip(np.rint((latent / layer.scale[:, None] - (codes // width - 1)) * C), 1 - C, C - 1)
    assert np.array_equal(codes % width - (C - 1), held)


def test_nearest_ternary_is_the_best_of_all() -> None:
    random = np.random.default_rng(1)
    rows = [random.normal(size=(4, 5)), random.choice([-2.0, 0.0, 0.5], (4, 5)), np.zeros((1, 5))]
    # Rows around the least scale, which as one far below it are nearest to nothing.
    rows += [1e-5 * random.normal(size=(6, 5)), np.full((1, 5), 4e-6), np.full((1, 5), 6e-6)]
    weights = np.concatenate(rows).astype(np.float32)
    t, scale = nearest_ternary(weights)
    signs = np.stack(np.meshgrid(*[[-1, 0, 1]] * 5), -1).reshape(-1, 5)
    for row, ours, size in zip(weights.astype(float), t, scale, strict=True):
        best = np.maximum(signs @ row / np.maximum((signs**2).sum(1), 1), 1e-5)
        least = np.square(row - best[:, None] * signs).sum(1).min()
        assert np.square(row - size * ours).sum() == pytest.approx(least, rel=1e-5, abs=0)
    assert (t[-2:, 0] == [0, 1]).all()


def test_what_the_counters_of_a_layer_cannot_hold(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(file_of(plain(sizes=(1, 4, 4, 43), c=(42, -42, 0, 3))))
    engine, (note,) = import_mncc(path)
    assert note.form == "dense"
    assert np.asarray(engine.tensors["a.weight"]).tolist() == [[-0.5, 0.5, 0.5, 0.0]]
    engine, (note,) = import_mncc(path, row_scales=True)
    # One scale a row is what the file has, so only the counters are coarser.
    assert (note.form, note.relative, note.largest, engine.layers["a"].C) == ("row scales", 0.0, 0.0, 11)
    odd = plain(sizes=(1, 3, 3, 8), perm=(0, 1, 2), t=(1, 0, 1), c=(0, 0, 0))
    path.write_bytes(file_of(odd))
    assert np.asarray(import_mncc(path)[0].tensors["a.weight"]).tolist() == [[0.5, 0.0, 0.5]]
    with pytest.raises(ValueError, match="'a': expected columns in fours"):
        import_mncc(path, row_scales=True)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "magic"),
        (b"MNCC0002" + bytes(4), "magic.*MNCC0002"),
        (file_of(count=2**32 - 1), "name of layer 0: expected 4 bytes"),
        (file_of(plain(), count=2), "name of layer 1"),
        (file_of(plain()) + b"1", "size: expected"),
        (file_of(plain(), plain()), "name of layer 1: expected distinct names"),
        (file_of(struct.pack("<I", 2**32 - 1) + b"abc"), "name of layer 0: expected at most 3 bytes"),
        (file_of(plain(name=b"\xff")), "name of layer 0: expected UTF-8"),
        (file_of(plain(sizes=(1, 4, 4, 0))), "layer a: C: expected an integer in 1..43, got 0"),
        (file_of(plain(sizes=(1, 4, 4, 44))), "layer a: C.*44"),
        (file_of(plain(sizes=(1, 0, 4, 8))), "layer a: in.*got 0"),
        (file_of(plain(sizes=(1, 4, 0, 8))), "layer a: group: expected a divisor of the 4"),
        (file_of(plain(sizes=(1, 4, 3, 8))), "layer a: group"),
        (file_of(plain(sizes=(1, 4, 8, 8))), "layer a: group"),
        (file_of(plain(sizes=(2**32 - 1, 2**31 - 4, 4, 8))), "layer a: sizes: expected at most"),
        (file_of(plain(sizes=(2, 4, 4, 8))), "layer a: sizes: expected at most"),
        (file_of(plain(perm=(0, 1, 2, 2))), "layer a: perm"),
        (file_of(plain(perm=(0, 1, 2, 4))), "layer a: perm"),
        (file_of(plain(perm=(0, 1, 2, -1))), "layer a: perm"),
        (file_of(plain(t=(0, 0, 2, 0))), "layer a: t: expected -1 to 1, got '2 at 2'"),
        (file_of(plain(t=(0, -128, 2, 0))), "layer a: t.*-128 at 1"),
        (file_of(plain(c=(0, 0, 0, 8))), "layer a: c: expected -7 to 7"),
        (file_of(plain(scale=(float("nan"),))), "layer a: scale: expected finite values > 0, got 'nan at 0'"),
        (file_of(plain(scale=(0.0,))), "layer a: scale"),
        (file_of(by_hand(scale=(1.0, float("inf")))), "layer a: scale.*inf at 1"),
        (file_of(by_hand(salient=((4,), (1.0,)))), "single weights: index: expected 0 to 3, got '4 at 0'"),
        (file_of(by_hand(salient=((-1,), (1.0,)))), "single weights: index"),
        (file_of(by_hand(salient=((1, 1), (1.0, 2.0)))), "single weights: index: expected distinct"),
        (file_of(by_hand(salient=((1,), (float("nan"),)))), "single weights: value"),
        (file_of(by_hand(count=2**32 - 1)), "single weights: expected at most 1, got"),
        (file_of(by_hand(count=0)), "size"),
    ],
)
def test_faults_are_named(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "a.mncc"
    path.write_bytes(data)
    with less_memory_than(1_000_000), pytest.raises(CorruptFile, match=message) as caught:
        read_mncc(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_refusals_leave_nothing(tmp_path: Path) -> None:
    bad = dataclasses.replace(golden_layer(), scale=np.array([1, np.inf], np.float32))
    with pytest.raises(ValueError, match="'b': expected scale of finite values > 0, got inf"):
        write_mncc(tmp_path / "m", {"a": golden_layer(), "b": bad})
    with pytest.raises(ValueError, match="expected a layer name in Unicode"):
        write_mncc(tmp_path / "m", {"\ud800": golden_layer()})
    with pytest.raises(ValueError, match=r"'e': expected .* columns"):
        write_mncc(tmp_path / "m", {"e": random_layer(0, 2, 0, 11)})
    assert list(tmp_path.iterdir()) == []
