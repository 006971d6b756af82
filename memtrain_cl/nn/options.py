"""Options of counter layers, checked when they are assigned: a wrong one never reaches a step."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

T = TypeVar("T")


class Option(Generic[T]):
    """An attribute whose value passes `check(name, value)` on its way in; else ValueError and the old one stays."""

    def __init__(self, check: Callable[[str, Any], T]) -> None:
        self._check = check

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, layer: None, owner: type) -> Self: ...

    @overload
    def __get__(self, layer: Any, owner: type) -> T: ...

    def __get__(self, layer: Any, owner: type) -> Self | T:
        if layer is None:
            return self
        value: T = layer.__dict__[self._name]
        return value

    def __set__(self, layer: Any, value: Any) -> None:
        layer.__dict__[self._name] = self._check(self._name, value)


def is_whole(value: Any) -> bool:
    """Whether a value is an integer that counts something: no bool, no float."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def at_least(lowest: int) -> Callable[[str, Any], int]:
    """A check for integers from `lowest` on."""

    def check(name: str, value: Any) -> int:
        if not is_whole(value) or value < lowest:
            raise ValueError(f"expected {name} as an integer >= {lowest}, got {value!r}")
        return int(value)

    return check


def one_of(*known: str) -> Callable[[str, Any], str]:
    """A check for one of several words."""

    def check(name: str, value: Any) -> str:
        if value not in known:
            raise ValueError(f"expected {name} as one of {', '.join(known)}, got {value!r}")
        return str(value)

    return check


def flag(name: str, value: Any) -> bool:
    """A check for True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"expected {name} as True or False, got {value!r}")
    return value


def flag_or_none(name: str, value: Any) -> bool | None:
    """A check for True, False or None."""
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"expected {name} as True, False or None, got {value!r}")
    return value


def saved_bits(name: str, value: Any) -> int:
    """A check for the bits of a saved input: 0 for all of it, else 2..15."""
    if not is_whole(value) or not (value == 0 or 2 <= value <= 15):
        raise ValueError(f"expected {name} as 0 or an integer in 2..15, got {value!r}")
    return int(value)
