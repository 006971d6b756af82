"""Launchers of kernels/codec.cl: codes packed and unpacked, and a layer decoded to floats.

Signatures, formulas and results are those of `memtrain_cl.reference.counter`, byte for byte on every device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from memtrain_cl.array import DeviceArray
from memtrain_cl.bridge import Crossing
from memtrain_cl.device import Device
from memtrain_cl.formats import check_c, packed_row_bytes
from memtrain_cl.ops.launch import ready_device, require_layer, require_tensor
from memtrain_cl.program import Kernel, get_kernel
from memtrain_cl.tuning import ceil_div, flat_shape, groups_share_rows


def _codec_kernel(device: Device, name: str, *, words: bool = False, C: int = 1, packed: bool = True) -> Kernel:
    gpu = int(groups_share_rows(device.info))
    return get_kernel(device, "codec", name, GPU=gpu, WORDS=int(words), C=C, PACKED=int(packed))


def launch_codec(device: Device, name: str, source: DeviceArray, target: DeviceArray, groups: int) -> Any:
    """Enqueue pack_codes or unpack_codes over groups of four codes; nothing waits. The launch's event."""
    whole = groups % 4 == 0 and min(source.alignment, target.alignment) >= 16
    words = whole and groups_share_rows(device.info)
    global_size, per = ((groups // 4,), 4) if words else flat_shape(device.info, groups)
    kernel = _codec_kernel(device, name, words=words)
    return kernel(global_size, None, source, target, np.uint64(groups), np.uint64(per))


def _codec(name: str, source: torch.Tensor, target_shape: tuple[int, int], groups: int) -> torch.Tensor:
    if groups == 0:
        return torch.empty(target_shape, dtype=torch.uint8, device=source.device)
    device = ready_device(source)
    with Crossing(device, source) as cross:
        result, target = cross.output(target_shape, torch.uint8)
        launch_codec(device, name, cross.read(source), target, groups)
    return result


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [out, in] (the low six bits count) -> packed uint8 [out, in/4*3]; in % 4 != 0 is a ValueError."""
    require_tensor("codes", codes, torch.uint8, (None, None))
    out, n = codes.shape
    return _codec("pack_codes", codes, (out, packed_row_bytes(n)), out * n // 4)


def unpack_codes(packed: torch.Tensor, in_features: int) -> torch.Tensor:
    """packed uint8 [out, in/4*3] -> uint8 codes [out, in_features]."""
    require_tensor("packed", packed, torch.uint8, (None, packed_row_bytes(in_features)))
    out = packed.shape[0]
    return _codec("unpack_codes", packed, (out, in_features), out * in_features // 4)


def decode_dense(state: torch.Tensor, scale: torch.Tensor, in_features: int, *, C: int, packed: bool) -> torch.Tensor:
    """float32 [out, in]: scale[row] * t. state uint8 [out, in] or packed [out, in/4*3], scale float32 [out, 1]."""
    C = check_c(C, packed=packed)
    out, n = require_layer(state, scale, in_features, packed=packed)
    if out * n == 0:
        return torch.empty((out, n), device=state.device)
    device = ready_device(state)
    with Crossing(device, state) as cross:
        result, target = cross.output((out, n))
        groups = ceil_div(n, 4)
        per = 1 if groups_share_rows(device.info) else groups
        kernel = _codec_kernel(device, "decode_dense", C=C, packed=packed)
        kernel(
            (ceil_div(groups, per) * out,),
            None,
            cross.read(state),
            cross.read(scale),
            target,
            np.uint32(n),
            np.uint32(per),
        )
    return result
