"""Tensors of any shape, strides and contents through public functions, 2000 a function in the acceptance run.

A subject takes what hypothesis draws for it and says what is wrong with what its function answers, "" where nothing is:
most compare the launchers with the oracle, to the bit or by the errors that both raise. Subjects of other rooms are
added to `SUBJECTS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench import hostile_fp8, hostile_moments
from bench.hostile_tensors import FLOATING, WRONG, tensors
from memtrain_cl import ops, reference
from memtrain_cl.formats import FP8_FORMATS
from memtrain_cl.optim import CompressedAdam
from memtrain_cl.optim.families import FAMILIES
from memtrain_cl.optim.moments import METHODS

#: Cases of a function in the acceptance run.
EXAMPLES = 2000
#: Few, since each is a program where kernels are made for it.
BLOCK_SIZES = (1, 3, 64, 100, 256)

Draw = Callable[[st.SearchStrategy[Any]], Any]


def answer(call: Callable[[], Any]) -> Any:
    """What a call gives; the type of the error by which it refuses its arguments."""
    try:
        return call()
    except (TypeError, ValueError) as error:
        return type(error)


def same(got: Any, want: Any) -> bool:
    """Whether two answers agree: tensors to the bit (any NaN is one), everything else as it compares."""
    if isinstance(got, tuple) and isinstance(want, tuple):
        return len(got) == len(want) and all(same(*pair) for pair in zip(got, want, strict=True))
    if not isinstance(got, torch.Tensor) or not isinstance(want, torch.Tensor):
        return type(got) is type(want) and (got == want or (got != got and want != want))
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    if not got.is_floating_point():
        return torch.equal(got, want)
    both = got.isnan() & want.isnan()
    return bool((both | ((got == want) & (got.signbit() == want.signbit()))).all())


def told(what: str, x: torch.Tensor, **arguments: Any) -> str:
    """A finding, with what brought it about."""
    return f"{what}: {x.dtype} {list(x.shape)} {x.stride()} {x.flatten()[:12].tolist()}, {arguments}"


def both_rooms(call: Callable[[Any], Any]) -> tuple[Any, Any]:
    """The answers of the launchers and of the oracle."""
    return answer(lambda: call(ops)), answer(lambda: call(reference))


def blockwise(draw: Draw) -> str:
    """Codes in blocks, of every kind, and the way back."""
    x = draw(tensors(dtypes=FLOATING + WRONG))
    block_size = draw(st.sampled_from((*BLOCK_SIZES, 0)))
    options = {
        "code": draw(st.sampled_from(("linear", "dynamic"))),
        "signed": draw(st.booleans()),
        "positive": draw(st.booleans()),
        "seed": draw(st.sampled_from((None, 0, 0xFFFFFFFF))),
    }
    codes, want = both_rooms(lambda room: room.quantize_blockwise(x, block_size, **options))
    if not same(codes, want):
        return told(f"quantize_blockwise gives {codes}, expected {want}", x, block_size=block_size, **options)
    if isinstance(codes, type):
        return ""
    kind = {"code": options["code"], "signed": options["signed"]}
    back, want = both_rooms(lambda room: room.dequantize_blockwise(*codes, block_size, **kind))
    if not same(back, want):
        return told(f"dequantize_blockwise gives {back}, expected {want}", x, block_size=block_size, **kind)
    return ""


def int8_blockwise(draw: Draw) -> str:
    """The published pair: half a step off at most, zeros as zeros."""
    x = draw(tensors())
    block_size = draw(st.sampled_from(BLOCK_SIZES))
    codes, scales = ops.quantize_int8_blockwise(x, block_size)
    back = ops.dequantize_int8_blockwise(codes, scales, block_size)
    flat = x.reshape(-1).float()
    allowed = scales.repeat_interleave(block_size)[: flat.numel()]
    dead = flat.abs() < 127 * 2.0**-126
    fine = allowed.isnan() | dead | ((back.reshape(-1) - flat).abs() <= allowed * 0.5001)
    fine &= (back.reshape(-1) == 0) | (flat != 0) | allowed.isnan()
    return "" if bool(fine.all()) else told("an int8 code is more than half a step off", x, block_size=block_size)


def profile(draw: Draw) -> str:
    """Profiles of blocks, the way back, and what they are judged by."""
    x, wrong = draw(tensors()), draw(tensors(dtypes=WRONG))
    if (found := answer(lambda: ops.encode_profile(wrong))) is not TypeError:
        return told(f"encode_profile gives {found}, expected TypeError", wrong)
    block_size, positive = draw(st.sampled_from(hostile_moments.BLOCK_SIZES)), draw(st.booleans())
    found = hostile_moments.judge_codes(x, block_size, positive)
    return told(found, x, block_size=block_size, positive=positive) if found else ""


def moment(draw: Draw) -> str:
    """Compressed moments and sorted profiles, and what comes back."""
    x = draw(tensors())
    options = {
        "method": draw(st.sampled_from(METHODS)),
        "family": draw(st.sampled_from(list(FAMILIES))),
        "block_size": draw(st.sampled_from((0, *hostile_moments.BLOCK_SIZES))),
        "top_k": draw(st.integers(0, 5)),
    }
    found = hostile_moments.judge_encoding(x, **options)
    return told(found, x, **options) if found else ""


def anomaly(draw: Draw) -> str:
    """A tensor beside its own profile."""
    x = draw(tensors())
    options = {
        "family": draw(st.sampled_from(list(FAMILIES))),
        "block_size": draw(st.sampled_from((0, *hostile_moments.BLOCK_SIZES))),
        "top_k": draw(st.integers(0, 5)),
    }
    found = hostile_moments.judge_anomaly(x, **options)
    return told(found, x, **options) if found else ""


def state(draw: Draw) -> str:
    """Both moments of an optimizer, compressed."""
    x = draw(tensors())
    options = {"method": draw(st.sampled_from(METHODS)), "block_size": draw(st.sampled_from(BLOCK_SIZES))}
    found = hostile_moments.judge_state(x, **options)
    return told(found, x, **options) if found else ""


def adam(draw: Draw) -> str:
    """Two steps of CompressedAdam on a gradient: the bits of the oracle, and a state that stays finite."""
    grad = draw(tensors())
    weight = draw(st.floats(-4.0, 4.0, width=32))
    settings_of = {
        "compression_method": draw(st.sampled_from(("int8", "profile", "dense"))),
        "code": draw(st.sampled_from(("linear", "dynamic"))),
        "moment_rounding": draw(st.sampled_from(("nearest", "stochastic"))),
        "skip": draw(st.sampled_from(("tensor", "block"))),
        "weight_decay": draw(st.sampled_from((0.0, 0.1))),
        "int8_block_size": draw(st.sampled_from((3, 64))),
    }
    results = []
    for room in (ops, reference):
        p = torch.nn.Parameter(torch.full(tuple(grad.shape), weight, dtype=grad.dtype))
        optimizer = CompressedAdam([p], lr=1e-2, profile_block_size=64, ops=room, **settings_of)
        for factor in (1.0, -0.5):
            p.grad = grad if factor == 1.0 else grad * factor
            optimizer.step()
        held = [value for value in optimizer.state.get(p, {}).values() if isinstance(value, torch.Tensor)]
        results.append((p.detach(), *held))
        if not all(bool(torch.isfinite(value.float()).all()) for value in results[-1]):
            return told("a weight or a moment is not finite", grad, weight=weight, **settings_of)
    return "" if same(*results) else told("the launchers and the oracle differ", grad, weight=weight, **settings_of)


def fp8(draw: Draw) -> str:
    """What the guard of a cast to 8-bit floating numbers says and gives."""
    x = draw(st.one_of(tensors(), tensors(hostile_fp8.NUMBERS)))
    options = {"name": draw(st.sampled_from(list(FP8_FORMATS))), "threshold": draw(st.floats(0.0, 1.0))}
    found = hostile_fp8.judge(x, **options)
    return told(found, x, **options) if found else ""


SUBJECTS: dict[str, Callable[[Draw], str]] = {
    "quantize_blockwise": blockwise,
    "quantize_int8_blockwise": int8_blockwise,
    "encode_profile": profile,
    "compress_moment": moment,
    "detect_anomaly": anomaly,
    "CompressedOptimizerState": state,
    "CompressedAdam": adam,
    "fp8_cast_with_guard": fp8,
}


class Wrong(Exception):
    """What a subject found."""


def sweep(name: str, examples: int) -> str:
    """The smallest finding of so many cases of a subject, "" without one. The cases are the same in each run."""

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(data=st.data())
    def anything(data: st.DataObject) -> None:
        found = SUBJECTS[name](data.draw)
        if found:
            raise Wrong(found)

    try:
        anything()
    except Wrong as error:
        return str(error)
    return ""


def run() -> dict[str, Any]:
    """Every subject; ok where none finds anything."""
    rows = {}
    for name in SUBJECTS:
        rows[name] = sweep(name, EXAMPLES)
        print(f"hostile {name}: {rows[name] or 'nothing wrong'}", flush=True)
    return {"examples": EXAMPLES, "findings": rows, "ok": not any(rows.values())}
