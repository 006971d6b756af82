"""tests/golden/counter.json, numbers of an independent implementation: the reference and every device give the same."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from memtrain_cl import ops, reference
from memtrain_cl.array import empty, from_numpy
from memtrain_cl.device import Device
from memtrain_cl.formats import CounterRule
from memtrain_cl.program import get_kernel

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "counter.json").read_text())
UPDATES = [pytest.param(case, id=case["name"]) for case in GOLDEN["counter_update"]]
FORMULAS = [
    pytest.param(case, id=f"lagged={case['lagged']}-clip={case['clip']}")
    for case in GOLDEN["counter_update_formula"]["cases"]
]


def column(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).reshape(-1, 1)


def update(room: ModuleType, case: dict[str, Any], *, packed: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scale, v) after the case's update by `room`, in either storage."""
    arguments = dict(case["args"])
    seed = arguments.pop("seed")
    codes = torch.tensor(case["codes"], dtype=torch.uint8)
    scale, v = column(case["scale"]), column(case["v"])
    totals = torch.zeros(3, dtype=torch.int64)
    state = reference.pack_codes(codes) if packed else codes.clone()
    rms_mode = "lagged" if arguments.pop("lagged") else "exact"
    rule = CounterRule(packed=packed, rms_mode=rms_mode, **arguments)
    room.counter_update_(state, scale, v, torch.tensor(case["grad_w"]), totals, rule, seed=seed)
    return reference.unpack_codes(state, codes.shape[1]) if packed else state, scale, v


def check(result: tuple[torch.Tensor, torch.Tensor, torch.Tensor], case: dict[str, Any]) -> None:
    # The rules allow one code in a thousand to be off by one between orders of summation; ours has none.
    assert result[0].tolist() == case["codes_out"]
    for got, name in zip(result[1:], ("scale_out", "v_out"), strict=True):
        torch.testing.assert_close(got, column(case[name]), rtol=1e-6, atol=0.0)


def formula_case(case: dict[str, Any]) -> dict[str, Any]:
    """The inputs that the golden file gives as formulas."""
    rows, columns = range(4), range(8)
    names = ("C", "lr", "lr_scale", "rms_beta", "rms_eps", "seed")
    return {
        **case,
        "args": {
            **dict(zip(names, (11, 0.1, 0.01, 0.9, 1e-3, 7), strict=True)),
            "lagged": case["lagged"],
            "clip": case["clip"],
        },
        "codes": [[(13 * i + 5 * j) % 63 for j in columns] for i in rows],
        "grad_w": np.sin([[7 * i + j for j in columns] for i in rows]).astype(np.float32).tolist(),
        "scale": [0.1 + 0.05 * i for i in rows],
        "v": [0.01 * (i + 1) for i in rows],
    }


# ---- the reference ----


def test_hash_and_uniform_numbers() -> None:
    inputs = torch.tensor(GOLDEN["hash"]["input"])
    assert reference.hash_u32(inputs).tolist() == GOLDEN["hash"]["hash_u32"]
    assert reference.uniform01(inputs).tolist() == GOLDEN["hash"]["uniform01"]


@pytest.mark.parametrize("C", [2, 8, 11])
def test_codes(C: int) -> None:
    case = GOLDEN["encode"][str(C)]
    t, c, codes = (torch.tensor(case[name]) for name in ("t", "c", "code"))
    assert reference.encode_state(t, c, C).tolist() == case["code"]
    assert [part.tolist() for part in reference.decode_state(codes.to(torch.uint8), C)] == [case["t"], case["c"]]
    every = torch.arange(case["states"], dtype=torch.uint8)
    assert torch.equal(reference.encode_state(*reference.decode_state(every, C), C), every)


@pytest.mark.parametrize("name", ["from_dense", "from_dense_small"])
def test_from_dense(name: str) -> None:
    case = GOLDEN[name]
    ratio = case.get("threshold_ratio", 0.7)
    scale, t, c = reference.weight_to_counter_state(torch.tensor(case["weight"]), case["C"], ratio)
    assert t.tolist() == case["t"]
    assert c.tolist() == case["c"]
    torch.testing.assert_close(scale, column(case["scale"]), rtol=1e-6, atol=0.0)


def test_packing_by_the_reference() -> None:
    codes, packed = (torch.tensor(GOLDEN["pack6"][name], dtype=torch.uint8) for name in ("codes", "packed"))
    assert torch.equal(reference.pack_codes(codes), packed)
    assert torch.equal(reference.unpack_codes(packed, codes.shape[1]), codes)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", UPDATES)
def test_update_by_the_reference(case: dict[str, Any], packed: bool) -> None:
    check(update(reference, case, packed=packed), case)


@pytest.mark.parametrize("case", FORMULAS)
def test_formula_by_the_reference(case: dict[str, Any]) -> None:
    check(update(reference, formula_case(case), packed=True), case)


# ---- the devices ----


def test_hash_on_devices(device: Device) -> None:
    # The probe kernel hashes the bits of its first operand.
    bits = np.array(GOLDEN["hash"]["input"], np.uint32)
    a = from_numpy(device, bits.view(np.float32))
    outputs = [empty(device, bits.shape, dtype) for dtype in (np.float32, np.float32, np.float32, np.uint32)]
    kernel = get_kernel(device, "probe", "arithmetic_probe", VECTOR_WIDTHS=(1,))
    kernel((bits.size,), None, a, a, *outputs, np.uint32(bits.size))
    assert outputs[3].numpy().tolist() == GOLDEN["hash"]["hash_u32"]


@pytest.mark.parametrize("C", [2, 8, 11])
def test_ternary_values_on_devices(device: Device, C: int) -> None:
    case = GOLDEN["encode"][str(C)]
    codes = torch.tensor([case["code"]], dtype=torch.uint8)
    dense = ops.decode_dense(codes, torch.ones(1, 1), codes.shape[1], C=C, packed=False)
    assert dense.tolist() == [case["t"]]


def test_packing_on_devices(shaped: Device) -> None:
    codes, packed = (torch.tensor(GOLDEN["pack6"][name], dtype=torch.uint8) for name in ("codes", "packed"))
    assert torch.equal(ops.pack_codes(codes), packed)
    assert torch.equal(ops.unpack_codes(packed, codes.shape[1]), codes)


@pytest.mark.parametrize("case", UPDATES)
def test_update_on_devices(device: Device, case: dict[str, Any]) -> None:
    check(update(ops, case, packed=True), case)


@pytest.mark.parametrize("case", UPDATES)
def test_published_function_on_devices(device: Device, case: dict[str, Any]) -> None:
    codes = torch.tensor(case["codes"], dtype=torch.uint8)
    scale, v = column(case["scale"]), column(case["v"])
    result = ops.counter_update_hashsr(codes, scale, v, torch.tensor(case["grad_w"]), **case["args"])
    check((result, scale, v), case)
    assert codes.tolist() == case["codes"], "the input codes are not the output"


@pytest.mark.parametrize("case", FORMULAS)
def test_formula_on_devices(device: Device, case: dict[str, Any]) -> None:
    check(update(ops, formula_case(case), packed=True), case)
