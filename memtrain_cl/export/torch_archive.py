"""Files of torch.save, loaded with ``weights_only=True`` after they were checked for what that does not look at.

A zip archive: ``<root>/data.pkl``, a pickle whose tensors name storages by key, and ``<root>/data/<key>``, a storage's
bytes. Before PyTorch sees it: members are uncompressed, within the file's length and of the checksums that they say;
the pickle holds nothing but containers, plain values and dense tensors; each storage is as large as its member, each
tensor no larger than its storage. So nothing is allocated that the file does not hold.
"""

from __future__ import annotations

import math
import os
import pickletools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from memtrain_cl.errors import CorruptFile
from memtrain_cl.export.archive import StoredArchive
from memtrain_cl.export.hostile import corrupt, element_count

Path = str | os.PathLike[str]

PICKLE = "data.pkl"
_PROTOCOL = 2
#: Types of storages that a pickle may name, and the bytes of their elements.
STORAGES = {
    "BoolStorage": 1,
    "ByteStorage": 1,
    "CharStorage": 1,
    "ShortStorage": 2,
    "HalfStorage": 2,
    "BFloat16Storage": 2,
    "IntStorage": 4,
    "FloatStorage": 4,
    "LongStorage": 8,
    "DoubleStorage": 8,
    "ComplexFloatStorage": 8,
}
_TENSOR, _DICTIONARY = "torch._utils _rebuild_tensor_v2", "collections OrderedDict"
_CALLED = (_TENSOR, "torch._utils _rebuild_parameter", _DICTIONARY)
_NAMED = {*_CALLED, *(f"torch {name}" for name in STORAGES)}


def load_archive(path: Path) -> Any:
    """What was saved, its tensors on the host. CorruptFile for any fault, OSError when there is no file."""
    import torch

    with StoredArchive(path) as archive:
        pickles = [name for name in archive.sizes if name.count("/") == 1 and name.endswith(f"/{PICKLE}")]
        if len(pickles) != 1:
            raise corrupt(path, "members", f"one {PICKLE}, as torch.save writes it", pickles)
        # PyTorch finds members without regard to case.
        if len({name.lower() for name in archive.sizes}) != len(archive.sizes):
            raise corrupt(path, "members", "names that differ by more than case", sorted(archive.sizes))
        archive.verify()
        _Pickle(path, pickles[0].removesuffix(PICKLE), archive.sizes).check(archive.bytes_of(pickles[0]))
    try:
        # Not mapped: the file may be replaced while its tensors are still in use.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=False)
    except (MemoryError, OSError):
        raise
    except Exception as fault:  # what PyTorch raises for a damaged file depends on where the damage is
        raise corrupt(path, PICKLE, "what torch.load(weights_only=True) takes", str(fault)) from fault


class _Global(str):
    """A name that a pickle imports."""


class _Made(str):
    """What a call makes, by the name that is called."""


class _Storage(int):
    """A storage, by the number of its elements."""


class _Dictionary:
    """A dictionary, by its keys."""

    def __init__(self) -> None:
        self.keys: list[Any] = []


