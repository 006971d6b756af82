"""Small layers and files for the export tests."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from memtrain_cl.export.container import RawTensor, Tensor
from memtrain_cl.formats import LayerState, code_count

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "files.json").read_text())


@contextmanager
def less_memory_than(most: int) -> Iterator[None]:
    """AssertionError when what runs within allocates so many bytes at a time, however it ends."""
    tracemalloc.start()
    try:
        yield
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < most


def pack(codes: np.ndarray) -> np.ndarray:
    """The definition of the packing, written as the 24-bit number, apart from the code under test."""
    quads = codes.astype(np.uint32).reshape(codes.shape[0], codes.shape[1] // 4, 4)
    number = quads[..., 0] | quads[..., 1] << 6 | quads[..., 2] << 12 | quads[..., 3] << 18
    parts = np.stack([number & 255, number >> 8 & 255, number >> 16], axis=-1)
    return parts.astype(np.uint8).reshape(codes.shape[0], codes.shape[1] // 4 * 3)


def golden_layer() -> LayerState:
    scale, v = (np.array(GOLDEN[name], dtype=np.float32) for name in ("scale", "v"))
    return LayerState(8, 2, 11, np.array(GOLDEN["packed"], dtype=np.uint8).reshape(2, 6), scale, v, None)


def random_layer(seed: int, out_features: int, in_features: int, C: int, kind: str = "RMSCounterLinear") -> LayerState:
    random = np.random.default_rng(seed)
    codes = random.integers(0, code_count(C), (out_features, in_features), dtype=np.uint8)
    scale, v = (random.uniform(0.01, 2, out_features).astype(np.float32) for _ in range(2))
    moments = kind != "CompactCounterLinear"
    return LayerState(
        in_features=in_features,
        out_features=out_features,
        C=C,
        state=pack(codes),
        scale=scale,
        v=v if moments else None,
        s_base=scale.copy() if moments else None,
        hyper={"lr": 3e-3, "rms_mode": "exact", "use_rms": True, "tile_rows": 0},
        seed=2**32 - 1 - seed,
        step=seed * 1000,
        kind=kind,
    )


def small_model() -> tuple[dict[str, LayerState], dict[str, Tensor], dict[str, Any]]:
    layers = {
        "blocks.0.attn.q": golden_layer(),
        "blocks.0.up": random_layer(3, 4, 8, 8),
        "compact": random_layer(4, 1, 4, 2, "CompactCounterLinear"),
    }
    tensors: dict[str, Tensor] = {
        "embed.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "norm": RawTensor("BF16", (2, 2), np.arange(8, dtype=np.uint8)),
        "steps": np.array(7, dtype=np.int64),
    }
    return layers, tensors, {"layers": 1, "dim": 8, "name": "tiny \u00e9", "rope": [1.5, None, True]}


def assert_same_layer(ours: LayerState, theirs: LayerState) -> None:
    for name in ("in_features", "out_features", "C", "seed", "step", "kind"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert dict(ours.hyper) == dict(theirs.hyper)
    for name in ("state", "scale", "v", "s_base"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert a.tobytes() == b.tobytes(), name


def assert_same_tensor(ours: Tensor, theirs: Tensor) -> None:
    assert type(ours) is type(theirs)
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    a, b = (tensor.data if isinstance(tensor, RawTensor) else tensor for tensor in (ours, theirs))
    assert a.tobytes() == b.tobytes()
