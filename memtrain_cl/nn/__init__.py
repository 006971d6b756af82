"""torch modules whose weights are counters."""

from memtrain_cl.nn.counter import CompactCounterLinear, PackedRMSCounterLinear, RMSCounterLinear
from memtrain_cl.nn.layer_state import layer_from_state, layer_state, load_layer_state

__all__ = [
    "CompactCounterLinear",
    "PackedRMSCounterLinear",
    "RMSCounterLinear",
    "layer_from_state",
    "layer_state",
    "load_layer_state",
]
