"""The row moments that rms_mode "proxy" takes instead of the mean of the gradient's squares, in torch."""

from __future__ import annotations

import torch

from memtrain_cl.reference.counter import lane_sum


def proxy_moments(grad_out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """g_sq float32 [out, 1] of a layer's grad_out float32 [M, out] and x float32 [M, in]:

    S(grad_out[:, o]^2) * (S(x^2) / numel(x))

    S sums in the one order, over the tokens and over the flat index; each operation is rounded. It estimates
    mean_j grad_w[o, j]^2 by as much as the tokens' gradients are independent of each other. Without elements: zeros.
    """
    if x.numel() == 0:
        return torch.zeros(grad_out.shape[1], 1)
    mean = lane_sum((x * x).reshape(1, -1)) / torch.tensor(x.numel(), dtype=torch.float64).to(torch.float32)
    return (lane_sum((grad_out * grad_out).t()) * mean)[:, None]
