"""Products with a packed weight decoded inside, and dense products in every layout, beside torch's own product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.counter import layer
from bench.harness import Bench, Row, host_time
from bench.peers import cuda_time
from memtrain_cl.array import DeviceArray, empty, from_numpy
from memtrain_cl.elements import ELEMENTS
from memtrain_cl.launchers.decoded import launch_forward, launch_grad_input, launch_grad_weight
from memtrain_cl.launchers.matmul import matmul
from memtrain_cl.operand import Operand, contiguous_strides, empty_operand
from memtrain_cl.reference import decode_dense


def _peer(left: torch.Tensor, right: torch.Tensor) -> dict[str, float]:
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = False
        a, b = left.cuda(), right.cuda()
        return {f"torch CUDA {str(left.dtype)[6:]}": cuda_time(lambda: a @ b)}
    left @ right
    return {"torch CPU": host_time(lambda turn: left @ right, 9)}


def bench_products(bench: Bench, tokens: int, out: int, columns: int) -> None:
    """The three products of one layer [out, columns] over a batch of tokens."""
    device = bench.device
    tensors = layer(out, columns)
    dense = decode_dense(tensors["state"], tensors["scale"], columns, C=11, packed=True)
    x, grad_out = torch.randn(tokens, columns), torch.randn(tokens, out)
    state, scale, inputs, outgoing = (
        from_numpy(device, tensor.numpy()) for tensor in (tensors["state"], tensors["scale"], x, grad_out)
    )
    y, grad_x, grad_w = (
        empty(device, shape, np.float32) for shape in ((tokens, out), (tokens, columns), (out, columns))
    )
    work: dict[str, tuple[Callable[[], Any], DeviceArray, torch.Tensor, torch.Tensor]] = {
        "forward": (lambda: launch_forward(device, inputs, state, scale, y, C=11, packed=True), y, x, dense.t()),
        "grad_input": (
            lambda: launch_grad_input(device, outgoing, state, scale, grad_x, C=11, packed=True),
            grad_x,
            grad_out,
            dense,
        ),
        "grad_weight": (lambda: launch_grad_weight(outgoing, inputs, grad_w, 0), grad_w, grad_out.t(), x),
    }
    for name, (launch, result, left, right) in work.items():
        launch()
        # The first rows suffice: every row is made by the same code.
        found = torch.from_numpy(result.numpy()[:64]).to(torch.float64)
        expected = left[:64].to(torch.float64) @ right.to(torch.float64)
        error = float((found - expected).norm() / expected.norm())
        # The product of the gradient may be two kernels.
        us = _dense_time(bench, launch) if name == "grad_weight" else bench.time(lambda _turn: launch())  # noqa: B023
        size = f"{name} tokens {tokens} layer {out}x{columns}"
        flops = 2 * tokens * out * columns
        moved = 4 * (x.numel() + grad_out.numel()) + (
            4 * out * columns if name == "grad_weight" else tensors["state"].numel() + 4 * out
        )
        bench.add(Row("matmul", size, us, moved, flops, error=f"{error:.1e} relative", peers=_peer(left, right)))


def _operand(bench: Bench, tensor: torch.Tensor) -> Operand:
    """A copy of the tensor on the device, its last two dimensions as they lie in memory."""
    transposed = not tensor.is_contiguous()
    stored = tensor.transpose(-1, -2) if transposed else tensor
    array = from_numpy(bench.device, stored.contiguous().reshape(-1).view(torch.uint8).numpy())
    whole = Operand(array, tuple(stored.shape), contiguous_strides(stored.shape), 0, str(tensor.dtype)[6:])
    if not transposed:
        return whole
    return whole.viewed(tensor.shape, (*whole.strides[:-2], whole.strides[-1], whole.strides[-2]))


def _dense_time(bench: Bench, launch: Callable[[], Any]) -> float:
    """Median microseconds of a product, which may be two kernels: of runs of ten on GPUs, of single ones on CPUs."""
    count = 10 if bench.events else 1

    def several(_turn: int) -> None:
        for _ in range(count):
            launch()
        bench.device.queue.finish()

    several(0)
    return host_time(several, 5 if bench.events else bench.repeats) / count


def bench_dense(bench: Bench, name: str, left: torch.Tensor, right: torch.Tensor) -> None:
    """left @ right; transposed tensors are read as they lie."""
    a, b = _operand(bench, left), _operand(bench, right)
    shape = (*left.shape[:-1], right.shape[-1])
    out = empty_operand(bench.device, shape, a.element)
    matmul(a, b, out)
    found = torch.from_numpy(out.array.numpy()).view(left.dtype)[: out.size].reshape(shape)[..., :64, :].double()
    expected = left[..., :64, :].double() @ right.double()
    error = float((found - expected).norm() / expected.norm())
    us = _dense_time(bench, lambda: matmul(a, b, out))
    moved = (left.numel() + right.numel() + out.size) * ELEMENTS[a.element].itemsize
    size = f"{name} {'x'.join(str(value) for value in (*shape, left.shape[-1]))} {a.element}"
    flops = 2 * out.size * left.shape[-1]
    bench.add(Row("matmul", size, us, moved, flops, error=f"{error:.1e} relative", peers=_peer(left, right)))


def bench_dense_layer(bench: Bench, tokens: int, out: int, columns: int, dtype: torch.dtype) -> None:
    """The three products of a dense layer."""
    x, grad, weight = (torch.randn(shape).to(dtype) for shape in ((tokens, columns), (tokens, out), (out, columns)))
    bench_dense(bench, "dense forward", x, weight.t())
    bench_dense(bench, "dense grad_input", grad, weight)
    bench_dense(bench, "dense grad_weight", grad.t(), x)


def run(bench: Bench) -> None:
    """Layers of the demo model on CPUs, of a large one on GPUs."""
    shapes = (
        [(8192, 4096, 4096), (2048, 768, 768)]
        if bench.events
        else [(2048, 256, 256), (2048, 704, 256), (2048, 256, 704)]
    )
    for tokens, out, columns in shapes:
        bench_products(bench, tokens, out, columns)
    square = torch.randn(4096, 4096)
    bench_dense(bench, "dense", square, torch.randn(4096, 4096))
    layers = (
        [(8192, 3072, 768), (8192, 768, 768), (2048, 768, 768)] if bench.events else [(512, 688, 256), (512, 256, 256)]
    )
    for tokens, out, columns in layers:
        bench_dense_layer(bench, tokens, out, columns, torch.float32)
    bench_dense_layer(bench, *layers[0], torch.bfloat16)
    if bench.events:
        bench_dense_layer(bench, 8192, 4096, 4096, torch.bfloat16)
    bench_dense(bench, "dense batch", torch.randn(48, 128, 64), torch.randn(48, 64, 128))
    bench_dense(bench, "matrix-vector", square, torch.randn(4096, 1))
    bench_dense(bench, "vector-matrix", torch.randn(1, 4096), square)
    bench_dense(bench, "dot", torch.randn(1, 1 << 24), torch.randn(1 << 24, 1))
