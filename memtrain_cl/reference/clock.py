"""The decimation clock of a layer in torch: int64 [4] of (period, since, fire, flips_before), [1, 0, 0, 0] when new.

A step advances it, updates only where it fires (with lr*period), and then lets it observe how many weights changed.
"""

from __future__ import annotations

import torch


def advance_clock_(clock: torch.Tensor, totals: torch.Tensor) -> None:
    """A step begins: since += 1; fire = since >= period; where it fires, since = 0 and flips_before = totals[1].

    clock int64 [4], changed in place; totals int64 [3], the layer's counts.
    """
    period, since, _, before = clock.tolist()
    fire = since + 1 >= period
    clock.copy_(torch.tensor([period, 0 if fire else since + 1, int(fire), int(totals[1]) if fire else before]))


def observe_clock_(clock: torch.Tensor, totals: torch.Tensor, weights: int) -> None:
    """A step ends: where it fired, the share r of the layer's `weights` that its update changed gives the next period:

    1 if r > 1e-3, 2 if r > 1e-4, 4 if r > 1e-5, else 8, compared in whole numbers.
    """
    _, _, fire, before = clock.tolist()
    if fire:
        flips = int(totals[1]) - before
        clock[0] = next(
            (period for period, parts in ((1, 10**3), (2, 10**4), (4, 10**5)) if flips * parts > weights), 8
        )
