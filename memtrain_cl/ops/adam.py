"""Launchers of kernels/adam.cl: one step of Adam on compressed moments, of many tensors.

Signature, formulas and results are those of `memtrain_cl.reference.adam`, byte for byte on every device. Small tensors
share launches, `TOGETHER` at most; nothing waits for the device.

Unproven: how the shapes fare on GPUs other than NVIDIA's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from memtrain_cl.adam_rule import AdamStep, AdamTensor
from memtrain_cl.array import DeviceArray
from memtrain_cl.bridge import Crossing
from memtrain_cl.device import Device
from memtrain_cl.launchers.elementwise import Formula, launch
from memtrain_cl.operand import Operand
from memtrain_cl.ops.blocks import BlockShape, block_shape, map_of
from memtrain_cl.ops.launch import ready_device, require_dtype, require_seed, require_tensor, require_together
from memtrain_cl.ops.stochastic import FLOATING_DTYPES, name_of
from memtrain_cl.program import get_kernel
from memtrain_cl.tuning import ceil_div

#: Tensors of one launch at most: all their arguments fit the 1024 bytes that every device takes.
TOGETHER = 12
#: Tensors of as many elements have a launch of their own.
LARGE = 1 << 18
#: Elements that a work-group or item takes at a time where moments have no blocks.
DENSE_BLOCK = 2048
#: Types of the moments' codes.
STORED = {"dense": torch.float32, "linear": torch.int8, "dynamic": torch.uint8, "profile": torch.uint8}

# Not by the queue's own fill, of which Oclgrind 21.10 leaves the buffer as it was.
_CLEAR = Formula("y0 = 0;", (), ("int",))

Tables = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class AdamArrays:
    """The arrays of an `AdamTensor` on the device. scales: none if dense. elements: of param and grad, by name."""

    param: DeviceArray
    grad: DeviceArray
    moments: tuple[DeviceArray, DeviceArray]
    scales: tuple[DeviceArray, ...]
    skipped: DeviceArray
    seed: int
    elements: tuple[str, str]

    # Kept: a launch of many tensors asks for them many times.
    @cached_property
    def n(self) -> int:
        """Elements."""
        return self.param.size

    @cached_property
    def aligned(self) -> bool:
        """Whether vectors of four elements lie whole and on their boundaries, where blocks do."""
        return self.n % 4 == 0 and min(a.alignment for a in (self.param, self.grad, *self.moments)) >= 16


def _block_size(rule: AdamStep) -> int:
    return DENSE_BLOCK if rule.code == "dense" else int(rule.block_size)


def _skip(rule: AdamStep, batch: Sequence[AdamArrays]) -> str:
    """What a launch leaves out. A tensor of one block needs no look ahead: its block is the tensor."""
    if rule.code == "dense":
        return "tensor"
    return "block" if max(tensor.n for tensor in batch) <= _block_size(rule) else rule.skip


def launch_step(
    device: Device,
    tensors: Sequence[AdamArrays],
    rule: AdamStep,
    flags: DeviceArray,
    tables: tuple[DeviceArray, DeviceArray] | None = None,
) -> Any:
    """Enqueue a step of tensors that are not empty; the last launch's event.

    flags: int32, one a tensor, which are made zero here. tables: of profiles, float32 [256] each.
    """
    launch(_CLEAR, [Operand(flags, (len(tensors),), (1,), 0, "int32")], [])
    event, first = None, 0
    for batch in _batches(tensors):
        if _skip(rule, batch) == "tensor":
            _launch(device, "adam_scan", batch, rule, flags, first)
        event = _launch(device, "adam_step", batch, rule, flags, first, tables)
        first += len(batch)
    return event


def _batches(tensors: Sequence[AdamArrays]) -> Iterator[list[AdamArrays]]:
    """Tensors in their order, as many in a launch as may be: small ones of the same elements."""
    batch: list[AdamArrays] = []
    for tensor in tensors:
        alike = not batch or (batch[0].elements == tensor.elements and batch[0].n < LARGE)
        if batch and (not alike or tensor.n >= LARGE or len(batch) == TOGETHER):
            yield batch
            batch = []
        batch.append(tensor)
    if batch:
        yield batch


def _launch(
    device: Device,
    name: str,
    batch: list[AdamArrays],
    rule: AdamStep,
    flags: DeviceArray,
    first: int,
    tables: tuple[DeviceArray, DeviceArray] | None = None,
) -> Any:
    steps = name == "adam_step"
    param, grad = batch[0].elements
    size = min(_block_size(rule), max(tensor.n for tensor in batch))
    blocks = sum(ceil_div(tensor.n, size) for tensor in batch)
    drawn = param != "float32" or rule.stochastic_moments
    decay = "shrink" if rule.shrink is not None else "added" if rule.weight_decay else ""
    shape = _shape(device, name, rule, blocks, size, aligned=size % 4 == 0 and all(tensor.aligned for tensor in batch))
    coding = rule.code if steps else "dense"
    kernel = get_kernel(
        device,
        "adam",
        name,
        NAME=name,
        PARAM=param if steps else grad,
        GRAD=grad,
        CODING=coding,
        CODES="uint8" if coding in ("dynamic", "profile") else "int8",
        COUNT=1 if len(batch) == 1 else TOGETHER,
        DECAY=decay if steps else "",
        SKIP=_skip(rule, batch),
        CHANCE=int(steps and rule.stochastic_moments and coding in ("linear", "dynamic")),
        STOCHASTIC=int(steps and drawn),
        **shape.constants,
    )
    arguments: list[Any] = []
    for place in range(1 if len(batch) == 1 else TOGETHER):
        # A launch of fewer tensors names the first one again, without elements.
        tensor = batch[place] if place < len(batch) else batch[0]
        arguments += [tensor.grad, np.uint64(tensor.n if place < len(batch) else 0)]
        if steps:
            arguments += [tensor.param, *tensor.moments, *tensor.scales, tensor.skipped]
            arguments += [np.uint32(rule.seed_of(tensor.seed, 0))] if drawn else []
    arguments += [flags, np.uint32(first), np.uint32(size), np.uint64(blocks), np.uint32(shape.per)]
    if steps:
        # Host scalars are float64 until here and rounded to float32 once: part of the rule.
        reals: tuple[float, ...] = (
            -1.0 if rule.maximize else 1.0,
            rule.weight_decay if rule.shrink is None else rule.shrink,
            rule.beta1,
            1.0 - rule.beta1,
            rule.beta2,
            1.0 - rule.beta2,
            rule.step_size,
            rule.root2,
            rule.eps,
            rule.bound,
        )
        reals += rule.quick if shape.constants["PTX"] else ()
        arguments += [np.int32(rule.step), *(np.float32(value) for value in reals)]
        arguments += [map_of(device, True, False)] if coding == "dynamic" else [] if tables is None else list(tables)
    return kernel(shape.global_size, shape.local_size, *arguments)


def _shape(device: Device, name: str, rule: AdamStep, blocks: int, size: int, *, aligned: bool) -> BlockShape:
    whole = name == "adam_step" and rule.code == "profile"
    mapped = name == "adam_step" and rule.code == "dynamic"
    shape = block_shape(device, blocks, size, aligned=aligned, mapped=mapped, whole=whole)
    held = shape.constants["PTX"] if name == "adam_scan" else rule.code in ("linear", "dynamic")
    return shape if held else replace(shape, constants={**shape.constants, "HELD": 0})


def _require(tensor: Any, rule: AdamStep) -> None:
    """TypeError or ValueError unless the tensor's parts are of the types, shapes and place that the rule asks for."""
    if not isinstance(tensor, AdamTensor):
        raise TypeError(f"expected tensors as AdamTensor, got {type(tensor).__name__}")
    require_dtype("param", tensor.param, *FLOATING_DTYPES)
    shape, n = tuple(tensor.param.shape), tensor.param.numel()
    require_dtype("grad", tensor.grad, *dict.fromkeys((tensor.param.dtype, torch.float32)))
    for name in ("exp_avg", "exp_avg_sq"):
        moment = getattr(tensor, name)
        require_dtype(name, moment, STORED[rule.code])
        if not moment.is_contiguous():
            raise ValueError(f"expected {name} contiguous, got strides {moment.stride()}")
    for name in ("grad", "exp_avg", "exp_avg_sq"):
        if tuple(getattr(tensor, name).shape) != shape:
            raise ValueError(f"expected {name} of shape {list(shape)}, got {list(getattr(tensor, name).shape)}")
    blocks = ceil_div(n, _block_size(rule))
    for name in ("exp_avg_scale", "exp_avg_sq_scale"):
        scale = getattr(tensor, name)
        if (scale is None) != (rule.code == "dense"):
            raise ValueError(f"expected {name} for codes, and None for 'dense', got {scale!r} for {rule.code!r}")
        if scale is not None:
            require_tensor(name, scale, torch.float32, (blocks, 2) if rule.code == "profile" else (blocks,))
    require_tensor("skipped", tensor.skipped, torch.int32, (2,))
    require_seed("a seed", tensor.seed)
    require_together(
        param=tensor.param,
        grad=tensor.grad,
        exp_avg=tensor.exp_avg,
        exp_avg_sq=tensor.exp_avg_sq,
        exp_avg_scale=tensor.exp_avg_scale,
        exp_avg_sq_scale=tensor.exp_avg_sq_scale,
        skipped=tensor.skipped,
    )


