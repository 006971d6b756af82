"""Random operations: fills in place, dropout, permutations, draws. Other forms (rand, randn, normal) end in these.

A `generator` is None, for the device's own state, or a CPU generator that gives each operation its stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memtrain_cl.elements import ELEMENTS
from memtrain_cl.launchers import random as launch
from memtrain_cl.operand import Operand
from memtrain_cl.torch_device.aten.copy import contiguous, copy_operand, fresh_copy, require_apart, strided_like
from memtrain_cl.torch_device.random import stream_of
from memtrain_cl.torch_device.registry import aten, implements
from memtrain_cl.torch_device.tensor import OpenCLTensor, allocated, element_of, empty, opened, wrap

_FLOATING = ("float32", "float16", "bfloat16")
#: Whole numbers that a type holds without gaps: 0 .. 2^bits.
_EXACT_BITS = {"float32": 24, "float16": 11, "bfloat16": 8}


def _fill(self: OpenCLTensor, generator: Any, fill: Callable[..., None], *arguments: Any) -> OpenCLTensor:
    """Fill in place, through a contiguous copy where `self` is none."""
    operand = self.operand
    if operand.size:
        require_apart(operand)
        stream = stream_of(operand.array.device, generator)
        target = operand if operand.contiguous else allocated(operand.array.device, operand.shape, operand.element)
        fill(target, stream, *arguments)
        if target is not operand:
            copy_operand(target, operand)
    return self


def _require_floating(name: str, operand: Operand) -> None:
    if operand.element not in _FLOATING:
        raise NotImplementedError(f'"{name}" not implemented for {operand.element}: expected a floating type')


@implements(aten.uniform_.default)
def uniform_(self: OpenCLTensor, from_: float = 0.0, to: float = 1.0, *, generator: Any = None) -> OpenCLTensor:
    """from <= x < to, evenly."""
    _require_floating("uniform_", self.operand)
    if not from_ <= to:
        raise RuntimeError(f"uniform_ expects to return a [from, to) range, but found from={from_} > to={to}")
    return _fill(self, generator, launch.uniform, from_, to)


def _require_std(std: float) -> None:
    if not std >= 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}")


@implements(aten.normal_.default)
def normal_(self: OpenCLTensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> OpenCLTensor:
    """Normal numbers."""
    _require_floating("normal_", self.operand)
    _require_std(std)
    return _fill(self, generator, launch.normal, mean, std)


@implements(aten.log_normal_.default)
def log_normal_(self: OpenCLTensor, mean: float = 1.0, std: float = 2.0, *, generator: Any = None) -> OpenCLTensor:
    """The exponentials of normal numbers."""
    normal_(self, mean, std, generator=generator)
    self.exp_()
    return self


@implements(aten.exponential_.default)
def exponential_(self: OpenCLTensor, lambd: float = 1.0, *, generator: Any = None) -> OpenCLTensor:
    """Exponential numbers of rate lambd, never 0."""
    _require_floating("exponential_", self.operand)
    if not lambd > 0:
        raise RuntimeError(f"exponential_ expects lambda > 0.0, but found lambda={lambd}")
    return _fill(self, generator, launch.exponential, lambd)


def _standard_normal(like: OpenCLTensor, shape: Sequence[int], dtype: torch.dtype, generator: Any) -> Any:
    return normal_(empty(like.operand.array.device, shape, dtype), generator=generator)


@implements(aten.normal.Tensor_float)
def normal_tensor_float(mean: OpenCLTensor, std: float = 1.0, *, generator: Any = None) -> Any:
    """Normal numbers around each mean."""
    _require_std(std)
    return _standard_normal(mean, mean.shape, mean.dtype, generator) * std + mean


@implements(aten.normal.float_Tensor)
def normal_float_tensor(mean: float, std: OpenCLTensor, *, generator: Any = None) -> Any:
    """Normal numbers of each spread."""
    return _standard_normal(std, std.shape, std.dtype, generator) * std + mean


@implements(aten.normal.Tensor_Tensor)
def normal_tensor_tensor(mean: OpenCLTensor, std: OpenCLTensor, *, generator: Any = None) -> Any:
    """Normal numbers around each mean, of each spread, broadcast."""
    on_device = mean if isinstance(mean, OpenCLTensor) else std
    shape = torch.broadcast_shapes(mean.shape, std.shape)
    return _standard_normal(on_device, shape, mean.dtype, generator) * std + mean


def _require_probability(p: float) -> None:
    if not 0 <= p <= 1:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p}")


@implements(aten.bernoulli_.float)
def bernoulli_float_(self: OpenCLTensor, p: float = 0.5, *, generator: Any = None) -> OpenCLTensor:
    """1 with probability p, else 0."""
    _require_probability(p)
    return _fill(self, generator, launch.bernoulli, p)


@implements(aten.bernoulli_.Tensor)
def bernoulli_tensor_(self: OpenCLTensor, p: OpenCLTensor, *, generator: Any = None) -> Any:
    """1 with each probability of p, broadcast, else 0."""
    if not p.is_floating_point():
        raise RuntimeError(f"expected probabilities of a floating type, got {p.dtype}")
    if not isinstance(p, OpenCLTensor):
        return bernoulli_float_(self, float(p), generator=generator)
    each = contiguous(p.expand(self.shape).operand)  # type: ignore[attr-defined]

    def fill(target: Operand, stream: int) -> None:
        launch.bernoulli_each(each, target, stream)

    return _fill(self, generator, fill)


@implements(aten.bernoulli.default)
def bernoulli(self: OpenCLTensor, *, generator: Any = None) -> Any:
    """1 with each probability, else 0."""
    return bernoulli_tensor_(empty(self.operand.array.device, self.shape, self.dtype), self, generator=generator)


@implements(aten.native_dropout.default)
def native_dropout(input: OpenCLTensor, p: float, train: bool | None) -> tuple[OpenCLTensor, OpenCLTensor]:  # noqa: A002
    """(x/(1 - p) or 0, what was kept)."""
    if not input.is_floating_point():
        raise RuntimeError(f"result type Float can't be cast to the desired output type {input.dtype}")
    if train is False:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)  # type: ignore[return-value]
    _require_probability(p)
    operand = contiguous(input.operand)
    home = operand.array.device
    out, mask = allocated(home, operand.shape, operand.element), allocated(home, operand.shape, "bool")
    launch.dropout(operand, out, mask, stream_of(home, None), p)
    return wrap(out), wrap(mask)


@implements(aten.native_dropout_backward.default)
def native_dropout_backward(grad_output: OpenCLTensor, mask: OpenCLTensor, scale: float) -> OpenCLTensor:
    """grad*scale where kept, else 0."""
    grad = contiguous(grad_output.operand)
    out = allocated(grad.array.device, grad.shape, grad.element)
    launch.dropout_backward(grad, contiguous(mask.operand), out, scale)
    return wrap(out)


def _integer_range(element: str) -> tuple[int, int]:
    """(least, most) whole numbers of a type."""
    if element in _EXACT_BITS:
        return -(1 << _EXACT_BITS[element]), 1 << _EXACT_BITS[element]
    if element == "bool":
        return 0, 1
    bits = 8 * ELEMENTS[element].itemsize
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if ELEMENTS[element].signed else (0, (1 << bits) - 1)


@implements(aten.random_.default)
def random_(self: OpenCLTensor, *, generator: Any = None) -> OpenCLTensor:
    """Whole numbers from 0 to the type's largest (2^24, 2^11, 2^8 for the floating types)."""
    return _fill(self, generator, launch.integers, 0, _integer_range(self.operand.element)[1] + 1)


