"""NumPy's .npz of counter layers: what numpy.load shows, the way back, archives made to harm."""

from __future__ import annotations

import dataclasses
import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memtrain_cl.errors import CorruptFile
from memtrain_cl.export.npz import read_npz, write_npz
from memtrain_cl.formats import LayerState
from tests.export_cases import GOLDEN, golden_layer, less_memory_than, random_layer

Parts = dict[str, bytes]


def npy(array: Any, dtype: str) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(array, dtype))
    return file.getvalue()


def golden_parts() -> Parts:
    """The golden layer's members, laid out by NumPy and not by the writer."""
    types = {"codes": "u1", "C": "i8", "scale": "f4", "v": "f4"}
    values = {**GOLDEN, "C": 11}
    return {f"l.{name}.npy": npy(values[name], dtype) for name, dtype in types.items()}


def zipped(parts: Parts, **options: Any) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return file.getvalue()


def assert_same(ours: LayerState, theirs: LayerState) -> None:
    for name in ("state", "scale", "v", "s_base"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert (a is None) == (b is None), name
        assert a is None or a.tobytes() == b.tobytes(), name
    assert ours.C == theirs.C


def test_numpy_opens_it_and_layers_come_back_bit_for_bit(tmp_path: Path) -> None:
    layers = {
        "blocks.0.q": golden_layer(),
        "": random_layer(1, 70, 12, 5),
        "a/\u00e9 x": random_layer(2, 1, 4, 11, "CompactCounterLinear"),
        "no rows": random_layer(3, 0, 8, 3),
        "no columns": random_layer(4, 2, 0, 3),
    }
    path = tmp_path / "m.npz"
    write_npz(path, layers)
    with np.load(path, allow_pickle=False) as shown:
        assert shown["blocks.0.q.codes"].tolist() == GOLDEN["codes"]
        assert shown["blocks.0.q.C"] == 11
        assert shown["blocks.0.q.v"].tolist() == GOLDEN["v"]
        assert "blocks.0.q.s_base" not in shown
        assert shown["codes"].shape == (70, 12)
        assert "a/\u00e9 x.v" not in shown
    read = read_npz(path, seed=1)
    assert list(read) == list(layers)
    for name, layer in layers.items():
        assert_same(read[name], layer)
    assert read["a/\u00e9 x"].kind == "CompactCounterLinear"
    assert read[""].kind == "PackedRMSCounterLinear"
    assert len({layer.seed for layer in read.values()}) == 5
    write_npz(tmp_path / "again", read)
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_archives_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "m.npz"
    path.write_bytes(zipped(golden_parts()))
    assert_same(read_npz(path)["l"], golden_layer())
    savez: Callable[..., None] = np.savez
    layer = golden_layer()
    codes = np.asfortranarray(np.array(GOLDEN["codes"], np.uint8))
    savez(path, **{"l.codes": codes, "l.C": np.int64(11), "l.scale": layer.scale.astype(">f4"), "l.v": layer.v})
    assert_same(read_npz(path)["l"], golden_layer())
    path.write_bytes(zipped({}))
    assert read_npz(path) == {}


def header(text: str, payload: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    data = text.encode("latin1")
    length = len(data).to_bytes(2 if version == b"\x01\x00" else 4, "little")
    return b"\x93NUMPY" + version + length + data + payload


def described(descr: Any, shape: Any, payload: bytes = b"", order: bool = False) -> bytes:
    return header(f"{{'descr': {descr!r}, 'fortran_order': {order}, 'shape': {shape}, }}\n", payload)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"l.codes.npy": described("|u1", "(2**40, 4)")}, "member l.codes.npy: expected an array as NumPy"),
        ({"l.codes.npy": described("|u1", f"({2**40}, 4)", b"1234")}, "l.codes.npy: shape: expected 4 bytes"),
        ({"l.codes.npy": described("|u1", f"({2**62}, 4)", b"1234")}, "l.codes.npy: shape: expected sizes"),
        ({"l.codes.npy": described("|u1", "(-1, 4)", b"1234")}, "l.codes.npy: shape"),
        ({"l.codes.npy": described("|u1", "(True, 4)", b"1234")}, "l.codes.npy: shape"),
        ({"l.codes.npy": described("|u1", "(2, 8)", b"1" * 17)}, "l.codes.npy: shape: expected 17 bytes"),
        ({"l.codes.npy": described("|O", "(1,)", b"cos\nsystem\n")}, "l.codes.npy: dtype.*got dtype.'O'"),
        ({"l.codes.npy": described([("a", "|u1")], "(1, 4)", b"1234")}, "l.codes.npy: dtype"),
        ({"l.codes.npy": described("<f4", "(1, 1)", b"1234")}, "l.codes.npy: dtype"),
        ({"l.codes.npy": described("|i1", "(1, 4)", b"1234")}, "l.codes.npy: dtype"),
        ({"l.codes.npy": header("[" * 5000)}, "l.codes.npy: expected an array as NumPy"),
        ({"l.codes.npy": header("{'a': 1}\n")}, "l.codes.npy: expected an array as NumPy"),
        ({"l.codes.npy": header("'\\d'\n")}, "l.codes.npy: expected an array as NumPy"),
        ({"l.codes.npy": header(" " * 100_000, version=b"\x02\x00")}, "l.codes.npy: expected an array as NumPy"),
        ({"l.codes.npy": header("{}", version=b"\x09\x00")}, "l.codes.npy: expected an array as NumPy"),
        ({"l.codes.npy": b""}, "l.codes.npy: expected an array as NumPy"),
        ({"l.codes.npy": npy([1, 2], "u1")}, r"l.codes.npy: shape: expected \[out, in\]"),
        ({"l.codes.npy": npy(np.zeros((2, 3)), "u1")}, "l.codes.npy: shape"),
        ({"l.codes.npy": npy(np.full((2, 8), 63), "u1")}, "l.codes.npy: expected codes below 63.*'63 at 0'"),
        ({"l.C.npy": npy(12, "i8")}, "l.C.npy: expected an integer in 1..11"),
        ({"l.C.npy": npy([11], "i8")}, "l.C.npy"),
        ({"l.C.npy": npy(7, "i8")}, "l.codes.npy: expected codes below 39"),
        ({"l.scale.npy": npy([1, np.nan], "f4")}, "l.scale.npy: expected finite values > 0, got 'nan in row 1'"),
        ({"l.scale.npy": npy([1], "f4")}, r"l.scale.npy: shape: expected \[2\], got \(1,\)"),
        ({"l.v.npy": npy([1, -1], "f4")}, "l.v.npy: expected finite values >= 0"),
        ({"l.s_base.npy": npy([1, 0], "f4")}, "l.s_base.npy"),
        ({"l.x.npy": npy([1], "f4")}, "member l.x.npy: expected <layer>"),
        ({"l.codes": npy([1], "u1")}, "member l.codes: expected <layer>"),
    ],
)
def test_faults_are_named(tmp_path: Path, changes: Parts, message: str) -> None:
    path = tmp_path / "m.npz"
    path.write_bytes(zipped(golden_parts() | changes))
    refused(path, message)


