"""The corpus: bytes of text files, split by file into training and validation, and the batches drawn from it."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Tokens = NDArray[np.int64]

HELD_OUT = 10  # one file in ten, or one byte in ten where files are few
_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages"})
_SNIFFED_BYTES = 8192  # a zero byte among the first ones marks a binary file
# The library's own tests are half of its bytes and mostly tables; leaving them out keeps start-up short.
_SKIPPED_LIBRARY_FOLDERS = _SKIPPED_FOLDERS | {"test", "tests", "idle_test"}


@dataclass(frozen=True)
class Corpus:
    """Training and validation text, uint8 [n] each. `name` says where it comes from, `files` how many files were
    read.
    """

    name: str
    files: int
    train: Bytes
    valid: Bytes

    def fingerprint(self) -> str:
        """SHA-256 over both parts: a resumed run must see the same text."""
        digest = hashlib.sha256(f"{self.train.size},{self.valid.size};".encode())
        digest.update(self.train.tobytes())
        digest.update(self.valid.tobytes())
        return digest.hexdigest()


def load_corpus(paths: Sequence[str | Path], seq: int) -> Corpus:
    """Reads text files and folders (recursively; hidden, empty and binary files in folders are left out) as bytes.

    No path: every *.py file of the standard library that runs, without its tests and without site-packages. Files come
    in the order of the arguments, those of a folder sorted by path, and a file reached twice counts once. From ten
    files on, every tenth file is validation; with fewer, the last tenth of each file is. Raises ValueError when a path
    is missing, a named file or the whole is empty, or the text is shorter than seq + 1 bytes to train on; OSError when
    a file cannot be read.
    """
    texts: list[Bytes] = []
    if paths:
        name = ", ".join(str(path) for path in paths)
        for file, named in _text_files(paths):
            text = np.fromfile(file, dtype=np.uint8)
            if named and text.size == 0:
                raise ValueError(f"expected text in {file}, got an empty file")
            if named or (text.size and not (text[:_SNIFFED_BYTES] == 0).any()):
                texts.append(text)
    else:
        library = Path(sysconfig.get_path("stdlib"))
        name = f"the Python standard library in {library}"
        texts = [np.fromfile(file, dtype=np.uint8) for file in _walk(library, _SKIPPED_LIBRARY_FOLDERS, ".py")]
    if not texts:
        raise ValueError(f"expected text in {name}, got no file that holds any")
    train, valid = _split(texts)
    if train.size < seq + 1 or valid.size < 2:
        raise ValueError(
            f"expected at least {seq + 1} bytes to train on and 2 to validate with, got {train.size} and {valid.size} "
            f"from {name}: give more text or a shorter sequence"
        )
    return Corpus(name, len(texts), train, valid)


def _text_files(paths: Sequence[str | Path]) -> Iterator[tuple[Path, bool]]:
    """Each file once, with whether it was named itself (True) or found in a folder."""
    seen: set[Path] = set()
    for path in map(Path, paths):
        if path.is_dir():
            found = _walk(path, _SKIPPED_FOLDERS, "")
        elif path.exists():
            found = [path]
        else:
            raise ValueError(f"expected a text file or a folder, got {path}, which does not exist")
        for file in found:
            real = file.resolve()
            if real not in seen:
                seen.add(real)
                yield file, file is path


def _walk(folder: Path, skipped: frozenset[str], suffix: str) -> list[Path]:
    """The regular, unhidden files under `folder`, in one order on every machine: by their path below it."""
    found: list[Path] = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        files = (Path(root, name) for name in names if name.endswith(suffix) and not name.startswith("."))
        found += [file for file in files if file.is_file()]
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())


def _split(texts: list[Bytes]) -> tuple[Bytes, Bytes]:
    if len(texts) >= HELD_OUT:
        train = [text for index, text in enumerate(texts) if index % HELD_OUT != HELD_OUT - 1]
        valid = texts[HELD_OUT - 1 :: HELD_OUT]
    else:
        cuts = [text.size - text.size // HELD_OUT for text in texts]
        train = [text[:cut] for text, cut in zip(texts, cuts, strict=True)]
        valid = [text[cut:] for text, cut in zip(texts, cuts, strict=True)]
    return np.concatenate(train), np.concatenate(valid)


def training_batch(text: Bytes, seed: int, step: int, batch: int, seq: int) -> Tokens:
    """int64 [batch, seq + 1]: windows of `text` at places drawn from (seed, step) alone.

    So the data position is the step's number, and a resumed run sees the batches of a run that went through.
    """
    starts = np.random.default_rng((seed, step)).integers(0, text.size - seq, size=batch)
    windows: Tokens = text[starts[:, None] + np.arange(seq + 1)].astype(np.int64)
    return windows


def validation_windows(text: Bytes, count: int, seq: int) -> Tokens:
    """int64 [n, length + 1]: at most `count` windows spread evenly over `text`, not overlapping; the same ones at every
    call.

    length is seq, or less where the text is shorter.
    """
    length = min(seq, text.size - 1)
    n = min(count, text.size // (length + 1))
    starts = np.arange(n) * (text.size // n)
    windows: Tokens = text[starts[:, None] + np.arange(length + 1)].astype(np.int64)
    return windows
