"""One launcher a kernel: check the input, cross the bridge, launch. Names and signatures as `memtrain_cl.reference`."""

from memtrain_cl.ops.counter import (
    counter_update_,
    counter_update_hashsr,
    decode_dense,
    pack_codes,
    row_statistics,
    unpack_codes,
)
from memtrain_cl.ops.matmul_counter import counter_backward_, counter_forward, counter_grad_input, grad_weight
from memtrain_cl.ops.proxy import proxy_moments
from memtrain_cl.ops.stochastic import quantize_int8
from memtrain_cl.ops.stochastic import quantize_int8

__all__ = [
    "counter_backward_",
    "counter_forward",
    "counter_grad_input",
    "counter_update_",
    "counter_update_hashsr",
    "decode_dense",
    "grad_weight",
    "pack_codes",
    "proxy_moments",
    "quantize_int8",
    "quantize_int8",
    "row_statistics",
    "unpack_codes",
]