class _Pickle:
    """A pickle's machine without its effects: it follows what lies on the stack and makes no object. Whatever the check
    need not know is None there.
    """

    def __init__(self, path: Path, root: str, sizes: Mapping[str, int]) -> None:
        self.path, self.root, self.sizes = path, root, sizes
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def check(self, data: bytes) -> None:
        """CorruptFile for the first thing that a saved state does not hold."""
        try:
            with warnings.catch_warnings():
                # About escapes in a damaged name.
                warnings.simplefilter("ignore", DeprecationWarning)
                for opcode, argument, _ in pickletools.genops(data):
                    step = _STEPS.get(opcode.name)
                    if step is None:
                        raise self.fault("containers, plain values and dense tensors", opcode.name)
                    step(self, argument)
        except CorruptFile:
            raise
        except (ValueError, LookupError, TypeError, OverflowError) as fault:
            raise self.fault("a whole pickle", str(fault)) from None

    def fault(self, expected: str, got: str) -> CorruptFile:
        return corrupt(self.path, PICKLE, expected, got)

    def require_protocol(self, version: int) -> None:
        if version != _PROTOCOL:
            raise self.fault(f"pickle protocol {_PROTOCOL}, that of torch.save", str(version))

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self) -> None:
        self.marked.append(self.stack)
        self.stack = []

    def since_mark(self) -> tuple[Any, ...]:
        items, self.stack = tuple(self.stack), self.marked.pop()
        return items

    def taken(self, count: int) -> tuple[Any, ...]:
        if len(self.stack) < count:
            raise ValueError("more taken from the stack than there is")
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        return items

    def import_name(self, name: str) -> None:
        if name not in _NAMED:
            raise self.fault("the names of dense tensors and dictionaries", name)
        self.push(_Global(name))

    def find_storage(self) -> None:
        (identity,) = self.taken(1)
        kind, name, key, _, count = identity
        size = STORAGES.get(name.removeprefix("torch ")) if isinstance(name, _Global) else None
        if kind != "storage" or size is None or not isinstance(key, str) or type(count) is not int:
            raise self.fault("storages by type, key and length", "another")
        member = f"{self.root}data/{key}"
        if self.sizes.get(member) != count * size:
            raise corrupt(self.path, f"member {member}", f"{count * size} bytes", self.sizes.get(member, "none"))
        self.push(_Storage(count))

    def call(self) -> None:
        function, arguments = self.taken(2)
        if not isinstance(function, _Global) or function not in _CALLED:
            raise self.fault("calls that make dense tensors and dictionaries", "another")
        if function == _TENSOR:
            storage, offset, shape, strides = arguments[:4]
            plain = all(type(number) is int and number >= 0 for number in (offset, *shape, *strides))
            if not plain or not isinstance(storage, _Storage) or element_count(shape) is None:
                raise self.fault("tensors of sizes that an array can have", "another")
            if math.prod(shape) > storage:
                raise self.fault(f"tensors within their storages, here {int(storage)} elements", str(list(shape)))
        self.push(_Made(function))

    def set_items(self, items: tuple[Any, ...]) -> None:
        if isinstance(self.stack[-1], _Dictionary):
            self.stack[-1].keys += items[::2]

    def build(self) -> None:
        # Another attribute could take the place of a method.
        (attributes,) = self.taken(1)
        made, plain = self.stack[-1], isinstance(attributes, _Dictionary)
        if not isinstance(made, _Made) or made != _DICTIONARY or not plain or attributes.keys != ["_metadata"]:
            raise self.fault("the metadata of a dictionary", "other attributes")


#: What the pickles of torch.save consist of.
_STEPS: dict[str, Callable[[_Pickle, Any], object]] = {
    "PROTO": lambda machine, version: machine.require_protocol(version),
    "STOP": lambda machine, _: None,
    **dict.fromkeys(
        ("BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"), lambda machine, value: machine.push(value)
    ),
    **dict.fromkeys(("NONE", "NEWTRUE", "NEWFALSE", "BINFLOAT", "EMPTY_LIST"), lambda machine, _: machine.push(None)),
    "EMPTY_DICT": lambda machine, _: machine.push(_Dictionary()),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), lambda machine, place: machine.memo.update({place: machine.stack[-1]})),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda machine, place: machine.push(machine.memo[place])),
    "MARK": lambda machine, _: machine.mark(),
    "SETITEM": lambda machine, _: machine.set_items(machine.taken(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    "APPENDS": lambda machine, _: machine.since_mark(),
    "APPEND": lambda machine, _: machine.taken(1),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "TUPLE": lambda machine, _: machine.push(machine.since_mark()),
    "TUPLE1": lambda machine, _: machine.push(machine.taken(1)),
    "TUPLE2": lambda machine, _: machine.push(machine.taken(2)),
    "TUPLE3": lambda machine, _: machine.push(machine.taken(3)),
    "GLOBAL": lambda machine, name: machine.import_name(name),
    "BINPERSID": lambda machine, _: machine.find_storage(),
    "REDUCE": lambda machine, _: machine.call(),
    "BUILD": lambda machine, _: machine.build(),
}
