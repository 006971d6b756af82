"""Launchers of kernels/automagic.cl: steps of Automagic on rotated int8 state, and the learning rate that they vote on.

Signatures, formulas and results are those of `memtrain_cl.reference.automagic`, byte for byte on every device. A
tensor takes two kernels, and three small ones more where it has more than a chunk of 8192 elements; nothing waits.

Unproven: how the shapes fare on GPUs other than NVIDIA's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from memtrain_cl.adam_rule import STREAM_WEIGHT
from memtrain_cl.array import DeviceArray
from memtrain_cl.automagic_rule import CHUNK, RATE_MIN, SIDE, AutomagicStep, AutomagicTensor, sign_planes
from memtrain_cl.bridge import Crossing
from memtrain_cl.device import Device
from memtrain_cl.errors import UnsupportedDevice
from memtrain_cl.formats import row_length, row_rotation, step_seed
from memtrain_cl.homes import pooled
from memtrain_cl.launchers.elementwise import Formula, launch
from memtrain_cl.operand import Operand
from memtrain_cl.ops.launch import (
    ready_device,
    require_dtype,
    require_seed,
    require_tensor,
    require_together,
)
from memtrain_cl.ops.stochastic import FLOATING_DTYPES, name_of
from memtrain_cl.program import get_kernel
from memtrain_cl.tuning import BLOCKS_PER_UNIT, SIZE_LIMIT, ceil_div, flat_shape, groups_share_rows

#: Items that add up the chunks' sums on a GPU.
SUM_ITEMS = 256

_CLEAR = Formula("y0 = 0.0f;", (), ("float",))


@dataclass(frozen=True)
class AutomagicArrays:
    """The arrays of an `AutomagicTensor` on the device. elements: of param and grad, by name. shape: of param."""

    param: DeviceArray
    grad: DeviceArray
    held: DeviceArray
    scale: DeviceArray | None
    signs: DeviceArray
    skipped: DeviceArray
    rule: AutomagicStep
    place: int
    seed: int
    elements: tuple[str, str]
    shape: tuple[int, ...]

    @property
    def n(self) -> int:
        """Elements."""
        return self.param.size

    @property
    def chunks(self) -> int:
        """How many of them there are."""
        return ceil_div(self.n, CHUNK)

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return self.n if self.scale is None else row_length(self.shape)


class _Plan:
    """How the kernels of one tensor are launched."""

    def __init__(self, device: Device, own: AutomagicArrays) -> None:
        self.device, self.own = device, own
        self.gpu = groups_share_rows(device.info)
        wide = (own.param, own.grad, own.held, own.signs)
        aligned = self.gpu and own.n % 4 == 0 and min(array.alignment for array in wide) >= 16
        self.shape = {
            "GPU": int(self.gpu),
            "PTX": int(self.gpu and device.info.inline_ptx),
            "LANES": SIDE if self.gpu else 1,
            "SLOTS": 1,
            "HELD": 0,
            "ALIGNED": int(aligned),
            "ROWS": int(own.scale is not None),
            "ROT": row_rotation(own.columns) if own.scale is not None else 1,
            "CHUNK": CHUNK,
            "SIDE": SIDE,
        }
        if self.gpu:
            self.per, self.global_size, self.local_size = 1, (own.chunks * SIDE,), (SIDE,)
        else:
            self.per = ceil_div(own.chunks, device.info.compute_units * BLOCKS_PER_UNIT)
            self.global_size, self.local_size = (ceil_div(own.chunks, self.per),), (1,)

    def launch(self, name: str, param: str, planes: int, *arguments: Any) -> Any:
        """Enqueue automagic_measure or automagic_apply; the event."""
        constants = {**self.shape, "PARAM": param, "GRAD": self.own.elements[1], "PLANES": planes}
        kernel = get_kernel(self.device, "automagic", name, NAME=name, STOCHASTIC=int(param != "float32"), **constants)
        return kernel(self.global_size, self.local_size, *arguments)

    @property
    def numbers(self) -> tuple[Any, ...]:
        """Sizes and constants that both kernels take. Host scalars are float64 until here: part of the rule."""
        own, rule = self.own, self.own.rule
        rows = own.n // own.columns
        sizes = (np.uint64(own.n), np.uint32(own.columns), np.uint64(rows), np.uint64(own.chunks), np.uint32(self.per))
        reals = (rule.beta2, 1.0 - rule.beta2, rule.lift, rule.eps)
        return (*sizes, *(np.float32(value) for value in reals))


def launch_step(device: Device, own: AutomagicArrays, lr: DeviceArray, tally: DeviceArray) -> Any:
    """Enqueue the step of a tensor that is not empty; the last launch's event."""
    if own.columns >= SIZE_LIMIT:
        raise UnsupportedDevice(f"expected rows of fewer than 2^31 elements, got {own.columns}")
    plan, rule = _Plan(device, own), own.rule
    several = own.chunks > 1
    sums = pooled(device, (own.chunks + several,), np.float32)
    # Kernels of what has no rows take buffers that they do not touch.
    scale, old, most = own.scale or sums, sums, sums
    if own.scale is not None:
        old, most = (pooled(device, (own.scale.size,), np.float32) for _ in range(2))
        if several:
            launch(_CLEAR, [Operand(most, most.shape, (1,), 0, "float32")], [])
    plan.launch(
        "automagic_measure", "float32", 1, own.grad, own.held, scale, old, most, sums, own.skipped, *plan.numbers
    )
    items = min(SUM_ITEMS, device.info.max_work_group_size) if plan.gpu else 1
    if several:
        kernel = _plain_kernel(device, "automagic_sum", lanes=items)
        kernel((items,), (items,), sums, np.uint64(own.chunks))
    votes = pooled(device, (own.chunks, 2), np.float32) if several else tally
    event = plan.launch(
        "automagic_apply",
        own.elements[0],
        sign_planes(rule.history),
        *(own.grad, own.held, old, scale, most, sums, own.param, own.signs, lr, votes),
        np.uint64(0 if several else own.place),
        *plan.numbers,
        *(np.float32(value) for value in (rule.clip, rule.weight_decay, own.n)),
        *(np.uint32(value) for value in (rule.slot, rule.history, rule.full)),
        np.uint32(step_seed(own.seed, rule.step, STREAM_WEIGHT)),
    )
    if several:
        kernel = _plain_kernel(device, "automagic_tally", lanes=items)
        event = kernel((items,), (items,), votes, tally, np.uint64(own.place), np.uint64(own.chunks))
    return event


