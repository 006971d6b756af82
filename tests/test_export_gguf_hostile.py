"""Damaged and malicious GGUF files, and files made by hand: what loads has the declared shapes, all else is named."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain_cl.errors import CorruptFile
from memtrain_cl.export.gguf import read_gguf, write_gguf
from tests.export_cases import less_memory_than
from tests.gguf_cases import corrupted, gguf_bytes, judge, model_file, read_all, read_bytes, small, text

_U32 = (4, struct.pack("<I", 7))


def test_a_file_made_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(small())
    file = read_all(path)
    assert file.bytes == path.stat().st_size
    plain = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in file.metadata.items()}
    unsigned = {"u8": 255, "u16": 65535, "u32": 2**32 - 1, "u64": 2**64 - 1}
    signed = {"i8": -1, "i16": -1, "i32": -1, "i64": -1}
    arrays = {"words": ["a", "", "bc"], "numbers": [-1, 0, 2**31 - 1], "flags": [True, False], "none": []}
    others = {"f32": 0.5, "f64": 0.1, "yes": True, "text": "\u00e9\n", "general.alignment": 64}
    assert plain == {**unsigned, **signed, **arrays, **others}
    assert type(plain["yes"]) is bool
    assert file.values("f32").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert file.values("f16").tolist() == [0, 1, 2, 3]
    assert file.values("number") == 3
    two, one = file.ternary("tq2"), file.ternary("tq1")
    assert two.codes.reshape(2, 4, 32)[:, :, 7].tolist() == [[-1, 0, 1, 0]] * 2
    assert (two.scale.tolist(), one.scale.tolist()) == ([0.25], [0.25, 0.25])
    # 160 of five digits 2, 80 of five digits 0, 16 of four digits 2.
    assert one.codes.tolist() == [[1] * 160 + [-1] * 80 + [1] * 16] * 2
    assert np.array_equal(file.values("tq1"), one.codes * np.float32(0.25))
    with pytest.raises(ValueError, match="'f16': expected a type of TQ2_0, TQ1_0, got F16"):
        file.ternary("f16")


def test_scales_that_differ_in_a_row_are_no_row_scale(tmp_path: Path) -> None:
    blocks = b"".join(bytes(64) + struct.pack("<e", scale) for scale in (1, 2))
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes({}, [("x", (512, 1), 35, blocks), ("i", (1,), 26, b"1234")]))
    found = read_gguf(path).ternary("x")
    assert found.block_scale.tolist() == [[1, 2]]
    with pytest.raises(ValueError, match="one scale a row"):
        _ = found.scale
    with pytest.raises(ValueError, match="'i': expected a type of floating numbers, got I32"):
        read_gguf(path).values("i")


def test_every_truncation(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, model_file(layers=1, dim=8, heads=2, hidden=8), "f16")
    # Every length of a file that has everything, and some of one that is written, whose tokens take time.
    for whole, step in ((small(), 1), (path.read_bytes(), 53)):
        path.write_bytes(whole)
        read_all(path)
        for length in range(len(whole) - 1, -1, -step):
            os.truncate(path, length)
            with pytest.raises(CorruptFile):
                read_gguf(path)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_corruption_is_found_or_loads_as_declared(data: st.DataObject) -> None:
    judge(corrupted(small(), data))


BIG = 2**62


def head(version: int = 3, tensors: int = 0, keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def one_tensor(name: str = "x", dims: tuple[int, ...] = (4,), kind: int = 0, data: bytes = bytes(16)) -> bytes:
    return gguf_bytes({}, [(name, dims, kind, data)])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "magic: expected at most 0 bytes there, got 4"),
        (b"GGUG" + bytes(20), "magic: expected b'GGUF', got b'GGUG'"),
        (head(version=2), "version: expected 3, little-endian, got 2"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version: expected 3, little-endian, got 50331648"),
        (head(tensors=BIG), "tensor count: expected at most 0 in 0 bytes, got 4611686018427387904"),
        (head(keys=BIG) + bytes(99), "key count: expected at most 7 in 99 bytes"),
        (head(keys=1) + struct.pack("<Q", BIG) + bytes(99), "key 0: length: expected at most 65535"),
        (gguf_bytes({"": _U32}, []), "key 0: expected a name of its own, got ''"),
        (head(keys=2) + 2 * (text("a") + struct.pack("<II", 4, 7)), "key 1: expected a name of its own, got 'a'"),
        (head(keys=1) + text(b"\xff") + struct.pack("<II", 4, 7), "key 0: expected UTF-8"),
        (gguf_bytes({"a": (13, bytes(8))}, []), "key a: type: expected 0..12, and no array of arrays, got 13"),
        (gguf_bytes({"a": (9, struct.pack("<IQIQ", 9, 1, 4, 0))}, []), "key a: type.*no array of arrays, got 9"),
        (gguf_bytes({"a": (9, struct.pack("<IQ", 12, BIG))}, []), "key a: count: expected at most 0"),
        (gguf_bytes({"a": (9, struct.pack("<IQ", 8, BIG) + bytes(80))}, []), "key a: count: expected at most 10"),
        (gguf_bytes({"a": (8, struct.pack("<Q", 2**64 - 1))}, []), "key a: length"),
        (gguf_bytes({"a": (8, text(b"\xc3"))}, []), "key a: expected UTF-8"),
        (gguf_bytes({"a": (7, b"\x02")}, []), "key a: expected 0 or 1, got 2"),
        (gguf_bytes({"a\x1b[2J" + "b" * 900: (13, bytes(8))}, []), r"key a\\x1b\[2Jbbb"),
        (gguf_bytes({"general.alignment": (4, struct.pack("<I", 0))}, []), "general.alignment: expected.*got 0"),
        (gguf_bytes({"general.alignment": (4, struct.pack("<I", 48))}, []), "general.alignment: expected.*got 48"),
        (gguf_bytes({"general.alignment": (10, struct.pack("<Q", 32))}, []), "general.alignment: expected a uint32"),
        (one_tensor("x" * 65), "tensor 0: name: length: expected at most 64, got 65"),
        (one_tensor(dims=(4, 1, 1, 1, 1)), "tensor x: number of dims: expected at most 4, got 5"),
        (one_tensor(dims=(2**32, 2**32)), "tensor x: dims: expected sizes that an array can have"),
        (one_tensor(dims=(0, 2**63)), "tensor x: dims"),
        (one_tensor(kind=4), "tensor x: type: expected one of 0, 1, 2, .*got 4"),
        (one_tensor(dims=(255,), kind=35), "tensor x: dims: expected rows of a multiple of 256 for TQ2_0, got 255"),
        (one_tensor(dims=(2**40,)), "tensor x: expected at most the 32 bytes there, got 4398046511104"),
        (
            one_tensor(dims=(256,), kind=35, data=b"\xff" * 66),
            "tensor x: expected codes 0, 1 and 2, got '3 in block 0'",
        ),
        (one_tensor() + b"\0", "size: expected"),
        (one_tensor()[:-1], "size: expected"),
        (
            gguf_bytes({}, [("x", (4,), 0, bytes(16)), ("x", (4,), 0, bytes(16))]),
            "tensor 1: name: expected a name of its own, got 'x'",
        ),
        (
            gguf_bytes({}, [("x", (4,), 0, bytes(64)), ("y", (4,), 0, bytes(16))]),
            "tensor y: offset: expected 32 .tensors back to back., got 64",
        ),
        (
            gguf_bytes({}, [("x", (16,), 0, b""), ("y", (16,), 0, bytes(64))]),
            "tensor y: offset: expected 64 .tensors back to back., got 0",
        ),
    ],
)
def test_faults_are_named(data: bytes, message: str) -> None:
    with less_memory_than(4_000_000), pytest.raises(CorruptFile, match=message):
        read_bytes(data)


def test_a_file_that_shrinks_after_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(small())
    file = read_gguf(path)
    os.truncate(path, file.tensors["tq1"].start + 7)
    with pytest.raises(CorruptFile, match="tensor tq1: expected 108 bytes, got '7 before"):
        file.data("tq1")
    with pytest.raises(FileNotFoundError):
        read_gguf(tmp_path / "missing")