@implements(aten.random_.to)
def random_to_(self: OpenCLTensor, to: int, *, generator: Any = None) -> Any:
    """Whole numbers 0 <= x < to."""
    return random_from_(self, 0, to, generator=generator)


@implements(getattr(aten.random_, "from"))
def random_from_(self: OpenCLTensor, from_: int, to: int | None, *, generator: Any = None) -> OpenCLTensor:
    """Whole numbers from <= x < to; up to the type's largest where `to` is None."""
    least, most = _integer_range(self.operand.element)
    end = most + 1 if to is None else to
    if not from_ < end:
        raise RuntimeError(f"random_ expects 'from' to be less than 'to', but got from={from_} >= to={end}")
    if self.operand.element not in _FLOATING and not (least <= from_ and end - 1 <= most):
        raise RuntimeError(
            f"expected from and to - 1 within {least}..{most} of {self.dtype}, got {from_} and {end - 1}"
        )
    return _fill(self, generator, launch.integers, from_, end)


# ---- new tensors ---------------------------------------------------------------------------------------------------


def _enter_functional(functional: Any, in_place: Callable[..., Any]) -> None:
    """A form that leaves `self` alone and gives a tensor like it."""

    def make(self: OpenCLTensor, *args: Any, **options: Any) -> Any:
        return in_place(wrap(strided_like(self.operand, self.operand.element)), *args, **options)

    implements(functional)(make)


