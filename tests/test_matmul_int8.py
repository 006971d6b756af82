"""Exact products of int8 codes: every layout, size and way to form sums, tiles and chunks, gates, refusals, chance."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import memtrain_cl.torch_device  # noqa: F401 (registers the device)
from bench.acceptance_statistics import ESTIMATORS
from memtrain_cl import inline_assembly, ops, reference, staging
from memtrain_cl.array import empty, from_numpy
from memtrain_cl.device import Device, DeviceInfo, TensorCores, _features, use_device
from memtrain_cl.errors import BuildError
from memtrain_cl.formats import INT8_CHUNK
from memtrain_cl.inline_assembly import note_inline_assembly
from memtrain_cl.ops.matmul_int8 import Codes, launch_grad_weight_int8, launch_gradient_codes, launch_int8_product
from memtrain_cl.runtimes import import_pyopencl
from memtrain_cl.torch_device.fallback import strict
from memtrain_cl.tuning_int8 import FLOAT_BLOCK, TERNARY_BLOCK, int8_shape
from memtrain_cl.verify_int8 import kinds_of
from tests.test_counter_inputs import LAYOUTS
from tests.test_counter_opencl import padded

pytestmark = pytest.mark.device

M, N, R, C = 9, 40, 10, 11
LAYER: dict[str, Any] = {"C": C, "packed": True}
SEEDS = {"seed_grad": 5, "seed_input": 6}
Arguments = dict[str, torch.Tensor]


def codes(*shape: int) -> torch.Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def arguments() -> Arguments:
    state = reference.pack_codes(torch.randint(0, 63, (R, N), dtype=torch.uint8))
    return {
        "a": codes(M, N),
        "b": codes(R, N),
        "row": torch.rand(M, 1)[:, 0] + 0.5,
        "col": torch.rand(R, 1)[:, 0] + 0.5,
        "state": state,
        "scale": torch.rand(R, 1) + 0.1,
        "x": torch.randn(M, N),
        "grad_out": torch.randn(M, R),
        "cache": reference.decode_ternary(state, N, **LAYER),
    }


#: Each operation over a room and named arguments, and the names it uses.
OPERATIONS: dict[str, tuple[Callable[[Any, Arguments], torch.Tensor], str]] = {
    "int8_product": (lambda room, a: room.int8_product(a["a"], a["b"]), "a b"),
    "scaled": (lambda room, a: room.int8_product(a["a"], a["b"], a["row"], a["col"]), "a b row col"),
    "forward": (lambda room, a: room.counter_forward_int8(a["x"], a["state"], a["scale"], **LAYER), "x state scale"),
    "forward_cached": (
        lambda room, a: room.counter_forward_int8(a["x"], a["state"], a["scale"], **LAYER, cache=a["cache"]),
        "x state scale cache",
    ),
    "grad_input": (
        lambda room, a: room.counter_grad_input_int8(a["grad_out"], a["state"], a["scale"], N, **LAYER, seed=7),
        "grad_out state scale",
    ),
    "grad_weight": (lambda room, a: room.grad_weight_int8(a["grad_out"], a["x"], 2, 5, **SEEDS), "grad_out x"),
    "grad_weight_of_codes": (
        lambda room, a: room.grad_weight_of_codes(a["a"], a["row"], a["b"], a["col"], 2, 5),
        "a row b col",
    ),
    "decode": (lambda room, a: room.decode_ternary(a["state"], N, **LAYER), "state"),
    "decode_transposed": (lambda room, a: room.decode_ternary(a["state"], N, **LAYER, transposed=True), "state"),
}
USES = [(name, used) for name, (_, names) in OPERATIONS.items() for used in names.split()]


def same_bytes(got: torch.Tensor, want: torch.Tensor) -> bool:
    bits = torch.int32 if want.dtype == torch.float32 else want.dtype
    return got.dtype == want.dtype and torch.equal(got.view(bits), want.view(bits))


# ---- layouts and places ----


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "used"), USES)
def test_layout_changes_nothing(device: Device, name: str, used: str, layout: Callable[..., torch.Tensor]) -> None:
    run, _ = OPERATIONS[name]
    plain = arguments()
    laid_out = {key: layout(value.clone()) if key == used else value for key, value in plain.items()}
    assert same_bytes(run(ops, laid_out), run(reference, plain))


@pytest.mark.parametrize("name", OPERATIONS)
def test_memory_of_its_own_changes_nothing(discrete: Device, name: str) -> None:
    run, _ = OPERATIONS[name]
    plain = arguments()
    assert same_bytes(run(ops, plain), run(reference, plain))


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_tensors_of_the_device(device: Device, name: str, views: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = OPERATIONS[name]
    place = torch.device("opencl", device.info.index)
    host = arguments()
    there = {key: value.to(place) for key, value in host.items()}
    if views:
        there = {key: padded(value) for key, value in there.items()}

    def refuse(*_: Any) -> None:
        raise AssertionError("bytes went to the host")

    with strict(), monkeypatch.context() as patch:
        patch.setattr(staging, "upload", refuse)
        patch.setattr(staging, "download", refuse)
        result = run(ops, there)
    assert result.device == place
    assert same_bytes(result.cpu(), run(reference, host))


# ---- sizes ----


@pytest.mark.parametrize("sizes", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
def test_empty_operands_give_zeros(device: Device, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    assert same_bytes(ops.int8_product(codes(m, k), codes(n, k)), torch.zeros(m, n, dtype=torch.int32))
    scaled = ops.int8_product(codes(m, k), codes(n, k), torch.ones(m), torch.ones(n))
    assert same_bytes(scaled, torch.zeros(m, n))
    state, scale = torch.zeros(n, k, dtype=torch.uint8), torch.ones(n, 1)
    layer: dict[str, Any] = {"C": 8, "packed": False}
    assert same_bytes(ops.counter_forward_int8(torch.ones(m, k), state, scale, **layer), torch.zeros(m, n))
    grad_x = ops.counter_grad_input_int8(torch.ones(m, n), state, scale, k, **layer, seed=1)
    assert same_bytes(grad_x, torch.zeros(m, k))
    assert same_bytes(ops.grad_weight_int8(torch.ones(m, n), torch.ones(m, k), **SEEDS), torch.zeros(n, k))
    for transposed in (False, True):
        shape = (k, n) if transposed else (n, k)
        assert ops.decode_ternary(state, k, **layer, transposed=transposed).shape == shape


def test_the_longest_sums_fit(shaped: Device) -> None:
    a = torch.full((2, INT8_CHUNK), 127, dtype=torch.int8)
    for kind in kinds_of(shaped):
        with use_device(kind):
            assert ops.int8_product(a, -a[:1]).tolist() == [[-127 * 127 * INT8_CHUNK]] * 2
    with pytest.raises(ValueError, match="expected at most 131072 columns, got 131073"):
        ops.int8_product(
            torch.zeros(1, INT8_CHUNK + 1, dtype=torch.int8), torch.zeros(1, INT8_CHUNK + 1).to(torch.int8)
        )


def test_ternary_sums_may_be_longer(shaped: Device) -> None:
    # Beyond what a float32 block of 127 by 1 holds, and what int32 would hold of 127 by 127.
    n = TERNARY_BLOCK + 12
    state = torch.zeros(1, n // 4 * 3, dtype=torch.uint8)  # t = -1
    x = torch.ones(1, n)
    for kind in kinds_of(shaped):
        with use_device(kind):
            y = ops.counter_forward_int8(x, state, torch.ones(1, 1), **LAYER)
            assert same_bytes(y, reference.counter_forward_int8(x, state, torch.ones(1, 1), **LAYER))


def test_the_references_sums_are_those_of_integers() -> None:
    a, b = codes(5, 3000), codes(4, 3000)
    assert torch.equal(reference.int8_product(a, b).to(torch.int64), a.to(torch.int64) @ b.to(torch.int64).t())


# ---- tiles and chunks of the gradient ----


def test_tiles_are_the_wholes_bytes(shaped: Device) -> None:
    grad_out, x = torch.randn(37, 29), torch.randn(37, 18)
    whole = reference.grad_weight_int8(grad_out, x, **SEEDS)
    for rows in (1, 7, 29):
        tiles = [ops.grad_weight_int8(grad_out, x, at, min(rows, 29 - at), **SEEDS) for at in range(0, 29, rows)]
        assert same_bytes(torch.cat(tiles), whole)
    grad_codes = ops.quantize_int8(grad_out, dim=0, seed=SEEDS["seed_grad"], transposed=True)
    x_codes = ops.quantize_int8(x, dim=0, seed=SEEDS["seed_input"], transposed=True)
    for chunk in (8, INT8_CHUNK):
        of_codes = [
            ops.grad_weight_of_codes(*grad_codes, *x_codes, at, min(7, 29 - at), chunk=chunk) for at in range(0, 29, 7)
        ]
        assert same_bytes(torch.cat(of_codes), reference.grad_weight_int8(grad_out, x, **SEEDS, chunk=chunk))
    with pytest.raises(ValueError, match=r"expected rows 20\.\.30 within 29"):
        ops.grad_weight_int8(grad_out, x, 20, 10, **SEEDS)


@pytest.mark.parametrize("chunk", [1, 8, 31, 37, 38])
def test_chunks_are_added_in_their_order(shaped: Device, chunk: int) -> None:
    grad_out, x = torch.randn(37, 11), torch.randn(37, 6) * 1e4
    want = reference.grad_weight_int8(grad_out, x, 3, 5, **SEEDS, chunk=chunk)
    assert same_bytes(ops.grad_weight_int8(grad_out, x, 3, 5, **SEEDS, chunk=chunk), want)


def test_more_tokens_than_a_chunk(device: Device) -> None:
    grad_out, x = torch.randn(INT8_CHUNK + 3, 2), torch.randn(INT8_CHUNK + 3, 3)
    want = reference.grad_weight_int8(grad_out, x, **SEEDS)
    assert same_bytes(ops.grad_weight_int8(grad_out, x, **SEEDS), want)
    assert torch.allclose(want, grad_out.t() @ x, atol=40.0)


@pytest.mark.parametrize("chunk", [8, 64])
def test_a_gate_at_rest_leaves_the_gradient(shaped: Device, chunk: int) -> None:
    device = shaped
    x, grad_out = (from_numpy(device, torch.randn(20, size).numpy()) for size in (6, 7))
    prepared = launch_gradient_codes(device, grad_out, x, **SEEDS)
    tile = from_numpy(device, np.full((7, 6), 3, np.float32))
    for fire in (0, 1):
        gate = from_numpy(device, np.array([2, 1, fire, 0]))
        launch_grad_weight_int8(device, prepared, tile, 0, chunk=chunk, gate=gate)
        assert (tile.numpy() == 3).all() == (not fire)
    ungated = empty(device, (7, 6), np.float32)
    launch_grad_weight_int8(device, prepared, ungated, 0, chunk=chunk)
    assert (tile.numpy() == ungated.numpy()).all()


# ---- what the products mean ----


def test_the_products_are_near_those_of_floats(device: Device) -> None:
    x, grad_out = torch.randn(64, N), torch.randn(64, R)
    state, scale = arguments()["state"], arguments()["scale"]
    weight = reference.decode_dense(state, scale, N, **LAYER)
    pairs = [
        (ops.counter_forward_int8(x, state, scale, **LAYER), x @ weight.t()),
        (ops.counter_grad_input_int8(grad_out, state, scale, N, **LAYER, seed=3), grad_out @ weight),
        (ops.grad_weight_int8(grad_out, x, **SEEDS), grad_out.t() @ x),
    ]
    for got, want in pairs:
        assert float((got - want).norm() / want.norm()) < 0.03


def test_tokens_that_are_not_finite_are_seen_in_their_rows_alone(shaped: Device) -> None:
    a = arguments()
    sound = ops.counter_forward_int8(a["x"], a["state"], a["scale"], **LAYER)
    a["x"][2, 3], a["x"][5, 0] = math.nan, -math.inf
    y = ops.counter_forward_int8(a["x"], a["state"], a["scale"], **LAYER)
    hurt = torch.zeros(M, dtype=torch.bool).index_fill(0, torch.tensor([2, 5]), True)
    assert y[hurt].isnan().all()
    assert same_bytes(y[~hurt], sound[~hurt])
    grad_w = ops.grad_weight_int8(a["grad_out"], a["x"], **SEEDS)
    assert grad_w[:, [0, 3]].isnan().all()
    assert grad_w.isnan().sum() == 2 * R


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16])
def test_a_cache_changes_nothing(device: Device, dtype: torch.dtype) -> None:
    a = arguments()
    cache = a["cache"].to(dtype)
    for room in (ops, reference):
        y = room.counter_forward_int8(a["x"], a["state"], a["scale"], **LAYER, cache=cache)
        assert same_bytes(y, reference.counter_forward_int8(a["x"], a["state"], a["scale"], **LAYER))
        layer = (a["grad_out"], a["state"], a["scale"], N)
        grad_x = room.counter_grad_input_int8(*layer, **LAYER, seed=4, cache=cache)
        assert same_bytes(grad_x, reference.counter_grad_input_int8(*layer, **LAYER, seed=4))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimators_are_unbiased(device: Device, estimator: Callable[..., Any]) -> None:
    verdict = estimator(300)
    assert verdict.ok, verdict


# ---- refusals ----


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda a: ops.int8_product(a["x"], a["b"]), TypeError, "expected a of dtype torch.int8, got torch.float32"),
        (lambda a: ops.int8_product(a["a"], a["b"][:, 1:]), ValueError, r"expected b of shape \[any, 40\]"),
        (lambda a: ops.int8_product(a["a"], a["b"], a["col"]), ValueError, r"expected row of shape \[9\], got \[10\]"),
        (lambda a: ops.int8_product(a["a"], a["b"], None, a["col"]), ValueError, "expected row beside col"),
        (
            lambda a: ops.counter_forward_int8(a["x"], a["state"], a["scale"], **LAYER, cache=a["cache"][1:]),
            ValueError,
            r"expected cache of shape \[10, 40\], got \[9, 40\]",
        ),
        (
            lambda a: ops.counter_forward_int8(a["x"], a["state"], a["scale"], **LAYER, cache=a["cache"].float()),
            TypeError,
            "expected cache of dtype torch.int8 or torch.float16, got torch.float32",
        ),
        (lambda a: ops.counter_forward_int8(a["x"], a["state"], a["scale"], C=12, packed=True), ValueError, r"1\.\.11"),
        (
            lambda a: ops.counter_grad_input_int8(a["grad_out"], a["state"], a["scale"], N, **LAYER, seed=-1),
            ValueError,
            "expected seed in 0",
        ),
        (
            lambda a: ops.grad_weight_int8(a["grad_out"], a["x"], seed_grad=1, seed_input=2**32),
            ValueError,
            "expected seed_input in 0",
        ),
        (lambda a: ops.grad_weight_int8(a["grad_out"], a["x"][1:], **SEEDS), ValueError, "expected grad_out of shape"),
        (lambda a: ops.grad_weight_int8(a["grad_out"], a["x"], **SEEDS, chunk=0), ValueError, "a chunk of 1..131072"),
        (
            lambda a: ops.grad_weight_of_codes(a["a"], a["row"], a["b"], a["col"][1:]),
            ValueError,
            r"expected x_scale of shape \[10\], got \[9\]",
        ),
        (
            lambda a: ops.grad_weight_of_codes(a["a"], a["row"], a["b"], a["col"], 8, 2),
            ValueError,
            r"expected rows 8\.\.10 within 9",
        ),
        (lambda a: ops.decode_ternary(a["state"], N + 4, **LAYER), ValueError, r"expected state of shape \[any, 33\]"),
    ],
)
def test_bad_input_is_refused(
    device: Device, call: Callable[[Arguments], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(arguments())


def test_operands_of_two_lengths_are_refused(device: Device) -> None:
    a, b = (from_numpy(device, codes(3, n).numpy()) for n in (8, 12))
    out = empty(device, (3, 3), np.int32)
    with pytest.raises(ValueError, match="expected two operands of one length up to 131072, got 8 and 12"):
        launch_int8_product(device, Codes(a, 3, 8, 8), Codes(b, 3, 12, 12), out)


# ---- who forms the sums ----


@pytest.mark.parametrize(
    ("changes", "kind", "gpu"),
    [
        ({"type": "gpu", "integer_dot": True}, "dot", True),
        ({"type": "gpu", "tensor_cores": "narrow", "compute_units": 1}, "mma", True),
        ({"type": "gpu", "tensor_cores": "mma", "compute_units": 1}, "mma", True),
        ({"type": "gpu", "tensor_cores": "wgmma", "compute_units": 6}, "wgmma", True),
        ({"type": "gpu", "tensor_cores": "wgmma", "compute_units": 7}, "mma", True),
        ({"type": "cpu", "short_loops": False, "tensor_cores": "wgmma", "inline_vnni": False}, "float", False),
        ({"type": "gpu", "integer_dot": False}, "float", True),
        ({"type": "gpu", "max_work_group_size": 128, "inline_vnni": False}, "float", False),
        ({"type": "cpu", "short_loops": False, "inline_vnni": True, "local_mem_bytes": 1 << 18}, "vnni", False),
        ({"type": "cpu", "short_loops": False, "inline_vnni": True, "local_mem_bytes": 1 << 15}, "float", False),
        ({"type": "cpu", "short_loops": False, "inline_vnni": None}, "float", False),
        ({"type": "cpu", "short_loops": True, "integer_dot": False, "max_work_group_size": 1024}, "float", True),
    ],
)
def test_capabilities_choose(device: Device, changes: dict[str, Any], kind: str, gpu: bool) -> None:
    own = {"max_work_group_size": 256, "tensor_cores": "", "integer_dot": False}
    info = device.with_capabilities(**(own | changes)).info
    shape = int8_shape(info, 300, 300, 300, ternary=False, chunks=True)
    assert (shape.constants["KIND"], shape.gpu) == (kind, gpu)


def test_tensor_cores_take_rows_that_begin_on_sixteen_bytes(device: Device) -> None:
    info = device.with_capabilities(type="gpu", tensor_cores="wgmma", compute_units=1, max_work_group_size=256).info
    kinds = [int8_shape(info, 300, 300, 300, ternary=False, chunks=c).constants["KIND"] for c in (True, False)]
    assert kinds == ["wgmma", "dot" if info.integer_dot else "float"]


@pytest.mark.parametrize("units", [1, 8, 10_000])
@pytest.mark.parametrize("sizes", [(1, 1), (256, 1024), (5, 100_000), (129, 257)])
@pytest.mark.parametrize(("cores", "granted"), [("mma", 220 << 10), ("narrow", 99 << 10)])
def test_blocks_of_tensor_cores_cover_the_result_and_fit(
    device: Device, sizes: tuple[int, int], units: int, cores: TensorCores, granted: int
) -> None:
    info = device.with_capabilities(type="gpu", tensor_cores=cores, compute_units=units).info
    shape = int8_shape(info, *sizes, 64, ternary=False, chunks=True)
    down, across = 64 * shape.constants["WARPS_M"], 64 * shape.constants["WARPS_N"]
    assert shape.global_size[0] // shape.local_size[0] == -(-sizes[0] // down) * -(-sizes[1] // across)
    assert shape.local_size == (down * across // 128,)
    assert shape.constants["STAGES"] * shape.constants["DEPTH"] * (down + across) <= granted


@pytest.mark.parametrize("local_mem_bytes", [1 << 15, 48 << 10, 1 << 18, 1 << 21])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (256, 1024, 1024), (5, 100_000, 70), (100_000, 5, 70)])
def test_shapes_cover_the_result_and_fit(device: Device, local_mem_bytes: int, sizes: tuple[int, int, int]) -> None:
    m, n, _ = sizes
    for changes in (
        {"type": "gpu", "tensor_cores": ""},
        {"type": "cpu", "inline_vnni": True},
        {"type": "cpu", "inline_vnni": False},
    ):
        given = {"local_mem_bytes": local_mem_bytes, "max_work_group_size": 256, "short_loops": False, **changes}
        shape = int8_shape(device.with_capabilities(**given).info, *sizes, ternary=False, chunks=True)
        constants = shape.constants
        if shape.gpu:
            words = 2 * constants["DEPTH"] * (constants["TILE"] + 4)
            down, across = constants["TILE"], constants["TILE"]
            groups = tuple(whole // part for whole, part in zip(shape.global_size, shape.local_size, strict=True))
        else:
            # Panels, a tile of six rows, and their sums in a panel.
            words = constants["DEPTH"] * (constants["TILE_N"] + 6) + 6 * 64
            (across, down), groups = (shape.columns, shape.per), shape.global_size
            assert shape.per % 6 == 0
        assert 4 * words < local_mem_bytes
        assert groups[0] * across >= n > (groups[0] - 1) * across
        assert groups[1] * down >= m > (groups[1] - 1) * down


def test_blocks_of_float_sums_stay_exact() -> None:
    assert FLOAT_BLOCK * 127 * 127 < 1 << 24
    assert TERNARY_BLOCK * 127 < 1 << 24
    assert INT8_CHUNK * 127 * 127 < 1 << 31


def test_the_instruction_is_asked_for_once(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run(command: Any, **_: Any) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(returncode=0, stdout="the sums are wrong")

    monkeypatch.setattr(inline_assembly, "_verdicts", {})
    monkeypatch.setattr(inline_assembly, "_possible", lambda device: True)
    monkeypatch.setattr(subprocess, "run", run)
    twins = [device.with_capabilities(inline_vnni=None) for _ in range(2)]
    for twin in twins:
        note_inline_assembly(twin)
        assert twin.info.inline_vnni is False
    assert len(asked) == 1
    assert asked[0][-1] == device.info.label


@pytest.mark.parametrize("failure", [subprocess.TimeoutExpired("python", 1), OSError("no such interpreter")])
def test_a_child_that_fails_leaves_the_portable_way(
    device: Device, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise failure

    monkeypatch.setattr(inline_assembly, "_verdicts", {})
    monkeypatch.setattr(inline_assembly, "_possible", lambda device: True)
    monkeypatch.setattr(subprocess, "run", fail)
    twin = device.with_capabilities(inline_vnni=None)
    note_inline_assembly(twin)
    assert twin.info.inline_vnni is False
    assert ops.int8_product(codes(2, 3), codes(2, 3)).dtype == torch.int32


@pytest.mark.parametrize(
    "failure", [BuildError("uses too much shared data"), import_pyopencl().Error("out of resources")]
)
def test_tensor_cores_that_a_driver_refuses_are_told_of_and_left(
    device: Device, failure: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> bool:
        raise failure

    monkeypatch.setattr(inline_assembly, "_verdicts", {})
    monkeypatch.setattr(inline_assembly, "sums_are_right", fail)
    changes: dict[str, Any] = {"type": "gpu", "inline_vnni": False, "tensor_cores": None}
    # One that takes no PTX is not tried, and its verdict is not another's.
    twins = [device.with_capabilities(inline_ptx=ptx, **changes) for ptx in (False, True)]
    for twin in twins:
        note_inline_assembly(twin)
        assert twin.info.tensor_cores == ""
        assert ("multiplies without its tensor cores' way 'narrow'" in caplog.text) == twin.info.inline_ptx
    assert str(failure) in caplog.text


def test_a_driver_that_grants_less_local_memory_gets_smaller_blocks(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def multiply(device: Device, info: DeviceInfo, *sizes: int) -> bool:
        if info.tensor_cores != "narrow":
            raise BuildError("uses too much shared data")
        return True

    monkeypatch.setattr(inline_assembly, "_verdicts", {})
    monkeypatch.setattr(inline_assembly, "sums_are_right", multiply)
    twin = device.with_capabilities(type="gpu", inline_ptx=True, inline_vnni=False, tensor_cores=None)
    note_inline_assembly(twin)
    assert twin.info.tensor_cores == "narrow"
    assert "way 'mma': uses too much shared data" in caplog.text


@pytest.mark.parametrize("changes", [{"type": "gpu"}, {"short_loops": True}])
def test_devices_that_are_no_such_processor_are_not_tried(device: Device, changes: dict[str, Any]) -> None:
    assert not inline_assembly._possible(device.with_capabilities(**changes))


def test_the_child_says_what_it_found(device: Device, capsys: pytest.CaptureFixture[str]) -> None:
    note_inline_assembly(device)
    if not device.info.inline_vnni:
        pytest.skip("this device's compiler does not take the instruction")
    assert inline_assembly.sums_are_right(device, device.info, *inline_assembly._SIZES)


def test_features_that_cannot_be_asked_for_are_none() -> None:
    assert _features(SimpleNamespace()) == set()
    feature = SimpleNamespace(name="__opencl_c_fp64")
    assert _features(SimpleNamespace(opencl_c_features=[feature])) == {"__opencl_c_fp64"}
