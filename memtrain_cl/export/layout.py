"""What an engine file says about itself: the JSON under its metadata key, and the bounds of a layer's values.

    {"format": 1, "created_by": version, "model": {...},
     "layers": {"<layer>": {"in_features", "out_features", "C", "hyper": {...}, "seed", "step", "kind", "clock"}},
     "sha256": {"<tensor>": hex of its bytes}, "header_sha256": hex}

``header_sha256`` covers what the tensors' own sums do not: the rest of this JSON, and each tensor's name, dtype and
shape. A file without it (or without ``kind``: PackedRMSCounterLinear) is read too. ``clock``, [period, steps since the
last update], is there in layers that decimate their updates.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from memtrain_cl.export.codes import first_bad_code
from memtrain_cl.export.hostile import corrupt, shorten
from memtrain_cl.formats import DECIMATION_PERIODS, LayerState, check_c, code_count, packed_row_bytes

KEY = "memtrain_cl"
FORMAT = 1
#: Class name -> whether the layer keeps a second moment a row (a layer without one is written with v = 0).
KINDS = {"CompactCounterLinear": False, "RMSCounterLinear": True, "PackedRMSCounterLinear": True}
_SEED_LIMIT = 2**63
_SIZE_LIMIT = 2**40

Header = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class LayerFacts:
    """A layer's metadata, checked: everything of a LayerState but its arrays."""

    in_features: int
    out_features: int
    C: int
    hyper: Mapping[str, Any]
    seed: int
    step: int
    kind: str
    clock: tuple[int, int] | None

    @property
    def shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Tensor suffix -> (dtype code, shape)."""
        row = ("F32", (self.out_features,))
        state = ("U8", (self.out_features, packed_row_bytes(self.in_features)))
        return {"state": state, "scale": row, "v": row, "s_base": row}


@dataclass(frozen=True)
class Metadata:
    """The file's metadata, checked; sha256: tensor name -> hex."""

    layers: Mapping[str, LayerFacts]
    model: Mapping[str, Any]
    created_by: str
    sha256: Mapping[str, str]


def tensor_name(layer: str, suffix: str) -> str:
    """``<layer>.<suffix>``; plain suffixes for the layer "" (a model that is itself a layer), as in state_dict."""
    return f"{layer}.{suffix}" if layer else suffix


def is_unicode(name: str) -> bool:
    """Whether a name can be written as UTF-8, which half a surrogate pair cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def rows_of(layer: LayerState) -> dict[str, np.ndarray]:
    """The layer's arrays of one number a row, by suffix."""
    rows = {"scale": layer.scale, "v": layer.v, "s_base": layer.s_base}
    return {suffix: row for suffix, row in rows.items() if row is not None}


def row_fault(suffix: str, row: np.ndarray) -> tuple[str, str] | None:
    """(expected, got) of the first value out of bounds: scale and s_base > 0, v >= 0, all finite; or None."""
    good = np.isfinite(row) & ((row >= 0) if suffix == "v" else (row > 0))
    if good.all():
        return None
    at = int(np.argmin(good))
    return f"finite values {'>= 0' if suffix == 'v' else '> 0'}", f"{row[at]} in row {at}"


def layer_fault(layer: LayerState) -> tuple[str, str, str] | None:
    """(suffix, expected, got) of the first value out of bounds in a layer's arrays, or None."""
    for suffix, row in rows_of(layer).items():
        fault = row_fault(suffix, row)
        if fault:
            return (suffix, *fault)
    bad = first_bad_code(layer.state, layer.C)
    if bad:
        place = "row {}, column {}".format(*divmod(bad[0], layer.in_features))
        return "state", f"codes below {code_count(layer.C)} (C = {layer.C})", f"{bad[1]} at {place}"
    return None


def build_metadata(
    layers: Mapping[str, LayerState],
    model: Mapping[str, Any],
    created_by: str,
    sha256: Mapping[str, str],
    header: Header,
) -> str:
    """The JSON text, the same for equal input. ValueError when hyper or model hold what JSON changes (NaN, tuples)."""
    facts = {}
    for name, layer in layers.items():
        if layer.kind not in KINDS:
            raise ValueError(f"layer {name!r}: expected a kind of {', '.join(KINDS)}, got {layer.kind!r}")
        for field in ("seed", "step"):
            value = getattr(layer, field)
            if type(value) is not int or not 0 <= value < _SEED_LIMIT:
                raise ValueError(f"layer {name!r}: expected {field} as an int in 0..2**63-1, got {value!r}")
        if layer.hyper.get("C", layer.C) != layer.C:
            raise ValueError(f"layer {name!r}: expected C = {layer.C} in hyper too, got {layer.hyper['C']!r}")
        facts[name] = {
            "in_features": layer.in_features,
            "out_features": layer.out_features,
            "C": layer.C,
            "hyper": _exact_json(layer.hyper, f"hyper of layer {name!r}"),
            "seed": layer.seed,
            "step": layer.step,
            "kind": layer.kind,
            **({} if layer.clock is None else {"clock": list(layer.clock)}),
        }
    body = {
        "format": FORMAT,
        "created_by": created_by,
        "model": _exact_json(model, "model"),
        "layers": facts,
        "sha256": dict(sha256),
    }
    return json.dumps({**body, "header_sha256": _header_sum(body, header)}, sort_keys=True, allow_nan=False)


