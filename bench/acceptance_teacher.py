"""Whether counter layers find a teacher's ternary weights again: 256 x 256, C = 11, 400 steps, in every mode."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from memtrain_cl import PackedRMSCounterLinear
from memtrain_cl.formats import RMS_MODES, SCALE_REBASES

SIZE, STEPS, BATCH, LR = 256, 400, 512, 3e-3
#: The floor of the row moments: the gradient of a mean over all outputs lies above it until the teacher is found.
FLOOR = 1e-4
BOUND = 1e-4
INT8 = {"forward_compute": "int8", "update_compute": "int8"}
WAYS: tuple[dict[str, Any], ...] = ({}, {"act_save_bits": 4}, {"act_save_bits": 8}, INT8)


def recover(steps: int = STEPS, **options: Any) -> tuple[float, int]:
    """(mean squared error on new inputs, wrong weights) of a layer trained on a teacher's outputs, mean square loss."""
    torch.manual_seed(0)
    weight = torch.randint(-1, 2, (SIZE, SIZE)).float()
    teacher = math.sqrt(3 / (2 * SIZE)) * weight
    layer = PackedRMSCounterLinear(SIZE, SIZE, C=11, lr=LR, rms_eps=FLOOR, **options)
    for step in range(steps):
        layer.lr = LR * (1 - step / steps)
        x = torch.randn(BATCH, SIZE)
        (layer(x) - x @ teacher.t()).square().mean().backward()
    layer.eval()
    with torch.no_grad():
        x = torch.randn(1024, SIZE)
        error = float((layer(x) - x @ teacher.t()).square().mean())
    return error, int((layer.visible_ternary() != weight).sum())


def run() -> dict[str, Any]:
    """Every rms_mode, scale_rebase and precision; ok where each error is below the bound."""
    rows = []
    for rms_mode, scale_rebase, way in itertools.product(RMS_MODES, SCALE_REBASES, WAYS):
        options = {"rms_mode": rms_mode, "scale_rebase": scale_rebase, **way}
        error, wrong = recover(**options)
        rows.append({**options, "mse": error, "wrong_weights": wrong})
        print(f"teacher {rms_mode} {scale_rebase} {way}: mse {error:.1e}, {wrong} wrong", flush=True)
    return {"bound": BOUND, "rows": rows, "ok": all(row["mse"] < BOUND for row in rows)}