@pytest.mark.parametrize("missing", ["codes", "C", "scale"])
def test_missing_members_are_named(tmp_path: Path, missing: str) -> None:
    parts = golden_parts()
    del parts[f"l.{missing}.npy"]
    (tmp_path / "m.npz").write_bytes(zipped(parts))
    refused(tmp_path / "m.npz", f"member l.{missing}.npy: expected a member of the layer")


def refused(path: Path, message: str) -> None:
    with less_memory_than(2_000_000), pytest.raises(CorruptFile, match=message) as caught:
        read_npz(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_archives_that_are_more_than_their_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.npz"
    large = described("|u1", f"({2**24}, 4)", bytes(2**26))
    path.write_bytes(zipped({"l.codes.npy": large}, compression=zipfile.ZIP_DEFLATED))
    assert path.stat().st_size < 100_000
    refused(path, "member l.codes.npy: expected contents as they are")
    for data, message in [
        (b"", "zip directory"),
        (b"PK\x03\x04" + bytes(100), "zip directory"),
        (zipped(golden_parts())[:-1], "zip directory"),
    ]:
        path.write_bytes(data)
        refused(path, message)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("l.codes.npy", b"1")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("l.codes.npy", b"2")
    refused(path, "member l.codes.npy: expected distinct names")
    whole = bytearray(zipped(golden_parts()))
    at = whole.index(b"PK\x01\x02")
    whole[at + 24 : at + 28] = whole[at + 20 : at + 24] = (2**31).to_bytes(4, "little")  # sizes in the directory
    path.write_bytes(whole)
    refused(path, "member l.codes.npy: size: expected members that fill at most")


def test_a_changed_byte_of_a_member_is_found(tmp_path: Path) -> None:
    data = bytearray(zipped(golden_parts()))
    data[data.index(np.float32(2.5).tobytes()) + 2] ^= 1
    (tmp_path / "m.npz").write_bytes(data)
    refused(tmp_path / "m.npz", "member l.v.npy: expected a whole zip archive, got .*CRC")


def test_refusals_leave_nothing(tmp_path: Path) -> None:
    bad = dataclasses.replace(golden_layer(), scale=np.array([1, np.nan], np.float32))
    with pytest.raises(ValueError, match=r"'b\.scale': expected finite values > 0, got nan"):
        write_npz(tmp_path / "m", {"a": golden_layer(), "b": bad})
    for name in ("a\0", "\ud800", "x" * 2**16):
        with pytest.raises(ValueError, match="expected a layer name in Unicode"):
            write_npz(tmp_path / "m", {name: golden_layer()})
    assert list(tmp_path.iterdir()) == []
