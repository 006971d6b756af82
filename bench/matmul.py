"""Products with a packed weight decoded inside (forward, grad_input, grad_weight) beside torch's own product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.counter import layer
from bench.harness import Bench, Row, host_time
from bench.peers import cuda_time
from memtrain_cl.array import DeviceArray, empty, from_numpy
from memtrain_cl.ops.matmul import launch_forward, launch_grad_input, launch_grad_weight
from memtrain_cl.reference import decode_dense


def _peer(left: torch.Tensor, right: torch.Tensor) -> dict[str, float]:
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = False
        a, b = left.cuda(), right.cuda()
        return {"torch CUDA float32": cuda_time(lambda: a @ b)}
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
        "grad_weight": (lambda: launch_grad_weight(device, outgoing, inputs, grad_w, 0), grad_w, grad_out.t(), x),
    }
    for name, (launch, result, left, right) in work.items():
        launch()
        # The first rows suffice: every row is made by the same code.
        found = torch.from_numpy(result.numpy()[:64]).to(torch.float64)
        expected = left[:64].to(torch.float64) @ right.to(torch.float64)
        error = float((found - expected).norm() / expected.norm())
        us = bench.time(lambda _turn: launch())  # noqa: B023 - called within this turn of the loop
        size = f"{name} tokens {tokens} layer {out}x{columns}"
        flops = 2 * tokens * out * columns
        moved = 4 * (x.numel() + grad_out.numel()) + (
            4 * out * columns if name == "grad_weight" else tensors["state"].numel() + 4 * out
        )
        bench.add(Row("matmul", size, us, moved, flops, error=f"{error:.1e} relative", peers=_peer(left, right)))


def run(bench: Bench) -> None:
    """Layers of the demo model on CPUs, of a large one on GPUs."""
    shapes = (
        [(8192, 4096, 4096), (2048, 768, 768)]
        if bench.events
        else [(2048, 256, 256), (2048, 704, 256), (2048, 256, 704)]
    )
    for tokens, out, columns in shapes:
        bench_products(bench, tokens, out, columns)
