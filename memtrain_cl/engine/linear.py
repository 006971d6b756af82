"""Linear layers on the device, with what goes before and behind their products.

Activations are contiguous float32 operands [tokens, width].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from memtrain_cl.array import DeviceArray
from memtrain_cl.launchers.counter_matvec import Norm
from memtrain_cl.launchers.decoded import launch_forward
from memtrain_cl.launchers.elementwise import Formula, launch
from memtrain_cl.launchers.matmul import matmul
from memtrain_cl.launchers.norm import norm as launch_norm
from memtrain_cl.operand import Operand, contiguous_strides, empty_operand

_SUM = Formula("y0 = x0 + x1;", ("float", "float"), ("float",))
_GATED = Formula("y0 = x0 / (1.0f + exp(-x0)) * x1;", ("float", "float"), ("float",))


def operand_of(array: DeviceArray) -> Operand:
    """A float32 array as the launchers of operands take it."""
    return Operand(array, array.shape, contiguous_strides(array.shape), 0, "float32", contiguous=True)


def array_of(operand: Operand) -> DeviceArray:
    """An operand that begins its memory, as an array of its shape."""
    array = operand.array
    return DeviceArray(array.device, array.buffer, operand.shape, np.float32, owner=array, alignment=array.alignment)


def normed(x: Operand, by: Norm) -> Operand:
    """The root-mean-square norm of each row."""
    y, rstd = empty_operand(x.device, x.shape, "float32"), empty_operand(x.device, x.shape[:1], "float32")
    launch_norm(x, operand_of(by.weight), None, y, None, rstd, n=x.shape[1], eps=by.eps)
    return y


class Linear(ABC):
    """A weight [out, in]: one layer's, or those of several layers of one input below each other."""

    @abstractmethod
    def product(self, x: Operand, add: Operand | None) -> Operand:
        """x [T, in] times the weight's transpose, plus `add`: [T, out]."""

    def apply(
        self, x: Operand, *, norm: Norm | None = None, add: Operand | None = None, gated: bool = False
    ) -> Operand:
        """The product with x, normed before; plus `add`, or gated behind: silu(first half of y) * second half."""
        y = self.product(x if norm is None else normed(x, norm), add)
        if not gated:
            return y
        tokens, width = y.shape[0], y.shape[1] // 2
        halves = [y.viewed((tokens, width), y.strides, offset) for offset in (0, width)]
        out = empty_operand(y.device, (tokens, width), "float32")
        launch(_GATED, [out], halves)
        return out


@dataclass(frozen=True)
class DenseLinear(Linear):
    """weight: float32 [out, in]."""

    weight: DeviceArray

    def product(self, x: Operand, add: Operand | None) -> Operand:
        out, columns = self.weight.shape
        y = empty_operand(x.device, (x.shape[0], out), "float32")
        matmul(x, operand_of(self.weight).viewed((columns, out), (1, columns)), y, add=add)
        return y


@dataclass(frozen=True)
class PackedLinear(Linear):
    """state: uint8 [out, in/4*3]. scale: float32 [out]."""

    state: DeviceArray
    scale: DeviceArray
    C: int

    @property
    def arrays(self) -> tuple[DeviceArray, DeviceArray]:
        """Codes and scales."""
        return self.state, self.scale

    def product(self, x: Operand, add: Operand | None) -> Operand:
        y = empty_operand(x.device, (x.shape[0], self.scale.size), "float32")
        launch_forward(x.device, array_of(x), self.state, self.scale, array_of(y), C=self.C, packed=True)
        if add is not None:
            launch(_SUM, [y], [y, add])
        return y
