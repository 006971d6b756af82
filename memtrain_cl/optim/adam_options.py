"""The options of CompressedAdam's parameter groups, checked when a group is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from memtrain_cl.adam_rule import EPS_MIN, PROFILE_BLOCK_MAX, SKIPS, AdamStep
from memtrain_cl.code_maps import CODES
from memtrain_cl.formats import LR_MAX
from memtrain_cl.nn.options import at_least, flag, flag_or_none, one_of
from memtrain_cl.optim.group_options import betas, between, require_same_groups, whole_between
from memtrain_cl.optim.group_options import checked as checked_options

#: The ways to hold moments that a group can ask for; "g4" is the published name of profiles.
METHODS = ("auto", "int8", "g4", "profile", "dense")
ROUNDINGS = ("nearest", "stochastic")
#: The options that decide how a state's bytes are read. A state loads only where they are the same.
LAYOUT = ("compression_method", "code", "int8_block_size", "profile_block_size")


def _refused(name: str, value: Any) -> bool:
    if value is not False:
        raise ValueError(f"expected {name}=False, got {value!r}: the step runs outside of CUDA graphs and of autograd")
    return False


CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "lr": between(0.0, LR_MAX),
    "betas": betas,
    "eps": between(EPS_MIN, LR_MAX),
    "weight_decay": between(0.0, LR_MAX),
    "compression_method": one_of(*METHODS),
    "decoupled_weight_decay": flag,
    "maximize": flag,
    "int8_block_size": whole_between(1, (1 << 31) - 1),
    "profile_block_size": whole_between(1, PROFILE_BLOCK_MAX),
    "code": one_of(*CODES),
    "moment_rounding": one_of(*ROUNDINGS),
    "refit_every": at_least(1),
    "min_size_for_g4": at_least(1),
    "g4_gof_threshold": between(0.0, 1.0),
    "skip": one_of(*SKIPS),
    "seed": whole_between(0, 0xFFFFFFFF),
    "foreach": flag_or_none,
    "capturable": _refused,
    "differentiable": _refused,
}


def checked(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group with its options checked; ValueError for an unknown one and for one out of range."""
    return checked_options(group, CHECKS)


def require_groups(current: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """ValueError unless saved groups can take the place of these."""
    require_same_groups(current, saved)
    for group, other in zip(current, saved, strict=True):
        missing = sorted(set(CHECKS) - set(other))
        if missing:
            raise ValueError(f"expected the state of a CompressedAdam, got groups without {', '.join(missing)}")
        checked({name: other[name] for name in CHECKS})
        for name in LAYOUT:
            if _plain(other[name]) != _plain(group[name]):
                raise ValueError(
                    f"expected a state with {name}={group[name]!r}, as this optimizer has, got {other[name]!r}"
                )


def _plain(value: Any) -> Any:
    """The value, without the published name of profiles."""
    return "profile" if value == "g4" else value


def require_layout(group: Mapping[str, Any], code: str, block_size: int) -> None:
    """ValueError unless a state of this code and block size is what the group's options ask for."""
    wanted = codes_of(group)
    if code not in wanted:
        raise ValueError(
            f"expected the group's compression_method and code as when its states were made, in the code {code}, "
            f"got {' or '.join(wanted)}"
        )
    if block_size != block_size_of(group, code):
        raise ValueError(
            f"expected the group's block size as when its states were made, {block_size}, "
            f"got {block_size_of(group, code)}"
        )


def first_code(group: Mapping[str, Any]) -> str:
    """The code, of `adam_rule.MOMENT_CODES`, with which a tensor of the group begins."""
    method = group["compression_method"]
    if method == "dense":
        return "dense"
    return "profile" if method in ("g4", "profile") else str(group["code"])


def codes_of(group: Mapping[str, Any]) -> tuple[str, ...]:
    """The codes that tensors of the group can have."""
    first = first_code(group)
    return (first, "profile") if group["compression_method"] == "auto" else (first,)


def chooses(group: Mapping[str, Any], n: int, step: int) -> bool:
    """Whether a tensor of n elements chooses its code anew after this step: the first, and every refit_every-th on."""
    due = group["compression_method"] == "auto" and (step - 1) % int(group["refit_every"]) == 0
    return due and n >= int(group["min_size_for_g4"])


def block_size_of(group: Mapping[str, Any], code: str) -> int:
    """Elements that share a scale."""
    return int(group["profile_block_size" if code == "profile" else "int8_block_size"])


def rule_of(group: Mapping[str, Any], code: str, step: int) -> AdamStep:
    """The constants of a group's step; ValueError for one that a schedule has driven out of its range."""
    beta1, beta2 = group["betas"]
    return AdamStep(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=group["decoupled_weight_decay"],
        maximize=group["maximize"],
        step=step,
        code=code,
        block_size=block_size_of(group, code),
        stochastic_moments=group["moment_rounding"] == "stochastic",
        skip=group["skip"],
    )
