"""One line of the table of cases (see `memtrain_cl.cases`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One check of a kernel.

    file, kernel: kernels/<file>.cl and the `__kernel` in it.   op: its launcher's name.   shape: sizes by name.
    options: constants by name.   bytes_moved: each input read once, each output written once.   flops: float operations
    of the formula, as the source writes them.   tolerance: 0 for results that must agree byte for byte, else the
    largest relative error.
    small: part of the set that a simulator can run.   native_only: not run in shapes that a device would not choose.
    also: (file, kernel) of others that the launcher runs beside, in one of its shapes at least.
    """

    file: str
    kernel: str
    op: str
    shape: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    bytes_moved: int = 0
    flops: int = 0
    tolerance: float = 0.0
    small: bool = False
    native_only: bool = False
    also: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """What tells this case from all others: operation, sizes, options."""
        sizes = "x".join(str(size) for size in self.shape.values())
        words = [
            key if value is True else f"{key}={value}" for key, value in self.options.items() if value is not False
        ]
        return "-".join([self.op, sizes, *words])
