"""torch modules whose weights are counters."""

from memtrain_cl.nn.counter import CompactCounterLinear, PackedRMSCounterLinear, RMSCounterLinear

__all__ = ["CompactCounterLinear", "PackedRMSCounterLinear", "RMSCounterLinear"]
