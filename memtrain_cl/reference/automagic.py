"""Automagic in torch: steps whose learning rate is voted up and down by the signs of gradients.

One tensor of n elements, with everything in float32 and each operation rounded, in this order (constants are rounded
from float64 once; sums are `tensor_sum`'s):

    g = grad, 0 where it is not finite, which is counted                     finite: up to 2^63 in magnitude
    v = beta2*(s*s) + (1 - beta2)*(g*g)       two dimensions and more: s = max(what the codes give, 0); else beta2*v
    u = g / (sqrt(v)*lift + eps)                                                     lift = 1 / sqrt(1 - beta2^step)
    u = clamp(u * (1 / max(1, sqrt(sum(u*u)/n) / clip)), -clip, clip)
    the sign g > 0 enters the ring of the last `history` signs
    p = p - lr*(u + weight_decay*p)

and sqrt(v), or v, is held again. bfloat16 and float16 weights are rounded stochastically as they are written
(`memtrain_cl.reference.rounding`), with step_seed(seed, step, STREAM_WEIGHT).

A full ring votes: 1 where all its signs are alike, -1 where each differs from the one before it, else 0. The tensor's
votes are sum(|u|*vote) and sum(|u|), both 0 while its ring is not full. Once a step and group, over the group's
tensors in their order:

    signal = clamp(sum of the first / max(sum of the second, 1e-30), -1, 1)
    lr = clamp(lr * exp(signal), min_lr, max_lr)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from memtrain_cl.adam_rule import GRADIENT_MAX, STREAM_WEIGHT
from memtrain_cl.automagic_rule import CHUNK, RUN, SIDE, AutomagicTensor
from memtrain_cl.formats import row_length, row_rotation, step_seed
from memtrain_cl.reference.counter import lane_sum
from memtrain_cl.reference.hadamard import decode_rotated, encode_rotated
from memtrain_cl.reference.rounding import round_to


def _float32(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64).to(torch.float32)


def _sqrt(values: torch.Tensor) -> torch.Tensor:
    # torch's own float32 root is off by one place now and then; through float64 the result is rounded right.
    return torch.sqrt(values.to(torch.float64)).to(torch.float32)


def _halved(values: torch.Tensor, left: int) -> torch.Tensor:
    """The last dimension, a power of two long, added up to `left` numbers: upper half onto lower, repeatedly."""
    while values.shape[-1] > left:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values


def tensor_sum(values: torch.Tensor) -> torch.Tensor:
    """The float32 sum [] of a tensor's elements, flat, in the order that runs on every device alike:

    Runs of 16 consecutive elements are halved to 8 numbers, and those to 4. A chunk is 8192 elements, 512 runs; the
    numbers of its run k are added to the lanes 4*(k mod 64) .. + 3, ascending, and the 256 lanes are halved 128, 64 ...
    1. The chunks' sums are added up as the elements of a row are: 1024 lanes, halved (`reference.counter.lane_sum`).
    Beyond the end stand zeros.
    """
    chunks = -(-values.numel() // CHUNK)
    padded = torch.zeros(chunks * CHUNK)
    padded[: values.numel()] = values.reshape(-1)
    runs = _halved(padded.reshape(chunks, CHUNK // RUN // SIDE, SIDE, RUN), 4)
    lanes = torch.zeros(chunks, 4 * SIDE)
    for row in runs.flatten(2).unbind(1):
        lanes = lanes + row
    return lane_sum(_halved(lanes, 1).t())[0]


def exp_of(x: torch.Tensor) -> torch.Tensor:
    """exp of float32 x in -1..1: k = x/ln 2 to nearest, r = x - k*ln 2, sum of r^i/i! to i = 11 (Horner), times 2^k."""
    k = torch.round(x * _float32(1 / math.log(2)))
    # ln 2 in two parts, of which the first has so few bits that its product with k is exact.
    r = (x - k * 0.693359375) + k * _float32(0.693359375 - math.log(2))
    series = _float32(1 / math.factorial(11)).expand_as(x)
    for i in range(10, -1, -1):
        series = series * r + _float32(1 / math.factorial(i))
    return torch.ldexp(series, k.to(torch.int32))


def pack_signs(signs: torch.Tensor) -> torch.Tensor:
    """bool [history, n] -> uint8 [ceil(history/8), n]: eight signs in a byte, the first one in the lowest bit."""
    history, n = signs.shape
    padded = torch.zeros(-(-history // 8) * 8, n, dtype=torch.uint8)
    padded[:history] = signs.to(torch.uint8)
    weights = 2 ** torch.arange(8, dtype=torch.int64)
    return (padded.reshape(-1, 8, n).to(torch.int64) * weights[:, None]).sum(1).to(torch.uint8)


def unpack_signs(packed: torch.Tensor, history: int) -> torch.Tensor:
    """The way back of `pack_signs`: bool [history, n]."""
    bits = (packed[:, None, :] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    return bits.reshape(-1, packed.shape[1])[:history].bool()


def votes_of(signs: torch.Tensor) -> torch.Tensor:
    """float32 [n] of signs bool [history, n], oldest first: 1 where all agree, -1 where all neighbours differ."""
    up = signs.all(0) | ~signs.any(0)
    down = (signs[1:] ^ signs[:-1]).all(0)
    return up.to(torch.float32) - down.to(torch.float32)


def _step(tensor: AutomagicTensor, lr: torch.Tensor, tally: torch.Tensor) -> None:
    rule, shape = tensor.rule, tensor.param.shape
    p = tensor.param.reshape(-1).to(torch.float32)
    grad = tensor.grad.reshape(-1).to(torch.float32)
    finite = grad.abs() <= GRADIENT_MAX
    tensor.skipped += (~finite).sum().to(torch.int32)
    g = torch.where(finite, grad, 0.0)

    rot = row_rotation(row_length(shape))
    if tensor.scale is None:
        held = tensor.exp_avg_sq.reshape(-1)
    else:
        s = decode_rotated(tensor.exp_avg_sq, tensor.scale, rot).reshape(-1).clamp_min(0.0)
        held = s * s
    v = _float32(rule.beta2) * held + _float32(1.0 - rule.beta2) * (g * g)
    root = _sqrt(v)
    u = g / (root * _float32(rule.lift) + _float32(rule.eps))
    norm = _sqrt(tensor_sum(u * u) / _float32(float(u.numel())))
    u = u * (1.0 / (norm / _float32(rule.clip)).clamp_min(1.0))
    u = u.clamp(-_float32(rule.clip), _float32(rule.clip))

    if tensor.scale is None:
        tensor.exp_avg_sq.copy_(v.reshape(shape))
    else:
        codes, scale = encode_rotated(root.reshape(shape), rot)
        tensor.exp_avg_sq.copy_(codes)
        tensor.scale.copy_(scale)

    ring = unpack_signs(tensor.signs, rule.history)
    ring[rule.slot] = g > 0
    tensor.signs.copy_(pack_signs(ring))
    if rule.full:
        vote = votes_of(ring.roll(-(rule.slot + 1), dims=0))
        tally[tensor.place] = torch.stack([tensor_sum(u.abs() * vote), tensor_sum(u.abs())])
    else:
        tally[tensor.place] = 0.0

    p = p - lr * (u + _float32(rule.weight_decay) * p)
    dtype = tensor.param.dtype
    written = p if dtype == torch.float32 else round_to(p, dtype, step_seed(tensor.seed, rule.step, STREAM_WEIGHT))
    tensor.param.copy_(written.reshape(shape))


@torch.no_grad()
def automagic_step_(tensors: Sequence[AutomagicTensor], lr: torch.Tensor, tally: torch.Tensor) -> None:
    """One step of every tensor, in place (see above; `AutomagicTensor` has the shapes).

    lr: float32 [1], the group's learning rate.   tally: float32 [tensors of the group, 2], whose rows `place` are set
    to the tensors' votes.
    """
    for tensor in tensors:
        if tensor.param.numel():
            _step(tensor, lr, tally)


@torch.no_grad()
def automagic_rate_(lr: torch.Tensor, tally: torch.Tensor, min_lr: float, max_lr: float) -> None:
    """Apply the votes: lr float32 [1] by the sums over tally float32 [tensors, 2], which is made zero."""
    sums = torch.zeros(2)
    for row in tally:
        sums = sums + row
    signal = (sums[0] / sums[1].clamp_min(_float32(1e-30))).clamp(-1.0, 1.0)
    lr.copy_((lr * exp_of(signal)).clamp(_float32(min_lr), _float32(max_lr)))
    tally.zero_()


@torch.no_grad()
def add_rounded_(total: torch.Tensor, grad: torch.Tensor, seed: int) -> None:
    """total + grad in float32, into total, bfloat16 or float16, rounded stochastically; grad of total's shape."""
    summed = total.to(torch.float32) + grad.to(torch.float32)
    total.copy_(round_to(summed.contiguous(), total.dtype, seed))
