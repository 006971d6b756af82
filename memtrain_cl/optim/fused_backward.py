"""Steps in backward: each parameter is stepped when its gradient is complete, and the gradient is freed at once.

So gradients never exist all at a time, and what needs all of them at a time is refused: a norm over all, one verdict on
infinities, a loss evaluated again by a closure, a mean over ranks that is taken after backward. In the place of a
freed gradient stands one without memory, which refuses to be computed with, so that a mistake shows where it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

_FREED = (
    "expected no use of a gradient after backward, got {name}: where parameters are stepped in backward "
    "(fused_backward=True of CompressedAdam, fused=True of Automagic) a gradient is freed with its step. Clip each "
    "tensor's with max_grad_norm=, and let no GradScaler look for infinities (a gradient that is not finite is skipped "
    "and counted)"
)
_aten = torch.ops.aten
#: What may be done with a freed gradient: moving its parameter, which takes it along.
_HARMLESS = {_aten.detach.default, _aten.alias.default, _aten._to_copy.default, _aten.clone.default}


class FreedGradient(torch.Tensor):
    """The place of a gradient that has been used and freed: its shape, type and device, and no memory."""

    @staticmethod
    def __new__(cls, like: torch.Tensor, dtype: torch.dtype | None = None, device: Any = None) -> FreedGradient:
        made: FreedGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=dtype or like.dtype, device=device or like.device, requires_grad=False
        )
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FreedGradient({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _HARMLESS and isinstance(args[0], FreedGradient):
            options = kwargs or {}
            return FreedGradient(args[0], options.get("dtype"), options.get("device"))
        raise RuntimeError(_FREED.format(name=str(func).removeprefix("aten.")))


#: The parameters that are stepped in backward, so that none is so twice.
_stepped: Any = WeakTensorKeyDictionary()


class BackwardSteps:
    """The hooks of an optimizer on its parameters.

    update(group, index, parameter): takes the step with the parameter's gradient.   accumulate: gradients of a
    parameter that make one step; they are summed.   max_grad_norm: the longest gradient of a tensor, None for any.
    option: the optimizer's word for steps in backward.
    """

    def __init__(
        self,
        update: Callable[[int, int, torch.Tensor], None],
        accumulate: int,
        max_grad_norm: float | None,
        option: str = "fused_backward",
    ) -> None:
        self._update = update
        self._option = option
        self._accumulate = accumulate
        self._max_grad_norm = max_grad_norm
        self._handles: list[Any] = []
        self._pending: Any = WeakTensorKeyDictionary()
        self._arrived = 0

    def attach(self, parameters: Iterable[tuple[int, int, torch.Tensor]]) -> None:
        """Step these parameters, (group, index, parameter) each, in backward from now on; all of them or none."""
        chosen = [place for place in parameters if place[2].requires_grad]
        if any(parameter in _stepped for _, _, parameter in chosen):
            raise ValueError(
                "expected a parameter that no optimizer steps in backward, got one that is; "
                "call release_backward() of the other optimizer"
            )
        for group, index, parameter in chosen:
            _stepped[parameter] = True
            self._handles += [
                parameter.register_hook(self._before(parameter)),
                parameter.register_post_accumulate_grad_hook(self._after(group, index)),
            ]

    def release(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take the hooks away; gradients stay from then on."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for parameter in parameters:
            _stepped.pop(parameter, None)
        self.clear(parameters)

    def clear(self, parameters: Iterable[torch.Tensor]) -> None:
        """Drop gradients, freed ones and those that wait for others."""
        self._pending.clear()
        for parameter in parameters:
            parameter.grad = None

    def finish(self, parameters: Iterable[torch.Tensor]) -> None:
        """What `step()` has left to do: see that backward came. RuntimeError where it cannot have."""
        for parameter in parameters:
            grad = parameter.grad
            if grad is not None and not isinstance(grad, FreedGradient) and not self._pending.get(parameter):
                raise RuntimeError(
                    f"expected gradients from backward alone with {self._option}=True, got one that was assigned, "
                    "or of a parameter that was frozen when the optimizer was made"
                )
        if not self._arrived:
            raise RuntimeError(
                f"expected a backward before step() with {self._option}=True, got none that reached a parameter: "
                "are these still the model's parameters?"
            )
        self._arrived = 0

    def _before(self, parameter: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """Makes room for a gradient that is about to come."""
        reference = TensorWeakRef(parameter)

        def hook(grad: torch.Tensor) -> None:
            own = reference()
            if own is None:
                return
            if isinstance(own.grad, FreedGradient):
                own.grad = None
            if own.grad is None:
                self._pending[own] = 0

        return hook

    def _after(self, group: int, index: int) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            _require_alone(self._option)
            self._arrived += 1
            count = self._pending.get(parameter, 0) + 1
            if count < self._accumulate:
                self._pending[parameter] = count
                return
            self._pending[parameter] = 0
            with torch.no_grad():
                self._clip(parameter.grad)
                self._update(group, index, parameter)
                parameter.grad = FreedGradient(parameter)

        return hook

    def _clip(self, grad: Any) -> None:
        """As clip_grad_norm_ of this tensor alone: grad * min(1, max/(norm + 1e-6)), without waiting for the device.

        A norm beyond float32 makes the gradient NaN, which is left out and counted, where a factor of 0 would pass for
        a gradient of zeros.
        """
        if self._max_grad_norm is not None:
            norm = torch.linalg.vector_norm(grad.float())
            factor = (self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            grad.mul_((factor + (norm - norm)).to(grad.dtype))


def _require_alone(option: str) -> None:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise RuntimeError(
            f"expected one process with {option}=True, got {distributed.get_world_size()} ranks: "
            "gradients would be used before they are averaged"
        )
