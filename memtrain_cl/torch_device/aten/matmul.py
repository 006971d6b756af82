"""Matrix products: mm, bmm, addmm, baddbmm, addbmm, mv, addmv, dot, vdot; float32, float16, bfloat16 with float32 sums.

A matrix with a unit stride in either dimension is read where it lies, so transposed operands cost no copy; others are
made contiguous first. Products of whole numbers run on the host.
"""

from __future__ import annotations

from typing import Any

from memtrain_cl.launchers.matmul import matmul, matrix_layout
from memtrain_cl.operand import Operand
from memtrain_cl.torch_device.aten.copy import contiguous
from memtrain_cl.torch_device.geometry import meta
from memtrain_cl.torch_device.registry import aten, implements
from memtrain_cl.torch_device.tensor import OpenCLTensor, allocated, same_device, wrap

#: Types whose products have kernels.
FLOATS = frozenset({"float32", "float16", "bfloat16"})


def _operands(*tensors: Any) -> tuple[Operand, ...] | None:
    """The operands of tensors of one floating type on one device; None where the host has to do it."""
    same_device(*tensors)
    if not all(isinstance(tensor, OpenCLTensor) for tensor in tensors):
        return None
    operands = tuple(tensor.operand for tensor in tensors)
    elements = {operand.element for operand in operands}
    if len(elements) > 1:
        names = " and ".join(str(tensor.dtype) for tensor in tensors)
        raise RuntimeError(f"expected the operands of a product to have the same dtype, but got: {names}")
    return operands if elements <= FLOATS else None


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> RuntimeError:
    """torch's own error for these shapes, raised; otherwise one to raise."""
    meta(func, args, kwargs)
    shapes = ", ".join(str(list(arg.shape)) for arg in args)
    return RuntimeError(f"{func} cannot multiply tensors of shapes {shapes}")


def _laid(operand: Operand) -> Operand:
    """Itself where one of the last two strides is 1, else a contiguous copy."""
    return operand if matrix_layout(*operand.shape[-2:], *operand.strides[-2:]) else contiguous(operand)