def _arrays(cross: Crossing, tensor: AdamTensor) -> AdamArrays:
    scales = (tensor.exp_avg_scale, tensor.exp_avg_sq_scale)
    return AdamArrays(
        cross.update(tensor.param),
        cross.read(tensor.grad),
        (cross.update(tensor.exp_avg), cross.update(tensor.exp_avg_sq)),
        tuple(cross.update(scale) for scale in scales if scale is not None),
        cross.update(tensor.skipped),
        tensor.seed,
        (name_of(tensor.param.dtype), name_of(tensor.grad.dtype)),
    )


@torch.no_grad()
def adam_step_(tensors: Sequence[AdamTensor], rule: AdamStep, *, tables: Tables | None = None) -> None:
    """One step of every tensor, in place; `memtrain_cl.reference.adam` has the equations, `AdamTensor` the shapes.

    tables: for code "profile", the standardised quantiles float32 [256] of m and of sqrt(v), where the tensors are.
    TypeError or ValueError, before anything changes, for parts of other types, shapes or places, for tensors on
    several devices, and for tables that are missing or given for another code.
    """
    if (tables is None) == (rule.code == "profile"):
        raise ValueError(f"expected tables for the code 'profile' and no other, got code {rule.code!r}")
    for tensor in tensors:
        _require(tensor, rule)
    for name, table in zip(("the first table", "the second table"), tables or (), strict=False):
        require_tensor(name, table, torch.float32, (256,))
    if len({id(tensor.param) for tensor in tensors}) != len(tensors):
        raise ValueError("expected each parameter once, got one twice")
    some = [tensor for tensor in tensors if tensor.param.numel()]
    if not some:
        return
    together = {f"param {place}": tensor.param for place, tensor in enumerate(some)}
    require_together(**together, **{f"table {place}": table for place, table in enumerate(tables or ())})
    # Of one kind after the other, so that more of them share launches; which come first makes no difference.
    some.sort(key=lambda tensor: (str(tensor.param.dtype), str(tensor.grad.dtype)))
    device = ready_device(some[0].param)
    with Crossing(device, some[0].param) as cross:
        arrays = [_arrays(cross, tensor) for tensor in some]
        own = None if tables is None else (cross.read(tables[0]), cross.read(tables[1]))
        launch_step(device, arrays, rule, cross.scratch((len(some),), np.int32), own)
