"""What the cases of memtrain_cl.cases_aten do, but the random ones (verify_random.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memtrain_cl.case import Case
from memtrain_cl.launchers import attention as attention_ops
from memtrain_cl.operation import Operation, Tensors, numbers
from memtrain_cl.verify_random import CHECKS as RANDOM
from memtrain_cl.verify_random import STREAM

aten = torch.ops.aten


def _on(tensor: torch.Tensor) -> dict[str, Any]:
    return {"device": tensor.device, "dtype": tensor.dtype}


# ---- elementwise, reductions, rows ----

_MATRIX = numbers(("rows", "columns"))
_MATRICES = numbers(("rows", "columns"), ("rows", "columns"))


def _softmax(case: Case, x: torch.Tensor) -> Any:
    op = aten._log_softmax if case.options["log"] else aten._softmax
    return op(x, 0 if case.options.get("over_rows") else 1, False)


def _softmax_backward(case: Case, grad: torch.Tensor, x: torch.Tensor) -> Any:
    op = aten._log_softmax_backward_data if case.options["log"] else aten._softmax_backward_data
    return op(grad, _softmax(case, x), 0 if case.options.get("over_rows") else 1, x.dtype)


def _sort(case: Case, x: torch.Tensor) -> Any:
    return torch.sort(torch.round(x * 4), dim=1, stable=True)  # many are equal


# ---- norms ----


def _layer_norm(case: Case, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    return aten.native_layer_norm(x, [x.shape[1]], weight, bias, 1e-5)


def _layer_norm_backward(case: Case, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, grad: torch.Tensor) -> Any:
    _, mean, rstd = aten.native_layer_norm(x, [x.shape[1]], w, b, 1e-5)
    return aten.native_layer_norm_backward(grad, x, [x.shape[1]], mean, rstd, w, b, [True] * 3)


_PLANES = ("batch", "channels", "size")


def _batch_norm(case: Case, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    return aten.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)


def _batch_norm_eval(case: Case, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor) -> Any:
    return aten.native_batch_norm(x, weight, bias, mean, mean * mean + 0.5, False, 0.1, 1e-5)[0]


def _batch_norm_backward(case: Case, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, grad: torch.Tensor) -> Any:
    _, mean, rstd = aten.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5)
    return aten.native_batch_norm_backward(grad, x, w, None, None, mean, rstd, True, 1e-5, [True] * 3)


# ---- losses ----


def _classified(case: Case, chance: torch.Generator) -> Tensors:
    rows, classes = case.shape["rows"], case.shape["classes"]
    target = torch.randint(0, classes, (rows,), generator=chance)
    target[rows // 2] = -100
    return torch.randn(rows, classes, generator=chance), target, torch.rand(classes, generator=chance) + 0.5


def _nll(reduction: int) -> Callable[..., Any]:
    def run(case: Case, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> Any:
        return aten.nll_loss_forward(x, target, weight, reduction, -100)

    return run


def _nll_backward(case: Case, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> Any:
    total = aten.nll_loss_forward(x, target, weight, 1, -100)[1]
    return aten.nll_loss_backward(torch.full((), 0.5, **_on(x)), x, target, weight, 1, -100, total)


# ---- attention ----

_HEADS = ("batch", "heads", "tokens", "head")


def _attention(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    causal = bool(case.options.get("causal"))
    if q.device.type == "opencl":
        return aten._scaled_dot_product_fused_attention_overrideable(q, k, v, None, 0.0, causal)[0]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _attention_backward(case: Case, q: Any, k: Any, v: Any, grad: Any) -> Any:
    alone = case.options.get("alone")
    wanted = [True, alone in (None, "key"), alone in (None, "value")]
    if q.device.type != "opencl":
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2])
        grads = torch.autograd.grad(out, leaves, grad)
        return [grad for grad, want in zip(grads, wanted, strict=True) if want]
    made: list[Any] = [
        torch.empty_like(tensor) if want else None for tensor, want in zip((q, k, v), wanted, strict=True)
    ]
    result: Any = torch.empty_like(q)
    level: Any = torch.empty(q.shape[:3], **_on(q))
    forward = q.operand, k.operand, v.operand, None, result.operand, level.operand
    attention_ops.attention(*forward)
    dq, dk, dv = (None if tensor is None else tensor.operand for tensor in made)
    attention_ops.attention_backward(grad.operand, *forward, (dq, dk, dv))
    return [tensor for tensor in made if tensor is not None]


# ---- indices ----


def _indexed(*shapes: tuple[str, ...]) -> Callable[[Case, torch.Generator], Tensors]:
    """Indices [count] of rows, many of them equal, before numbers of these shapes."""
    rest = numbers(*shapes)

    def make(case: Case, chance: torch.Generator) -> Tensors:
        index = torch.randint(0, case.shape["rows"], (case.shape["count"],), generator=chance)
        return index, *rest(case, chance)

    return make


def _every(index: torch.Tensor, columns: int) -> torch.Tensor:
    return index[:, None].expand(len(index), columns).contiguous()


def _embedding_backward(case: Case, index: torch.Tensor, grad: torch.Tensor) -> Any:
    return aten.embedding_dense_backward(grad, index, case.shape["rows"], -1, False)


def _search(case: Case, index: torch.Tensor, row: torch.Tensor) -> Any:
    return torch.searchsorted(row.sort().values, index.to(row.dtype) / case.shape["rows"])


def _dropped_out(case: Case, place: torch.Tensor) -> torch.Tensor:
    made = torch.empty(1, 1, case.shape["n"] // 8, 8, device=place.device)
    attention_ops.dropped(made.operand, dropout_p=0.5, seed=STREAM)  # type: ignore[attr-defined]
    return torch.stack([(made == 0).sum() + (made == 2).sum(), made.new_full((), made.numel()).long()])


def _plain(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` of the tensors alone."""
    return lambda case, *tensors: run(*tensors)