def launch_rate(device: Device, lr: DeviceArray, tally: DeviceArray, min_lr: float, max_lr: float) -> Any:
    """Enqueue the learning rate's change by the votes, and make the tally zero; the event."""
    kernel = _plain_kernel(device, "automagic_rate")
    return kernel((1,), (1,), lr, tally, np.uint32(tally.shape[0]), np.float32(min_lr), np.float32(max_lr))


def _plain_kernel(
    device: Device, name: str, *, lanes: int = 1, param: str = "float32", grad: str = "float32", aligned: int = 0
) -> Any:
    """A kernel that does not depend on how a tensor is held."""
    constants = {"SLOTS": 1, "HELD": 0, "ROWS": 0, "ROT": 1, "PLANES": 1, "CHUNK": CHUNK, "SIDE": SIDE}
    return get_kernel(
        device,
        "automagic",
        name,
        NAME=name,
        GPU=int(groups_share_rows(device.info)),
        PTX=0,
        LANES=lanes,
        ALIGNED=aligned,
        PARAM=param,
        GRAD=grad,
        STOCHASTIC=int(param != "float32"),
        **constants,
    )


def _require(tensor: Any, tally: torch.Tensor) -> None:
    """TypeError or ValueError unless the tensor's parts are of the types, shapes and place that the rule asks for."""
    if not isinstance(tensor, AutomagicTensor):
        raise TypeError(f"expected tensors as AutomagicTensor, got {type(tensor).__name__}")
    require_dtype("param", tensor.param, *FLOATING_DTYPES)
    shape, n = tuple(tensor.param.shape), tensor.param.numel()
    require_dtype("grad", tensor.grad, *dict.fromkeys((tensor.param.dtype, torch.float32)))
    rows = len(shape) > 1
    require_dtype("exp_avg_sq", tensor.exp_avg_sq, torch.int8 if rows else torch.float32)
    for name in ("grad", "exp_avg_sq"):
        if tuple(getattr(tensor, name).shape) != shape:
            raise ValueError(f"expected {name} of shape {list(shape)}, got {list(getattr(tensor, name).shape)}")
    if (tensor.scale is not None) != rows:
        raise ValueError(f"expected scale from two dimensions on, else None, got {tensor.scale!r} for {list(shape)}")
    if tensor.scale is not None:
        require_tensor("scale", tensor.scale, torch.float32, (shape[0],))
    require_tensor("signs", tensor.signs, torch.uint8, (sign_planes(tensor.rule.history), n))
    require_tensor("skipped", tensor.skipped, torch.int32, (1,))
    for name, value, limit in (("seed", tensor.seed, 1 << 32), ("place", tensor.place, tally.shape[0])):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < limit:
            raise ValueError(f"expected {name} as an integer in 0..{limit - 1}, got {value!r}")
    require_together(
        param=tensor.param,
        grad=tensor.grad,
        exp_avg_sq=tensor.exp_avg_sq,
        scale=tensor.scale,
        signs=tensor.signs,
        skipped=tensor.skipped,
        tally=tally,
    )


