"""Damaged files of every format: each truncation is refused, and corruptions are refused or load as they declare."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain_cl.errors import CorruptFile
from tests.damaged_files import KINDS, assert_sentence, corrupted, judge, whole


@pytest.mark.parametrize("kind", KINDS)
def test_every_truncation_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m"
    path.write_bytes(whole(kind))
    for length in range(len(whole(kind)) - 1, -1, -1):
        os.truncate(path, length)
        with pytest.raises(CorruptFile) as caught:
            KINDS[kind].read(path)
        assert_sentence(caught.value, path)


@pytest.mark.parametrize("kind", KINDS)
def test_corruptions_are_refused_or_load_as_they_declare(kind: str) -> None:
    seen = []

    @settings(max_examples=40, deadline=None)
    @given(st.data())
    def try_one(data: st.DataObject) -> None:
        seen.append(judge(kind, corrupted(whole(kind), data.draw)))

    try_one()
    assert not all(seen)
