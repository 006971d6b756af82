"""Malicious engine files: every fault is a CorruptFile that names file and field; nothing large is allocated."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memtrain_cl.errors import CorruptFile
from memtrain_cl.export.motifcl import read_mt
from memtrain_cl.export.packed import EngineFile, read_engine, write_engine
from tests.damaged_files import assert_sentence, assert_unchanged
from tests.export_cases import less_memory_than, small_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "m.safetensors"
    write_engine(path, *small_model())
    return path.read_bytes()


def read_bytes(data: bytes) -> EngineFile:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.safetensors"
        path.write_bytes(data)
        try:
            return read_engine(path)
        except CorruptFile as fault:
            assert_sentence(fault, path)
            raise


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(header: Any, payload: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + payload


def entry(dtype: str, shape: Any, offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


META = {"memtrain_cl": json.dumps({"format": 1, "created_by": "x", "model": {}, "layers": {}, "sha256": {}})}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "size: expected at least 8 bytes, got 0"),
        (b"\xff" * 8, "header length: expected at most 0"),
        ((2**62).to_bytes(8, "little") + b"{}", "header length"),
        (join(b"\xff\xfe", b""), "header: expected JSON"),
        (join(b"[" * 200_000, b""), "header: expected JSON"),
        (join(b'{"a":' + b"9" * 5000 + b"}", b""), "header: expected JSON"),
        (join([], b""), "header: expected a JSON object"),
        (join(b'{"a":1,"a":1}', b""), "'a' twice"),
        (join(b'{"a":NaN}', b""), "NaN"),
        (join(b'{"a":1e999}', b""), "1e999"),
        (join(b'{"a":-1' + b"0" * 400 + b"}", b""), "finite numbers.*the number .*-1000"),
        # Deep enough for what walks through it later, yet not for the parser itself.
        (join(b'{"a":' + b"[" * 100 + b"]" * 100 + b"}", b""), "at most 100 levels, got 'more than 100 levels'"),
        (join(b'{"\\ud800":1}', b""), "surrogate"),
        (join({}, b""), "__metadata__: expected the key 'memtrain_cl'"),
        (join({"__metadata__": {"a": 1}}, b""), "__metadata__: expected an object of strings"),
        (join({"__metadata__": META, "a": 1}, b""), "tensor a: expected an object of"),
        (join({"__metadata__": META, "a": entry("F33", [1], [0, 4])}, b"1234"), "tensor a: dtype.*got 'F33'"),
        (join({"__metadata__": META, "a": entry("F32", [-1], [0, 4])}, b"1234"), r"tensor a: shape.*got \[-1\]"),
        (join({"__metadata__": META, "a": entry("F32", [True], [0, 4])}, b"1234"), "tensor a: shape"),
        (join({"__metadata__": META, "a": entry("F32", [2**32, 2**32], [0, 4])}, b"1234"), "tensor a: shape"),
        (join({"__metadata__": META, "a": entry("F32", [0, 2**63], [0, 0])}, b""), "tensor a: shape"),
        (join({"__metadata__": META, "a": entry("F32", [1] * 100, [0, 4])}, b"1234"), "tensor a: shape"),
        (join({"__metadata__": META, "a": entry("F32", [2**40], [0, 2**42])}, b"1234"), "data_offsets.*within 4 bytes"),
        (join({"__metadata__": META, "a": entry("F32", [1], [-4, 0])}, b"1234"), "data_offsets"),
        (join({"__metadata__": META, "a": entry("F32", [1], [4, 0])}, b"1234"), "data_offsets"),
        (join({"__metadata__": META, "a": entry("F32", [1], [0, 4.0])}, b"1234"), "data_offsets.*two integers"),
        (join({"__metadata__": META, "a": entry("U8", [1], [0, 4])}, b"1234"), "data_offsets: expected 1 bytes"),
        (join({"__metadata__": META, "a": entry("U8", [2], [2, 4])}, b"1234"), "a start of 0"),
        (join({"__metadata__": META, "a": entry("U8", [2], [0, 2])}, b"1234"), "size: expected"),
        (
            join({"__metadata__": META, "a": entry("U8", [3], [0, 3]), "b": entry("U8", [2], [2, 4])}, b"1234"),
            "tensor b: data_offsets: expected a start of 3, got 2",
        ),
        (join({"__metadata__": META, "\x1b[2J": entry("U8", [9], [0, 1])}, b"1"), r"tensor \\x1b\[2J"),
        (join({"__metadata__": META, "a": entry("U8", [1], [0, 1])}, b"1"), "sha256: expected one sum for each tensor"),
    ],
)
def test_container_faults_are_named(data: bytes, message: str) -> None:
    with less_memory_than(4_000_000), pytest.raises(CorruptFile, match=message):
        read_bytes(data)


def put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        for name in parents:
            body = body[name]
        body[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("format", 2), "memtrain_cl.format: expected 1, got 2"),
        (put("format", True), "memtrain_cl.format"),
        (put("layers", []), "memtrain_cl.layers: expected an object"),
        (put("model", "x"), "memtrain_cl.model"),
        (put("created_by", None), "memtrain_cl.created_by"),
        (put("sha256", {}), "memtrain_cl.sha256"),
        (put("layers/compact", 5), "memtrain_cl.layers.compact: expected an object"),
        (put("layers/compact/C", 12), "compact.C: expected an integer in 1..11, got 12"),
        (put("layers/compact/C", 1.0), "compact.C"),
        (put("layers/compact/C", 1), "tensor compact.state: expected codes below 3"),
        (put("layers/compact/in_features", 8), r"tensor compact.state: expected U8 \[1, 6\], got 'U8 \[1, 3\]'"),
        (put("layers/compact/in_features", 5), "compact.in_features: expected a multiple of 4"),
        (put("layers/compact/in_features", 2**80), "compact.in_features"),
        (put("layers/compact/out_features", -1), "compact.out_features"),
        (put("layers/compact/out_features", 2), "tensor compact.state"),
        (put("layers/compact/seed", -1), "compact.seed"),
        (put("layers/compact/step", "1"), "compact.step"),
        (put("layers/compact/hyper", None), "compact.hyper"),
        (put("layers/compact/hyper/C", 5), "compact.hyper.C: expected 2, the layer's C, got 5"),
        (put("layers/compact/kind", "Linear"), "compact.kind"),
        (put("layers/blocks.0.up/kind", "CompactCounterLinear"), "blocks.0.up.kind: expected a layer with row moments"),
        (put("layers/blocks.0.attn.q/kind", "CompactCounterLinear"), "tensor blocks.0.attn.q.v: expected zeros"),
        (
            put("layers/new", {"in_features": 4, "out_features": 1, "C": 8, "hyper": {}, "seed": 0, "step": 0}),
            "new.state",
        ),
        (put("sha256/norm", "00"), "sha256 of tensor norm: expected '?00"),
        (put("sha256/norm", 5), "sha256 of tensor norm"),
    ],
)
def test_metadata_faults_are_named(whole: bytes, change: Callable[[dict[str, Any]], None], message: str) -> None:
    header, payload = split(whole)
    body = json.loads(header["__metadata__"]["memtrain_cl"])
    del body["header_sha256"]  # else it would speak first
    header["__metadata__"]["memtrain_cl"] = json.dumps(body)
    assert_unchanged(read_bytes(join(header, payload)))
    change(body)
    header["__metadata__"]["memtrain_cl"] = json.dumps(body)
    with pytest.raises(CorruptFile, match=message):
        read_bytes(join(header, payload))


@pytest.mark.parametrize("path", ["layers/compact/seed", "layers/compact/step", "model/dim", "created_by"])
def test_a_changed_number_in_the_metadata_is_found(whole: bytes, path: str) -> None:
    header, payload = split(whole)
    body = json.loads(header["__metadata__"]["memtrain_cl"])
    put(path, "9" if path == "created_by" else 9)(body)
    header["__metadata__"]["memtrain_cl"] = json.dumps(body)
    with pytest.raises(CorruptFile, match="header_sha256"):
        read_bytes(join(header, payload))


def test_a_sum_whose_name_is_damaged_is_missed(whole: bytes) -> None:
    header, payload = split(whole)
    body = json.loads(header["__metadata__"]["memtrain_cl"])
    body["deader_sha256"] = body.pop("header_sha256")
    header["__metadata__"]["memtrain_cl"] = json.dumps(body)
    with pytest.raises(CorruptFile, match=r"expected header_sha256, or no keys but .* got 'deader_sha256'"):
        read_bytes(join(header, payload))


@pytest.mark.parametrize(
    ("suffix", "value"), [("scale", np.nan), ("scale", 0), ("v", -1), ("v", np.inf), ("s_base", -2)]
)
def test_values_out_of_bounds_are_refused_although_the_sums_agree(whole: bytes, suffix: str, value: float) -> None:
    name = f"blocks.0.up.{suffix}"
    header, payload = split(whole)
    start, stop = header[name]["data_offsets"]
    rows = np.frombuffer(payload[start:stop], "<f4").copy()
    rows[2] = value
    payload = payload[:start] + rows.tobytes() + payload[stop:]
    body = json.loads(header["__metadata__"]["memtrain_cl"])
    with pytest.raises(CorruptFile, match=f"sha256 of tensor {name}"):
        read_bytes(join(header, payload))
    body["sha256"][name] = hashlib.sha256(rows.tobytes()).hexdigest()
    del body["header_sha256"]
    header["__metadata__"]["memtrain_cl"] = json.dumps(body)
    with pytest.raises(CorruptFile, match=f"tensor {name}: expected finite values .* in row 2"):
        read_bytes(join(header, payload))


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_engine(tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        read_engine(tmp_path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        for read in (read_engine, read_mt):
            with pytest.raises(CorruptFile, match="regular file"):
                read(tmp_path / "pipe")