AFFINE = (("columns",), ("columns",))
CHANNELS = (("channels",), ("channels",))
CHECKS: dict[str, Operation] = {
    "add_row": Operation(numbers(("rows", "columns"), ("columns",)), _plain(torch.add)),
    "add_transposed": Operation(numbers(("rows", "columns"), ("columns", "rows")), _plain(lambda x, y: x + y.t())),
    "gelu": Operation(numbers(("n",)), _plain(torch.nn.functional.gelu)),
    "sum_rows": Operation(_MATRIX, _plain(lambda x: x.sum(1))),
    "sum_columns": Operation(_MATRIX, _plain(lambda x: x.sum(0))),
    "sum_all": Operation(_MATRIX, _plain(torch.sum)),
    "variance": Operation(_MATRIX, _plain(lambda x: x.var(1))),
    "argmax": Operation(_MATRIX, _plain(lambda x: x.argmax(1))),
    "cumsum": Operation(_MATRIX, _plain(lambda x: x.cumsum(1))),
    "sort": Operation(_MATRIX, _sort),
    "softmax": Operation(_MATRIX, _softmax),
    "softmax_backward": Operation(_MATRICES, _softmax_backward),
    "layer_norm": Operation(numbers(("rows", "columns"), *AFFINE), _layer_norm),
    "layer_norm_backward": Operation(numbers(("rows", "columns"), *AFFINE, ("rows", "columns")), _layer_norm_backward),
    "batch_norm": Operation(numbers(_PLANES, *CHANNELS), _batch_norm),
    "batch_norm_eval": Operation(numbers(_PLANES, *CHANNELS, ("channels",)), _batch_norm_eval),
    "batch_norm_backward": Operation(numbers(_PLANES, *CHANNELS, _PLANES), _batch_norm_backward),
    "nll_each": Operation(_classified, _nll(0)),
    "nll_mean": Operation(_classified, _nll(1)),
    "nll_backward": Operation(_classified, _nll_backward),
    "attention": Operation(numbers(_HEADS, _HEADS, _HEADS), _attention),
    "attention_backward": Operation(numbers(_HEADS, _HEADS, _HEADS, _HEADS), _attention_backward),
    "attention_dropout": Operation(
        numbers(()), _dropped_out, lambda case, place: torch.tensor([case.shape["n"], case.shape["n"]])
    ),
    "index_select": Operation(_indexed(("rows", "columns")), _plain(lambda i, x: x.index_select(0, i))),
    "masked_scatter": Operation(
        numbers(("count", "columns"), ("count", "columns")), _plain(lambda x, y: x.masked_scatter(x > 0, y))
    ),
    "gather": Operation(_indexed(("rows", "columns")), _plain(lambda i, x: x.gather(0, _every(i, x.shape[1])))),
    "scatter_value": Operation(
        _indexed(("rows", "columns")), _plain(lambda i, x: x.scatter(0, _every(i, x.shape[1]), 2.5))
    ),
    # Equal places get equal values, for torch's CPU operation leaves open which of several stays.
    "index_put": Operation(
        _indexed(("rows", "columns")), _plain(lambda i, x: x.index_put((i, i % x.shape[1]), i.to(x.dtype)))
    ),
    "scatter_add": Operation(
        _indexed(("rows", "columns"), ("count", "columns")),
        _plain(lambda i, x, y: x.scatter_add(0, _every(i, x.shape[1]), y)),
    ),
    "embedding_backward": Operation(_indexed(("count", "columns")), _embedding_backward),
    "search": Operation(_indexed(("rows",)), _search),
    "nonzero": Operation(numbers(("count", "columns")), _plain(lambda x: (x > 0).nonzero())),
    **RANDOM,
    "mm": Operation(
        numbers(("M", "K"), ("N", "K")),
        lambda case, a, b: a @ (b.t() if case.options["transposed"] else b.t().contiguous()),
    ),
    "mv": Operation(
        numbers(("M", "K"), ("K",)),
        lambda case, a, x: (a.t().contiguous().t() if case.options["transposed"] else a) @ x,
    ),
}
