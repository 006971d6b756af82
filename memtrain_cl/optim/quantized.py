"""Parameters of the optimum-quanto package: eight bits an element and a scale a row, updated as float32.

A `QBytesTensor` is known by its parts, so that nothing of the package is needed here.
"""

from __future__ import annotations

from typing import Any

import torch


def is_quantized(parameter: Any) -> bool:
    """Whether a parameter is a tensor of int8 codes with scales along one axis."""
    return type(parameter) is not torch.nn.Parameter and all(
        hasattr(parameter, name) for name in ("_data", "_scale", "axis", "dequantize", "qtype")
    )


def widened(parameter: torch.Tensor) -> torch.Tensor:
    """What a step changes: the parameter itself, or a float32 copy of what a quantised one stands for."""
    if not is_quantized(parameter):
        return parameter.detach()
    data: torch.Tensor = parameter._data  # type: ignore[attr-defined]
    if data.dtype != torch.int8:
        raise TypeError(f"expected quantised parameters of int8, got {data.dtype}")
    return parameter.detach().dequantize().to(torch.float32).contiguous()


def requantize_(parameter: Any, values: torch.Tensor, seed: int) -> None:
    """Write float32 values into a quantised parameter: fresh scales, largest/127 along its axis, codes rounded
    stochastically by random numbers of `seed`.
    """
    scale, axis = parameter._scale, parameter.axis
    dims = () if axis is None else tuple(dim for dim in range(values.ndim) if dim != axis % values.ndim)
    most = values.abs().amax(dim=dims, keepdim=axis is not None)
    fresh = torch.where(most > 0, most / 127, 1.0).to(scale.dtype).reshape(scale.shape)
    # The scale as it will be read, which its type may have rounded.
    y = values / fresh.to(torch.float32)
    below = torch.floor(y)
    chance = torch.Generator(device=values.device).manual_seed(seed)
    drawn = torch.rand(values.shape, generator=chance, device=values.device)
    codes = (below + (drawn < y - below)).clamp(-127, 127)
    parameter._data.copy_(codes.to(torch.int8))
    scale.copy_(fresh)
