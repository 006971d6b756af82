"""What a model and a training run are made of, checked when made. Imports no torch: the command line reads it first."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

from memtrain_cl.formats import check_c, is_normal

LINEAR_KINDS = ("counter", "dense")
COMPUTES = ("fp", "int8")
ACTIVATIONS = ("fp", "8", "4", "recompute", "auto")
MIB = 2**20
#: Kinds of tokens where text is read as it lies in files.
BYTES = 256


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama-shaped model.

    layers, dim, heads: blocks, width, attention heads (dim divisible by 4 for the packed rows, and by heads; head width
    even for RoPE). hidden: width of the feed-forward part; 0 takes 8/3 dim, rounded up to a multiple of 32. seq: the
    longest context in tokens. vocab: kinds of tokens, 256 where they are bytes. linear: "counter" (6-bit counter
    layers) or "dense" (float32). C, counter_lr, counter_eps (their rms_eps), counter_compute ("fp" or "int8", of
    forward and update), tile_rows: options of the counter layers. Raises ValueError for a value out of range.
    """

    layers: int = 4
    dim: int = 256
    heads: int = 4
    seq: int = 128
    hidden: int = 0
    vocab: int = 256
    linear: str = "counter"
    C: int = 11
    counter_lr: float = 3e-3
    counter_eps: float = 1e-5
    counter_compute: str = "fp"
    tile_rows: int = 0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("layers", "dim", "heads", "seq", "vocab"):
            _at_least(name, getattr(self, name), 1)
        _at_least("hidden", self.hidden, 0)
        _at_least("tile_rows", self.tile_rows, 0)
        if self.linear not in LINEAR_KINDS:
            raise ValueError(f"expected linear to be one of {', '.join(LINEAR_KINDS)}, got {self.linear!r}")
        if self.dim % 4:
            raise ValueError(f"expected dim divisible by 4 (four counters share three bytes), got dim={self.dim}")
        if self.dim % self.heads:
            raise ValueError(f"expected dim divisible by heads, got dim={self.dim}, heads={self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"expected an even head width (RoPE turns pairs), got dim / heads = {self.head_dim}")
        check_c(self.C, packed=True)
        if self.counter_compute not in COMPUTES:
            raise ValueError(
                f"expected counter_compute to be one of {', '.join(COMPUTES)}, got {self.counter_compute!r}"
            )
        _finite_positive("counter_lr", self.counter_lr)
        _finite_positive("counter_eps", self.counter_eps)
        for name in ("rope_theta", "norm_eps"):
            if not is_normal(getattr(self, name)):
                raise ValueError(f"expected {name} as a positive number within float32, got {getattr(self, name)}")
        if self.hidden == 0:
            object.__setattr__(self, "hidden", -(-8 * self.dim // (3 * 32)) * 32)
        elif self.hidden % 4:
            raise ValueError(
                f"expected hidden divisible by 4 (four counters share three bytes), got hidden={self.hidden}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    def to_json(self) -> dict[str, Any]:
        """The configuration as JSON-able values, as stored in checkpoints and model files."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`; ValueError names the field that is missing, unknown or of the wrong type."""
        return cls(**_typed_fields(cls, values))


@dataclass(frozen=True)
class TrainConfig:
    """One training run: all that decides its bytes, apart from the device.

    text: files and folders, empty for the standard library's source. lr: peak of AdamW. batch: sequences a step.
    freeze_counters: the control run, in which counter layers keep their first weights and everything else learns.
    activations: what is kept until backward, "fp" (all), "8" or "4" (in so many bits), "recompute" (the inputs of
    blocks) or "auto" (a choice for each block within the memory). memory_limit: MiB that the device may hold, or 0.
    Raises ValueError for a value out of range.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    text: tuple[str, ...] = ()
    steps: int = 800
    batch: int = 4
    lr: float = 2e-3
    freeze_counters: bool = False
    activations: str = "fp"
    memory_limit: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        require_bytes(self.model)
        _at_least("steps", self.steps, 1)
        _at_least("batch", self.batch, 1)
        _finite_positive("lr", self.lr)
        if self.activations not in ACTIVATIONS:
            raise ValueError(f"expected activations to be one of {', '.join(ACTIVATIONS)}, got {self.activations!r}")
        if not 0 <= self.memory_limit < math.inf:
            raise ValueError(f"expected memory_limit as a finite number >= 0, got {self.memory_limit}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"expected 0 <= seed < 2^63, got {self.seed}")
        if self.freeze_counters and self.model.linear != "counter":
            raise ValueError(
                "expected linear=counter beside freeze_counters, got linear=dense: there is no counter to freeze"
            )

    def with_flags(self, flags: Mapping[str, Any]) -> Self:
        """A copy with some fields replaced; the names of `ModelConfig` and of this class stand side by side in
        `flags`.
        """
        own = {f.name for f in fields(self)} - {"model"}
        model_flags = {name: value for name, value in flags.items() if name not in own}
        if "dim" in model_flags:
            model_flags.setdefault("hidden", 0)  # it follows dim unless it is given
        run_flags = {name: value for name, value in flags.items() if name in own}
        return replace(self, model=replace(self.model, **model_flags), **run_flags)

    def to_json(self) -> dict[str, Any]:
        """The configuration as JSON-able values."""
        return {**asdict(self), "text": list(self.text), "model": self.model.to_json()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`; ValueError names the field that is missing, unknown or of the wrong type."""
        plain = dict(values)
        model, text = plain.pop("model", None), plain.pop("text", None)
        if not isinstance(model, Mapping):
            raise ValueError(f"expected the field 'model' to be a mapping, got {type(model).__name__}")
        if not isinstance(text, list) or not all(isinstance(path, str) for path in text):
            raise ValueError(f"expected the field 'text' to be a list of paths, got {text!r}")
        typed = _typed_fields(cls, plain, skip=("model", "text"))
        return cls(model=ModelConfig.from_json(model), text=tuple(text), **typed)


def require_bytes(model: ModelConfig) -> None:
    """ValueError for a model whose tokens are not bytes."""
    if model.vocab != BYTES:
        raise ValueError(f"expected a vocabulary of {BYTES} bytes, got vocab={model.vocab}")


def _typed_fields(cls: type[Any], values: Mapping[str, Any], skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """`values` checked against the dataclass's fields, whose types are int, float, bool or str."""
    known = {f.name: f.type for f in fields(cls) if f.name not in skip}
    for name in values:
        if name not in known:
            raise ValueError(f"expected only fields of {cls.__name__}, got {name!r}")
    typed: dict[str, Any] = {}
    for name, kind in known.items():
        if name not in values:
            raise ValueError(f"expected the field {name!r} of {cls.__name__}, got none")
        value = values[name]
        if kind == "float" and type(value) is int:
            value = float(value)
        if type(value).__name__ != kind:
            raise ValueError(f"expected the field {name!r} to be {kind}, got {value!r}")
        typed[name] = value
    return typed


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"expected {name} >= {least}, got {value}")


def _finite_positive(name: str, value: float) -> None:
    if not 0 < value <= sys.float_info.max:  # an integer may be larger
        raise ValueError(f"expected {name} to be a positive number, got {value}")
