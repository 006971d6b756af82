"""MotifCL tensor files: golden bytes, both versions, hostile headers, whole layers."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memtrain_cl.errors import CorruptFile
from memtrain_cl.export.motifcl import (
    MAGIC_1,
    MAGIC_2,
    read_motifcl,
    read_motifcl_folder,
    read_mt,
    write_motifcl,
    write_mt,
)
from tests.export_cases import GOLDEN, golden_layer, less_memory_than, random_layer


def golden_arrays() -> dict[str, np.ndarray]:
    layer = golden_layer()
    assert layer.v is not None
    return {"state": layer.state.reshape(-1), "scale": layer.scale, "v": layer.v}


def test_golden_bytes_are_written_and_read(tmp_path: Path) -> None:
    assert write_motifcl(tmp_path, {"l0": golden_layer()}) == ["l0_state.mt", "l0_scale.mt", "l0_v.mt"]
    for suffix, array in golden_arrays().items():
        path = tmp_path / f"l0_{suffix}.mt"
        expected = bytes.fromhex(GOLDEN[f"{suffix}.mt"])
        assert path.read_bytes() == expected
        write_mt(tmp_path / "again", array)
        assert (tmp_path / "again").read_bytes() == expected
        read = read_mt(path)
        assert read.dtype == array.dtype
        assert read.shape == array.shape
        assert read.tobytes() == array.tobytes()


def test_a_layer_comes_back_from_its_three_files(tmp_path: Path) -> None:
    layers = {
        "blocks.0.q": golden_layer(),
        "\u00e9 k": random_layer(5, 3, 12, 5),
        "k": random_layer(5, 1, 4, 11, "CompactCounterLinear"),
    }
    write_motifcl(tmp_path / "out", layers)
    assert len(list((tmp_path / "out").iterdir())) == 9
    for name, layer in layers.items():
        read = read_motifcl(tmp_path / "out", name, layer.C, seed=3)
        assert (read.in_features, read.out_features, read.C, read.seed, read.step) == (
            layer.in_features,
            layer.out_features,
            layer.C,
            3,
            0,
        )
        assert read.state.tobytes() == layer.state.tobytes()
        assert read.scale.tobytes() == layer.scale.tobytes()
        assert read.v is not None
        assert read.v.tobytes() == (np.zeros_like(layer.scale) if layer.v is None else layer.v).tobytes()
        write_mt(tmp_path / "out" / f"{name}_state.mt", layer.state.reshape(layer.out_features, -1, 3))
        assert read_motifcl(tmp_path / "out", name, layer.C).state.tobytes() == layer.state.tobytes()


def header(
    dims: Any,
    nbytes: int,
    *,
    magic: bytes = MAGIC_2,
    code: int = 3,
    ndim: int | None = None,
    quant: Any = (1.0, 0, -1, 0),
) -> bytes:
    data = magic + struct.pack("<iQ", code, len(dims) if ndim is None else ndim) + struct.pack(f"<{len(dims)}q", *dims)
    return data + struct.pack("<Q", nbytes) + (struct.pack("<fiiq", *quant) if magic == MAGIC_2 else b"")


def test_version_1_and_other_shapes(tmp_path: Path) -> None:
    path = tmp_path / "a.mt"
    path.write_bytes(header([2, 1, 3], 6, magic=MAGIC_1) + bytes(range(6)))
    assert read_mt(path).tolist() == [[[0, 1, 2]], [[3, 4, 5]]]
    path.write_bytes(header([0, 7], 0))
    assert read_mt(path).shape == (0, 7)
    write_mt(path, np.array([[1, 2], [3, 4]], np.float32).T)
    assert read_mt(path).tolist() == [[1, 3], [2, 4]]
    write_mt(path, np.array(5, dtype=np.uint8))
    assert read_mt(path).shape == ()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "magic"),
        (b"MCLTEN3\0" + bytes(100), "magic.*MCLTEN3"),
        (header([4], 4, code=1) + b"1234", "dtype: expected 0 .F32. or 3 .U8., got 1"),
        (header([], 4, ndim=2**63) + b"1234", f"ndim: expected at most 32, got {2**63}"),
        (header([4], 4, ndim=30) + b"1234", "dims: expected 240 bytes"),
        (header([-4], 4) + b"1234", r"dims.*\(-4,\)"),
        (header([-2, -2], 4) + b"1234", "dims"),
        (header([2**62, 4], 4) + b"1234", "dims"),
        (header([2**32, 2**32], 0), "dims"),
        (header([0, 2**63 - 1], 0), "dims"),
        (header([2**40], 2**40) + b"1234", f"nbytes: expected 4 .*got {2**40}"),
        (header([4], 3) + b"123", "nbytes: expected 4 .*got 3"),
        (header([4], 2**64 - 1) + b"1234", "nbytes"),
        (header([1], 1, code=0) + b"1", "nbytes: expected 4"),
        (header([4], 4) + b"12345", "nbytes: expected 5"),
        (header([4], 4, quant=(0.5, 0, -1, 0)) + b"1234", "quant_scale.*0.5"),
        (header([4], 4, quant=(1.0, 1, -1, 0)) + b"1234", "has_scales"),
        (header([4], 4, quant=(1.0, 0, 0, 0)) + b"1234", "scale_axis"),
        (header([4], 4, quant=(1.0, 0, -1, 32)) + b"1234", "block_size"),
    ],
)
def test_hostile_headers_are_named(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "a.mt"
    path.write_bytes(data)
    with less_memory_than(1_000_000), pytest.raises(CorruptFile, match=message) as caught:
        read_mt(path)
    assert str(path) in str(caught.value)


def test_three_files_must_agree(tmp_path: Path) -> None:
    write_motifcl(tmp_path, {"l": golden_layer()})

    def refused(suffix: str, array: np.ndarray, message: str, C: int = 11) -> None:
        path = tmp_path / f"l_{suffix}.mt"
        before = path.read_bytes()
        write_mt(path, array)
        with pytest.raises(CorruptFile, match=message) as caught:
            read_motifcl(tmp_path, "l", C)
        assert path.name in str(caught.value)
        path.write_bytes(before)

    arrays = golden_arrays()
    refused("v", np.ones(3, np.float32), "dims")
    refused("v", np.ones(2, np.uint8), "dims")
    refused("scale", np.ones((1, 2), np.float32), "dims")
    refused("state", np.zeros(13, np.uint8), "dims")
    refused("state", np.zeros(8, np.uint8), "dims")
    refused("state", np.zeros((4, 1, 3), np.uint8), "dims")
    refused("state", np.zeros((2, 6), np.uint8), "dims")
    refused("scale", np.array([1, np.nan], np.float32), "finite values > 0, got 'nan in row 1'")
    refused("v", np.array([1, -1], np.float32), "finite values >= 0")
    refused("state", arrays["state"], "codes below 39", C=7)
    with pytest.raises(ValueError, match=r"1\.\.11"):
        read_motifcl(tmp_path, "l", 12)


def test_a_folder_of_layers(tmp_path: Path) -> None:
    layers = {"a": golden_layer(), "a_v": random_layer(5, 3, 12, 5), "b": random_layer(5, 1, 4, 11)}
    write_motifcl(tmp_path, layers)
    (tmp_path / "embed.mt").write_bytes(b"another tensor")
    read = read_motifcl_folder(tmp_path, {"*": 11, "a_v": 5}, seed=2)
    assert list(read) == ["a", "a_v", "b"]
    assert all(read[name].state.tobytes() == layer.state.tobytes() for name, layer in layers.items())
    assert read_motifcl_folder(tmp_path, 11, seed=2)["b"].seed == read["b"].seed
    with pytest.raises(ValueError, match="'b': expected C, which the files do not say"):
        read_motifcl_folder(tmp_path, {"a*": 11})
    (tmp_path / "a_v_state.mt").unlink()
    with pytest.raises(CorruptFile, match=r"a_v_scale\.mt: layer: expected a_v_state\.mt beside it"):
        read_motifcl_folder(tmp_path, 11)


def test_version_1_of_a_whole_layer(tmp_path: Path) -> None:
    for suffix, array in golden_arrays().items():
        code = 3 if array.dtype == np.uint8 else 0
        data = header(array.shape, array.nbytes, magic=MAGIC_1, code=code) + array.tobytes()
        (tmp_path / f"l_{suffix}.mt").write_bytes(data)
    layer = read_motifcl(tmp_path, "l", 11)
    assert layer.state.tobytes() == golden_layer().state.tobytes()
    assert layer.scale.tobytes() == golden_layer().scale.tobytes()


def test_refusals_leave_nothing(tmp_path: Path) -> None:
    bad_scale = dataclasses.replace(golden_layer(), scale=np.array([1, np.inf], np.float32))
    with pytest.raises(ValueError, match=r"'b'.*scale.*inf"):
        write_motifcl(tmp_path / "out", {"a": golden_layer(), "b": bad_scale})
    for name in ("../x", "a/b", "a\\b", "nul\0", "line\n"):
        with pytest.raises(ValueError, match="file name"):
            write_motifcl(tmp_path / "out", {"a": golden_layer(), name: golden_layer()})
    with pytest.raises(ValueError, match="'e': expected rows"):
        write_motifcl(tmp_path / "out", {"a": golden_layer(), "e": random_layer(0, 0, 8, 11)})
    with pytest.raises(OSError, match="name too long"):
        write_motifcl(tmp_path / "out", {"a": golden_layer(), "x" * 300: golden_layer()})
    with pytest.raises(TypeError, match="float32 or uint8"):
        write_mt(tmp_path / "x.mt", np.zeros(2))
    assert list(tmp_path.iterdir()) == []


def test_an_occupied_folder_needs_force(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(FileExistsError):
        write_motifcl(tmp_path, {"a": golden_layer()})
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    write_motifcl(tmp_path, {"a": golden_layer()}, force=True)
    assert len(list(tmp_path.iterdir())) == 4
