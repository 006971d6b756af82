"""``module.to("opencl")`` and back keep the module's Parameter objects, as moves to other devices do.

torch puts new values into a parameter by `data`, which a tensor of another class cannot take, and makes a new Parameter
instead: parameters that modules share would part, and an optimizer made before would go on with the old ones. So the
two change places here (torch.utils.swap_tensors) whenever a parameter comes to the device or leaves it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_torch_apply: Any = torch.nn.Module._apply


def _move(parameter: torch.nn.Parameter, values: Tensor) -> None:
    """Make `parameter` a parameter of `values`, on another kind of device. RuntimeError where views of it live."""
    gradient, parameter.grad = parameter.grad, None
    try:
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(values, requires_grad=parameter.requires_grad))
    except RuntimeError as error:
        parameter.grad = gradient
        raise RuntimeError(
            f"a parameter of shape {list(parameter.shape)} cannot move from {parameter.device} to {values.device} "
            "while views of it or weak references to it live; drop those, or move the module before they are made"
        ) from error
    if gradient is not None:
        parameter.grad = gradient.to(values.device, values.dtype)


def _keeping(convert: Callable[[Tensor], Tensor]) -> Any:
    """`convert`, which gives a parameter itself where it comes to the device or leaves it."""

    def converted(tensor: Tensor) -> Tensor:
        if torch.nn.parameter.is_lazy(tensor):
            target = convert(torch.empty(0)).device
            if target.type == "opencl":
                raise RuntimeError(
                    f"lazy modules do not move to {target} before a forward on the host has given them their shapes"
                )
        values = convert(tensor)
        if (values.device.type == "opencl") == (tensor.device.type == "opencl"):
            return values
        if not isinstance(tensor, torch.nn.Parameter):
            return values
        _move(tensor, values)
        return tensor

    converted.keeps = True  # type: ignore[attr-defined]
    return converted


def _apply(self: torch.nn.Module, fn: Any, recurse: bool = True) -> Any:
    """torch.nn.Module._apply, in which parameters that come to the device or leave it stay the objects they are."""
    # Children get the function that their parent got, which is wrapped once.
    return _torch_apply(self, fn if hasattr(fn, "keeps") else _keeping(fn), recurse)


def install() -> None:
    """Put `_apply` before torch's."""
    torch.nn.Module._apply = _apply  # type: ignore[method-assign]
