"""The corpus: which files, how they are split, and which windows are drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from memtrain_cl.lm.data import load_corpus, training_batch, validation_windows


def write_files(folder: Path, count: int) -> list[Path]:
    folder.mkdir(exist_ok=True)
    files = [folder / f"{index:02d}.txt" for index in range(count)]
    for index, file in enumerate(files):
        file.write_bytes(bytes([65 + index]) * 50)
    return files


def test_every_tenth_file_is_validation(tmp_path: Path) -> None:
    write_files(tmp_path / "texts", 20)
    corpus = load_corpus([tmp_path / "texts"], seq=16)
    assert corpus.files == 20
    assert corpus.valid.tobytes() == b"J" * 50 + b"T" * 50
    assert corpus.train.size == 18 * 50
    assert not set(corpus.train.tolist()) & set(corpus.valid.tolist())


def test_few_files_are_split_by_position(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_bytes(bytes(range(100)))
    corpus = load_corpus([file], seq=16)
    assert corpus.train.tobytes() == bytes(range(90))
    assert corpus.valid.tobytes() == bytes(range(90, 100))


def test_folders_leave_out_hidden_empty_and_binary_files_and_count_no_file_twice(tmp_path: Path) -> None:
    files = write_files(tmp_path / "texts", 2)
    (tmp_path / "texts" / ".hidden").write_text("x" * 99)
    (tmp_path / "texts" / "empty.txt").touch()
    (tmp_path / "texts" / "binary.bin").write_bytes(b"a\0b" * 20)
    (tmp_path / "texts" / "sub").mkdir()
    (tmp_path / "texts" / "sub" / "more.txt").write_bytes(b"C" * 50)
    corpus = load_corpus([files[1], tmp_path / "texts"], seq=16)
    assert corpus.train.tobytes() == b"B" * 45 + b"A" * 45 + b"C" * 45


def test_named_binary_file_counts_as_text(tmp_path: Path) -> None:
    (tmp_path / "binary.bin").write_bytes(b"a\0b" * 20)
    assert load_corpus([tmp_path / "binary.bin"], seq=16).files == 1


def test_standard_library_is_the_default_and_the_same_each_time() -> None:
    first, second = load_corpus([], seq=256), load_corpus([], seq=256)
    assert first.fingerprint() == second.fingerprint()
    assert first.train.size > 4_000_000
    assert 0.03 < first.valid.size / (first.train.size + first.valid.size) < 0.2
    assert b"import sys" in first.train.tobytes()


def test_fingerprint_tells_where_training_ends(tmp_path: Path) -> None:
    for name, size in (("a", 100), ("b", 109)):
        (tmp_path / name).write_bytes(b"x" * size)
    assert load_corpus([tmp_path / "a"], 16).fingerprint() != load_corpus([tmp_path / "b"], 16).fingerprint()


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("missing.txt", None, "does not exist"),
        ("empty.txt", b"", "empty file"),
        ("short.txt", b"x" * 15, "at least 17 bytes to train on"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, name: str, content: bytes | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=sentence) as error:
        load_corpus([tmp_path / name], seq=16)
    assert name in str(error.value)


def test_folder_without_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no file that holds any"):
        load_corpus([tmp_path], seq=16)


def test_batches_follow_from_seed_and_step_alone() -> None:
    text = np.arange(200, dtype=np.uint8)
    batch = training_batch(text, seed=3, step=7, batch=5, seq=16)
    assert batch.shape == (5, 17)
    assert batch.dtype == np.int64
    assert (np.diff(batch, axis=1) == 1).all()  # each row is one piece of the text
    assert np.array_equal(batch, training_batch(text, seed=3, step=7, batch=5, seq=16))
    assert not np.array_equal(batch, training_batch(text, seed=3, step=8, batch=5, seq=16))
    assert not np.array_equal(batch, training_batch(text, seed=4, step=7, batch=5, seq=16))


def test_batches_reach_both_ends_of_the_text() -> None:
    text = np.arange(20, dtype=np.uint8)
    seen = np.concatenate([training_batch(text, 0, step, 8, 16) for step in range(20)])
    assert seen.min() == 0
    assert seen.max() == 19


@pytest.mark.parametrize(
    ("size", "count", "seq", "shape"), [(100, 4, 9, (4, 10)), (25, 4, 9, (2, 10)), (5, 4, 9, (1, 5))]
)
def test_validation_windows_are_spread_and_fit(size: int, count: int, seq: int, shape: tuple[int, int]) -> None:
    windows = validation_windows(np.arange(size, dtype=np.uint8), count, seq)
    assert windows.shape == shape
    assert len(set(windows.flatten().tolist())) == windows.size  # no byte is judged twice
