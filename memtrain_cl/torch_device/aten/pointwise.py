"""How elementwise operations run: types promoted and shapes broadcast by torch's own rules, then one kernel.

An operation is a `Pointwise`: a body of OpenCL C over its tensor arguments x0, x1, ... and its scalar arguments s0,
s1, ... in the order of the call. Its in-place and out forms write into their target (derive.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from memtrain_cl.elements import ELEMENTS
from memtrain_cl.launchers.elementwise import Formula, launch
from memtrain_cl.operand import Operand
from memtrain_cl.torch_device.aten.copy import (
    compute_type,
    fresh_copy,
    misfit,
    overlaps,
    require_apart,
    require_castable,
    resize_,
)
from memtrain_cl.torch_device.geometry import meta
from memtrain_cl.torch_device.registry import implements
from memtrain_cl.torch_device.tensor import OpenCLTensor, allocated, dtype_of, element_of, same_device, wrap
from memtrain_cl.torch_device.transfer import from_host

#: What bodies of one operation are: one text for all compute types, or one for each ("float", "int", "long", "whole").
Bodies = str | Mapping[str, str]
_NUMBERS = (int, float, bool)


class _Case:
    """What one geometry of one operation needs: its formula, and the result's shape, strides and element."""

    __slots__ = ("element", "formula", "shape", "strides")

    def __init__(self, formula: Formula, shape: tuple[int, ...], strides: tuple[int, ...], element: str) -> None:
        self.formula = formula
        self.shape = shape
        self.strides = strides
        self.element = element


_formulas: dict[Any, Formula] = {}


def formula_of(body: str, casts: tuple[str, ...], result: str, scalars: tuple[str, ...]) -> Formula:
    """The one Formula of this text and these types."""
    key = (body, casts, result, scalars)
    if key not in _formulas:
        _formulas[key] = Formula(body, casts, (result,), scalars)
    return _formulas[key]


class Pointwise:
    """One operation. `func`: its functional overload, whose meta function gives result type, shape and strides.

    floats: whole numbers are computed as float32, as by sqrt. raw: leading tensor arguments that keep a type of their
    own (where's condition). arrange: turns the call's arguments into (tensors and numbers in the order of x and s,
    bodies); by default they are the call's positional arguments, and keyword arguments in the order of the schema.
    """

    def __init__(
        self,
        func: Any,
        bodies: Bodies,
        *,
        floats: bool = False,
        raw: int = 0,
        arrange: Callable[..., Any] | None = None,
    ) -> None:
        self.func = func
        self.bodies = bodies
        self.floats = floats
        self.raw = raw
        self.arrange = arrange
        self.cases: dict[Any, _Case | None] = {}

    def _case(self, key: Any, args: Any, kwargs: Any, tensors: Any, numbers: Any, bodies: Bodies) -> _Case | None:
        result = meta(self.func, args, kwargs)
        element = element_of(result.dtype)
        # Numbers count by their kind alone, as torch's promotion has it.
        promoted = self._promoted(tensors[self.raw :], numbers)
        compute = "float" if self.floats or ELEMENTS[promoted].floating else compute_type(promoted)
        if isinstance(bodies, str):
            body: str | None = bodies
        else:
            body = bodies.get(promoted) or bodies.get(compute) or (bodies.get("whole") if compute != "float" else None)
        case = None
        if body is not None:
            casts = tuple(
                compute_type(t.element) if position < self.raw else compute for position, t in enumerate(tensors)
            )
            scalars = tuple(compute for _ in numbers)
            out = compute if ELEMENTS[element].floating == (compute == "float") else compute_type(element)
            out = "int" if element == "bool" else out
            strides = tuple(result.stride())
            case = _Case(formula_of(body, casts, out, scalars), tuple(result.shape), strides, element)
        if len(self.cases) > 8192:
            self.cases.clear()
        self.cases[key] = case
        return case

    def _promoted(self, operands: Any, numbers: Any) -> str:
        tensors = [torch.empty(o.shape, dtype=dtype_of(o.element), device="meta") for o in operands]
        values = [*tensors, *numbers]
        dtype = torch.result_type(values[0], values[1]) if len(values) > 1 else tensors[0].dtype
        if len(values) > 2:
            dtype = torch._prims_common.elementwise_dtypes(
                *values, type_promotion_kind=torch._prims_common.ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT
            )[1]
        return element_of(torch.float32 if dtype == torch.float64 else dtype)

    def _call(self, args: Any, kwargs: Any) -> Any:
        """(case, operands, numbers) of a call, or NotImplemented."""
        arranged = (
            self.arrange(*args, **kwargs) if self.arrange is not None else ((*args, *kwargs.values()), self.bodies)
        )
        if arranged is NotImplemented:
            return NotImplemented
        values, bodies = arranged
        operands: list[Operand] = []
        numbers: list[Any] = []
        marks: list[Any] = []
        home: Any = None
        for value in values:
            if isinstance(value, OpenCLTensor):
                operand = value.operand
                operands.append(operand)
                marks.append((operand.shape, operand.strides, operand.element))
                if home is None:
                    home = operand.array.device.queue
                elif operand.array.device.queue is not home:
                    same_device(*values)
            elif isinstance(value, _NUMBERS):
                numbers.append(value)
                marks.append(type(value))
            elif isinstance(value, Tensor):
                same_device(*values)
                # A CPU scalar takes part in promotion as a tensor of no dimensions, which a number stands for.
                marks.append(value.dtype)
                operands.append(_placed(value, values))
            elif value is not None:
                return NotImplemented
            else:
                marks.append(None)
        key = (bodies if isinstance(bodies, str) else id(bodies), *marks)
        case = self.cases.get(key, self)
        if case is self:
            case = self._case(key, args, kwargs, operands, numbers, bodies)
        if case is None:
            return NotImplemented
        return case, operands, numbers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self._call(args, kwargs)
        if found is NotImplemented:
            return NotImplemented
        case, operands, numbers = found
        target = allocated(operands[0].array.device, case.shape, case.element)
        if case.strides != target.strides:
            target = Operand(target.array, case.shape, case.strides, 0, case.element)
        launch(case.formula, (target,), operands, *numbers)
        return wrap(target)

    def into(self, out: OpenCLTensor, args: Any, kwargs: Any, *, resize: bool) -> Any:
        """Write the result into `out`."""
        found = self._call(args, kwargs)
        if found is NotImplemented:
            return NotImplemented
        case, operands, numbers = found
        target = out.operand
        require_castable(case.element, target.element)
        if target.shape != case.shape:
            if not resize:
                raise misfit(target.shape, case.shape)
            target = resize_(out, case.shape).operand
        require_apart(target)
        operands = [fresh_copy(operand) if overlaps(operand, target) else operand for operand in operands]
        launch(case.formula, (target,), operands, *numbers)
        return out


def _placed(scalar: Tensor, values: Any) -> Operand:
    host = scalar.detach()
    if host.dtype == torch.float64:
        host = host.to(torch.float32)
    return from_host(host, same_device(*values)).operand


def pointwise(func: Any, bodies: Bodies, **options: Any) -> None:
    """Enter an elementwise operation; derive.py finds its in-place and out forms."""
    implements(func)(Pointwise(func, bodies, **options))
