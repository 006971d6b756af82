"""What CompressedAdam holds of a parameter: tensors and plain numbers, made, checked, moved and coded anew.

    step         number of steps taken                      seed         uint32, of the tensor's random numbers
    code         its place in `adam_rule.MOMENT_CODES`      block_size   elements that share a scale
    exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, skipped        the tensors of `adam_rule.AdamTensor`

Numbers, not words, because torch takes a word in a state for a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from memtrain_cl.adam_rule import MOMENT_CODES, AdamTensor
from memtrain_cl.code_maps import zero_code
from memtrain_cl.optim.base import checked_numbers, copied_tensors, placed

State = dict[str, Any]
NUMBERS = ("step", "code", "block_size", "seed")
_STORED = {"dense": torch.float32, "linear": torch.int8, "dynamic": torch.uint8, "profile": torch.uint8}

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def layout(code: str, shape: tuple[int, ...], block_size: int) -> Layout:
    """dtype and shape of each tensor of a state."""
    blocks = -(-torch.Size(shape).numel() // block_size)
    stored = _STORED[code]
    found: Layout = {"exp_avg": (stored, shape), "exp_avg_sq": (stored, shape), "skipped": (torch.int32, (2,))}
    if code != "dense":
        per_block = (blocks, 2) if code == "profile" else (blocks,)
        found.update(dict.fromkeys(("exp_avg_scale", "exp_avg_sq_scale"), (torch.float32, per_block)))
    return found


def _fill(code: str, name: str) -> float:
    """The value with which a tensor begins, so that the moments are zero."""
    if name.endswith("scale"):
        return 0.0 if code == "profile" else 1.0
    return float(zero_code(True)) if code == "dynamic" and name == "exp_avg" else 0.0


def new_state(param: torch.Tensor, code: str, block_size: int, seed: int) -> State:
    """The state before the first step: moments of zero."""
    tensors = {
        name: placed(torch.full(shape, _fill(code, name), dtype=dtype, device=param.device))
        for name, (dtype, shape) in layout(code, tuple(param.shape), block_size).items()
    }
    return {"step": 0, "code": MOMENT_CODES.index(code), "block_size": block_size, "seed": seed, **tensors}


def code_of(state: Mapping[str, Any]) -> str:
    """The code's name."""
    return MOMENT_CODES[state["code"]]


def adam_tensor(param: torch.Tensor, grad: torch.Tensor, state: Mapping[str, Any]) -> AdamTensor:
    """What a launcher takes."""
    return AdamTensor(
        param,
        grad,
        state["exp_avg"],
        state["exp_avg_sq"],
        state.get("exp_avg_scale"),
        state.get("exp_avg_sq_scale"),
        state["skipped"],
        state["seed"],
    )


def loaded_state(
    where: str, param: torch.Tensor, saved: Any, codes: tuple[str, ...], block_sizes: Mapping[str, int]
) -> State:
    """A copy of a saved state for `param`, on its device and with its own types; ValueError that names what is wrong.

    codes: those that it may have.   block_sizes: of each.
    """
    numbers = checked_numbers(where, saved, NUMBERS)
    known = [MOMENT_CODES.index(code) for code in codes]
    if saved["code"] not in known:
        named = MOMENT_CODES[saved["code"]] if saved["code"] < len(MOMENT_CODES) else saved["code"]
        raise ValueError(f"expected moments of {where} in the code {' or '.join(codes)}, got {named}")
    code = code_of(saved)
    if saved["block_size"] != block_sizes[code]:
        raise ValueError(f"expected blocks of {block_sizes[code]} in the state of {where}, got {saved['block_size']}")
    expected = layout(code, tuple(param.shape), saved["block_size"])
    return {**numbers, **copied_tensors(where, param, saved, expected)}


def root(v: torch.Tensor) -> torch.Tensor:
    """sqrt(v), rounded right everywhere: torch's float32 root is off by one place now and then on hosts."""
    return torch.sqrt(v.double()).float() if v.device.type == "cpu" else torch.sqrt(v)


def decoded(ops: Any, state: Mapping[str, Any], table: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(m, sqrt(v)), float32 of the parameter's shape, of a state in codes. table: of profiles."""
    code, size = code_of(state), state["block_size"]
    codes = (state["exp_avg"], state["exp_avg_sq"])
    scales = (state["exp_avg_scale"], state["exp_avg_sq_scale"])
    if code == "profile":
        first = ops.decode_profile(codes[0], scales[0], table, size)
        return first, ops.decode_profile(codes[1], scales[1], table, size, positive=True)
    first = ops.dequantize_blockwise(codes[0], scales[0], size, code=code, signed=True)
    return first, ops.dequantize_blockwise(codes[1], scales[1], size, code=code, signed=False)


def recode(ops: Any, state: State, code: str, block_size: int, moments: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Hold the moments (m, sqrt(v)) in another code, to nearest."""
    for name, moment, positive in (("exp_avg", moments[0], False), ("exp_avg_sq", moments[1], True)):
        if code == "profile":
            codes, scale = ops.encode_profile(moment, block_size)
        else:
            codes, scale = ops.quantize_blockwise(moment, block_size, code=code, signed=not positive, positive=positive)
        state[name], state[f"{name}_scale"] = placed(codes), placed(scale)
    state["code"], state["block_size"] = MOMENT_CODES.index(code), block_size
