"""Which function answers which aten operation.

`implements` enters a handler into the table. What nobody entered is derived, once an operation: its ``.out`` and
in-place forms from the functional one, views from torch's own view arithmetic, composite operations from their
decomposition; the rest runs on the host (see fallback.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

aten = torch.ops.aten

Handler = Callable[..., Any]
_H = TypeVar("_H", bound=Handler)

#: What was entered by hand.
TABLE: dict[Any, Handler] = {}
#: What every operation met so far resolves to.
RESOLVED: dict[Any, Handler] = {}
#: Handlers of whole kinds of operations, asked in order; each gives a handler or None.
KINDS: list[Callable[[Any], Handler | None]] = []


def implements(*overloads: Any) -> Callable[[_H], _H]:
    """Enter the decorated function as the handler of these overloads.

    It gets what ``__torch_dispatch__`` gets, and may return NotImplemented for arguments that it cannot do; the call
    then runs on the host and is counted.
    """

    def enter(handler: _H) -> _H:
        for overload in overloads:
            if overload in TABLE:
                raise ValueError(f"{overload} has a handler already: {TABLE[overload].__qualname__}")
            TABLE[overload] = handler
        return handler

    return enter


def resolve(func: Any) -> Handler:
    """The handler of `func`, found once."""
    handler = RESOLVED.get(func)
    if handler is None:
        handler = TABLE.get(func) or next((found for kind in KINDS if (found := kind(func)) is not None), None)
        if handler is None:
            raise NotImplementedError(f"{func} has no handler")  # the last kind, the host fallback, answers everything
        RESOLVED[func] = handler
    return handler


def has_kernel(func: Any) -> bool:
    """Whether `func` runs on the device: entered by hand, or derived from what was."""
    resolve(func)
    return bool(getattr(RESOLVED[func], "on_device", func in TABLE))


def is_composite(func: Any) -> bool:
    """Whether torch writes `func` out as others: its arguments then decide whether it is a view, as reshape."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))
