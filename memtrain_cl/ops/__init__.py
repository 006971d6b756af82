"""One launcher a kernel: check the input, cross the bridge, launch. Names and signatures as `memtrain_cl.reference`."""

from memtrain_cl.formats import effective_bits
from memtrain_cl.ops.adam import adam_step_
from memtrain_cl.ops.automagic import add_rounded_, automagic_rate_, automagic_step_
from memtrain_cl.ops.blockwise import (
    dequantize_blockwise,
    dequantize_int8_blockwise,
    quantize_blockwise,
    quantize_int8_blockwise,
)
from memtrain_cl.ops.cache import refresh_cache_
from memtrain_cl.ops.clock import advance_clock_, observe_clock_
from memtrain_cl.ops.codec import decode_dense, pack_codes, unpack_codes
from memtrain_cl.ops.counter import counter_update_, counter_update_hashsr, row_statistics
from memtrain_cl.ops.fp8 import fp8_cast, fp8_cast_counted, fp8_restore
from memtrain_cl.ops.from_io import counter_update_from_io_, counter_update_from_io_hashsr, wants_from_io
from memtrain_cl.ops.hadamard import (
    decode_rotated,
    dequantize_int8_rows,
    encode_rotated,
    largest_pow4_divisor,
    quantize_int8_rows,
    regular_hadamard,
    rotate,
)
from memtrain_cl.ops.matmul_counter import counter_backward_, counter_forward, counter_grad_input, grad_weight
from memtrain_cl.ops.matmul_int8 import (
    counter_forward_int8,
    counter_grad_input_int8,
    grad_weight_int8,
    grad_weight_of_codes,
    int8_product,
)
from memtrain_cl.ops.profile import decode_profile, encode_profile, pool_profile, profile_distance, profile_error
from memtrain_cl.ops.proxy import proxy_moments
from memtrain_cl.ops.saved_rows import restore_rows, save_rows
from memtrain_cl.ops.stochastic import (
    dequantize_codes,
    pack_int4,
    quantize_codes,
    quantize_int8,
    stochastic_quantize,
    unpack_int4,
)
from memtrain_cl.ops.ternary import decode_ternary

__all__ = [
    "adam_step_",
    "add_rounded_",
    "advance_clock_",
    "automagic_rate_",
    "automagic_step_",
    "counter_backward_",
    "counter_forward",
    "counter_forward_int8",
    "counter_grad_input",
    "counter_grad_input_int8",
    "counter_update_",
    "counter_update_from_io_",
    "counter_update_from_io_hashsr",
    "counter_update_hashsr",
    "decode_dense",
    "decode_profile",
    "decode_rotated",
    "decode_ternary",
    "dequantize_blockwise",
    "dequantize_codes",
    "dequantize_int8_blockwise",
    "dequantize_int8_rows",
    "effective_bits",
    "encode_profile",
    "encode_rotated",
    "fp8_cast",
    "fp8_cast_counted",
    "fp8_restore",
    "grad_weight",
    "grad_weight_int8",
    "grad_weight_of_codes",
    "int8_product",
    "largest_pow4_divisor",
    "observe_clock_",
    "pack_codes",
    "pack_int4",
    "pool_profile",
    "profile_distance",
    "profile_error",
    "proxy_moments",
    "quantize_blockwise",
    "quantize_codes",
    "quantize_int8",
    "quantize_int8_blockwise",
    "quantize_int8_rows",
    "refresh_cache_",
    "regular_hadamard",
    "restore_rows",
    "rotate",
    "row_statistics",
    "save_rows",
    "stochastic_quantize",
    "unpack_codes",
    "unpack_int4",
    "wants_from_io",
]
