"""Writing a file or a folder so that a kill at any moment leaves the old one or the new one, whole.

A temporary neighbour is written, flushed to the disk and renamed into place: a rename within one file system is atomic.
A process that is killed in between leaves the neighbour behind, under a name that begins with ``.memtrain-`` and ends
with ``.tmp``, or with ``.tmp`` where the safetensors library was writing; it can be deleted.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def _temporary_name() -> str:
    return f".memtrain-{secrets.token_hex(6)}.tmp"


def _sync_file(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    if os.name == "nt":  # Windows has no handle of a folder that can be flushed.
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


#: Errors of writing that come without a file's name.
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path beside ``path``: when the block ends well its file becomes ``path``, else nothing remains.

    The file is flushed before the rename and the folder after it. A symbolic link stays and its target is replaced;
    permissions are those of the replaced file, or what the umask gives a new one. OSError when the folder is missing or
    ``path`` is no regular file; one of the disk's names ``path``.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        code = errno.EISDIR if target.is_dir() else errno.EINVAL
        raise OSError(code, "expected a regular file to write to", str(target))
    temporary = target.with_name(_temporary_name())
    # Created here, not by the writer, to learn the mode that the umask grants: some writers choose their own.
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        mode = stat.S_IMODE((target if target.exists() else temporary).stat().st_mode)
        yield temporary
        _sync_file(temporary)
        os.chmod(temporary, mode)
        os.replace(temporary, target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        _name_target(error, temporary, target)
        raise
    _sync_folder(target.parent)


@contextmanager
def atomic_folder(path: str | os.PathLike[str], *, force: bool = False) -> Iterator[Path]:
    """A temporary folder for plain files: when the block ends well they stand in ``path``, else none of them remains.

    A new folder appears by one rename, once its parents are there. Into a folder that exists finished files are moved
    one by one, because it may be a mount point or somebody's working folder; files of other names stay, and permissions
    and symbolic links of those that are replaced. FileExistsError when ``path`` holds anything, unless ``force``;
    NotADirectoryError when it is a file; OSError when one of the names is a folder there.
    """
    target = Path(os.path.realpath(path))
    present = target.exists()
    if present and any(target.iterdir()) and not force:
        raise FileExistsError(errno.EEXIST, "expected an empty or a new folder", str(target))
    if not present:
        target.parent.mkdir(parents=True, exist_ok=True)
    temporary = (target if present else target.parent) / _temporary_name()
    temporary.mkdir()
    try:
        yield temporary
        names = sorted(entry.name for entry in temporary.iterdir())
        for name in names:
            _sync_file(temporary / name)
        _sync_folder(temporary)
        if present:
            _move_into(temporary, target, names)
        else:
            os.rename(temporary, target)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        _name_target(error, temporary, target)
        raise
    _sync_folder(target if present else target.parent)


def _name_target(error: BaseException, temporary: Path, target: Path) -> None:
    """Let a disk's error name what was to be written: a full disk names no file, and a temporary one says nothing."""
    if type(error) is OSError and error.filename is None and error.errno in (None, *_OF_DISKS):
        if error.errno is None:
            error.args = (f"{target}: {error}",)
        else:
            error.filename = str(target)
    elif isinstance(error, OSError) and isinstance(error.filename, str) and error.filename.startswith(str(temporary)):
        error.filename = str(target) + error.filename[len(str(temporary)) :]


def _move_into(temporary: Path, target: Path, names: list[str]) -> None:
    for name in names:  # Looked at before the first move, so that a refusal leaves everything as it was.
        if (target / name).is_dir():
            raise IsADirectoryError(errno.EISDIR, "expected a file to replace", str(target / name))
    for name in names:
        replaced = Path(os.path.realpath(target / name))
        if replaced.exists():
            os.chmod(temporary / name, stat.S_IMODE(replaced.stat().st_mode))
        os.replace(temporary / name, replaced)
    temporary.rmdir()
