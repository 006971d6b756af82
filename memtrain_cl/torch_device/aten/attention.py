"""Scaled dot product attention: torch's fused operation and its backward on the kernel pair that stores no [T, S].

`scaled_dot_product_attention` answers torch's function of that name above autograd: it calls the fused operation, for
which torch knows the derivative, where the kernels can, and torch's composition of products and a softmax elsewhere:
other ranks, batches that broadcast, a mask that wants a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memtrain_cl.launchers import attention as launch
from memtrain_cl.operand import Operand, contiguous_strides
from memtrain_cl.torch_device.aten.copy import contiguous
from memtrain_cl.torch_device.aten.indexing import check
from memtrain_cl.torch_device.random import next_seed
from memtrain_cl.torch_device.registry import aten, implements
from memtrain_cl.torch_device.tensor import OpenCLTensor, allocated, same_device, wrap

_fused = aten._scaled_dot_product_fused_attention_overrideable.default
_fused_backward = aten._scaled_dot_product_fused_attention_overrideable_backward.default
#: A CPU item keeps its rows of this many elements in private memory.
MOST_HEAD = 1024


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """softmax(scale * query key^T + mask) value, as torch.nn.functional defines it; torch's own errors."""
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    same_device(*tensors)
    if all(isinstance(tensor, OpenCLTensor) for tensor in tensors):
        options = {"scale": scale, "enable_gqa": enable_gqa}
        check(aten.scaled_dot_product_attention.default, query, key, value, attn_mask, dropout_p, is_causal, **options)
        if _fits(query, key, value, attn_mask):
            if query.ndim == 4:
                return _fused(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]
            # Heads stand third from last in every rank, so a mask keeps its meaning.
            lift = (None,) * (4 - query.ndim)
            out = _fused(query[lift], key[lift], value[lift], attn_mask, dropout_p, is_causal, scale=scale)[0]
            return out.flatten(0, 4 - query.ndim) if query.ndim == 3 else out[0, 0]
    return aten._scaled_dot_product_attention_math.default(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


def _fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernels can do what torch's checks let through."""
    if not query.ndim == key.ndim == value.ndim or query.ndim > 4 or (mask is not None and mask.ndim > 4):
        return False
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        return False
    floating = query.dtype in (torch.float32, torch.float16, torch.bfloat16)
    heads_alike = query.ndim < 3 or key.shape[-3] == value.shape[-3]
    batches_alike = query.shape[:-3] == key.shape[:-3] == value.shape[:-3]
    return floating and heads_alike and batches_alike and max(query.shape[-1], value.shape[-1]) <= MOST_HEAD


def _rows(operand: Operand) -> Operand:
    """The operand, or a copy, with neighbours along the last dimension."""
    return operand if operand.strides[-1] == 1 or operand.shape[-1] <= 1 else contiguous(operand)


def _laid_out_as(operand: Operand, columns: int) -> Operand:
    """An uninitialised [B, H, T, columns] whose heads stand inside or outside of its rows as the operand's do."""
    B, H, T, _ = operand.shape
    if operand.strides[1] >= operand.strides[2]:
        return allocated(operand.device, (B, H, T, columns), operand.element)
    made = allocated(operand.device, (B, T, H, columns), operand.element)
    b, t, h, c = contiguous_strides((B, T, H, columns))
    return made.viewed((B, H, T, columns), (b, h, t, c))


def _operands(query: Any, key: Any, value: Any, mask: Any) -> tuple[Operand, Operand, Operand, Operand | None] | None:
    """What the launchers take, or None where they cannot."""
    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    if not all(isinstance(tensor, OpenCLTensor) for tensor in tensors):
        return None
    q, k, v = query.operand, key.operand, value.operand
    if q.element not in launch.ELEMENTS or not q.element == k.element == v.element:
        return None
    if any(len(operand.shape) != 4 for operand in (q, k, v)) or max(q.shape[3], v.shape[3]) > MOST_HEAD:
        return None
    if mask is not None and (mask.ndim > 4 or mask.operand.element not in (*launch.ELEMENTS, "bool")):
        return None
    return _rows(q), _rows(k), _rows(v), None if mask is None else mask.operand


@implements(_fused)
def fused(
    query: Any,
    key: Any,
    value: Any,
    attn_bias: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """(out, logsumexp, None, None, T, S, seed, offset, None) of [B, H, T, D] and key, value of H or fewer heads."""
    operands = _operands(query, key, value, attn_bias)
    if operands is None or return_debug_mask:
        return NotImplemented
    q, k, v, mask = operands
    device = q.device
    out = _laid_out_as(query.operand, v.shape[3])
    logsumexp = allocated(device, q.shape[:3], "float32")
    seed = next_seed(device) if dropout_p > 0.0 else 0
    launch.attention(q, k, v, mask, out, logsumexp, scale=scale, causal=is_causal, dropout_p=dropout_p, seed=seed)
    # The seed stays with torch's graph, as a number on the host.
    stream = torch.tensor(seed, dtype=torch.int64) if dropout_p > 0.0 else None
    return wrap(out), wrap(logsumexp), None, None, q.shape[2], k.shape[2], stream, None, None


@implements(_fused_backward)
def fused_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_bias: Any,
    grad_input_mask: Any,
    out: Any,
    logsumexp: Any,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Any,
    philox_offset: Any,
    *,
    scale: float | None = None,
) -> Any:
    """The gradients of query, key and value that grad_input_mask asks for; a mask gets none."""
    operands = _operands(query, key, value, attn_bias)
    if operands is None or not isinstance(grad_out, OpenCLTensor) or grad_input_mask[3]:
        return NotImplemented
    q, k, v, mask = operands
    originals = (query.operand, key.operand, value.operand)
    grads = [
        _laid_out_as(operand, operand.shape[3]) if wanted else None
        for operand, wanted in zip(originals, grad_input_mask[:3], strict=True)
    ]
    launch.attention_backward(
        _rows(grad_out.operand),
        q,
        k,
        v,
        mask,
        _rows(out.operand),
        logsumexp.operand,
        (grads[0], grads[1], grads[2]),
        scale=scale,
        causal=is_causal,
        dropout_p=dropout_p,
        seed=int(philox_seed) if dropout_p > 0.0 else 0,
    )
    return *(None if grad is None else wrap(grad) for grad in grads), None


def _differentiable_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any,
    grad_input_mask: Any,
    *rest: Any,
    **scale: Any,
) -> Any:
    """`fused_backward` above autograd: composed of operations that torch differentiates where gradients of gradients
    are asked for (create_graph), the kernels otherwise.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (grad_out, query, key, value)):
        *_, dropout_p, is_causal, philox_seed, _ = rest
        return _composed_backward(
            grad_out, query, key, value, attn_bias, grad_input_mask, dropout_p, is_causal, philox_seed, **scale
        )
    with torch._C._AutoDispatchBelowAutograd():
        return _fused_backward(grad_out, query, key, value, attn_bias, grad_input_mask, *rest, **scale)


def _composed_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    wanted: Any,
    dropout_p: float,
    is_causal: bool,
    seed: Any,
    *,
    scale: float | None = None,
) -> Any:
    """The formulas of kernels/attention.cl, with p [B, H, T, S] stored."""
    B, H, T, D = query.shape
    G, S = key.shape[1:3]
    factor = (D**-0.5 if D else 1.0) if scale is None else scale
    keys, values = (t.repeat_interleave(H // G, 1) if G != H else t for t in (key, value))
    scores = query @ keys.transpose(-2, -1) * factor
    if is_causal:
        seen = torch.ones(T, S, dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    p = aten._safe_softmax.default(scores, -1)
    weights, grad_p = p, grad_out @ values.transpose(-2, -1)
    if dropout_p > 0.0:
        kept = allocated(query.operand.device, (B, H, T, S), "float32")  # type: ignore[attr-defined]
        launch.dropped(kept, dropout_p=dropout_p, seed=int(seed))
        factors = wrap(kept).to(p.dtype)
        weights, grad_p = p * factors, grad_p * factors
    grad_scores = p * (grad_p - (grad_p * p).sum(-1, keepdim=True)) * factor
    grads = (
        grad_scores @ keys,
        _of_groups(grad_scores.transpose(-2, -1) @ query, G),
        _of_groups(weights.transpose(-2, -1) @ grad_out, G),
    )
    return *(grad if asked else None for grad, asked in zip(grads, wanted[:3], strict=True)), None


def _of_groups(grad: Tensor, groups: int) -> Tensor:
    """[B, H, S, D] summed over the query heads that share a key head: [B, groups, S, D]."""
    return grad if grad.shape[1] == groups else grad.unflatten(1, (groups, -1)).sum(2)


#: Kept, since a library that is dropped takes its functions back.
_above_autograd = torch.library.Library("aten", "IMPL")
_above_autograd.impl(
    "_scaled_dot_product_fused_attention_overrideable_backward", _differentiable_backward, "AutogradPrivateUse1"
)
