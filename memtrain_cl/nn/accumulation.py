"""The sum of gradients that a layer keeps between backwards, where one update follows several of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

#: Keys of a partial sum in a layer's state_dict.
PROGRESS, VALUES, SQUARES = "accumulation", "accumulated", "accumulated_squares"
KEYS = (PROGRESS, VALUES, SQUARES)


class GradientSum:
    """The gradients of the backwards since a layer's last update, added in float32 in the order of the backwards.

    values: float32 [out, in], there from the first gradient on, with the device's memory kept for the next sum.
    squares: float32 [out, 1], the sum of estimated mean squares (rms_mode "proxy").   held: whether they hold
    anything.   rounds: backwards that count (of a reused layer, those of a whole forward count once).   open: the uses
    of a reused layer are not all done.   next_index: the number of the next use.
    """

    def __init__(self) -> None:
        self.values: torch.Tensor | None = None
        self.squares: torch.Tensor | None = None
        self.clear()

    def clear(self) -> None:
        """Begin a new sum in the same memory."""
        self.held = False
        self.open = False
        self.rounds = 0
        self.next_index = 0

    @property
    def partial(self) -> bool:
        """Whether an update is under way."""
        return self.open or self.rounds > 0

    @property
    def nbytes(self) -> int:
        """Bytes of the sum as it is allocated."""
        return sum(part.nbytes for part in (self.values, self.squares) if part is not None)

    def rows(self, row: int, count: int) -> torch.Tensor:
        """The sum's rows row .. row+count (a view)."""
        if self.values is None:
            raise RuntimeError("expected a sum of gradients, got none")
        return self.values[row : row + count]

    def keep(self, tile: torch.Tensor, row: int, shape: tuple[int, int]) -> None:
        """Add rows row .. of a gradient of `shape`; `finish` follows the last of its tiles."""
        if self.values is None or (not self.held and self.values.device != tile.device):
            self.values = torch.empty(shape, dtype=torch.float32, device=tile.device)
        target = self.rows(row, tile.shape[0])
        if self.held:
            target.add_(tile)
        else:
            target.copy_(tile)

    def finish(self, squares: torch.Tensor | None) -> None:
        """A gradient's tiles are all in; squares: its estimated mean squares."""
        if squares is not None:
            self.squares = squares.clone() if not self.held or self.squares is None else self.squares.add_(squares)
        self.held = True

    def move(self, device: torch.device) -> None:
        """To another device; types stay."""
        self.values = None if self.values is None else self.values.to(device)
        self.squares = None if self.squares is None else self.squares.to(device)

    def saved(self) -> dict[str, torch.Tensor]:
        """The entries of a state_dict: none between updates.

        "accumulation" int64 [3]: rounds, next_index, open. "accumulated" float32 [out, in] and "accumulated_squares"
        [out, 1] where there is a sum already.
        """
        if not self.partial:
            return {}
        progress = torch.tensor([self.rounds, self.next_index, int(self.open)], device="cpu")
        named = {VALUES: self.values, SQUARES: self.squares} if self.held else {}
        return {PROGRESS: progress, **{name: part for name, part in named.items() if part is not None}}

    def load(self, saved: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Take a sum over from `saved`, or begin a new one where that holds none."""
        self.clear()
        progress = saved.get(PROGRESS)
        if progress is None:
            return
        self.rounds, self.next_index, is_open = (int(number) for number in progress)
        self.open = bool(is_open)
        values, squares = saved.get(VALUES), saved.get(SQUARES)
        if values is not None:
            self.values = values.detach().to(device, torch.float32, copy=True)
            self.squares = None if squares is None else squares.detach().to(device, torch.float32, copy=True)
            self.held = True


def sum_fault(saved: Mapping[str, torch.Tensor], shape: tuple[int, int], *, accumulates: bool) -> str | None:
    """What is wrong with the partial sum of a state that is about to be loaded into a layer of `shape`, or None."""
    if not saved:
        return None
    if not accumulates:
        return f"expected accumulate > 1 or reuse=True for a state with a partial sum, got {sorted(saved)}"
    wanted = {PROGRESS: (3,), VALUES: shape, SQUARES: (shape[0], 1)}
    for name, value in saved.items():
        if tuple(value.shape) != wanted[name]:
            return f"{name}: expected {list(wanted[name])}, got {list(value.shape)}"
    if PROGRESS not in saved:
        return f"expected {PROGRESS} beside {sorted(saved)}, got none"
    return None
