"""torch modules whose weights are counters."""

from memtrain_cl.nn.convert import CounterLinearWithBias, SwapReport, swap_linears_to_counter
from memtrain_cl.nn.counter import CompactCounterLinear, PackedRMSCounterLinear, RMSCounterLinear
from memtrain_cl.nn.layer_state import layer_from_state, layer_state, load_layer_state
from memtrain_cl.nn.memory import MemoryReport, memory_report
from memtrain_cl.nn.reversible import ReversibleCouplingBlock, ReversibleSequence, ReversibleSequential

__all__ = [
    "CompactCounterLinear",
    "CounterLinearWithBias",
    "MemoryReport",
    "PackedRMSCounterLinear",
    "RMSCounterLinear",
    "ReversibleCouplingBlock",
    "ReversibleSequence",
    "ReversibleSequential",
    "SwapReport",
    "layer_from_state",
    "layer_state",
    "load_layer_state",
    "memory_report",
    "swap_linears_to_counter",
]