def _exact_json(value: Mapping[str, Any], what: str) -> dict[str, Any]:
    plain = dict(value)
    try:
        kept = json.loads(json.dumps(plain, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as fault:
        raise ValueError(f"expected {what} as finite JSON values, got {shorten(plain)} ({fault})") from None
    if kept != plain:
        raise ValueError(f"expected {what} as JSON values (lists, string keys), got {shorten(plain)}")
    return plain


#: What the metadata holds beside its own sum.
_KEYS = frozenset({"format", "created_by", "model", "layers", "sha256"})


def _header_sum(body: Mapping[str, Any], header: Header) -> str:
    covered = {"metadata": body, "tensors": {name: [code, list(shape)] for name, (code, shape) in header.items()}}
    return hashlib.sha256(json.dumps(covered, sort_keys=True).encode("ascii")).hexdigest()


def parse_metadata(value: Any, header: Header, path: str | os.PathLike[str]) -> Metadata:
    """The checked metadata out of parsed JSON, and its agreement with the container's header. CorruptFile otherwise."""
    check = _Checker(path)
    body = check.field({"it": value}, "it", dict, KEY, "a JSON object")
    if type(body.get("format")) is not int or body["format"] != FORMAT:
        raise corrupt(path, f"{KEY}.format", str(FORMAT), body.get("format"))
    model = check.field(body, "model", dict, f"{KEY}.model", "an object")
    created_by = check.field(body, "created_by", str, f"{KEY}.created_by", "a string")
    sums = check.field(body, "sha256", dict, f"{KEY}.sha256", "an object")
    stored = check.field(body, "layers", dict, f"{KEY}.layers", "an object")
    if sums.keys() != header.keys():
        odd = sorted(sums.keys() ^ header.keys())[0]
        raise corrupt(path, f"{KEY}.sha256", "one sum for each tensor", f"{odd!r} on one side only")
    layers = {name: check.layer(name, fields, header) for name, fields in stored.items()}
    if "header_sha256" in body:
        found = body.pop("header_sha256")
        expected = _header_sum(body, header)
        if found != expected:
            raise corrupt(path, f"{KEY}.header_sha256", expected, found)
    else:
        # Another program's file may have none; a key that nobody knows may be this one's, damaged.
        unknown = sorted(body.keys() - _KEYS)
        if unknown:
            raise corrupt(path, KEY, f"header_sha256, or no keys but {', '.join(sorted(_KEYS))}", unknown[0])
    return Metadata(layers, model, created_by, sums)


@dataclass(frozen=True)
class _Checker:
    path: str | os.PathLike[str]

    def field(self, fields: Mapping[str, Any], key: str, kind: type, where: str, expected: str) -> Any:
        if key not in fields or type(fields[key]) is not kind:
            raise corrupt(self.path, where, expected, fields.get(key, "nothing"))
        return fields[key]

    def number(self, fields: Mapping[str, Any], key: str, where: str, limit: int) -> int:
        value = fields.get(key)
        if type(value) is not int or not 0 <= value < limit:
            raise corrupt(self.path, f"{where}.{key}", f"an integer in 0..{limit - 1}", value)
        return value

    def clock(self, fields: Mapping[str, Any], where: str) -> tuple[int, int] | None:
        value = fields.get("clock")
        if value is None:
            return None
        numbers = isinstance(value, list) and len(value) == 2 and all(type(number) is int for number in value)
        if not numbers or value[0] not in DECIMATION_PERIODS or not 0 <= value[1] < _SEED_LIMIT:
            raise corrupt(self.path, f"{where}.clock", f"[one of {DECIMATION_PERIODS}, an integer >= 0]", value)
        return value[0], value[1]

    def layer(self, name: str, fields: Any, header: Header) -> LayerFacts:
        where = f"{KEY}.layers.{name}"
        if not isinstance(fields, dict):
            raise corrupt(self.path, where, "an object", fields)
        try:
            C = check_c(fields.get("C"), packed=True)
        except ValueError:
            raise corrupt(self.path, f"{where}.C", "an integer in 1..11", fields.get("C")) from None
        kind = fields.get("kind", "PackedRMSCounterLinear")
        if not isinstance(kind, str) or kind not in KINDS:
            raise corrupt(self.path, f"{where}.kind", f"one of {', '.join(KINDS)}", kind)
        facts = LayerFacts(
            in_features=self.number(fields, "in_features", where, _SIZE_LIMIT),
            out_features=self.number(fields, "out_features", where, _SIZE_LIMIT),
            C=C,
            hyper=self.field(fields, "hyper", dict, f"{where}.hyper", "an object"),
            seed=self.number(fields, "seed", where, _SEED_LIMIT),
            step=self.number(fields, "step", where, _SEED_LIMIT),
            kind=kind,
            clock=self.clock(fields, where),
        )
        if facts.hyper.get("C", C) != C:
            raise corrupt(self.path, f"{where}.hyper.C", f"{C}, the layer's C", facts.hyper["C"])
        if facts.in_features % 4:
            raise corrupt(self.path, f"{where}.in_features", "a multiple of 4", facts.in_features)
        for suffix, (code, shape) in facts.shapes.items():
            tensor = tensor_name(name, suffix)
            if tensor not in header:
                if suffix == "s_base":
                    continue
                raise corrupt(self.path, f"tensor {tensor}", f"{code} {list(shape)} of layer {name}", "no such tensor")
            if header[tensor] != (code, shape):
                got_code, got_shape = header[tensor]
                raise corrupt(self.path, f"tensor {tensor}", f"{code} {list(shape)}", f"{got_code} {list(got_shape)}")
        if not KINDS[kind] and tensor_name(name, "s_base") in header:
            raise corrupt(self.path, f"{where}.kind", "a layer with row moments beside an s_base", kind)
        return facts
