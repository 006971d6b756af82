"""The cells of LSTM and GRU that torch asks of devices, with their backwards; the products are torch's own calls.

Gates lie side by side, [batch, gates*hidden], in torch's order.
"""

from __future__ import annotations

from typing import Any

import torch

from memtrain_cl.torch_device.registry import aten, implements
from memtrain_cl.torch_device.tensor import OpenCLTensor


def _biased(gates: Any, bias: Any) -> Any:
    return gates if bias is None else gates + bias


@implements(aten._thnn_fused_lstm_cell.default)
def lstm_cell(
    input_gates: OpenCLTensor,
    hidden_gates: OpenCLTensor,
    cx: OpenCLTensor,
    input_bias: Any = None,
    hidden_bias: Any = None,
) -> tuple[Any, Any, Any]:
    """cy = f*cx + i*g; hy = o*tanh(cy), with i, f, o = sigmoid and g = tanh of their gates. Third: i, f, g, o.

    input_gates, hidden_gates [batch, 4*hidden]: their sum and that of the biases are the gates. cx [batch, hidden].
    """
    i, f, g, o = (_biased(input_gates, input_bias) + _biased(hidden_gates, hidden_bias)).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


@implements(aten._thnn_fused_lstm_cell_backward_impl.default)
def lstm_cell_backward(
    grad_hy: Any, grad_cy: Any, cx: OpenCLTensor, cy: OpenCLTensor, workspace: OpenCLTensor, has_bias: bool
) -> tuple[Any, Any, Any]:
    """Gradients by the gates, by cx and by a bias (None without one); either gradient that comes may be None."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    by_cell = grad_cy
    by_output = torch.zeros_like(cx)
    if grad_hy is not None:
        squashed = cy.tanh()
        through = grad_hy * o * (1 - squashed * squashed)
        by_cell = through if grad_cy is None else through + grad_cy
        by_output = grad_hy * squashed * o * (1 - o)
    gates = torch.cat([by_cell * g * i * (1 - i), by_cell * cx * f * (1 - f), by_cell * i * (1 - g * g), by_output], 1)
    return gates, by_cell * f, gates.sum(0) if has_bias else None


@implements(aten._thnn_fused_gru_cell.default)
def gru_cell(
    input_gates: OpenCLTensor,
    hidden_gates: OpenCLTensor,
    hx: OpenCLTensor,
    input_bias: Any = None,
    hidden_bias: Any = None,
) -> tuple[Any, Any]:
    """hy = n + z*(hx - n), n = tanh(input's n + r*hidden's n), with r, z = sigmoid of their gates' sums.

    input_gates, hidden_gates [batch, 3*hidden]. Second: r, z, n, hx and the hidden's n, for the backward.
    """
    input_r, input_z, input_n = _biased(input_gates, input_bias).chunk(3, 1)
    hidden_r, hidden_z, hidden_n = _biased(hidden_gates, hidden_bias).chunk(3, 1)
    r, z = (input_r + hidden_r).sigmoid(), (input_z + hidden_z).sigmoid()
    n = (input_n + r * hidden_n).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hidden_n], 1)


@implements(aten._thnn_fused_gru_cell_backward.default)
def gru_cell_backward(grad_hy: OpenCLTensor, workspace: OpenCLTensor, has_bias: bool) -> tuple[Any, Any, Any, Any, Any]:
    """Gradients by the input's gates, the hidden's gates, hx, and the two biases (None without them)."""
    r, z, n, hx, hidden_n = workspace.chunk(5, 1)
    by_z = grad_hy * (hx - n) * z * (1 - z)
    by_n = grad_hy * (1 - z) * (1 - n * n)
    by_r = by_n * hidden_n * r * (1 - r)
    by_input, by_hidden = torch.cat([by_r, by_z, by_n], 1), torch.cat([by_r, by_z, by_n * r], 1)
    biases = (by_input.sum(0), by_hidden.sum(0)) if has_bias else (None, None)
    return by_input, by_hidden, grad_hy * z, *biases
