"""Writing through a temporary neighbour: permissions, links, refusals, and a process killed while it saves."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from memtrain_cl.export.atomic import atomic_folder, atomic_path
from memtrain_cl.export.gguf import write_gguf
from memtrain_cl.export.mncc import write_mncc
from memtrain_cl.export.motifcl import write_mt
from memtrain_cl.export.npz import write_npz
from memtrain_cl.export.packed import write_engine
from memtrain_cl.lm.checkpoint import save_checkpoint
from memtrain_cl.lm.config import TrainConfig
from tests.export_cases import golden_layer
from tests.gguf_cases import model_file

#: Writers of one file.
KINDS: dict[str, Callable[[Path], object]] = {
    "engine": lambda path: write_engine(path, {"l": golden_layer()}, {}, {}),
    "MNCC": lambda path: write_mncc(path, {"l": golden_layer()}),
    "npz": lambda path: write_npz(path, {"l": golden_layer()}),
    "MotifCL": lambda path: write_mt(path, golden_layer().scale),
    "GGUF": lambda path: write_gguf(path, model_file(layers=1, dim=8, heads=2, hidden=8), "f16"),
}

posix = pytest.mark.skipif(os.name == "nt", reason="POSIX permissions, links and signals")


def write_checkpoint(path: Path) -> None:
    """A training checkpoint that is longer than what files keep back before they write."""
    state = {"step": 0, "corpus": "", "model": {"w": torch.zeros(50_000)}, "optimizer": {}, "torch_rng": torch.zeros(1)}
    save_checkpoint(path, TrainConfig(), state)


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


@posix
def test_replaced_files_of_a_folder_keep_permissions_and_links(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.write_bytes(b"old")
    elsewhere.chmod(0o640)
    (folder / "a").symlink_to(elsewhere)
    write_folder(folder, {"a": b"new"}, force=True)
    assert (folder / "a").is_symlink()
    assert elsewhere.read_bytes() == b"new"
    assert elsewhere.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    KINDS[kind](tmp_path / "m")
    before = (tmp_path / "m").read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as caught:
        KINDS[kind](tmp_path / "m")
    assert caught.value.filename == str(tmp_path / "m")
    assert (tmp_path / "m").read_bytes() == before
    assert names(tmp_path) == ["m"]


@posix
@pytest.mark.parametrize("kind", [*KINDS, "checkpoint"])
def test_a_disk_that_is_full_halfway_is_said_and_leaves_nothing(tmp_path: Path, kind: str) -> None:
    import resource

    write = KINDS.get(kind, write_checkpoint)
    write(tmp_path / "m")
    before = (tmp_path / "m").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large|requested and") as caught:
            write(tmp_path / "m")
        assert str(tmp_path / "m") in str(caught.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "m").read_bytes() == before
    assert names(tmp_path) == ["m"]


#: Saves files in a loop in a forked child, kills it at a random moment, and looks at what is left: as often as told.
KILLS = """
import os, random, signal, sys, time
from pathlib import Path
import numpy as np, torch
from memtrain_cl.export.optimizer import read_optimizer, save_optimizer
from memtrain_cl.export.packed import read_engine, write_engine
from memtrain_cl.lm.checkpoint import load_checkpoint, save_checkpoint
from memtrain_cl.lm.config import TrainConfig

folder, kills = Path(sys.argv[1]), int(sys.argv[2])
chance, config = random.Random(0), TrainConfig()

class Optimizer:  # one of torch's would import its compiler
    def __init__(self, turn):
        self.turn = turn

    def state_dict(self):
        return {"state": {0: {"step": torch.full((20_000,), self.turn)}}, "param_groups": []}

def checkpoint(path, turn):
    state = {"step": turn, "corpus": "", "model": {"w": torch.full((20_000,), turn)}, "optimizer": {}}
    save_checkpoint(path, config, {**state, "torch_rng": torch.zeros(1)})

def turn_of_checkpoint(path):
    _, state = load_checkpoint(path)
    assert (state["model"]["w"] == state["step"]).all()
    return state["step"]

KINDS = {
    "engine": (
        lambda path, turn: write_engine(path, {}, {"t": np.full(20_000, turn)}, {"turn": turn}),
        lambda path: read_engine(path).model["turn"],
    ),
    "checkpoint": (checkpoint, turn_of_checkpoint),
    "optimizer": (
        lambda path, turn: save_optimizer(Optimizer(turn), path),
        lambda path: int(read_optimizer(path)["state"][0]["step"].unique()),
    ),
}

def save(turn):
    for name, (write, _) in KINDS.items():
        write(folder / name, turn)

turn = torn = 0
save(turn)
started = time.perf_counter()
save(turn)
span = time.perf_counter() - started
for kill in range(kills):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        while True:
            turn += 1
            save(turn)
            os.write(write, b".")
    os.close(write)
    turn += len(os.read(read, 1)) if kill % 2 else 0  # every other one comes when a save is done
    time.sleep(chance.uniform(0, 2 * span))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with open(read, "rb") as pipe:
        turn += len(pipe.read())
    found = [read_turn(folder / name) for name, (_, read_turn) in KINDS.items()]
    assert found == sorted(found, reverse=True) and found[0] <= turn + 1 and found[-1] >= turn, (found, turn)
    for path in folder.glob(".*tmp*"):
        path.unlink()
        torn += 1
assert sorted(path.name for path in folder.iterdir()) == sorted(KINDS)
print(turn, torn)
"""


@posix
def test_fifty_kills_while_saving_leave_whole_files() -> None:
    # In memory where there is such a folder: a killed process, unlike a power cut, asks nothing of the disk.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        command = [sys.executable, "-W", "ignore", "-c", KILLS, folder, "50"]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    turns, torn = map(int, done.stdout.split())
    assert turns > 0  # saves were finished between the kills
    assert torn > 0  # and others were not
