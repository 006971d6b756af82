"""Cases of the kernels behind torch's device "opencl" (see `memtrain_cl.cases`): each is one operation of torch's.

What an operation does stands in `memtrain_cl.verify_aten`, under the name that `op` gives it here. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memtrain_cl.case import Case
from memtrain_cl.elements import ELEMENTS

#: Largest error of an element beside float64, relative to itself and the mean square of all: a few roundings.
CLOSE = {"float32": 5e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
#: The same where thousands of terms are summed, some of them cancelling.
SUMMED = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


def aten_case(
    op: str,
    kernels: str,
    shape: dict[str, int],
    element: str = "float32",
    *,
    moved: int = 0,
    flops: int = 0,
    tolerance: float = 0.0,
    small: bool = False,
    native_only: bool = False,
    **options: Any,
) -> Case:
    """kernels: "file.kernel ...", first the one that the case is about, then others that it launches. moved: elements
    read and written.
    """
    first, *rest = [tuple(name.split(".")) for name in kernels.split()]
    chosen = {"element": element} if element != "float32" else {}
    return Case(
        first[0],
        first[1],
        op,
        shape,
        chosen | options,
        bytes_moved=moved * ELEMENTS[element].itemsize,
        flops=flops,
        tolerance=tolerance,
        small=small,
        native_only=native_only,
        also=tuple((file, kernel) for file, kernel in rest),
    )


def _elementwise() -> Iterator[Case]:
    for rows, columns, small in ((5, 7, True), (129, 260, False), (33, 1023, False)):
        n = rows * columns
        shape = {"rows": rows, "columns": columns}
        yield aten_case("add_row", "elementwise.elementwise", shape, moved=2 * n + columns, flops=n, small=small)
        yield aten_case("add_transposed", "elementwise.elementwise", shape, moved=3 * n, flops=n, small=small)
    for element in ("float32", "float16", "bfloat16"):
        options: Any = {"moved": 2 * 5000, "flops": 8 * 5000, "tolerance": CLOSE[element]}
        yield aten_case("gelu", "elementwise.elementwise", {"n": 5000}, element, **options)


def _reductions() -> Iterator[Case]:
    for rows, columns, small in ((3, 5, True), (67, 1029, False), (3, 20000, False)):
        n = rows * columns
        shape = {"rows": rows, "columns": columns}
        parts = " reduce.reduce_parts" if columns > 8192 else ""
        options: Any = {"flops": n, "tolerance": SUMMED["float32"], "small": small}
        yield aten_case("sum_rows", f"reduce.reduce{parts}", shape, moved=n + rows, **options)
        yield aten_case("sum_columns", "reduce.reduce", shape, moved=n + columns, **options)
        yield aten_case("sum_all", f"reduce.reduce{parts}", shape, moved=n + 1, **options)
        yield aten_case("variance", f"reduce.reduce{parts}", shape, moved=n + rows, **{**options, "flops": 4 * n})
        yield aten_case("argmax", f"reduce.reduce{parts}", shape, moved=n + 2 * rows, small=small)
    for rows, columns, small in ((3, 9, True), (2, 20000, False), (40, 300, False)):
        n = rows * columns
        shape = {"rows": rows, "columns": columns}
        yield aten_case("cumsum", "scan.scan", shape, "int64", moved=2 * n, flops=n, small=small)
        kernels = "sort.sort_tiles sort.sort_finish" + (" sort.sort_merge" if columns > 8192 else "")
        yield aten_case("sort", kernels, shape, moved=4 * n, small=small)
    yield aten_case(
        "sum_all",
        "reduce.reduce_parts reduce.reduce",
        {"rows": 1, "columns": 40000},
        moved=40001,
        small=True,
        flops=40000,
        tolerance=SUMMED["float32"],
    )
    yield aten_case(
        "cumsum",
        "scan.scan_carries scan.scan",
        {"rows": 1, "columns": 40000},
        "int64",
        moved=80000,
        flops=40000,
        small=True,
    )
    yield aten_case("sort", "sort.sort_merge sort.sort_tiles", {"rows": 1, "columns": 9000}, moved=36000, small=True)


def _softmax() -> Iterator[Case]:
    for rows, columns, small in ((3, 7, True), (5, 1028, False), (2, 8193, False)):
        n = rows * columns
        shape = {"rows": rows, "columns": columns}
        options: Any = {"tolerance": CLOSE["float32"], "small": small}
        for log in (False, True):
            yield aten_case("softmax", "softmax.softmax", shape, moved=2 * n, flops=4 * n, log=log, **options)
            backward = "softmax.softmax_backward"
            yield aten_case("softmax_backward", backward, shape, moved=3 * n, flops=4 * n, log=log, **options)
    for rows, columns, small in ((5, 7, True), (65, 70, False)):
        n = rows * columns
        shape = {"rows": rows, "columns": columns}
        options = {"tolerance": CLOSE["float32"], "small": small, "log": False, "over_rows": True}
        yield aten_case("softmax", "softmax.softmax_columns", shape, moved=2 * n, flops=4 * n, **options)
        backward = "softmax.softmax_backward_columns"
        yield aten_case("softmax_backward", backward, shape, moved=3 * n, flops=4 * n, **options)


def _norms() -> Iterator[Case]:
    for rows, columns, small in ((3, 8, True), (67, 260, False), (5, 1025, False)):
        n = rows * columns
        shape = {"rows": rows, "columns": columns}
        options: Any = {"tolerance": SUMMED["float32"], "small": small}
        yield aten_case("layer_norm", "norm.norm_forward", shape, moved=2 * n + 2 * columns, flops=8 * n, **options)
        backward = "norm.norm_backward column_sums.column_sums"
        yield aten_case("layer_norm_backward", backward, shape, moved=3 * n + 3 * columns, flops=14 * n, **options)
    yield aten_case(
        "layer_norm_backward",
        "column_sums.column_sums norm.norm_backward",
        {"rows": 9, "columns": 12},
        moved=3 * 108 + 36,
        flops=14 * 108,
        tolerance=SUMMED["float32"],
        small=True,
    )
    for batch, channels, size, small in ((2, 3, 5, True), (4, 6, 77, False), (3, 2, 5000, False)):
        n = batch * channels * size
        shape = {"batch": batch, "channels": channels, "size": size}
        options = {"tolerance": SUMMED["float32"], "small": small}
        kernels = "channel_norm.moments channel_norm.normalize_planes"
        yield aten_case("batch_norm", kernels, shape, moved=2 * n + 2 * channels, flops=8 * n, **options)
        kernels = "channel_norm.inverse_deviation channel_norm.normalize_planes"
        yield aten_case("batch_norm_eval", kernels, shape, moved=2 * n + 4 * channels, flops=4 * n, **options)
        kernels = "channel_norm.backward_sums channel_norm.coefficients channel_norm.backward"
        yield aten_case("batch_norm_backward", kernels, shape, moved=3 * n + 5 * channels, flops=14 * n, **options)


def _losses() -> Iterator[Case]:
    for rows, classes, small in ((3, 5, True), (300, 67, False)):
        shape = {"rows": rows, "classes": classes}
        options: Any = {"tolerance": CLOSE["float32"], "small": small}
        yield aten_case("nll_each", "loss.nll_each", shape, moved=4 * rows, **options)
        yield aten_case("nll_mean", "loss.nll_parts loss.nll_total", shape, moved=3 * rows + 1, flops=rows, **options)
        yield aten_case("nll_backward", "loss.nll_backward", shape, moved=rows * (classes + 2), **options)


def _attention() -> Iterator[Case]:
    for batch, heads, tokens, head, small in ((1, 1, 5, 8, True), (2, 3, 65, 32, False), (1, 2, 130, 80, False)):
        n, scores = batch * heads * tokens * head, batch * heads * tokens * tokens
        shape = {"batch": batch, "heads": heads, "tokens": tokens, "head": head}
        options: Any = {"tolerance": SUMMED["float32"], "small": small}
        for causal in (False, True):
            forward = "attention.attention_forward"
            yield aten_case("attention", forward, shape, moved=4 * n, flops=4 * scores * head, causal=causal, **options)
        backward = "attention.attention_grad_query attention.attention_grad_key_value attention.attention_delta"
        yield aten_case("attention_backward", backward, shape, moved=8 * n, flops=10 * scores * head, **options)
        for one in ("key", "value"):
            kernel = f"attention.attention_grad_{one}"
            yield aten_case(
                "attention_backward", kernel, shape, moved=8 * n, flops=10 * scores * head, alone=one, **options
            )
    yield aten_case("attention_dropout", "attention.attention_dropout", {"n": 2000}, moved=2000, small=True)


def _indices() -> Iterator[Case]:
    for rows, columns, count, small in ((5, 3, 7, True), (37, 65, 300, False), (5000, 3, 9000, False)):
        n = count * columns
        shape = {"rows": rows, "columns": columns, "count": count}
        options: Any = {"small": small}
        yield aten_case("index_select", "index.select_rows", shape, moved=2 * n + 2 * count, **options)
        yield aten_case("gather", "index.gather", shape, moved=4 * n, **options)
        yield aten_case("scatter_value", "index.scatter_value", shape, moved=3 * n, **options)
        kernels = "index.put_sorted index.join_index index.plan_short"
        yield aten_case("index_put", kernels, shape, moved=2 * n + 4 * count, **options)
        yield aten_case("masked_scatter", "index.put_rows", shape, moved=4 * n, **options)
        yield aten_case("search", "index.search_sorted", shape, moved=rows + 3 * count, **options)
        yield aten_case("scatter_add", "index.scatter_walk", shape, moved=4 * n, flops=n, **options)
        halves: Any = {"moved": 7 * n, "flops": n, "tolerance": SUMMED["float16"], "small": small}
        yield aten_case("scatter_add", "index.flat_targets index.sum_sorted", shape, "float16", **halves)
        moved = n + 2 * count + rows * columns
        yield aten_case("embedding_backward", "index.sum_sorted", shape, moved=moved, flops=n, **options)
        kernels = "index.count_mask index.scan_counts index.write_positions index.write_coordinate"
        yield aten_case("nonzero", kernels, shape, moved=3 * n, **options)


def _random() -> Iterator[Case]:
    # Longer than what one work-group puts in order; minutes each on a simulator.
    radix = "index.plan_keys index.count_digits index.move_digits"
    yield aten_case("hashed", f"{radix} random.hash_fill", {"n": 9000}, moved=9000)
    for n, small in ((67, True), (5001, False)):
        for op in ("uniform", "normal", "exponential", "bernoulli", "integers", "hashed"):
            kernel = {"integers": "integer_fill", "hashed": "hash_fill"}.get(op, f"{op}_fill")
            tolerance = CLOSE["float32"] if op in ("normal", "exponential") else 0.0
            beside = " index.write_order" if op == "hashed" else ""
            yield aten_case(op, f"random.{kernel}{beside}", {"n": n}, moved=n, small=small, tolerance=tolerance)
        yield aten_case("dropout", "random.dropout", {"n": n}, moved=3 * n, small=small)
        yield aten_case("dropout_backward", "random.dropout_backward", {"n": n}, moved=3 * n, small=small)
        yield aten_case("bernoulli_each", "random.bernoulli_each", {"n": n}, moved=2 * n, small=small)
        yield aten_case("draw", "random.draw random.require_weights", {"n": n}, moved=n, small=small)


def _products() -> Iterator[Case]:
    for M, N, K, small in ((5, 7, 9, True), (65, 130, 97, False), (700, 200, 300, False)):
        shape = {"M": M, "N": N, "K": K}
        moved, flops = M * K + K * N + M * N, 2 * M * N * K
        for transposed in (False, True):
            yield aten_case(
                "mm",
                "matmul.matmul",
                shape,
                moved=moved,
                flops=flops,
                small=small,
                tolerance=SUMMED["float32"],
                transposed=transposed,
            )
        shape = {"M": M, "K": K}
        for transposed in (False, True):
            yield aten_case(
                "mv",
                "matvec.matvec",
                shape,
                moved=M * K + M + K,
                flops=2 * M * K,
                small=small,
                tolerance=SUMMED["float32"],
                transposed=transposed,
            )
    # Few results of long sums are split, and sums of parts summed.
    shape = {"M": 5, "N": 7, "K": 3000}
    yield aten_case(
        "mm",
        "matvec.sum_parts matmul.matmul",
        shape,
        moved=36035,
        flops=210000,
        small=True,
        tolerance=SUMMED["float32"],
        transposed=True,
    )
    # Operands are packed where they are large.
    M, N, K = 1200, 1100, 1024
    yield aten_case(
        "mm",
        "matmul.pack_panels matmul.pack_tiles",
        {"M": M, "N": N, "K": K},
        moved=M * K + K * N + M * N,
        flops=2 * M * N * K,
        tolerance=SUMMED["float32"],
        native_only=True,
        transposed=True,
    )


def aten_cases() -> tuple[Case, ...]:
    """All cases of these kernels."""
    families = (_elementwise, _reductions, _softmax, _norms, _losses, _attention, _indices, _random, _products)
    return tuple(case for family in families for case in family())
