"""What Automagic holds of a parameter: tensors and plain numbers, made, checked and moved.

    step      number of steps taken                       exp_avg_sq, scale, signs, skipped    `AutomagicTensor`'s
    history   signs that the ring has room for            rot    blocks in which rows are rotated (1: none)
    entered   signs that have entered it                  seed   uint32, of the tensor's random numbers
    lr        float32 [1], the group's learning rate: one tensor that all parameters of a group share

A parameter of n elements in rows takes n bytes of codes, 4 bytes a row, and n bytes for each eight signs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from memtrain_cl.automagic_rule import AutomagicStep, AutomagicTensor, sign_planes
from memtrain_cl.formats import row_length, row_rotation
from memtrain_cl.optim.base import checked_numbers, copied_tensors, placed

State = dict[str, Any]
NUMBERS = ("step", "history", "entered", "rot", "seed")
Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def layout(shape: tuple[int, ...], history: int) -> Layout:
    """dtype and shape of each tensor of a state, the learning rate aside."""
    rows = len(shape) > 1
    found: Layout = {
        "exp_avg_sq": (torch.int8 if rows else torch.float32, shape),
        "signs": (torch.uint8, (sign_planes(history), torch.Size(shape).numel())),
        "skipped": (torch.int32, (1,)),
    }
    if rows:
        found["scale"] = (torch.float32, shape[:1])
    return found


def rotation_of(shape: tuple[int, ...]) -> int:
    """The blocks in which a parameter's rows are rotated; 1 where they are not, or where there are none."""
    return row_rotation(row_length(shape)) if len(shape) > 1 else 1


def new_state(param: torch.Tensor, history: int, seed: int) -> State:
    """The state before the first step, but for the learning rate: moments of zero, and no signs."""
    shape = tuple(param.shape)
    tensors = {
        name: placed(torch.full(size, float(name == "scale"), dtype=dtype, device=param.device))
        for name, (dtype, size) in layout(shape, history).items()
    }
    numbers = {"step": 0, "history": history, "entered": 0, "rot": rotation_of(shape), "seed": seed}
    return {**numbers, **tensors}


def automagic_tensor(
    param: torch.Tensor, grad: torch.Tensor, state: Mapping[str, Any], rule: AutomagicStep, place: int
) -> AutomagicTensor:
    """What a launcher takes."""
    return AutomagicTensor(
        param,
        grad,
        state["exp_avg_sq"],
        state.get("scale"),
        state["signs"],
        state["skipped"],
        rule,
        place,
        state["seed"],
    )


def loaded_state(where: str, param: torch.Tensor, saved: Any, history: int) -> tuple[State, float]:
    """(a copy of a saved state for `param`, on its device and with its own types, and its learning rate).

    Signs of another history start afresh. ValueError that names what is wrong.
    """
    numbers = checked_numbers(where, saved, NUMBERS)
    shape = tuple(param.shape)
    if saved["rot"] != rotation_of(shape):
        raise ValueError(f"expected rows of {where} rotated by {rotation_of(shape)}, got {saved['rot']}")
    lr = saved.get("lr")
    if not isinstance(lr, torch.Tensor) or lr.numel() != 1 or not 0.0 <= float(lr) < float("inf"):
        raise ValueError(f"expected 'lr' of {where} as a tensor of one finite number >= 0, got {lr!r}")
    expected = layout(shape, max(saved["history"], 1))
    state: State = {**numbers, **copied_tensors(where, param, saved, expected)}
    if state["history"] != history:
        fresh = new_state(param, history, state["seed"])
        state.update({name: fresh[name] for name in ("history", "entered", "signs")})
    return state, float(lr)
