"""Writing through a temporary neighbour: permissions, links, refusals, and a process killed while it saves."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from memtrain_cl.export.atomic import atomic_folder, atomic_path
from memtrain_cl.export.packed import read_engine

posix = pytest.mark.skipif(os.name == "nt", reason="POSIX permissions, links and signals")


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def write_half(target: Path) -> None:
    with atomic_path(target) as temporary:
        temporary.write_bytes(b"half")
        raise KeyboardInterrupt


def write_folder(target: Path, files: dict[str, bytes], *, force: bool = False, fail: bool = False) -> None:
    with atomic_folder(target, force=force) as folder:
        for name, content in files.items():
            (folder / name).write_bytes(content)
        if fail:
            raise ZeroDivisionError


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "a"
    with atomic_path(target) as temporary:
        temporary.write_bytes(b"new")
        assert temporary.parent == tmp_path
        assert not target.exists()
    assert target.read_bytes() == b"new"
    with pytest.raises(KeyboardInterrupt):
        write_half(target)
    assert target.read_bytes() == b"new"
    assert names(tmp_path) == ["a"]


@posix
def test_permissions_and_links_survive(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        with atomic_path(tmp_path / "new") as temporary:
            temporary.write_bytes(b"")
            temporary.chmod(0o600)  # as the safetensors library does
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
    old = tmp_path / "old"
    old.write_bytes(b"1")
    old.chmod(0o604)
    (tmp_path / "link").symlink_to(old)
    with atomic_path(tmp_path / "link") as temporary:
        temporary.write_bytes(b"2")
    assert (tmp_path / "link").is_symlink()
    assert old.read_bytes() == b"2"
    assert stat.S_IMODE(old.stat().st_mode) == 0o604


def test_refuses_what_is_no_regular_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for target in (tmp_path / "folder", Path(os.devnull), tmp_path / "missing" / "file"):
        with pytest.raises(OSError, match=r"regular file|No such file"), atomic_path(target):
            pytest.fail("the block must not run")
    assert Path(os.devnull).exists()
    assert names(tmp_path) == ["folder"]


def test_a_new_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    with pytest.raises(ZeroDivisionError):
        write_folder(target, {"a": b"1"}, fail=True)
    assert names(tmp_path / "deep") == []
    write_folder(target, {"a": b"1"})
    assert names(target) == ["a"]


def test_a_folder_that_holds_files_needs_force(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"keep")
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(FileExistsError, match="empty"):
        write_folder(tmp_path, {"a": b"new"})
    assert (tmp_path / "a").read_bytes() == b"old"
    write_folder(tmp_path, {"a": b"new"}, force=True)
    assert names(tmp_path) == ["a", "mine"]
    assert (tmp_path / "a").read_bytes() == b"new"
    (tmp_path / "b").mkdir()
    with pytest.raises(IsADirectoryError):
        write_folder(tmp_path, {"a": b"newer", "b": b""}, force=True)
    assert names(tmp_path) == ["a", "b", "mine"]
    assert (tmp_path / "a").read_bytes() == b"new"


SAVE_FOREVER = """
import sys
import numpy as np
from memtrain_cl.export.packed import write_engine
for turn in range(10**9):
    write_engine(sys.argv[1], {}, {f"t{i}": np.full(50_000, turn, np.float32) for i in range(4)}, {"turn": turn})
    print(turn, flush=True)
"""


@posix
def test_a_kill_during_save_leaves_a_whole_file(tmp_path: Path) -> None:
    chance = random.Random(0)
    target = tmp_path / "model.safetensors"
    for _ in range(6):
        with subprocess.Popen([sys.executable, "-c", SAVE_FOREVER, target], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            done = int(child.stdout.readline())
            time.sleep(chance.uniform(0, 0.03))
            child.send_signal(signal.SIGKILL)
            done = max([done, *(int(line) for line in child.stdout.read().split())])
        engine = read_engine(target)  # whole: every sum is checked
        turn = engine.model["turn"]
        assert turn in (done, done + 1)
        for tensor in engine.tensors.values():
            assert isinstance(tensor, np.ndarray)
            assert (tensor == turn).all()
