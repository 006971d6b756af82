"""How kernels/counter_matvec.cl decodes, and what its launcher refuses."""

from __future__ import annotations

import re

import numpy as np
import pytest

from memtrain_cl.array import from_numpy, wrap_host
from memtrain_cl.device import Device
from memtrain_cl.formats import code_count
from memtrain_cl.launchers.counter_matvec import Norm, counter_matvec
from memtrain_cl.program import render
from memtrain_cl.tuning_decode import counter_matvec_shape

MAGIC = 3 * 2**22
_DECODER = re.compile(r"ternary_(\d+)\(const uint word\) {[^}]*word & 0x(\w+)u\);\s*return ([^;]*);")


@pytest.mark.parametrize("fused", [0, 1])
@pytest.mark.parametrize("C", range(1, 12))
def test_every_code_is_decoded_at_every_place_of_a_word(C: int, fused: int) -> None:
    constants = {"GPU": 1, "C": C, "NORM": 0, "ADD": 0, "GATED": 0, "LANES": 64, "ROWS": 4, "FUSED": fused}
    codes = np.arange(code_count(C), dtype=np.uint32)
    t = codes.astype(np.int64) // (2 * C - 1) - 1
    seen = set()
    for words in (0, 1):
        for place, mask, formula in _DECODER.findall(render("counter_matvec", {**constants, "WORDS": words})):
            seen.add(int(place))
            assert int(mask, 16) == 63 << int(place) | 0x3F800000
            numbers = (codes << np.uint32(place) | np.uint32(0x3F800000)).view(np.float32)
            values = [np.float32(text[:-1]) for text in re.findall(r"[\d.]+f", formula)]
            if fused:
                factor, offset, magic = values
                # Where float32 holds whole numbers alone: fma rounds to one, and none of these is a tie.
                sums = numbers.astype(np.float64) * float(factor) + float(offset)
                assert 2**23 < sums.min() < sums.max() < 2**24
                assert np.abs(sums - magic - t).max() < 0.499
            else:
                centre, factor, magic, again = values
                assert magic == again
                assert np.array_equal(((numbers - centre) * factor + magic) - magic, t)
            assert magic == MAGIC
    assert seen == {0, 2, 4, 6, 8, 10, 12}


def test_sizes_and_types_that_do_not_fit_are_refused(device: Device) -> None:
    state = from_numpy(device, np.zeros((4, 6), np.uint8))
    scale, x, out = (from_numpy(device, np.zeros(size, np.float32)) for size in (4, 8, 4))
    for change, sentence in (
        ({"state": x}, r"expected a state \[4, 8/4\*3\]"),
        ({"x": out}, r"expected a state \[4, 4/4\*3\]"),
        ({"scale": x}, "expected a state"),
        ({"gated": True}, r"expected a state \[8, 8/4\*3\]"),
        ({"add": x}, "expected 4 numbers to add"),
        ({"norm": Norm(out, 1e-5)}, "expected a norm of 8 numbers"),
        ({"C": 12}, r"1\.\.11"),
        ({"scale": from_numpy(device, np.zeros(4, np.int32))}, "expected codes of uint8 and float32"),
    ):
        with pytest.raises(ValueError, match=sentence):
            counter_matvec(**{"state": state, "scale": scale, "x": x, "out": out, "C": 11, **change})  # type: ignore[arg-type]


def test_codes_that_begin_off_words_are_read_by_bytes(shaped: Device) -> None:
    assert [
        counter_matvec_shape(shaped.info, 8, 64, False, words=words).constants["WORDS"] for words in (False, True)
    ] == [
        0,
        counter_matvec_shape(shaped.info, 8, 64, False).constants["GPU"],
    ]
    if not shaped.info.unified_memory:
        pytest.skip("arrays have memory of their own, which begins on words")
    chance = np.random.default_rng(3)
    memory = chance.integers(0, 256, 8 * 48 + 1, dtype=np.uint8)
    numbers = (chance.random(size, dtype=np.float32) for size in (8, 64))
    scale, x, first, second = (from_numpy(shaped, each) for each in (*numbers, *np.zeros((2, 8), np.float32)))
    state = wrap_host(shaped, memory[1:])
    counter_matvec(state, scale, x, first, C=11)
    counter_matvec(from_numpy(shaped, state.numpy()), scale, x, second, C=11)
    assert state.alignment < 4
    assert np.allclose(first.numpy(), second.numpy(), rtol=1e-6, atol=1e-5)


def test_groups_of_a_gpu_are_many_where_rows_are_few(device: Device) -> None:
    info = device.with_capabilities(type="gpu", compute_units=132, max_work_group_size=1024).info
    large, square, small = (
        counter_matvec_shape(info, M, K, False) for M, K in ((16384, 16384), (4096, 4096), (256, 4096))
    )
    assert [(shape.constants["ROWS"], shape.constants["LANES"]) for shape in (large, square)] == [(4, 128), (4, 64)]
    assert small.constants["ROWS"] == 1
    for shape, M in ((large, 16384), (square, 4096), (small, 256)):
        sets = 256 // shape.constants["LANES"] * shape.constants["ROWS"]
        assert shape.global_size == (-(-M // sets) * 256,)
