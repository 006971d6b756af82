"""Products of int8 codes, alone and as a layer's, and a layer's whole step by them, beside torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.counter import RULE, SEED, layer
from bench.harness import Bench, Row, host_time, mismatches
from bench.peers import cuda_time
from memtrain_cl import reference
from memtrain_cl.array import DeviceArray, empty, from_numpy
from memtrain_cl.cases_int8 import int8_case, layer_case, ternary_case
from memtrain_cl.ops.counter import launch_update
from memtrain_cl.ops.matmul_int8 import (
    Codes,
    launch_forward_int8,
    launch_grad_input_int8,
    launch_grad_weight_int8,
    launch_gradient_codes,
    launch_int8_product,
)
from memtrain_cl.ops.ternary import launch_ternary
from memtrain_cl.tuning_int8 import int8_shape
from memtrain_cl.verify_int8 import kinds_of

LAYER: dict[str, Any] = {"C": 11, "packed": True}


def _time(work: Callable[[], Any], *tensors: torch.Tensor) -> float:
    """Microseconds of torch's work, on CUDA where the tensors are there."""
    if tensors[0].is_cuda:
        return cuda_time(work)
    work()
    return host_time(lambda turn: work(), 9)


def _peers(a: torch.Tensor, b: torch.Tensor) -> dict[str, float]:
    """Products [M, K] by [N, K] transposed: torch's of int8, and of the floats that a dense layer would hold."""
    a, b = (t.cuda() for t in (a, b)) if torch.cuda.is_available() else (a, b)
    torch.backends.cuda.matmul.allow_tf32 = False
    place = "torch CUDA" if a.is_cuda else "torch CPU"
    dtypes = (torch.float32, torch.bfloat16) if a.is_cuda else (torch.float32,)
    times = {f"{place} int8": _time(lambda: torch._int_mm(a, b.t()), a)}
    for dtype in dtypes:
        x, y = a.to(dtype), b.to(dtype)
        times[f"{place} {str(dtype)[6:]}"] = _time(lambda x=x, y=y: x @ y.t(), a)  # type: ignore[misc]
    return times


def bench_product(bench: Bench, M: int, N: int, K: int) -> None:
    """int8_product by each way that the device has to form sums; the first rows are checked."""
    chance = torch.Generator().manual_seed(M)
    a, b = (torch.randint(-127, 128, (rows, K), generator=chance, dtype=torch.int8) for rows in (M, N))
    left, right = (from_numpy(bench.device, codes.numpy()) for codes in (a, b))
    out = empty(bench.device, (M, N), np.int32)
    case, peers = int8_case(M, N, K), _peers(a, b)
    kinds: dict[str, float] = {}
    for device in kinds_of(bench.device):
        us = bench.time(
            lambda turn, device=device: launch_int8_product(  # type: ignore[misc]
                device, Codes(left, M, K, K), Codes(right, N, K, K), out
            )
        )
        kind = int8_shape(device.info, M, N, K, ternary=False, chunks=True).constants["KIND"]
        if kind == "mma":
            kind = device.info.tensor_cores or kind
        if kind not in kinds:
            kinds[kind] = us
            error = mismatches({"sums": out.rows(64)}, {"sums": reference.int8_product(a[:64], b).numpy()})
            name = f"product {M}x{N}x{K} {kind}"
            bench.add(Row("int8", name, us, case.bytes_moved, case.flops, error=error, peers=peers))


def _dense_step(tokens: int, rows: int, columns: int) -> dict[str, float]:
    """The products of a dense layer's step and its AdamW, without autograd: CUDA's has no part beside "opencl"."""
    on_cuda = torch.cuda.is_available()
    place = "cuda" if on_cuda else "cpu"
    times = {}
    for dtype in (torch.float32, torch.bfloat16) if on_cuda else (torch.float32,):
        weight = torch.nn.Parameter(torch.randn(rows, columns, device=place, dtype=dtype))
        optimizer = torch.optim.AdamW([weight], fused=True)
        x = torch.randn(tokens, columns, device=place, dtype=dtype)
        grad_out = torch.randn(tokens, rows, device=place, dtype=dtype)

        @torch.no_grad()
        def step(weight: Any = weight, optimizer: Any = optimizer, x: Any = x, grad_out: Any = grad_out) -> None:
            weight.grad = None  # the old one's memory is the new one's
            _ = x @ weight.t(), grad_out @ weight
            weight.grad = grad_out.t() @ x
            optimizer.step()

        times[f"dense and fused AdamW {str(dtype)[6:]} {place}"] = _time(step, x)
    return times


