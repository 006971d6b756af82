"""Adam on compressed moments, in torch: one step of some tensors.

With everything in float32 and each operation rounded, in this order (constants are rounded from float64 once):

    g = grad, negated to maximize;   Adam: g = g + weight_decay*p, or 0 where that is beyond 2^63
    AdamW: p = p * (1 - lr*weight_decay)
    m = beta1*m + (1 - beta1)*g
    v = beta2*(s*s) + (1 - beta2)*(g*g);   s = sqrt(v)                  with code "dense": beta2*v, v itself is held
    q = (step_size*m) / (s/root2 + eps)
    codes other than "dense": q = clamp(q, -bound, bound)      bound = `AdamStep.bound`, the longest step of dense Adam
    p = p - q                           step_size = lr/(1 - beta1^step), root2 = sqrt(1 - beta2^step)

m and s are what their codes give, and the new ones are encoded: sqrt(v) is held, not v, and one above zero keeps a code
above zero, so that no q divides a moment by eps alone. An element whose m, s and g are zero keeps p bit for bit.

A gradient counts as finite up to 2^63 in magnitude. One that does not leaves out its tensor, or its block with
skip="block": weights and moments stay as they are, and `skipped` tells.

bfloat16 and float16 weights are widened, updated, and rounded stochastically as they are written
(`memtrain_cl.reference.rounding`), with seed_of(seed, STREAM_WEIGHT).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memtrain_cl.adam_rule import (
    GRADIENT_MAX,
    STREAM_EXP_AVG,
    STREAM_EXP_AVG_SQ,
    STREAM_WEIGHT,
    AdamStep,
    AdamTensor,
)
from memtrain_cl.reference.blockwise import dequantize_blockwise, quantize_blockwise
from memtrain_cl.reference.profile import decode_profile, encode_profile
from memtrain_cl.reference.rounding import round_to


def _float32(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64).to(torch.float32)


def _sqrt(values: torch.Tensor) -> torch.Tensor:
    # torch's own float32 root is off by one place now and then; through float64 the result is rounded right.
    return torch.sqrt(values.to(torch.float64)).to(torch.float32)


Tables = tuple[torch.Tensor, torch.Tensor]


def _decode(
    codes: torch.Tensor, scale: torch.Tensor | None, rule: AdamStep, table: torch.Tensor | None, positive: bool
) -> torch.Tensor:
    """The moment, flat; sqrt(v) where `positive`."""
    if scale is None:
        return codes.reshape(-1).clone()
    if table is not None:
        return decode_profile(codes.reshape(-1), scale, table, rule.block_size, positive=positive)
    return dequantize_blockwise(codes.reshape(-1), scale, rule.block_size, code=rule.code, signed=not positive)


def _encode(
    x: torch.Tensor, rule: AdamStep, table: torch.Tensor | None, positive: bool, seed: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(codes, scale) of a flat moment."""
    if rule.code == "dense":
        return x, None
    if table is not None:
        return encode_profile(x, rule.block_size)
    stream = STREAM_EXP_AVG_SQ if positive else STREAM_EXP_AVG
    return quantize_blockwise(
        x,
        rule.block_size,
        code=rule.code,
        signed=not positive,
        positive=positive,
        seed=rule.seed_of(seed, stream) if rule.stochastic_moments else None,
    )


def _step(tensor: AdamTensor, rule: AdamStep, tables: Tables | tuple[None, None], keep: torch.Tensor) -> None:
    """One tensor's step. keep: bool, one an element: which change."""
    p = tensor.param.reshape(-1).to(torch.float32)
    g = tensor.grad.reshape(-1).to(torch.float32)
    g = torch.where(keep, -g if rule.maximize else g, 0.0)
    if rule.weight_decay and not rule.decoupled:
        g = g + _float32(rule.weight_decay) * p
        g = torch.where(g.abs() <= GRADIENT_MAX, g, 0.0)
    if rule.shrink is not None:
        p = p * _float32(rule.shrink)
    m = _decode(tensor.exp_avg, tensor.exp_avg_scale, rule, tables[0], False)
    held = _decode(tensor.exp_avg_sq, tensor.exp_avg_sq_scale, rule, tables[1], True)
    m = _float32(rule.beta1) * m + _float32(1.0 - rule.beta1) * g
    v = held if rule.code == "dense" else held * held
    v = _float32(rule.beta2) * v + _float32(1.0 - rule.beta2) * (g * g)
    s = _sqrt(v)
    q = (_float32(rule.step_size) * m) / (s / _float32(rule.root2) + _float32(rule.eps))
    if rule.code != "dense":
        q = torch.clamp(q, -_float32(rule.bound), _float32(rule.bound))
    p = p - q

    dtype = tensor.param.dtype
    written = p if dtype == torch.float32 else round_to(p, dtype, rule.seed_of(tensor.seed, STREAM_WEIGHT))
    shape = tensor.param.shape
    tensor.param.copy_(torch.where(keep, written, tensor.param.reshape(-1)).reshape(shape))
    blocks = keep[:: rule.block_size]
    for codes, scale, x, table, positive in (
        (tensor.exp_avg, tensor.exp_avg_scale, m, tables[0], False),
        (tensor.exp_avg_sq, tensor.exp_avg_sq_scale, v if rule.code == "dense" else s, tables[1], True),
    ):
        new_codes, new_scale = _encode(x, rule, table, positive, tensor.seed)
        codes.copy_(torch.where(keep, new_codes, codes.reshape(-1)).reshape(shape))
        if scale is not None and new_scale is not None:
            scale.copy_(torch.where(blocks if scale.ndim == 1 else blocks[:, None], new_scale, scale))


@torch.no_grad()
def adam_step_(tensors: Sequence[AdamTensor], rule: AdamStep, *, tables: Tables | None = None) -> None:
    """One step of every tensor, in place (see above; `AdamTensor` has the shapes).

    tables: for code "profile", the standardised quantiles float32 [256] of m and of sqrt(v). ValueError where they are
    missing, or given for another code.
    """
    if (tables is None) == (rule.code == "profile"):
        raise ValueError(f"expected tables for the code 'profile' and no other, got code {rule.code!r}")
    for tensor in tensors:
        if tensor.param.numel() == 0:
            continue
        counts = tensor.grad.reshape(-1).to(torch.float32).abs() <= GRADIENT_MAX
        if rule.skip == "tensor" or rule.code == "dense":
            keep = counts.all().expand_as(counts)
        else:
            blocks = [part.all().expand_as(part) for part in counts.split(rule.block_size)]
            keep = torch.cat(blocks)
        if not keep.all():
            tensor.skipped += torch.tensor([1, 0], dtype=torch.int32)
            tensor.skipped[1] = rule.step
        if keep.any():
            _step(tensor, rule, (None, None) if tables is None else tables, keep)
