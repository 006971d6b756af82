"""memtrain_cl: train with little memory on any OpenCL device.

This list is lazy (PEP 562): importing the package imports neither torch nor pyopencl and opens no device; a name is
loaded from its module when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memtrain_cl import nn, ops, optim, reference
    from memtrain_cl.activations import saved_activations
    from memtrain_cl.array import DeviceArray, from_dlpack
    from memtrain_cl.budget import training_budget
    from memtrain_cl.device import Device, DeviceInfo, devices, get_device, put_first, use_device
    from memtrain_cl.engine import Engine
    from memtrain_cl.errors import BuildError, CorruptFile, MemtrainError, NotFinite, OutOfMemory, UnsupportedDevice
    from memtrain_cl.export.optimizer import load_optimizer, save_optimizer
    from memtrain_cl.formats import C_DEFAULT, effective_bits
    from memtrain_cl.fp8 import Fp8CastResult, fp8_cast_with_guard
    from memtrain_cl.lm.model import build_causal_lm
    from memtrain_cl.nn.convert import CounterLinearWithBias, SwapReport, swap_linears_to_counter
    from memtrain_cl.nn.counter import CompactCounterLinear, PackedRMSCounterLinear, RMSCounterLinear
    from memtrain_cl.nn.memory import memory_report
    from memtrain_cl.nn.reversible import ReversibleCouplingBlock, ReversibleSequence, ReversibleSequential
    from memtrain_cl.ops.blockwise import dequantize_int8_blockwise, quantize_int8_blockwise
    from memtrain_cl.ops.codec import pack_codes, unpack_codes
    from memtrain_cl.ops.counter import counter_update_hashsr
    from memtrain_cl.ops.fp8 import fp8_cast, fp8_restore
    from memtrain_cl.ops.from_io import counter_update_from_io_hashsr
    from memtrain_cl.ops.stochastic import (
        dequantize_codes,
        pack_int4,
        quantize_codes,
        stochastic_quantize,
        unpack_int4,
    )
    from memtrain_cl.optim.automagic import Automagic
    from memtrain_cl.optim.compressed_adam import CompressedAdam
    from memtrain_cl.optim.controller import CounterController
    from memtrain_cl.optim.moments import (
        CompressedMomentEncoding,
        CompressedOptimizerState,
        choose_compression_method,
        compress_moment,
        decompress_moment,
    )
    from memtrain_cl.optim.profiles import (
        AnomalyReport,
        SortedProfileEncoding,
        detect_anomaly,
        fit_sorted_profile,
        reconstruct,
    )
    from memtrain_cl.recompute_plan import recompute
    from memtrain_cl.recompute_policy import (
        RecomputeDecision,
        SelectiveRecomputePolicy,
        estimate_block_activation_bytes,
        estimate_block_recompute_flops,
        estimate_recompute_benefit,
        estimate_recompute_cost,
    )
    from memtrain_cl.reference.codes import (
        decode_state,
        encode_state,
        hash_u32,
        stochastic_round,
        ternary_gradient_unbiased,
        uniform01,
        weight_to_counter_state,
    )
    from memtrain_cl.sharing import share
    from memtrain_cl.torch_device.fallback import fallbacks, reset_fallbacks, strict
    from memtrain_cl.torch_device.module import (
        empty_cache,
        max_memory_allocated,
        memory_allocated,
        memory_reserved,
        memory_summary,
        reset_peak_memory_stats,
        synchronize,
    )

__version__ = "0.1.0"

_HOMES = {
    "memtrain_cl.activations": ("saved_activations",),
    "memtrain_cl.array": ("DeviceArray", "from_dlpack"),
    "memtrain_cl.budget": ("training_budget",),
    "memtrain_cl.device": ("Device", "DeviceInfo", "devices", "get_device", "put_first", "use_device"),
    "memtrain_cl.engine": ("Engine",),
    "memtrain_cl.errors": (
        "BuildError",
        "CorruptFile",
        "MemtrainError",
        "NotFinite",
        "OutOfMemory",
        "UnsupportedDevice",
    ),
    "memtrain_cl.export.optimizer": ("load_optimizer", "save_optimizer"),
    "memtrain_cl.formats": ("C_DEFAULT", "effective_bits"),
    "memtrain_cl.fp8": ("Fp8CastResult", "fp8_cast_with_guard"),
    "memtrain_cl.lm.model": ("build_causal_lm",),
    "memtrain_cl.nn.convert": ("CounterLinearWithBias", "SwapReport", "swap_linears_to_counter"),
    "memtrain_cl.nn.counter": ("CompactCounterLinear", "PackedRMSCounterLinear", "RMSCounterLinear"),
    "memtrain_cl.nn.memory": ("memory_report",),
    "memtrain_cl.nn.reversible": ("ReversibleCouplingBlock", "ReversibleSequence", "ReversibleSequential"),
    "memtrain_cl.ops.blockwise": ("dequantize_int8_blockwise", "quantize_int8_blockwise"),
    "memtrain_cl.ops.codec": ("pack_codes", "unpack_codes"),
    "memtrain_cl.ops.counter": ("counter_update_hashsr",),
    "memtrain_cl.ops.fp8": ("fp8_cast", "fp8_restore"),
    "memtrain_cl.ops.from_io": ("counter_update_from_io_hashsr",),
    "memtrain_cl.ops.stochastic": (
        "dequantize_codes",
        "pack_int4",
        "quantize_codes",
        "stochastic_quantize",
        "unpack_int4",
    ),
    "memtrain_cl.optim.automagic": ("Automagic",),
    "memtrain_cl.optim.compressed_adam": ("CompressedAdam",),
    "memtrain_cl.optim.controller": ("CounterController",),
    "memtrain_cl.optim.moments": (
        "CompressedMomentEncoding",
        "CompressedOptimizerState",
        "choose_compression_method",
        "compress_moment",
        "decompress_moment",
    ),
    "memtrain_cl.optim.profiles": (
        "AnomalyReport",
        "SortedProfileEncoding",
        "detect_anomaly",
        "fit_sorted_profile",
        "reconstruct",
    ),
    "memtrain_cl.torch_device.fallback": ("fallbacks", "reset_fallbacks", "strict"),
    "memtrain_cl.torch_device.module": (
        "empty_cache",
        "max_memory_allocated",
        "memory_allocated",
        "memory_reserved",
        "memory_summary",
        "reset_peak_memory_stats",
        "synchronize",
    ),
    "memtrain_cl.recompute_plan": ("recompute",),
    "memtrain_cl.recompute_policy": (
        "RecomputeDecision",
        "SelectiveRecomputePolicy",
        "estimate_block_activation_bytes",
        "estimate_block_recompute_flops",
        "estimate_recompute_benefit",
        "estimate_recompute_cost",
    ),
    "memtrain_cl.reference.codes": (
        "decode_state",
        "encode_state",
        "hash_u32",
        "stochastic_round",
        "ternary_gradient_unbiased",
        "uniform01",
        "weight_to_counter_state",
    ),
    "memtrain_cl.sharing": ("share",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_SUBPACKAGES = ("nn", "ops", "optim", "reference")

__all__ = [
    "C_DEFAULT",
    "AnomalyReport",
    "Automagic",
    "BuildError",
    "CompactCounterLinear",
    "CompressedAdam",
    "CompressedMomentEncoding",
    "CompressedOptimizerState",
    "CorruptFile",
    "CounterController",
    "CounterLinearWithBias",
    "Device",
    "DeviceArray",
    "DeviceInfo",
    "Engine",
    "Fp8CastResult",
    "MemtrainError",
    "NotFinite",
    "OutOfMemory",
    "PackedRMSCounterLinear",
    "RMSCounterLinear",
    "RecomputeDecision",
    "ReversibleCouplingBlock",
    "ReversibleSequence",
    "ReversibleSequential",
    "SelectiveRecomputePolicy",
    "SortedProfileEncoding",
    "SwapReport",
    "UnsupportedDevice",
    "build_causal_lm",
    "choose_compression_method",
    "compress_moment",
    "counter_update_from_io_hashsr",
    "counter_update_hashsr",
    "decode_state",
    "decompress_moment",
    "dequantize_codes",
    "dequantize_int8_blockwise",
    "detect_anomaly",
    "devices",
    "effective_bits",
    "empty_cache",
    "encode_state",
    "estimate_block_activation_bytes",
    "estimate_block_recompute_flops",
    "estimate_recompute_benefit",
    "estimate_recompute_cost",
    "fallbacks",
    "fit_sorted_profile",
    "fp8_cast",
    "fp8_cast_with_guard",
    "fp8_restore",
    "from_dlpack",
    "get_device",
    "hash_u32",
    "load_optimizer",
    "max_memory_allocated",
    "memory_allocated",
    "memory_report",
    "memory_reserved",
    "memory_summary",
    "nn",
    "ops",
    "optim",
    "pack_codes",
    "pack_int4",
    "put_first",
    "quantize_codes",
    "quantize_int8_blockwise",
    "recompute",
    "reconstruct",
    "reference",
    "reset_fallbacks",
    "reset_peak_memory_stats",
    "save_optimizer",
    "saved_activations",
    "share",
    "stochastic_quantize",
    "stochastic_round",
    "strict",
    "swap_linears_to_counter",
    "synchronize",
    "ternary_gradient_unbiased",
    "training_budget",
    "uniform01",
    "unpack_codes",
    "unpack_int4",
    "use_device",
    "weight_to_counter_state",
]


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return import_module(f"memtrain_cl.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'memtrain_cl' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
