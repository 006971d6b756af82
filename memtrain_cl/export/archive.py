"""Zip files that hold their members uncompressed, as NumPy and PyTorch write them, read as what may be damaged.

Every member's size is compared with the file's length before anything of that size is read, and its checksum when it
has been read.
"""

from __future__ import annotations

import errno
import os
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from typing import cast

from memtrain_cl.errors import CorruptFile
from memtrain_cl.export.hostile import corrupt, open_regular

#: The first bytes of an archive, and of one without members.
_MAGICS = (b"PK\x03\x04", b"PK\x05\x06")
_LOCAL_HEADER = 30
_PIECE = 2**20


def is_archive(head: bytes) -> bool:
    """Whether a file that begins so is a zip archive."""
    return head.startswith(_MAGICS)


class StoredArchive:
    """An opened zip file whose directory has been checked: ``sizes`` of its members by name, in the file's order.

    CorruptFile for a file that is no zip archive, and for members that are compressed, encrypted, named twice, or
    together larger than the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        self._file, self.size = open_regular(path)
        try:
            with self._faults("zip directory"):
                self._archive = zipfile.ZipFile(self._file)
            self._members = self._checked()
        except BaseException:
            self._file.close()
            raise
        self.sizes = {name: member.file_size for name, member in self._members.items()}

    def __enter__(self) -> StoredArchive:
        return self

    def __exit__(self, *fault: object) -> None:
        self._archive.close()
        self._file.close()

    @contextmanager
    def member(self, name: str) -> Iterator[BufferedIOBase]:
        """A member to read from. CorruptFile when what is read to its end has another checksum."""
        with self._faults(f"member {name}"), self._archive.open(self._members[name]) as file:
            yield cast(BufferedIOBase, file)

    def bytes_of(self, name: str) -> bytes:
        """A member's bytes."""
        with self.member(name) as file:
            return file.read()

    def verify(self) -> None:
        """Compare every member's checksum."""
        for name in self._members:
            with self.member(name) as file:
                while file.read(_PIECE):
                    pass

    @contextmanager
    def _faults(self, field: str) -> Iterator[None]:
        try:
            yield
        except CorruptFile:
            raise
        except (zipfile.BadZipFile, RuntimeError, EOFError, OverflowError, ValueError, struct.error) as fault:
            raise corrupt(self.path, field, "a whole zip archive", str(fault)) from None
        except OSError as fault:
            if fault.errno not in (None, errno.EINVAL):  # an offset before the file's begin, not the disk
                raise
            raise corrupt(self.path, field, "a whole zip archive", str(fault)) from None

    def _checked(self) -> dict[str, zipfile.ZipInfo]:
        members: dict[str, zipfile.ZipInfo] = {}
        total = 0
        for member in self._archive.infolist():
            where = f"member {member.filename}"
            if member.filename in members:
                raise corrupt(self.path, where, "distinct names", "this one twice")
            if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
                raise corrupt(self.path, where, "contents as they are, uncompressed", f"type {member.compress_type}")
            if member.file_size != member.compress_size:
                raise corrupt(self.path, f"{where}: size", str(member.compress_size), member.file_size)
            total += member.file_size
            # What lies twice in the file could make a small one large.
            if total > self.size or not 0 <= member.header_offset <= self.size - _LOCAL_HEADER - member.file_size:
                raise corrupt(self.path, f"{where}: size", f"members that fill at most {self.size} bytes", total)
            members[member.filename] = member
        return members
