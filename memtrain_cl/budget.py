"""The memory bill of training a transformer, by formula: 16-bit AdamW beside weights that are counters."""

from __future__ import annotations

import math
from dataclasses import dataclass

GIB = 2**30
POLICIES = ("store_all", "selective_half", "reversible", "none_lower_bound")


@dataclass(frozen=True)
class BudgetRow:
    """One way to train, in GiB: weights and their state, gradients, optimizer, activations, the rest, and the sum."""

    name: str
    persistent_gib: float
    grad_gib: float
    optim_gib: float
    acts_gib: float
    misc_gib: float

    @property
    def total_gib(self) -> float:
        """The sum."""
        return self.persistent_gib + self.grad_gib + self.optim_gib + self.acts_gib + self.misc_gib


def _activations(policy: str, one: float, layers: int, anchor_every: int) -> float:
    """Bytes of all blocks' activations, of which one block has `one`."""
    if policy == "store_all":
        return layers * one
    if policy == "selective_half":
        return layers * one / 2
    if policy == "reversible":
        return (1 + layers // anchor_every) * one
    return 0.0


def training_budget(
    *,
    layers: int = 24,
    d_model: int = 2048,
    vocab: int = 50257,
    linear_param_factor: float = 12.0,
    tied_lm_head: bool = True,
    batch: int = 1,
    seq: int = 1024,
    state_bits: float = 6.0,
    embedding_bits: float = 16.0,
    counter_act_bits: float = 4.0,
    row_state_bytes: float = 8.0,
    baseline_act_bytes: float = 2.0,
    activation_multiplier: float = 6.0,
    baseline_policy: str = "store_all",
    counter_policy: str = "reversible",
    anchor_every: int = 8,
    misc_gib: float = 1.0,
) -> list[BudgetRow]:
    """Three rows: AdamW in bfloat16, counters, and the least that ternary weights could take.

        n_lin = linear_param_factor * layers * d_model^2     n_emb = vocab * d_model (twice unless tied_lm_head)
        rows = linear_param_factor * layers * d_model        a = batch * seq * d_model * bytes * activation_multiplier

    The AdamW row has 2 bytes a parameter, 2 of gradient and 12 of optimizer. Counters have state_bits a linear weight,
    row_state_bytes a row (12 where the base of the scale is kept apart) and embedding_bits an embedding weight, no
    gradient and no optimizer. The bound has log2(3) bits a linear weight.

    Policies of activations: "store_all" layers * a, "selective_half" half of it, "reversible" (1 + layers //
    anchor_every) * a, "none_lower_bound" 0; a counts baseline_act_bytes an element in the first row and
    counter_act_bits in the others. ValueError for a policy of another name or a size out of range.
    """
    for name, value in (
        ("layers", layers),
        ("d_model", d_model),
        ("vocab", vocab),
        ("batch", batch),
        ("seq", seq),
        ("anchor_every", anchor_every),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"expected {name} as an integer >= 1, got {value!r}")
    for name, number in (
        ("linear_param_factor", linear_param_factor),
        ("state_bits", state_bits),
        ("embedding_bits", embedding_bits),
        ("counter_act_bits", counter_act_bits),
        ("row_state_bytes", row_state_bytes),
        ("baseline_act_bytes", baseline_act_bytes),
        ("activation_multiplier", activation_multiplier),
        ("misc_gib", misc_gib),
    ):
        if not 0 <= number < math.inf:
            raise ValueError(f"expected {name} as a finite number >= 0, got {number!r}")
    for name, policy in (("baseline_policy", baseline_policy), ("counter_policy", counter_policy)):
        if policy not in POLICIES:
            raise ValueError(f"expected {name} as one of {', '.join(POLICIES)}, got {policy!r}")
    linear = linear_param_factor * layers * d_model**2
    embedding = vocab * d_model * (1 if tied_lm_head else 2)
    rows = linear_param_factor * layers * d_model
    elements = batch * seq * d_model * activation_multiplier
    baseline_acts = _activations(baseline_policy, elements * baseline_act_bytes, layers, anchor_every) / GIB
    counter_acts = _activations(counter_policy, elements * counter_act_bits / 8, layers, anchor_every) / GIB
    every = linear + embedding
    embedded = embedding_bits / 8 * embedding
    counters = state_bits / 8 * linear + row_state_bytes * rows + embedded
    bound = math.log2(3) / 8 * linear + embedded
    bits = f"{state_bits:g}b + {counter_act_bits:g}b acts"
    return [
        BudgetRow("BF16 AdamW-style", 2 * every / GIB, 2 * every / GIB, 12 * every / GIB, baseline_acts, misc_gib),
        BudgetRow(f"finite-state {bits}", counters / GIB, 0.0, 0.0, counter_acts, misc_gib),
        BudgetRow("visible ternary entropy lower-bound", bound / GIB, 0.0, 0.0, counter_acts, misc_gib),
    ]
