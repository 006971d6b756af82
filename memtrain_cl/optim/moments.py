"""Moments of an optimizer, compressed tensor by tensor: sorted profiles, int8 in blocks, or float32 as it is.

    "g4"      `memtrain_cl.optim.profiles.fit_sorted_profile`
    "int8"    codes -127..127 and a scale a block: 1 byte an element and 4 a block
    "dense"   float32

Each of the first two has a receipt that says what it loses, and what a receipt refuses is stored dense. Encodings of
int8 lie where the tensor is.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from memtrain_cl.optim.families import TailFamily
from memtrain_cl.optim.profiles import (
    SortedProfileEncoding,
    default_ops,
    fit_sorted_profile,
    reconstruct,
    require_share,
    require_values,
    require_whole,
)

METHODS = ("auto", "g4", "int8", "dense")


@dataclass(frozen=True)
class CompressedMomentEncoding:
    """A tensor as `compress_moment` stores it. method: "g4", "int8" or "dense", and the fields that go with it.

    g4_encoding.   int8_codes int8 [n], int8_scales float32 [blocks], int8_block_size.   dense_values float32 [shape].
    """

    method: str
    shape: tuple[int, ...]
    g4_encoding: SortedProfileEncoding | None = None
    int8_codes: torch.Tensor | None = None
    int8_scales: torch.Tensor | None = None
    int8_block_size: int = 2048
    dense_values: torch.Tensor | None = None

    def nbytes(self) -> int:
        """Bytes that it takes."""
        if self.g4_encoding is not None:
            return self.g4_encoding.nbytes()
        parts = (self.int8_codes, self.int8_scales, self.dense_values)
        return sum(part.nbytes for part in parts if part is not None)


def _profile(
    x: torch.Tensor,
    top_k_fraction: float,
    gof_threshold: float,
    tail_family: TailFamily | str | None,
    block_size: int | None,
    ops: ModuleType | None,
) -> SortedProfileEncoding | None:
    """The sorted profile, None where its receipt is refused."""
    top_k = int(min(require_share("g4_top_k_fraction", top_k_fraction), 1.0) * x.numel())
    encoding = fit_sorted_profile(x, top_k, tail_family, gof_threshold, block_size=block_size, ops=ops)
    return None if encoding.used_dense_fallback else encoding


def choose_compression_method(
    tensor: torch.Tensor,
    *,
    min_size_for_g4: int = 4096,
    g4_top_k_fraction: float = 0.001,
    g4_gof_threshold: float = 0.05,
    tail_family: TailFamily | str | None = None,
    g4_block_size: int | None = None,
    ops: ModuleType | None = None,
) -> str:
    """ "g4" for a tensor of min_size_for_g4 elements or more whose sorted profile's receipt is accepted, else "int8".

    g4_top_k_fraction: of the elements, rounded down, that the profile stores as they are. The other arguments are
    those of `fit_sorted_profile`.
    """
    x = require_values("tensor", tensor)
    if x.numel() < require_whole("min_size_for_g4", min_size_for_g4, 0):
        return "int8"
    fitted = _profile(x, g4_top_k_fraction, g4_gof_threshold, tail_family, g4_block_size, ops)
    return "int8" if fitted is None else "g4"


def _int8(
    x: torch.Tensor, block_size: int, positive: bool, largest_error: float, most_flushed: float, ops: ModuleType
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Codes and scales, None where the receipt is refused."""
    flat = x.reshape(-1).to(torch.float32)
    codes, scales = ops.quantize_blockwise(flat, block_size, positive=positive)
    largest = float(flat.abs().max()) if flat.numel() else 0.0
    if not math.isfinite(largest):
        return None
    if largest == 0.0:
        return codes, scales
    back = ops.dequantize_int8_blockwise(codes, scales, block_size)
    # In units of the largest, so that squares neither vanish nor overflow.
    error = float(((back - flat) / largest).norm() / (flat / largest).norm())
    there = flat != 0
    flushed = float((there & (back == 0)).sum()) / float(there.sum())
    return (codes, scales) if error <= largest_error and flushed <= most_flushed else None


