"""Options that a user gives for all layers, or by pattern of their names: --C 11 --C "*.down_proj=8"."""

from __future__ import annotations

from collections.abc import Sequence


def per_layer(option: str, values: Sequence[str] | None) -> dict[str, int] | None:
    """The values by pattern, "*" for one without; None where the option was not given.

    ValueError for what is no number.
    """
    if not values:
        return None
    wanted = {}
    for value in values:
        pattern, equals, number = value.rpartition("=")
        try:
            wanted[pattern if equals else "*"] = int(number)
        except ValueError:
            raise ValueError(f"expected {option} as N or PATTERN=N, got {value!r}") from None
    return wanted
