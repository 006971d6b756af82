"""What MultiheadAttention and TransformerEncoder ask of a device in inference, where they skip their own modules."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from memtrain_cl.torch_device.registry import aten, implements
from memtrain_cl.torch_device.tensor import OpenCLTensor

#: Of a mask: [target, source]; [batch, source]; [batch, heads, target, source].
_ATTENTION, _PADDING = 0, 1


def _masked(scores: Any, mask: Any, mask_type: int | None) -> Any:
    # As in torch a mask of numbers means the places where it is not 0.
    mask = mask if mask.dtype == torch.bool else mask != 0
    if mask_type == _ATTENTION:
        mask = mask.view(1, 1, *mask.shape[-2:])
    elif mask_type == _PADDING:
        mask = mask.view(mask.shape[0], 1, 1, mask.shape[1])
    return scores.masked_fill(mask, -math.inf)


@implements(aten._native_multi_head_attention.default)
def multi_head_attention(
    query: OpenCLTensor,
    key: OpenCLTensor,
    value: OpenCLTensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: OpenCLTensor,
    qkv_bias: OpenCLTensor,
    proj_weight: OpenCLTensor,
    proj_bias: OpenCLTensor,
    mask: Any = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Any, Any]:
    """softmax(q k^T / sqrt(d)) v by heads, projected; and the softmax (None unless need_weights).

    query [batch, target, embed_dim], key and value [batch, source, embed_dim]. True in a mask leaves a place out.
    """
    heads = [
        functional.linear(x, weight, bias).unflatten(-1, (num_head, -1)).transpose(1, 2)
        for x, weight, bias in zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    ]
    q, k, v = heads
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    if mask is not None:
        scores = _masked(scores, mask, mask_type)
    weights = scores.softmax(-1)
    out = functional.linear((weights @ v).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if not need_weights:
        return out, None
    return out, weights.mean(1) if average_attn_weights else weights


@implements(aten._transformer_encoder_layer_fwd.default)
def encoder_layer(
    src: OpenCLTensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: OpenCLTensor,
    qkv_bias: OpenCLTensor,
    proj_weight: OpenCLTensor,
    proj_bias: OpenCLTensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: OpenCLTensor,
    norm_bias_1: OpenCLTensor,
    norm_weight_2: OpenCLTensor,
    norm_bias_2: OpenCLTensor,
    ffn_weight_1: OpenCLTensor,
    ffn_bias_1: OpenCLTensor,
    ffn_weight_2: OpenCLTensor,
    ffn_bias_2: OpenCLTensor,
    mask: Any = None,
    mask_type: int | None = None,
) -> Any:
    """One layer of torch.nn.TransformerEncoder without dropout; src [batch, length, embed_dim]."""

    def first_norm(x: Any) -> Any:
        return functional.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def second_norm(x: Any) -> Any:
        return functional.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    def attended(x: Any) -> Any:
        projections = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return multi_head_attention(x, x, x, embed_dim, num_heads, *projections, mask, False, True, mask_type)[0]

    def fed_forward(x: Any) -> Any:
        hidden = functional.linear(x, ffn_weight_1, ffn_bias_1)
        return functional.linear(hidden.relu() if not use_gelu else functional.gelu(hidden), ffn_weight_2, ffn_bias_2)

    if norm_first:
        x = src + attended(first_norm(src))
        return x + fed_forward(second_norm(x))
    x = first_norm(src + attended(src))
    return second_norm(x + fed_forward(x))


@implements(aten._nested_tensor_from_mask_left_aligned.default)
def nests(t: OpenCLTensor, mask: OpenCLTensor) -> bool:
    """False: the device holds no nested tensors, so that TransformerEncoder goes on with padded ones."""
    return False


@implements(aten._nested_tensor_from_mask.default, aten._nested_tensor_from_tensor_list.default)
def nested(*args: Any, **kwargs: Any) -> Any:
    """TypeError."""
    raise TypeError("the device 'opencl' holds dense real tensors alone, no nested ones")