def compress_moment(
    tensor: torch.Tensor,
    method: str = "auto",
    *,
    min_size_for_g4: int = 4096,
    g4_top_k_fraction: float = 0.001,
    g4_gof_threshold: float = 0.05,
    g4_block_size: int | None = None,
    int8_block_size: int = 2048,
    int8_adversarial_relative_error: float = 0.5,
    int8_flushed_fraction_threshold: float = 0.3,
    int8_positive: bool = False,
    tail_family: TailFamily | str | None = None,
    ops: ModuleType | None = None,
) -> CompressedMomentEncoding:
    """A tensor of floating numbers, of any shape, compressed.

    method: "auto" takes what `choose_compression_method` says, whose arguments are these, too; "g4" and "int8" are
    taken at any size; "dense" stores float32. Of profiles the receipt is `fit_sorted_profile`'s; of int8 it is
    ||decoded - x|| / ||x|| <= int8_adversarial_relative_error, and of the elements that are not zero the fraction that
    comes back as zero <= int8_flushed_fraction_threshold. What is refused, and what is not finite, is stored dense.
    int8_positive: an element above zero never gets the code 0.   g4_block_size: `fit_sorted_profile`'s block_size.
    ops: the launchers, `memtrain_cl.ops` or `memtrain_cl.reference`.

    ValueError for another method, and TypeError and ValueError for arguments of other types and ranges.
    """
    x = require_values("tensor", tensor)
    if method not in METHODS:
        raise ValueError(f"expected method as one of {', '.join(METHODS)}, got {method!r}")
    least = require_whole("min_size_for_g4", min_size_for_g4, 0)
    int8_block_size = require_whole("int8_block_size", int8_block_size, 1)
    largest_error = require_share("int8_adversarial_relative_error", int8_adversarial_relative_error)
    most_flushed = require_share("int8_flushed_fraction_threshold", int8_flushed_fraction_threshold)
    shape = tuple(x.shape)
    if method == "g4" or (method == "auto" and x.numel() >= least):
        fitted = _profile(x, g4_top_k_fraction, g4_gof_threshold, tail_family, g4_block_size, ops)
        if fitted is not None:
            return CompressedMomentEncoding("g4", shape, g4_encoding=fitted, int8_block_size=int8_block_size)
    if method in ("int8", "auto"):
        made = _int8(x, int8_block_size, int8_positive, largest_error, most_flushed, ops or default_ops())
        if made is not None:
            return CompressedMomentEncoding(
                "int8", shape, int8_codes=made[0], int8_scales=made[1], int8_block_size=int8_block_size
            )
    dense = x.to(torch.float32, copy=True)
    return CompressedMomentEncoding("dense", shape, dense_values=dense, int8_block_size=int8_block_size)


def decompress_moment(encoding: CompressedMomentEncoding, *, ops: ModuleType | None = None) -> torch.Tensor:
    """float32 of the shape, where the encoding is. ops: the launchers."""
    if not isinstance(encoding, CompressedMomentEncoding):
        raise TypeError(f"expected a CompressedMomentEncoding, got {type(encoding).__name__}")
    if encoding.g4_encoding is not None:
        return reconstruct(encoding.g4_encoding, ops=ops)
    if encoding.dense_values is not None:
        return encoding.dense_values.clone()
    codes, scales = encoding.int8_codes, encoding.int8_scales
    flat: torch.Tensor = (ops or default_ops()).dequantize_int8_blockwise(codes, scales, encoding.int8_block_size)
    return flat.reshape(encoding.shape)


class CompressedOptimizerState:
    """Adam's two moments of one tensor, m as it is and of v the square root, compressed.

    The root has half of v's range in powers of ten, so that it keeps more of the small ones; it is squared on its way
    back, and what is above zero never comes back as zero. shape: of both. method and more: `compress_moment`'s.
    """

    def __init__(
        self, shape: Sequence[int], method: str = "auto", *, ops: ModuleType | None = None, **options: Any
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"expected method as one of {', '.join(METHODS)}, got {method!r}")
        self.shape = tuple(require_whole("a size of shape", size, 0) for size in shape)
        self.method = method
        self._options = options
        self._ops = ops
        self._held: tuple[CompressedMomentEncoding, CompressedMomentEncoding] | None = None
        # What the options are worth shows at once.
        compress_moment(torch.zeros(0), "dense", ops=ops, **options)

    def __getstate__(self) -> dict[str, Any]:
        # A module does not pickle.
        return {**self.__dict__, "_ops": None if self._ops is None else self._ops.__name__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        name = state["_ops"]
        self.__dict__.update(state, _ops=None if name is None else importlib.import_module(name))

    def set(self, m: torch.Tensor, v: torch.Tensor) -> None:
        """Compress both moments. ValueError for other shapes, and for negative numbers in v; nothing is changed."""
        for name, tensor in (("m", m), ("v", v)):
            if tuple(require_values(name, tensor).shape) != self.shape:
                raise ValueError(f"expected {name} of shape {list(self.shape)}, got {list(tensor.shape)}")
        if bool((v < 0).any()):
            raise ValueError("expected v without negative numbers, got some")
        root = v.detach().to(torch.float32).sqrt()
        options: dict[str, Any] = {"int8_positive": True, **self._options}
        self._held = (
            compress_moment(m, self.method, ops=self._ops, **self._options),
            compress_moment(root, self.method, ops=self._ops, **options),
        )

    def _both(self) -> tuple[CompressedMomentEncoding, CompressedMomentEncoding]:
        if self._held is None:
            raise RuntimeError("expected moments to be set before they are read")
        return self._held

    def get(
        self, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(m, v) of the shape. device: None for where each is. RuntimeError before the first `set`."""
        m, root = (decompress_moment(encoding, ops=self._ops) for encoding in self._both())
        return m.to(device=device, dtype=dtype), (root * root).to(device=device, dtype=dtype)

    def nbytes(self) -> int:
        """Bytes that both take, 0 before the first `set`."""
        return sum(encoding.nbytes() for encoding in self._held or ())

    @property
    def methods(self) -> tuple[str, str]:
        """How m and the root of v are stored. RuntimeError before the first `set`."""
        m, root = self._both()
        return m.method, root.method
