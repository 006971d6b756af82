"""Rows rotated by a Hadamard matrix and held in 8 bits, there and back, beside plain torch, which multiplies by the
matrix: 268 million numbers on GPUs, 16.8 million on CPUs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bench.harness import Bench, Row
from bench.peers import time_peers
from memtrain_cl import reference
from memtrain_cl.array import empty, from_numpy
from memtrain_cl.cases_hadamard import hadamard_case
from memtrain_cl.ops.hadamard import launch_decode, launch_encode, launch_rotate
from memtrain_cl.probe import require_exact

ROT, COLUMNS = 256, 4096
TURNS = 2
#: Rows that are compared with the oracle.
CHECKED = 64


def plain_rotate(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """rotate as a torch user would write it, any device."""
    return (x.view(-1, ROT) @ matrix).view_as(x)


def plain_encode(x: torch.Tensor, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """encode_rotated as a torch user would write it."""
    y = plain_rotate(x, matrix)
    scale = y.abs().amax(dim=1, keepdim=True).clamp_min(1e-30) / 127
    return (y / scale).round().clamp(-127, 127).to(torch.int8), scale


def plain_decode(codes: torch.Tensor, scale: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """The way back of `plain_encode`."""
    return plain_rotate(codes.to(torch.float32) * scale, matrix)


def run(bench: Bench) -> None:
    """All of it at the size of this device's kind."""
    require_exact(bench.device)
    rows = 65536 if bench.events else 4096
    x = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(rows))
    sources = [from_numpy(bench.device, x.numpy()) for _ in range(TURNS)]
    results = [empty(bench.device, (rows, COLUMNS), np.float32) for _ in range(TURNS)]
    codes = [empty(bench.device, (rows, COLUMNS), np.int8) for _ in range(TURNS)]
    scales = [empty(bench.device, (rows,), np.float32) for _ in range(TURNS)]
    sizes: dict[str, Any] = {"rows": rows, "columns": COLUMNS, "rot": ROT}

    def rotate(turn: int) -> Any:
        at = turn % TURNS
        return launch_rotate(bench.device, sources[at], results[at], rot=ROT, element="float32")

    def encode(turn: int) -> Any:
        at = turn % TURNS
        return launch_encode(bench.device, sources[at], codes[at], scales[at], element="float32", **sizes)

    def decode(turn: int) -> Any:
        at = turn % TURNS
        return launch_decode(bench.device, codes[at], scales[at], results[at], **sizes)

    head = x[:CHECKED]
    want = reference.encode_rotated(head, ROT)
    expected = {
        "rotate": {"y": reference.rotate(head, ROT)},
        "encode_rotated": {"codes": want[0], "scale": want[1]},
        "decode_rotated": {"y": reference.decode_rotated(*want, ROT)},
    }
    matrix = reference.regular_hadamard(ROT)
    plain = plain_encode(x, matrix)
    peers = {
        "rotate": time_peers("plain", plain_rotate, x, matrix),
        "encode_rotated": time_peers("plain", plain_encode, x, matrix),
        "decode_rotated": time_peers("plain", plain_decode, *plain, matrix),
    }
    found: dict[str, Any] = {
        "rotate": {"y": results[0]},
        "encode_rotated": {"codes": codes[0], "scale": scales[0]},
        "decode_rotated": {"y": results[0]},
    }
    for name, launch in (("rotate", rotate), ("encode_rotated", encode), ("decode_rotated", decode)):
        launch(0)
        got = {part: array.numpy()[:CHECKED] for part, array in found[name].items()}
        error = differing(got, {part: tensor.numpy() for part, tensor in expected[name].items()})
        us = bench.time(launch)
        case = hadamard_case(name, rows, COLUMNS, ROT)
        line = f"{name} {rows}x{COLUMNS}, blocks of {ROT}"
        bench.add(Row("hadamard", line, us, case.bytes_moved, case.flops, error=error, peers=peers[name]))


def differing(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> str:
    """How many bytes differ, by name, of some rows; as `mismatches` says it of whole arrays."""
    wrong = {
        name: int(np.count_nonzero(np.ascontiguousarray(part).view(np.uint8) != expected[name].view(np.uint8)))
        for name, part in found.items()
    }
    return "0 bytes differ" if not any(wrong.values()) else f"bytes differ: {wrong}"
