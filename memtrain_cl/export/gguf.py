"""GGUF files (``.gguf``) of a whole model, ready for llama.cpp: written by the package gguf, architecture "llama".

    counter layers   TQ2_0 or TQ1_0, where blocks of 256 divide their rows; otherwise, and as kind "f16", F16
    dense linears, embedding, head   F16;   norms   F32
    tokens           256, one a byte, as a vocabulary of the "rwkv" kind: it matches bytes as they are

Of llama.cpp's kinds of vocabulary that one alone maps any text to its bytes one to one and back: the "llama" kind
rewrites blanks, the "gpt2" kind has no bytes that are not UTF-8, and both end a text at some byte. What llama.cpp does
with it is unproven here beyond what tests/test_llamacpp.py does, which `make llamacpp` runs.

llama.cpp turns neighbours (2i, 2i+1) of a head where the model turns halves (i, i + head_dim/2): rows of q and k are
written in that order, and their scales with them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np

from memtrain_cl.export.atomic import atomic_path
from memtrain_cl.export.gguf_blocks import BLOCK, TERNARY, encode_float16, encode_ternary, row_scales
from memtrain_cl.export.gguf_read import GgufFile, GgufTensor, TernaryTensor, gguf_package, read_gguf
from memtrain_cl.export.llama import ARCHITECTURE, LlamaShape, Parts, llama_parts
from memtrain_cl.export.packed import EngineFile
from memtrain_cl.formats import LayerState

__all__ = [
    "KINDS",
    "GgufFile",
    "GgufReport",
    "GgufTensor",
    "Kind",
    "TernaryTensor",
    "WrittenTensor",
    "read_gguf",
    "write_gguf",
]

Kind = Literal["tq2_0", "tq1_0", "f16"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_BYTES = 256
#: llama.cpp's type of a token that stands for text.
_NORMAL = 1
_TURNED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")


@dataclass(frozen=True)
class WrittenTensor:
    """A tensor of the file. source: its name in the engine file, a weight's where that is a layer. type: "TQ2_0"."""

    name: str
    source: str
    type: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class GgufReport:
    """What was written. scale_error: the largest relative error of a row scale in float16 (0 without counter layers).
    warnings: sentences about tensors that are not of the kind asked for, with their names. bytes: the file's length.
    """

    kind: Kind
    tensors: tuple[WrittenTensor, ...]
    scale_error: float
    warnings: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class _Plan:
    """A tensor to be written. encode: makes it as it lies in the file; ValueError for numbers that its type lacks."""

    written: WrittenTensor
    encode: Callable[[], np.ndarray]
    scale_error: float


