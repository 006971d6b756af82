"""Reading files that may be damaged or made to harm: exact reads, strict JSON, and one shape of error message.

Every fault becomes a CorruptFile "<file>: <field>: expected ..., got ...". Sizes are Python integers (they cannot
overflow) and are compared with the length of the file before anything of that size is allocated.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Sequence
from io import BufferedIOBase, BufferedReader
from typing import Any

import numpy as np

from memtrain_cl.errors import CorruptFile

#: NumPy makes arrays of at most 64 dimensions (32 before version 2) and counts their bytes in a signed 64-bit integer.
MAX_DIMS = 32
MAX_BYTES = 2**62
#: Lists and objects within each other in JSON: few enough for whatever walks through them by recursion.
MAX_NESTING = 100
#: Bytes asked for at a time: a file that is no plain one reads into memory of its own first.
_PIECE = 2**22


def corrupt(path: str | os.PathLike[str], field: str, expected: str, got: object) -> CorruptFile:
    """The error to raise: names file, field, what was expected and the value found (shortened, and safe to print)."""
    return CorruptFile(f"{printable(os.fspath(path))}: {printable(field)}: expected {expected}, got {shorten(got)}")


def printable(text: str) -> str:
    """``text`` with control characters escaped, so that a name out of a file cannot drive the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in text)


def shorten(value: object, limit: int = 80) -> str:
    """repr of ``value`` in at most about ``limit`` characters."""
    text = repr(value[: limit + 1] if isinstance(value, str | bytes) else value)
    return printable(text if len(text) <= limit else text[:limit] + "...")


def open_regular(path: str | os.PathLike[str]) -> tuple[BufferedReader, int]:
    """The opened file and its length. CorruptFile when it is a pipe or a device (which would block or never end)."""
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "expected a file", os.fspath(path))
    if not stat.S_ISREG(status.st_mode):
        raise corrupt(path, "type", "a regular file", stat.filemode(status.st_mode))
    file = open(path, "rb")  # noqa: SIM115 - the caller closes it
    return file, os.fstat(file.fileno()).st_size


def read_exactly(file: BufferedIOBase, count: int, path: str | os.PathLike[str], field: str) -> bytes:
    """``count`` bytes, which the caller has compared with the file's length; CorruptFile when it ends before."""
    data = file.read(count)
    if len(data) != count:
        raise corrupt(path, field, f"{count} bytes", f"{len(data)} before the end of the file")
    return data


def read_array(file: BufferedIOBase, count: int, path: str | os.PathLike[str], field: str) -> np.ndarray:
    """``count`` bytes as a fresh uint8 array, read without a second copy."""
    data = np.empty(count, dtype=np.uint8)
    filled = 0
    view = data.data
    while filled < count:
        got = file.readinto(view[filled : filled + _PIECE])
        if not got:
            raise corrupt(path, field, f"{count} bytes", f"{filled} before the end of the file")
        filled += got
    return data


def element_count(shape: Sequence[int]) -> int | None:
    """Product of the dimensions; None when no array can have them (negative, too many, too large)."""
    if len(shape) > MAX_DIMS or any(type(d) is not int or d < 0 for d in shape):
        return None
    # Empty dimensions count as one here: [0, 2**62] has no elements, and yet NumPy could not hold its strides.
    if math.prod(max(d, 1) for d in shape) > MAX_BYTES // 8:
        return None
    return math.prod(shape)


class _NotStrict(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise _NotStrict(f"the name {shorten(twice)} twice")
    for name in made:
        _encodable(name)
    return made


def _encodable(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _NotStrict(f"the name {shorten(text)} with half a surrogate pair") from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _NotStrict(f"the number {shorten(text)}")
    return value


def _no_constant(text: str) -> float:
    raise _NotStrict(f"the number {text}")


def _whole(text: str) -> int:
    value = int(text)
    if abs(value) >= 2**1023:  # what no float64 holds ends arithmetic by an OverflowError
        raise _NotStrict(f"the number {shorten(text)}")
    return value


def _require_flat(value: Any) -> None:
    level = [value]
    for _ in range(MAX_NESTING):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [each for values in inner for each in values]
    if any(isinstance(each, dict | list) for each in level):
        raise _NotStrict(f"more than {MAX_NESTING} levels")


def strict_json(data: bytes | str, path: str | os.PathLike[str], field: str) -> Any:
    """Parsed JSON of unique names, finite numbers and at most `MAX_NESTING` levels; CorruptFile otherwise."""
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        value = json.loads(
            text, object_pairs_hook=_unique, parse_float=_finite, parse_int=_whole, parse_constant=_no_constant
        )
        _require_flat(value)
        return value
    except _NotStrict as fault:
        expected = f"JSON of unique names, finite numbers and at most {MAX_NESTING} levels"
        raise corrupt(path, field, expected, str(fault)) from None
    except (ValueError, RecursionError):  # not UTF-8, not JSON, an integer of thousands of digits, nesting without end
        raise corrupt(path, field, "JSON", data) from None
