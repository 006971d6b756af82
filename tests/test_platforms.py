"""The same updates on every OpenCL platform of this machine end with the same bytes, compared pairwise."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from types import ModuleType

import pytest
import torch

from memtrain_cl import ops, reference
from memtrain_cl.cases import make_rule
from memtrain_cl.device import devices, use_device
from memtrain_cl.formats import code_count
from memtrain_cl.verify import gradient

STEPS = 4
#: C, packed, mode, rows, columns
SEQUENCES = [(11, True, mode, 11, 68) for mode in ("exact", "lagged_clip", "no_rms", "clipped_scale_clip")]
SEQUENCES += [(8, False, "exact", 9, 67), (11, True, "exact", 3, 1028)]


def digests(index: int | None) -> list[str]:
    """One digest a sequence, of every byte after every step, from device `index` or (None) from the reference."""
    if index is None:
        return _run(reference)
    with use_device(index):
        return _run(ops)


def _run(room: ModuleType) -> list[str]:
    results = []
    for number, (C, packed, mode, rows, columns) in enumerate(SEQUENCES):
        chance = torch.Generator().manual_seed(number)
        codes = torch.randint(0, code_count(C), (rows, columns), generator=chance, dtype=torch.uint8)
        state = reference.pack_codes(codes) if packed else codes
        scale, v = torch.rand(rows, 1, generator=chance), torch.rand(rows, 1, generator=chance)
        totals = torch.zeros(3, dtype=torch.int64)
        rule = make_rule({"C": C, "packed": packed, "mode": mode})
        digest = hashlib.sha256()
        for step in range(STEPS):
            grad = gradient(rows, columns, chance)
            room.counter_update_(state, scale, v, grad, totals, rule, seed=step)
            for tensor in (state, scale, v, totals):
                digest.update(tensor.numpy().tobytes())
        results.append(digest.hexdigest())
    return results


@pytest.mark.platforms
def test_platforms_agree_pairwise() -> None:
    spawn = multiprocessing.get_context("spawn")
    labels = [info.label for info in devices()]
    found = {"the reference": digests(None)}
    for index, label in enumerate(labels):
        # A process for each: a driver that ends its process is then named here.
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            found[label] = pool.submit(digests, index).result()
    assert len(found) >= 2, "expected an OpenCL device to compare with the reference"
    differing = [
        f"{left} and {right}: {SEQUENCES[number]}"
        for left, right in itertools.combinations(found, 2)
        for number in range(len(SEQUENCES))
        if found[left][number] != found[right][number]
    ]
    assert not differing
    assert len(set(found["the reference"])) == len(SEQUENCES), "each sequence is one of its own"