def _broadcasts(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(shape) <= len(wanted) and all(
        size in (1, want) for size, want in zip(reversed(shape), reversed(wanted), strict=False)
    )


def _result(a: Operand, shape: tuple[int, ...]) -> Operand:
    return allocated(a.array.device, shape, a.element)


def _multiplies(a: Operand, b: Operand, rank: int) -> bool:
    """Whether a @ b exists for two matrices (rank 2) or two batches of them (rank 3)."""
    return len(a.shape) == len(b.shape) == rank and a.shape[:-2] == b.shape[:-2] and a.shape[-1] == b.shape[-2]


def _product(func: Any, self: Any, mat2: Any, rank: int) -> Any:
    operands = _operands(self, mat2)
    if operands is None:
        return NotImplemented
    a, b = operands
    if not _multiplies(a, b, rank):
        raise _refuse(func, (self, mat2))
    out = _result(a, (*a.shape[:-1], b.shape[-1]))
    matmul(_laid(a), _laid(b), out)
    return wrap(out)


def _sum(func: Any, self: Any, mat1: Any, mat2: Any, rank: int, beta: float, alpha: float) -> Any:
    operands = _operands(self, mat1, mat2)
    if operands is None:
        return NotImplemented
    add, a, b = operands
    if not _multiplies(a, b, rank) or not _broadcasts(add.shape, (*a.shape[:-1], b.shape[-1])):
        raise _refuse(func, (self, mat1, mat2))
    out = _result(a, (*a.shape[:-1], b.shape[-1]))
    matmul(_laid(a), _laid(b), out, add=add, alpha=float(alpha), beta=float(beta))
    return wrap(out)


@implements(aten.mm.default)
def mm(self: OpenCLTensor, mat2: OpenCLTensor) -> Any:
    """out [M, N] = self [M, K] @ mat2 [K, N]."""
    return _product(aten.mm.default, self, mat2, 2)


@implements(aten.bmm.default)
def bmm(self: OpenCLTensor, mat2: OpenCLTensor) -> Any:
    """out [Z, M, N] = self [Z, M, K] @ mat2 [Z, K, N]."""
    return _product(aten.bmm.default, self, mat2, 3)


@implements(aten.addmm.default)
def addmm(self: OpenCLTensor, mat1: OpenCLTensor, mat2: OpenCLTensor, *, beta: float = 1, alpha: float = 1) -> Any:
    """out [M, N] = beta * self + alpha * (mat1 @ mat2); self broadcasts and is not read where beta is 0."""
    return _sum(aten.addmm.default, self, mat1, mat2, 2, beta, alpha)


@implements(aten.baddbmm.default)
def baddbmm(
    self: OpenCLTensor, batch1: OpenCLTensor, batch2: OpenCLTensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    """out [Z, M, N] = beta * self + alpha * (batch1 @ batch2), as addmm for each item."""
    return _sum(aten.baddbmm.default, self, batch1, batch2, 3, beta, alpha)


@implements(aten.addbmm.default)
def addbmm(self: OpenCLTensor, batch1: OpenCLTensor, batch2: OpenCLTensor, *, beta: float = 1, alpha: float = 1) -> Any:
    """out [M, N] = beta * self + alpha * (the sum over items of batch1 @ batch2): one product over items and K."""
    operands = _operands(self, batch1, batch2)
    if operands is None:
        return NotImplemented
    _, a, b = operands
    if not _multiplies(a, b, 3):
        raise _refuse(aten.addbmm.default, (self, batch1, batch2))
    z, m, k = a.shape
    left, right = batch1.transpose(0, 1).reshape(m, z * k), batch2.reshape(z * k, b.shape[2])
    return aten.addmm.default(self, left, right, beta=beta, alpha=alpha)


def _column(vector: Operand) -> Operand:
    """[K] as [K, 1], of stride 1."""
    vector = contiguous(vector)
    return vector.viewed((vector.shape[0], 1))


@implements(aten.mv.default)
def mv(self: OpenCLTensor, vec: OpenCLTensor) -> Any:
    """out [M] = self [M, K] @ vec [K]."""
    operands = _operands(self, vec)
    if operands is None:
        return NotImplemented
    a, x = operands
    if len(a.shape) != 2 or len(x.shape) != 1 or a.shape[1] != x.shape[0]:
        raise _refuse(aten.mv.default, (self, vec))
    out = _result(a, (a.shape[0],))
    matmul(_laid(a), _column(x), out.viewed((a.shape[0], 1)))
    return wrap(out)


@implements(aten.addmv.default)
def addmv(self: OpenCLTensor, mat: OpenCLTensor, vec: OpenCLTensor, *, beta: float = 1, alpha: float = 1) -> Any:
    """out [M] = beta * self + alpha * (mat [M, K] @ vec [K]); self broadcasts and is not read where beta is 0."""
    operands = _operands(self, mat, vec)
    if operands is None:
        return NotImplemented
    add, a, x = operands
    if len(a.shape) != 2 or len(x.shape) != 1 or a.shape[1] != x.shape[0] or not _broadcasts(add.shape, a.shape[:1]):
        raise _refuse(aten.addmv.default, (self, mat, vec))
    out = _result(a, (a.shape[0],))
    row = add.viewed((*add.shape, 1), (*add.strides, 1))
    matmul(_laid(a), _column(x), out.viewed((a.shape[0], 1)), add=row, alpha=float(alpha), beta=float(beta))
    return wrap(out)


@implements(aten.dot.default, aten.vdot.default)
def dot(self: OpenCLTensor, other: OpenCLTensor) -> Any:
    """out [] = the sum of self [K] * other [K]."""
    operands = _operands(self, other)
    if operands is None:
        return NotImplemented
    x, y = operands
    if len(x.shape) != 1 or len(y.shape) != 1 or x.shape != y.shape:
        raise _refuse(aten.dot.default, (self, other))
    x = contiguous(x)
    out = _result(x, ())
    matmul(x.viewed((1, x.shape[0])), _column(y), out.viewed((1, 1)))
    return wrap(out)
