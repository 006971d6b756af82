"""Small models and hand-made files for the tests of GGUF."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from memtrain_cl.errors import CorruptFile
from memtrain_cl.export.container import Tensor
from memtrain_cl.export.gguf import GgufFile, read_gguf
from memtrain_cl.export.llama import LlamaShape
from memtrain_cl.export.packed import EngineFile
from memtrain_cl.formats import LayerState
from memtrain_cl.lm.config import ModelConfig
from tests.export_cases import less_memory_than, random_layer


def model_file(linear: str = "counter", **shape: int) -> EngineFile:
    """An engine file of a model with random parts, as `memtrain-cl train` would export it."""
    usual: dict[str, Any] = {"layers": 2, "dim": 256, "heads": 4, "hidden": 512, "seq": 32, "C": 11}
    config = ModelConfig(**{**usual, **shape})
    llama = LlamaShape(
        config.layers,
        config.dim,
        config.heads,
        config.hidden,
        config.seq,
        config.vocab,
        config.rope_theta,
        config.norm_eps,
    )
    random = np.random.default_rng(5)
    layers: dict[str, LayerState] = {}
    tensors: dict[str, Tensor] = {}
    for index, (name, size) in enumerate(llama.linears().items()):
        if linear == "counter":
            layers[name.removesuffix(".weight")] = random_layer(index, *size, config.C, "PackedRMSCounterLinear")
        else:
            tensors[name] = random.standard_normal(size, dtype=np.float32)
    for name, dims in llama.tensors().items():
        tensors[name] = random.standard_normal(dims, dtype=np.float32)
    return EngineFile(layers, tensors, {"architecture": "llama", **config.to_json(), "linear": linear}, "0")


def codes_of(layer: LayerState) -> np.ndarray:
    """t of each weight, int8 [out, in], by the packing's definition."""
    triples = layer.state.reshape(layer.out_features, -1, 3).astype(np.uint32)
    number = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
    codes = np.stack([number >> 6 * place & 63 for place in range(4)], axis=-1).reshape(layer.out_features, -1)
    return (codes // (2 * layer.C - 1)).astype(np.int8) - 1


def text(value: str | bytes) -> bytes:
    """A string of the format."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def gguf_bytes(
    keys: Mapping[str, tuple[int, bytes]],
    tensors: Sequence[tuple[str, Sequence[int], int, bytes]],
    alignment: int = 32,
) -> bytes:
    """A file made by hand from the layout. keys: type, value's bytes. tensors: name, dims as stored, type, bytes."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    for key, (kind, value) in keys.items():
        head += text(key) + struct.pack("<I", kind) + value
    body = b""
    for name, dims, kind, data in tensors:
        head += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, len(body))
        body += data + bytes(-len(data) % alignment)
    return head + (bytes(-len(head) % alignment) + body if tensors else b"")


def read_all(path: Path) -> GgufFile:
    """Reads every tensor too: each has the shape that the header declares."""
    file = read_gguf(path)
    for tensor in file.tensors.values():
        assert file.data(tensor.name).shape == (tensor.nbytes,)
        assert file.values(tensor.name).shape == tensor.shape
    return file


def read_bytes(data: bytes) -> GgufFile:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(data)
        try:
            return read_all(path)
        except CorruptFile as fault:
            message = str(fault)
            assert message.startswith(f"{path}: ")
            assert ": expected " in message
            assert len(message) < 600
            assert message.isprintable()
            raise


def small() -> bytes:
    """Every type of value, a tensor of every type that we write, all by hand."""
    keys = {
        "u8": (0, b"\xff"),
        "i8": (1, b"\xff"),
        "u16": (2, b"\xff\xff"),
        "i16": (3, b"\xff\xff"),
        "u32": (4, b"\xff" * 4),
        "i32": (5, b"\xff" * 4),
        "f32": (6, struct.pack("<f", 0.5)),
        "yes": (7, b"\x01"),
        "text": (8, text("\u00e9\n")),
        "words": (9, struct.pack("<IQ", 8, 3) + text("a") + text("") + text("bc")),
        "numbers": (9, struct.pack("<IQ3i", 5, 3, -1, 0, 2**31 - 1)),
        "flags": (9, struct.pack("<IQ", 7, 2) + b"\x01\x00"),
        "none": (9, struct.pack("<IQ", 6, 0)),
        "u64": (10, b"\xff" * 8),
        "i64": (11, b"\xff" * 8),
        "f64": (12, struct.pack("<d", 0.1)),
        "general.alignment": (4, struct.pack("<I", 64)),
    }
    half = struct.pack("<e", 0.25)
    # Bytes of four digits 0, 1, 2, 1 (low first), 64 of them; in base 3 all digits 2, and all 0.
    two_bits = bytes([0 | 1 << 2 | 2 << 4 | 1 << 6]) * 64 + half
    base_three = bytes([255]) * 32 + bytes([0]) * 16 + bytes([253]) * 4 + half
    tensors = [
        ("f32", (3, 2), 0, struct.pack("<6f", *range(6))),
        ("f16", (4,), 1, struct.pack("<4e", *range(4))),
        ("tq2", (256, 1), 35, two_bits),
        ("tq1", (256, 2), 34, base_three * 2),
        ("number", (), 0, struct.pack("<f", 3.0)),
        ("empty", (256, 0), 35, b""),
    ]
    return gguf_bytes(keys, tensors, alignment=64)


def corrupted(whole: bytes, data: st.DataObject) -> bytes:
    """The file with a change of one kind, mostly in its header."""
    broken = bytearray(whole)
    at = data.draw(st.one_of(st.integers(0, min(1023, len(whole) - 1)), st.integers(0, len(whole) - 1)))
    how = data.draw(st.sampled_from(["replace", "insert", "delete", "swap", "number"]))
    if how == "replace":
        broken[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1))
    elif how == "insert":
        broken[at:at] = data.draw(st.binary(min_size=1, max_size=9))
    elif how == "delete":
        del broken[at : at + data.draw(st.integers(1, 64))]
    elif how == "swap":
        other = data.draw(st.integers(0, len(whole) - 1))
        broken[at], broken[other] = broken[other], broken[at]
    else:
        width = data.draw(st.sampled_from([4, 8]))
        number = data.draw(st.one_of(st.integers(0, 40), st.integers(0, 2 ** (8 * width) - 1)))
        broken[at : at + width] = number.to_bytes(width, "little")
    return bytes(broken)


def judge(broken: bytes) -> bool:
    """Whether the file loads: then with the declared shapes, and else it is refused by name; little is allocated."""
    with less_memory_than(2_000_000 + 40 * len(broken)):
        try:
            read_bytes(broken)
        except CorruptFile:
            return False
        except ValueError as fault:  # a type that holds no floating numbers, and says so
            assert "expected a type of floating numbers" in str(fault)  # noqa: PT017
    return True