def bench_layer(bench: Bench, tokens: int, rows: int, columns: int) -> None:
    """The products of a layer [rows, columns] with all that comes before them, and the step that they make."""
    device = bench.device
    tensors = layer(rows, columns)
    x, grad_out = torch.randn(tokens, columns), torch.randn(tokens, rows)
    state, scale, v, totals, inputs, outgoing = (
        from_numpy(device, tensor.numpy())
        for tensor in (*(tensors[name] for name in ("state", "scale", "v", "totals")), x, grad_out)
    )
    y, grad_x, grad_w = (
        empty(device, shape, np.float32) for shape in ((tokens, rows), (tokens, columns), (rows, columns))
    )

    def forward() -> None:
        launch_forward_int8(device, inputs, state, scale, y, **LAYER)

    def grad_input() -> None:
        launch_grad_input_int8(device, outgoing, state, scale, grad_x, **LAYER, seed=SEED)

    def grad_weight() -> None:
        codes = launch_gradient_codes(device, outgoing, inputs, seed_grad=SEED, seed_input=SEED + 1)
        launch_grad_weight_int8(device, codes, grad_w, 0)

    def step() -> None:
        forward()
        grad_input()
        grad_weight()
        launch_update(device, state, scale, v, grad_w, totals, RULE, seed=SEED, row_offset=0, index_base=0)

    # The first tokens and rows suffice: each is made by the same code.
    few = slice(0, 64)
    own = (tensors["state"], tensors["scale"])
    work: dict[str, tuple[Callable[[], None], DeviceArray, Callable[[], torch.Tensor]]] = {
        "counter_forward_int8": (forward, y, lambda: reference.counter_forward_int8(x[few], *own, **LAYER)),
        "counter_grad_input_int8": (
            grad_input,
            grad_x,
            lambda: reference.counter_grad_input_int8(grad_out[few], *own, columns, **LAYER, seed=SEED),
        ),
        "grad_weight_int8": (
            grad_weight,
            grad_w,
            lambda: reference.grad_weight_int8(grad_out, x, 0, 64, seed_grad=SEED, seed_input=SEED + 1),
        ),
    }
    size = f"tokens {tokens} layer {rows}x{columns}"
    for op, (launch, result, expected) in work.items():
        launch()
        error = mismatches({"result": result.rows(64)}, {"result": expected().numpy()})
        us = bench.time_several(launch)
        case = layer_case(op, tokens, rows, columns, True)
        bench.add(Row("int8", f"{op} {size}", us, case.bytes_moved, case.flops, error=error))
    peers = _dense_step(tokens, rows, columns)
    flops = 6 * tokens * rows * columns
    bench.add(Row("int8", f"step {size}", bench.time_several(step), flops=flops, error="as above", peers=peers))


def bench_ternary(bench: Bench, rows: int, columns: int) -> None:
    """The ternary weights of packed codes, as they lie and transposed."""
    tensors = layer(rows, columns)
    state = from_numpy(bench.device, tensors["state"].numpy())
    for transposed in (False, True):
        shape = (columns, rows) if transposed else (rows, columns)
        targets = [empty(bench.device, shape, np.int8) for _ in range(3)]

        def launch(turn: int, targets: list[DeviceArray] = targets, transposed: bool = transposed) -> Any:
            target = targets[turn % 3]
            return launch_ternary(bench.device, state, target, rows, columns, **LAYER, transposed=transposed)

        us = bench.time(launch)
        expected = reference.decode_ternary(tensors["state"], columns, **LAYER, transposed=transposed)
        case = ternary_case(rows, columns, 11, True, transposed)
        error = mismatches({"t": targets[0]}, {"t": expected.numpy()})
        name = f"decode_ternary {rows}x{columns}{' transposed' if transposed else ''}"
        bench.add(Row("int8", name, us, case.bytes_moved, error=error))


def run(bench: Bench) -> None:
    """Layers of this device's kind."""
    tokens, rows, columns = (8192, 4096, 4096) if bench.events else (256, 1024, 1024)
    bench_product(bench, tokens, rows, columns)
    bench_product(bench, rows, columns, tokens)
    if not bench.events:
        bench_product(bench, 2048, 256, 256)
    bench_ternary(bench, rows, columns)
    bench_layer(bench, tokens, rows, columns)