@torch.no_grad()
def automagic_step_(tensors: Sequence[AutomagicTensor], lr: torch.Tensor, tally: torch.Tensor) -> None:
    """One step of every tensor, in place; `memtrain_cl.reference.automagic` has the equations.

    lr: float32 [1], the group's learning rate.   tally: float32 [tensors of the group, 2], whose rows `place` are set
    to the tensors' votes. TypeError or ValueError, before anything changes, for parts of other types, shapes or
    places, and for tensors on several devices.
    """
    require_tensor("lr", lr, torch.float32, (1,))
    require_tensor("tally", tally, torch.float32, (None, 2))
    require_together(lr=lr, tally=tally)
    for tensor in tensors:
        _require(tensor, tally)
    if len({id(tensor.param) for tensor in tensors}) != len(tensors):
        raise ValueError("expected each parameter once, got one twice")
    some = [tensor for tensor in tensors if tensor.param.numel()]
    if not some:
        return
    device = ready_device(lr)
    with Crossing(device, lr) as cross:
        rate, votes = cross.read(lr), cross.update(tally)
        for tensor in some:
            own = AutomagicArrays(
                cross.update(tensor.param),
                cross.read(tensor.grad),
                cross.update(tensor.exp_avg_sq),
                None if tensor.scale is None else cross.update(tensor.scale),
                cross.update(tensor.signs),
                cross.update(tensor.skipped),
                tensor.rule,
                tensor.place,
                tensor.seed,
                (name_of(tensor.param.dtype), name_of(tensor.grad.dtype)),
                tuple(tensor.param.shape),
            )
            launch_step(device, own, rate, votes)


@torch.no_grad()
def automagic_rate_(lr: torch.Tensor, tally: torch.Tensor, min_lr: float, max_lr: float) -> None:
    """Apply the votes: lr float32 [1] by the sums over tally float32 [tensors, 2], which is made zero."""
    require_tensor("lr", lr, torch.float32, (1,))
    require_tensor("tally", tally, torch.float32, (None, 2))
    require_together(lr=lr, tally=tally)
    if not RATE_MIN <= min_lr <= max_lr < float("inf"):
        raise ValueError(f"expected 2^-126 <= min_lr <= max_lr, finite, got {min_lr!r} and {max_lr!r}")
    if tally.shape[0] == 0:
        raise ValueError("expected a tally of one tensor or more, got none")
    device = ready_device(lr)
    with Crossing(device, lr) as cross:
        launch_rate(device, cross.update(lr), cross.update(tally), min_lr, max_lr)


@torch.no_grad()
def add_rounded_(total: torch.Tensor, grad: torch.Tensor, seed: int) -> None:
    """total + grad in float32, into total, bfloat16 or float16, rounded stochastically.

    grad: total's dtype or float32, of its shape. seed: uint32, of this sum alone.
    """
    require_dtype("total", total, torch.bfloat16, torch.float16)
    require_dtype("grad", grad, total.dtype, torch.float32)
    require_tensor("grad", grad, grad.dtype, tuple(total.shape))
    require_together(total=total, grad=grad)
    require_seed("a seed", seed)
    n = total.numel()
    if n == 0:
        return
    device = ready_device(total)
    with Crossing(device, total) as cross:
        target, source = cross.update(total), cross.read(grad)
        gpu = groups_share_rows(device.info)
        aligned = gpu and n % 4 == 0 and min(target.alignment, source.alignment) >= 16
        param, element = name_of(total.dtype), name_of(grad.dtype)
        kernel = _plain_kernel(device, "add_rounded", aligned=int(aligned), param=param, grad=element)
        size, per = flat_shape(device.info, ceil_div(n, 4 if gpu else 8))
        kernel(size, None, target, source, np.uint64(n), np.uint64(per), np.uint32(seed))
