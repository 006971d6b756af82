"""Optimizers in torch's shape, and what compresses their moments."""

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

__all__ = [
    "AnomalyReport",
    "Automagic",
    "CompressedAdam",
    "CompressedMomentEncoding",
    "CompressedOptimizerState",
    "CounterController",
    "SortedProfileEncoding",
    "choose_compression_method",
    "compress_moment",
    "decompress_moment",
    "detect_anomaly",
    "fit_sorted_profile",
    "reconstruct",
]