def write_gguf(path: str | os.PathLike[str], file: EngineFile, kind: Kind) -> GgufReport:
    """Writes the model of an engine file atomically, with one tensor in memory at a time.

    ValueError (and no file) naming the tensor when a row scale leaves float16's normal range, a value is not finite in
    its type or a code is none of C's, and when the engine file holds no model of 256 tokens, kind is none of `KINDS`,
    or there is no gguf.
    """
    if kind not in KINDS:
        raise ValueError(f"expected a kind of {', '.join(KINDS)}, got {kind!r}")
    gguf = gguf_package()
    shape, parts = llama_parts(file)
    if shape.vocab != _BYTES:
        raise ValueError(f"expected a vocabulary of {_BYTES} bytes, got vocab={shape.vocab}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, shape.layers)
    turned = _neighbours(shape)
    plans = []
    for source, part in parts.items():
        name = names.get_name(source, try_suffixes=(".weight",))
        plans.append(_plan(name, source, part, kind, turned if source.endswith(_TURNED) else None))
    with atomic_path(path) as temporary:
        writer = gguf.GGUFWriter(temporary, ARCHITECTURE)
        try:
            _add_keys(writer, shape, gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"])
            for plan in plans:
                told = plan.written
                # The dtype counts only where it is uint8 (rows of bytes); these are rows of weights.
                code = gguf.GGMLQuantizationType[told.type]
                writer.add_tensor_info(told.name, told.shape, np.dtype(np.float32), told.bytes, raw_dtype=code)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for plan in plans:
                writer.write_tensor_data(_encoded(plan))
        finally:
            writer.close()
        size = temporary.stat().st_size
    written = tuple(plan.written for plan in plans)
    warnings = _warnings(written, parts, kind)
    return GgufReport(kind, written, max(plan.scale_error for plan in plans), warnings, size)


def _neighbours(shape: LlamaShape) -> np.ndarray:
    """Row of the model for each row of the file: of a head, 0, half, 1, half + 1 ..."""
    return np.arange(shape.dim).reshape(shape.heads, 2, shape.head_dim // 2).swapaxes(1, 2).reshape(-1)


def _plan(name: str, source: str, part: LayerState | np.ndarray, kind: Kind, order: np.ndarray | None) -> _Plan:
    if isinstance(part, LayerState):
        try:
            scale, error = row_scales(part)
        except ValueError as fault:
            raise ValueError(f"tensor {source.removesuffix('.weight') + '.scale'!r}: {fault}") from None
        size = (part.out_features, part.in_features)
        ternary = TERNARY.get(kind.upper()) if part.in_features % BLOCK == 0 else None
        if ternary is None:
            written = WrittenTensor(name, source, "F16", size, 2 * math.prod(size))
            return _Plan(written, partial(encode_float16, part, scale, order), error)
        blocks = math.prod(size) // BLOCK
        written = WrittenTensor(name, source, kind.upper(), size, blocks * ternary.block_bytes)
        return _Plan(written, partial(encode_ternary, ternary, part, scale, order), error)
    dtype = np.dtype(np.float32 if part.ndim == 1 else np.float16)
    written = WrittenTensor(name, source, f"F{8 * dtype.itemsize}", part.shape, part.size * dtype.itemsize)
    return _Plan(written, partial(_encode_dense, part, dtype, order), 0.0)


def _encoded(plan: _Plan) -> np.ndarray:
    try:
        return plan.encode()
    except ValueError as fault:
        raise ValueError(f"tensor {plan.written.source!r}: {fault}") from None


def _encode_dense(values: np.ndarray, dtype: np.dtype[Any], order: np.ndarray | None) -> np.ndarray:
    ordered = values if order is None else values[order]
    with np.errstate(over="ignore"):
        stored = np.ascontiguousarray(ordered, dtype=dtype)
    finite = np.isfinite(stored)
    if not finite.all():
        got = ordered.flat[np.argmin(finite)]
        raise ValueError(f"expected finite values within {dtype}, got {got:g}")
    return stored


def _add_keys(writer: Any, shape: LlamaShape, file_type: int) -> None:
    writer.add_file_type(file_type)
    writer.add_quantization_version(2)
    writer.add_vocab_size(shape.vocab)
    writer.add_context_length(shape.seq)
    writer.add_embedding_length(shape.dim)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_tokenizer_model("rwkv")
    # Tokens of this kind are Python's literals of their bytes, without b and quotes.
    writer.add_token_list([repr(bytes([byte]))[2:-1] for byte in range(_BYTES)])
    writer.add_token_types([_NORMAL] * _BYTES)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)


def _warnings(written: tuple[WrittenTensor, ...], parts: Parts, kind: Kind) -> tuple[str, ...]:
    if kind == "f16":
        return ()
    ragged: dict[int, list[str]] = {}
    dense = []
    for tensor in written:
        part = parts[tensor.source]
        if isinstance(part, LayerState) and tensor.type == "F16":
            ragged.setdefault(part.in_features, []).append(tensor.source)
        elif not isinstance(part, LayerState) and tensor.source.endswith("_proj.weight"):
            dense.append(tensor.source)
    told = [
        f"F16 instead of {kind.upper()}, whose blocks of {BLOCK} do not divide rows of {width}: {', '.join(names)}"
        for width, names in ragged.items()
    ]
    if dense:
        told.append(f"F16 instead of {kind.upper()}, for dense weights, which are not ternary: {', '.join(dense)}")
    return tuple(told)
