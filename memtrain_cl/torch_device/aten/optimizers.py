"""torch's fused Adam and AdamW: one kernel a tensor, the step count read on the device.

    g <- -g if maximize;  Adam: g <- g + weight_decay*p;  AdamW: p <- p - lr*weight_decay*p
    m <- m + (1 - beta1)*(g - m);  v <- beta2*v + (1 - beta2)*g^2;  amsgrad: w <- max(w, v), which takes v's place below
    p <- p - lr/(1 - beta1^step) * m / (sqrt(v)/sqrt(1 - beta2^step) + eps)

1 - beta^step is computed as -expm1(step*log(beta)), which keeps float32's digits in the first steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from memtrain_cl.launchers.elementwise import Formula, launch
from memtrain_cl.torch_device.registry import aten, implements
from memtrain_cl.torch_device.tensor import OpenCLTensor

# s0 lr, s1 1 - beta1, s2 beta2, s3 1 - beta2, s4 weight_decay, s5 eps, s6 log(beta1), s7 log(beta2), s8 gradient's sign
_HEAD = "float g = x1 * s8; float p = x0;"
_DECAY = {False: " g += s4 * p;", True: " p -= s0 * s4 * p;"}
# As lerp: exact for beta1 = 0 too.
_MOMENTS = " y1 = s1 < 0.5f ? x2 + s1 * (g - x2) : g + (s1 - 1.0f) * (g - x2); y2 = s2 * x3 + s3 * g * g;"
_MAXIMUM = {False: " const float w = y2;", True: " const float w = fmax(x5, y2); y3 = w;"}
_STEP = " y0 = p - s0 / -expm1(x4 * s6) * y1 / (sqrt(w) / sqrt(-expm1(x4 * s7)) + s5);"


def _formula(decoupled: bool, amsgrad: bool) -> Formula:
    tensors = 6 if amsgrad else 5
    body = _HEAD + _DECAY[decoupled] + _MOMENTS + _MAXIMUM[amsgrad] + _STEP
    return Formula(body, ("float",) * tensors, ("float",) * (4 if amsgrad else 3), ("float",) * 9)


_FORMULAS = {
    (decoupled, amsgrad): _formula(decoupled, amsgrad) for decoupled in (False, True) for amsgrad in (False, True)
}


def _handler(decoupled: bool) -> Any:
    def step(
        self: Sequence[OpenCLTensor],
        grads: Sequence[OpenCLTensor],
        exp_avgs: Sequence[OpenCLTensor],
        exp_avg_sqs: Sequence[OpenCLTensor],
        max_exp_avg_sqs: Sequence[OpenCLTensor],
        state_steps: Sequence[OpenCLTensor],
        *,
        lr: Any,
        beta1: float,
        beta2: float,
        weight_decay: float,
        eps: float,
        amsgrad: bool,
        maximize: bool,
        grad_scale: Any = None,
        found_inf: Any = None,
    ) -> Any:
        if grad_scale is not None or found_inf is not None:
            return NotImplemented
        formula = _FORMULAS[decoupled, amsgrad]
        scalars = (
            float(lr),
            1.0 - beta1,
            beta2,
            1.0 - beta2,
            weight_decay,
            eps,
            math.log(beta1) if beta1 > 0 else -math.inf,
            math.log(beta2) if beta2 > 0 else -math.inf,
            -1.0 if maximize else 1.0,
        )
        for position, parameter in enumerate(self):
            tensors = [parameter, grads[position], exp_avgs[position], exp_avg_sqs[position], state_steps[position]]
            outputs = [tensors[0], tensors[2], tensors[3]]
            if amsgrad:
                tensors.append(max_exp_avg_sqs[position])
                outputs.append(tensors[5])
            launch(formula, [t.operand for t in outputs], [t.operand for t in tensors], *scalars)
        return None

    return step


implements(aten._fused_adam_.default, aten._fused_adam_.tensor_lr)(_handler(decoupled=False))
implements(aten._fused_adamw_.default, aten._fused_adamw_.tensor_lr)(_handler(decoupled=True))
