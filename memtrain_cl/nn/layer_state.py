"""A counter layer to and from `LayerState`, the NumPy description that exporters and importers speak."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch

from memtrain_cl.formats import LayerState
from memtrain_cl.nn.counter import CompactCounterLinear, PackedRMSCounterLinear, RMSCounterLinear
from memtrain_cl.reference.counter import unpack_codes

_KINDS: dict[str, type[CompactCounterLinear]] = {
    kind.__name__: kind for kind in (CompactCounterLinear, RMSCounterLinear, PackedRMSCounterLinear)
}


def _row_values(column: torch.Tensor) -> np.ndarray:
    """A copy of float32 [out, 1] as [out]."""
    return column[:, 0].cpu().numpy().copy()


def layer_state(layer: CompactCounterLinear) -> LayerState:
    """The layer as NumPy copies, its state packed.

    ValueError when C or in_features does not pack, and while a sum of gradients is under way, which has no place here.
    """
    if layer._sum.partial:
        raise ValueError(
            f"expected a layer between updates, got one with {layer._sum.rounds} of {layer.accumulate} backwards done; "
            "state_dict holds their sum"
        )
    rows = {name: getattr(layer, name, None) for name in ("v", "s_base")}
    return LayerState(
        in_features=layer.in_features,
        out_features=layer.out_features,
        C=layer.C,
        state=layer.packed_state().cpu().numpy(),
        scale=_row_values(layer.scale),
        v=None if rows["v"] is None else _row_values(rows["v"]),
        s_base=None if rows["s_base"] is None else _row_values(rows["s_base"]),
        hyper=layer.hyper(),
        seed=layer.seed,
        step=layer.step,
        kind=type(layer).__name__,
        clock=(int(layer.clock[0]), int(layer.clock[1])) if layer.decimate_updates else None,
    )


def load_layer_state(layer: CompactCounterLinear, state: LayerState) -> None:
    """Put a saved state, with its options and its place in the rounding stream, into a layer of the same shape and C.

    ValueError, with nothing changed, when shape, C, row moments or an option do not fit. The layer may use another
    storage than the saved one. A sum of gradients that was under way is dropped.
    """
    for name in ("in_features", "out_features", "C"):
        if getattr(layer, name) != getattr(state, name):
            raise ValueError(f"expected a layer with {name}={getattr(state, name)}, got {getattr(layer, name)}")
    if isinstance(layer, RMSCounterLinear) and state.v is None:
        raise ValueError(f"expected a state with row moments for {type(layer).__name__}, got one of {state.kind}")
    _take_options(layer, state.hyper)
    packed = torch.from_numpy(state.state)
    scale = torch.from_numpy(state.scale)[:, None]
    layer.state.copy_(packed if layer.packed else unpack_codes(packed, state.in_features))
    layer.scale.copy_(scale)
    if isinstance(layer, RMSCounterLinear) and state.v is not None:
        layer.v.copy_(torch.from_numpy(state.v)[:, None])
        layer.s_base.copy_(scale if state.s_base is None else torch.from_numpy(state.s_base)[:, None])
    if layer.decimate_updates:
        layer.clock.copy_(torch.tensor([*(state.clock or (1, 0)), 0, 0]))
    layer.seed, layer.step = state.seed, state.step
    layer._sum.clear()
    layer._changed_outside()


def _take_options(layer: CompactCounterLinear, hyper: Mapping[str, Any]) -> None:
    before = layer.hyper()
    try:
        for name in before.keys() & hyper.keys():
            setattr(layer, name, hyper[name])
        layer.rule()
    except ValueError:
        for name, value in before.items():
            setattr(layer, name, value)
        raise


def layer_from_state(state: LayerState, ops: ModuleType | None = None) -> CompactCounterLinear:
    """A new layer of the saved kind, holding the saved state."""
    if state.kind not in _KINDS:
        raise ValueError(f"expected a layer kind of {sorted(_KINDS)}, got {state.kind!r}")
    layer = _KINDS[state.kind](state.in_features, state.out_features, C=state.C, ops=ops)
    load_layer_state(layer, state)
    return layer
