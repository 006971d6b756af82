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
from memtrain_cl.ops.stochastic import (
    dequantize_codes,
    pack_int4,
    quantize_codes,
    quantize_int8,
    restore_rows,
    save_rows,
    stochastic_quantize,
    unpack_int4,
)

__all__ = [
    "counter_backward_",
    "counter_forward",
    "counter_grad_input",
    "counter_update_",
    "counter_update_hashsr",
    "decode_dense",
    "dequantize_codes",
    "grad_weight",
    "pack_codes",
    "pack_int4",
    "proxy_moments",
    "quantize_codes",
    "quantize_int8",
    "restore_rows",
    "row_statistics",
    "save_rows",
    "stochastic_quantize",
    "unpack_codes",
    "unpack_int4",
]