_enter_functional(aten.uniform.default, uniform_)
_enter_functional(aten.normal_functional.default, normal_)
_enter_functional(aten.exponential.default, exponential_)
_enter_functional(aten.bernoulli.p, bernoulli_float_)
_enter_functional(aten.bernoulli.Tensor, bernoulli_tensor_)
_enter_functional(aten.random.default, random_)
_enter_functional(aten.random.to, random_to_)
_enter_functional(getattr(aten.random, "from"), random_from_)


def _enter_like(overload: Any, in_place: Callable[..., Any]) -> None:
    """A form that takes leading numbers, and the options of empty_like."""

    def make(self: OpenCLTensor, *numbers: Any, generator: Any = None, **options: Any) -> Any:
        made = aten.empty_like.default(self, **options)
        return in_place(made, *numbers, generator=generator)

    implements(overload)(make)


_enter_like(aten.rand_like.default, aten.uniform_.default)
_enter_like(aten.rand_like.generator, aten.uniform_.default)
_enter_like(aten.randn_like.default, aten.normal_.default)
_enter_like(aten.randn_like.generator, aten.normal_.default)
_enter_like(aten.randint_like.default, aten.random_.to)
_enter_like(aten.randint_like.generator, aten.random_.to)
_enter_like(aten.randint_like.low_dtype, getattr(aten.random_, "from"))
_enter_like(aten.randint_like.low_generator_dtype, getattr(aten.random_, "from"))


@implements(aten.randperm.generator, aten.randperm.default)
def randperm(
    n: int,
    *,
    generator: Any = None,
    dtype: torch.dtype | None = torch.int64,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> OpenCLTensor:
    """0..n-1 in random order."""
    if n < 0:
        raise RuntimeError(f"n must be non-negative, got {n}")
    out = empty(opened(device), (n,), torch.int64 if dtype is None else dtype)
    return _permute(out, generator)


def _permute(out: OpenCLTensor, generator: Any) -> OpenCLTensor:
    n, dtype = out.numel(), out.dtype
    most = _integer_range(element_of(dtype))[1]
    if n > most + 1:
        raise RuntimeError(f"n is too large for {dtype}: {n} numbers from 0, and the largest is {most}")
    return _fill(out, generator, launch.permutation)


@implements(aten.randperm.generator_out)
def randperm_generator_out(n: int, *, generator: Any, out: OpenCLTensor) -> OpenCLTensor:
    """0..n-1 in random order, into `out`."""
    if n < 0:
        raise RuntimeError(f"n must be non-negative, got {n}")
    if out.numel() != n:
        out.resize_((n,))
    return _permute(out, generator)


@implements(aten.randperm.out)
def randperm_out(n: int, *, out: OpenCLTensor) -> Any:
    """0..n-1 in random order, into `out`."""
    return randperm_generator_out(n, generator=None, out=out)


@implements(aten.multinomial.default)
def multinomial(self: OpenCLTensor, num_samples: int, replacement: bool = False, *, generator: Any = None) -> Any:
    """int64 [rows, num_samples] or [num_samples]: categories drawn in proportion to each row of `self`.

    Rows that are no probabilities raise RuntimeError when the device is next waited for.
    """
    if self.ndim not in (1, 2):
        raise RuntimeError(f"prob_dist must be 1 or 2 dim, got {self.ndim}")
    if not self.is_floating_point():
        raise RuntimeError(f"multinomial only supports floating-point dtypes for input, got: {self.dtype}")
    if num_samples <= 0:
        raise RuntimeError(f"cannot sample n_sample <= 0 samples, got {num_samples}")
    columns = self.shape[-1]
    if columns == 0 or (not replacement and num_samples > columns):
        raise RuntimeError(
            f"cannot sample n_sample > prob_dist.size(-1) samples without replacement: {num_samples} of {columns}"
        )
    p = contiguous(self.operand)
    rows = p.viewed((p.size // columns, columns))
    home = p.array.device
    drawn = allocated(home, (rows.shape[0], num_samples), "int64")
    if replacement or num_samples == 1:
        launch.draw(rows, drawn, stream_of(home, generator))
    else:
        # The largest p/q with exponential q, one after the other, are draws without replacement.
        q = exponential_(empty(home, rows.shape, torch.float32), generator=generator)
        launch.require_weights(rows)
        largest, places = torch.topk(wrap(fresh_copy(rows, "float32")) / q, num_samples)
        launch.require_weights(contiguous(largest.operand), positive=True)  # type: ignore[attr-defined]
        drawn = contiguous(places.operand)  # type: ignore[attr-defined]
    return wrap(drawn.viewed(drawn.shape if self.ndim == 2 else (num_samples,)))
