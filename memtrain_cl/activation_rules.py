"""Which of what torch saves for backward may come back rounded, by the function of torch's that saves it.

Where the gradient is linear in what was saved, as in every product, unbiased rounding leaves its mean as it is; where
it is a smooth bounded function of it, a little noise does a little harm. A ReLU's gradient asks for the sign alone, and
an unbiased value near 0 would lose it. Elsewhere an error grows without bounds (a quotient by what was rounded to 0, an
exponential of a log-probability) or nobody knows: there the tensor is kept as it is.
"""

from __future__ import annotations

import enum
import sys
import threading
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memtrain_cl.saved_tensors import in_checkpoint


class Keep(enum.Enum):
    """What is kept of a saved tensor."""

    FULL = "as it is"
    ROUNDED = "rounded without bias"
    SIGNS = "signs"


_PRODUCTS = """
linear bilinear matmul mm bmm mv addmm addbmm baddbmm addmv addr outer ger dot vdot inner tensordot einsum kron
conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution
mul mul_ multiply multiply_ addcmul addcmul_ lerp lerp_ square square_ exp exp_ exp2 exp2_ expm1 expm1_
dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout mse_loss
"""
_SMOOTH = """
gelu silu mish sigmoid sigmoid_ tanh tanh_ softplus softmax sin sin_ cos cos_ erf erf_ glu
layer_norm rms_norm group_norm batch_norm instance_norm
"""
_SIGNS = "relu relu_ leaky_relu leaky_relu_"
#: These save log-sum-exps beside their operands, which tells them apart: those have a gradient.
_ATTENTION = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward"})
_RULES = dict.fromkeys((_PRODUCTS + _SMOOTH).split(), Keep.ROUNDED) | dict.fromkeys(_SIGNS.split(), Keep.SIGNS)

_FUNCTIONS = "torch.autograd.function"
#: Rooms whose hooks may stand between torch and what asks for a rule.
_HOOKS = ("memtrain_cl.activation", "memtrain_cl.recompute", "memtrain_cl.forecast")


class FunctionWatch(TorchFunctionMode):
    """While it is entered, it knows which function of torch's a thread is in."""

    def __init__(self) -> None:
        super().__init__()
        self._of_thread = threading.local()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = self._of_thread
        before = getattr(own, "name", None)
        own.name = getattr(func, "__name__", "")
        try:
            return func(*args, **(kwargs or {}))
        finally:
            own.name = before

    def rule_for(self, tensor: torch.Tensor) -> Keep:
        """What to keep of a tensor; to be asked by the hook that torch calls with it."""
        name = getattr(self._of_thread, "name", None)
        if name is None:
            return _rule_of_function(sys._getframe(1).f_back)
        if name in _ATTENTION:
            return Keep.ROUNDED if tensor.requires_grad else Keep.FULL
        return _RULES.get(name, Keep.FULL)


def _rule_of_function(frame: Any) -> Keep:
    """Outside torch's functions it is a custom autograd function that saves: those that bear it say so."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_HOOKS):
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") != _FUNCTIONS:
        return Keep.FULL
    return Keep.ROUNDED if getattr(frame.f_locals.get("cls"), "saved_may_be_rounded", False) else Keep.FULL


def require_outside_checkpoint() -> None:
    """RuntimeError in a region of torch.utils.checkpoint that saves nothing itself (use_reentrant=False)."""
    if in_checkpoint():
        raise RuntimeError(
            "saved_activations inside a region of torch.utils.checkpoint would save what the checkpoint is there to "
            "recompute, and nothing would be recomputed; put it around the checkpoint, or leave one of the two away"
        )
