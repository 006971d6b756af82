"""Counter layers from dense weights, and from counters that come as numbers."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn

from memtrain_cl.nn.saving import SavedState
from memtrain_cl.reference.codes import encode_state, weight_to_counter_state
from memtrain_cl.reference.counter import pack_codes


def _require_weight(weight: Any, threshold_ratio: Any) -> torch.Tensor:
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point() or weight.ndim != 2:
        got = f"{weight.dtype} {list(weight.shape)}" if isinstance(weight, torch.Tensor) else type(weight).__name__
        raise ValueError(f"expected a weight as a floating-point tensor [out, in], got {got}")
    if not 0.0 <= threshold_ratio < float("inf"):
        raise ValueError(f"expected threshold_ratio as a finite number >= 0, got {threshold_ratio!r}")
    host = weight.detach().to("cpu", torch.float32).contiguous()
    if not bool(torch.isfinite(host).all()):
        raise ValueError("expected a finite weight, got one with inf or nan")
    return host


class FromDense(SavedState):
    """The part of a counter layer that takes over weights from outside."""

    @classmethod
    def from_dense(cls, weight: torch.Tensor, *, threshold_ratio: float = 0.7, **options: Any) -> Self:
        """A new layer, on the weight's device, with the counters nearest to `weight` [out, in] (any floating type).

        threshold_ratio: see `weight_to_counter_state`. options: the constructor's.
        """
        _require_weight(weight, threshold_ratio)
        out_features, in_features = weight.shape
        layer = cls(in_features, out_features, **options).to(weight.device)
        layer.load_dense_weight(weight, threshold_ratio)
        return layer

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, threshold_ratio: float = 0.7, **options: Any) -> Self:
        """`from_dense` of a torch.nn.Linear without bias (`CounterLinearWithBias.from_linear` keeps one)."""
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"expected a torch.nn.Linear, got {type(linear).__name__}")
        if linear.bias is not None:
            raise ValueError(
                "expected a linear without bias, which a counter layer does not have; CounterLinearWithBias keeps one"
            )
        layer = cls.from_dense(linear.weight, threshold_ratio=threshold_ratio, **options)
        return layer.train(linear.training)

    def load_dense_weight(self, weight: torch.Tensor, threshold_ratio: float = 0.7) -> None:
        """Take the counters nearest to `weight` [out, in]; as `load_counter_state` in all else."""
        host = _require_weight(weight, threshold_ratio)
        if tuple(host.shape) != (self.out_features, self.in_features):
            raise ValueError(f"expected a weight {[self.out_features, self.in_features]}, got {list(host.shape)}")
        self.load_counter_state(*weight_to_counter_state(host, self.C, threshold_ratio))

    def load_counter_state(self, scale: torch.Tensor, t: torch.Tensor, c: torch.Tensor) -> None:
        """Take ternary weights t and counters c, integers [out, in], and row scales float32 [out, 1] or [out].

        Moments begin at zero, s_base is the scale, a sum of gradients is dropped; seed and step go on. ValueError, with
        nothing changed, for other shapes and for values out of range.
        """
        shape = (self.out_features, self.in_features)
        for name, value in (("t", t), ("c", c)):
            if tuple(value.shape) != shape or value.is_floating_point() or value.dtype == torch.bool:
                raise ValueError(f"expected {name} as integers {list(shape)}, got {value.dtype} {list(value.shape)}")
        if tuple(scale.shape) not in ((self.out_features, 1), (self.out_features,)):
            raise ValueError(f"expected scale {[self.out_features, 1]}, got {list(scale.shape)}")
        rows = scale.detach().to("cpu", torch.float32).reshape(-1, 1)
        if not bool(((rows > 0) & torch.isfinite(rows)).all()):
            raise ValueError("expected scale as finite numbers > 0, got others")
        codes = encode_state(t.cpu(), c.cpu(), self.C)
        with torch.no_grad():
            self.state.copy_(pack_codes(codes) if self.packed else codes)
            self.scale.copy_(rows)
            for name in ("v", "s_base"):
                if name in self._buffers:
                    getattr(self, name).copy_(rows if name == "s_base" else torch.zeros_like(rows))
            if self.decimate_updates:
                self.clock.copy_(torch.tensor([1, 0, 0, 0]))
        self._sum.clear()
        self._changed_outside()
