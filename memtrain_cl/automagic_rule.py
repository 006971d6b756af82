"""What one step of Automagic is told: its constants, and the tensor that it changes. No torch.

`memtrain_cl.reference.automagic` has the equations. Constants are computed here in float64; whoever uses one rounds it
to float32 once.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memtrain_cl.adam_rule import EPS_MIN
from memtrain_cl.formats import LR_MAX

if TYPE_CHECKING:
    import torch

#: Signs that an element remembers, least and most.
HISTORY_MIN, HISTORY_MAX = 2, 64
#: The least learning rate, a normal float32.
RATE_MIN = 2.0**-126

#: The order of a tensor's sum: runs of so many consecutive elements, so many of them side by side, chunks of so many
#: elements (`memtrain_cl.reference.automagic.tensor_sum`).
RUN, SIDE, CHUNK = 16, 64, 8192

#: The use of chance when gradients of 16 bits are added up, a stream of random numbers of its own.
STREAM_SUM = 10


def clamp_history(polarity_history: int) -> int:
    """The signs that are remembered: the number that was asked for, in 2..64. ValueError unless it is an integer."""
    if isinstance(polarity_history, bool) or not isinstance(polarity_history, numbers.Integral):
        raise ValueError(f"expected polarity_history as an integer, got {polarity_history!r}")
    return min(max(int(polarity_history), HISTORY_MIN), HISTORY_MAX)


def sign_planes(history: int) -> int:
    """Bytes that an element's signs take."""
    return -(-history // 8)


@dataclass(frozen=True)
class AutomagicStep:
    """The constants of one step of a tensor.

    beta2: decay of the mean square.   eps: added to its root.   clip: bound of the update's root mean square and of
    each element.   weight_decay: decoupled.   step: the number of this step, from 1.   history: signs that an element
    remembers.   entered: how many entered before this step.

    ValueError for a value out of its range.
    """

    beta2: float = 0.999
    eps: float = 1e-8
    clip: float = 1.0
    weight_decay: float = 0.0
    step: int = 1
    history: int = 8
    entered: int = 0

    def __post_init__(self) -> None:
        for name, lowest, highest in (
            ("eps", EPS_MIN, LR_MAX),
            ("clip", EPS_MIN, LR_MAX),
            ("weight_decay", 0.0, LR_MAX),
        ):
            value = getattr(self, name)
            if not (isinstance(value, numbers.Real) and lowest <= float(value) <= highest):
                raise ValueError(f"expected {name} as a number {lowest:g}..{highest:g}, got {value!r}")
        if not (isinstance(self.beta2, numbers.Real) and 0.0 <= float(self.beta2) < 1.0):
            raise ValueError(f"expected beta2 in [0, 1), got {self.beta2!r}")
        for name, least, most in (
            ("step", 1, (1 << 31) - 1),
            ("history", HISTORY_MIN, HISTORY_MAX),
            ("entered", 0, (1 << 31) - 1),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= int(value) <= most:
                raise ValueError(f"expected {name} as an integer in {least}..{most}, got {value!r}")

    @property
    def lift(self) -> float:
        """1 / sqrt(1 - beta2^step)."""
        return 1.0 / math.sqrt(1.0 - float(self.beta2) ** int(self.step))

    @property
    def slot(self) -> int:
        """The bit of the ring that takes this step's sign."""
        return self.entered % self.history

    @property
    def full(self) -> bool:
        """Whether the ring is full once this step's sign is in it."""
        return self.entered + 1 >= self.history


@dataclass
class AutomagicTensor:
    """A parameter, its gradient and its state, of n elements, all on one device; the step changes them in place.

    param: float32, bfloat16 or float16.   grad: the parameter's dtype or float32, of its shape.
    exp_avg_sq: of the parameter's shape, contiguous. Two dimensions and more: int8 codes of sqrt(v) in rotated rows;
    else float32 v.   scale: float32 [shape[0]], one a row; None for fewer than two dimensions.
    signs: uint8 [ceil(history / 8), n], of which plane b holds the bits 8b..8b+7 of each element's ring, least
    significant first; bit k is set where the gradient of the last step of slot k was above 0.
    skipped: int32 [1], counts elements of gradients that were not finite.   rule: the step's constants.
    place: the row of the tally that takes the tensor's votes.   seed: uint32, the tensor's own.
    """

    param: torch.Tensor
    grad: torch.Tensor
    exp_avg_sq: torch.Tensor
    scale: torch.Tensor | None
    signs: torch.Tensor
    skipped: torch.Tensor
    rule: AutomagicStep
    place: int = 0
    seed: int = 0
