"""What one step of Adam on compressed moments is told: its constants, and the tensors that it changes. No torch.

`memtrain_cl.reference.adam` has the equations. Constants are computed here in float64; whoever uses one rounds it to
float32 once.
"""

from __future__ import annotations

import math
import numbers
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memtrain_cl.formats import LR_MAX, step_seed

if TYPE_CHECKING:
    import torch

#: How moments are held: float32, or as codes of a linear or a non-uniform map, or as ranks within a block.
MOMENT_CODES = ("dense", "linear", "dynamic", "profile")
SKIPS = ("tensor", "block")

#: The largest gradient that counts as finite: its square, and whatever the moments make of it, stays finite in float32.
GRADIENT_MAX = 2.0**63
#: The least eps, a normal float32: a quotient of zeros is then zero.
EPS_MIN = 2.0**-126
#: The most that `AdamStep.bound` is, in units of lr: only a beta2 below beta1^2 comes near.
LONGEST_STEP = 1000.0
#: Ranks within a block are bytes.
PROFILE_BLOCK_MAX = 256

#: The uses of chance in a step, each a stream of random numbers of its own: weights of fewer than 32 bits rounded as
#: they are written, and the codes of the two moments where they are rounded stochastically.
STREAM_WEIGHT, STREAM_EXP_AVG, STREAM_EXP_AVG_SQ = 7, 8, 9


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _geometric_sum(ratio: float, terms: int) -> float:
    """1 + ratio + ratio^2 ...; infinite where it is beyond e^100."""
    if terms == 1 or ratio == 1.0:
        return float(terms)
    if ratio > 1.0 and terms * math.log(ratio) > 100.0:
        return math.inf
    return (1.0 - ratio**terms) / (1.0 - ratio)


@dataclass(frozen=True)
class AdamStep:
    """The constants of one step.

    decoupled: weight decay shrinks the weight (AdamW) and is not added to the gradient.   maximize: the gradient's
    sign is turned.   step: the number of this step, from 1.   code: of `MOMENT_CODES`.   block_size: elements that
    share a scale (at most 256 for "profile", without meaning for "dense").   stochastic_moments: codes are rounded
    stochastically, else to nearest ("profile" ranks, which rounds nothing).   skip: a gradient that is not finite
    leaves out its whole "tensor" or its "block" (the whole tensor for "dense", which has no blocks).

    ValueError for a value out of its range.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    maximize: bool = False
    step: int = 1
    code: str = "linear"
    block_size: int = 2048
    stochastic_moments: bool = False
    skip: str = "tensor"

    def __post_init__(self) -> None:
        for name, lowest, highest in (("lr", 0.0, LR_MAX), ("weight_decay", 0.0, LR_MAX), ("eps", EPS_MIN, LR_MAX)):
            value = getattr(self, name)
            if not (isinstance(value, numbers.Real) and lowest <= float(value) <= highest):
                raise ValueError(f"expected {name} as a number {lowest:g}..{highest:g}, got {value!r}")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not (isinstance(value, numbers.Real) and 0.0 <= float(value) < 1.0):
                raise ValueError(f"expected {name} in [0, 1), got {value!r}")
        for name in ("step", "block_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not 1 <= int(value) < 1 << 31:
                raise ValueError(f"expected {name} as an integer in 1..2^31-1, got {value!r}")
        for name, known in (("code", MOMENT_CODES), ("skip", SKIPS)):
            if getattr(self, name) not in known:
                raise ValueError(f"expected {name} as one of {', '.join(known)}, got {getattr(self, name)!r}")
        if self.code == "profile" and self.block_size > PROFILE_BLOCK_MAX:
            raise ValueError(f"expected block_size in 1..{PROFILE_BLOCK_MAX} for profiles, got {self.block_size}")

    @property
    def step_size(self) -> float:
        """lr / (1 - beta1^step)."""
        return float(self.lr) / (1.0 - float(self.beta1) ** int(self.step))

    @property
    def root2(self) -> float:
        """sqrt(1 - beta2^step)."""
        return math.sqrt(1.0 - float(self.beta2) ** int(self.step))

    @property
    def quick(self) -> tuple[float, float, float]:
        """1/root2 in two parts, of root2 as float32, and the least quotient that kernels/_exact.cl need not doubt with
        this eps: none where root2 is below 2^-20.
        """
        root2 = _float32(self.root2)
        if root2 < 2.0**-20:
            return 1.0, 0.0, math.inf
        inverse = _float32(1.0 / root2)
        return inverse, 1.0 / root2 - inverse, max(2.0**-120, 2.0**-98 / float(self.eps))

    @property
    def shrink(self) -> float | None:
        """1 - lr*weight_decay, by which AdamW multiplies a weight; None where it has nothing to do."""
        return 1.0 - float(self.lr) * float(self.weight_decay) if self.decoupled and self.weight_decay else None

    @property
    def bound(self) -> float:
        """The longest step that dense Adam can take, to which steps on codes are held: lr times

            (1 - beta1)/(1 - beta1^step) * sqrt((1 - beta2^step)/(1 - beta2) * sum of (beta1^2/beta2)^k, 0 <= k < step)

        which is 1 at the first step and 7.3 at last with the usual betas, and at most `LONGEST_STEP` here. (Cauchy and
        Schwarz: m and v are sums of the same gradients, with these weights and their squares.)
        """
        beta1, beta2, step = float(self.beta1), float(self.beta2), int(self.step)
        total = _geometric_sum(beta1 * beta1 / beta2 if beta2 else math.inf if beta1 else 0.0, step)
        spread = (1.0 - beta2**step) / (1.0 - beta2) * total
        longest = (1.0 - beta1) / (1.0 - beta1**step) * math.sqrt(spread)
        return float(self.lr) * min(longest, LONGEST_STEP)

    def seed_of(self, seed: int, stream: int) -> int:
        """The seed of a stream in this step, of a tensor whose own seed is `seed`; uint32."""
        return step_seed(seed, self.step, stream)


@dataclass
class AdamTensor:
    """A parameter, its gradient and its moments, of n elements, all on one device; the step changes them in place.

    param: float32, bfloat16 or float16.   grad: the parameter's dtype or float32, of its shape.
    exp_avg, exp_avg_sq: of the parameter's shape, contiguous. "dense": m and v, float32. "linear": int8 codes of m and
    of sqrt(v). "dynamic" and "profile": uint8 codes of the same.
    exp_avg_scale, exp_avg_sq_scale: float32 [blocks], for "profile" [blocks, 2] (mean, scale); None for "dense".
    skipped: int32 [2], how often this tensor's update was left out, all or a block of it, and the last step at which.
    seed: the tensor's own, uint32; it and the step's number and an element's flat index make the random numbers.
    """

    param: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    exp_avg_scale: torch.Tensor | None
    exp_avg_sq_scale: torch.Tensor | None
    skipped: torch.Tensor
    seed: int = 0
