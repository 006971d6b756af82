"""What a user says of layers whose file does not: one value for all of them, or values by patterns of their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from memtrain_cl.formats import hash_number

#: A value for every layer, or values by pattern (``*``, ``?``, ``[...]``), of which the last that matches counts.
PerLayer = int | Mapping[str, int]


def value_for(layer: str, wanted: PerLayer | None) -> int | None:
    """The value for a layer; None where nothing was said of it."""
    if wanted is None or isinstance(wanted, int):
        return wanted
    matching = [value for pattern, value in wanted.items() if fnmatchcase(layer, pattern)]
    return matching[-1] if matching else None


def require_matches(wanted: PerLayer | None, layers: Iterable[str], what: str) -> None:
    """ValueError for a pattern that matches none of the layers, where there are any: what it says would go unheard.

    what: of which the values are, such as "C".
    """
    names = list(layers)
    for pattern in wanted if isinstance(wanted, Mapping) else ():
        if names and not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"expected {what} by patterns that match a layer, got {pattern!r}, which matches none")


def seeds(layers: Iterable[str], seed: int) -> dict[str, int]:
    """A seed for each layer, uint32, out of one number: layers with one seed would round their counters alike.

    ValueError unless seed is in 0..2**63-1. Equal names and seed give equal seeds.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"expected seed as an integer in 0..2**63-1, got {seed!r}")
    return {layer: hash_number(hash_number(seed) + place) for place, layer in enumerate(sorted(layers))}
