"""Dense products on devices: layouts, types, epilogues, batches, splits, vectors; and torch's operations."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import memtrain_cl.torch_device
from memtrain_cl import tuning
from memtrain_cl.device import Device, TensorCores
from memtrain_cl.launchers import matmul as room
from memtrain_cl.launchers.matmul import matmul, matrix_layout
from memtrain_cl.memory import pool_of
from memtrain_cl.operand import Operand, empty_operand
from memtrain_cl.torch_device import fallback
from memtrain_cl.torch_device.aten import matmul as handlers
from memtrain_cl.torch_device.aten.copy import contiguous
from memtrain_cl.torch_device.tensor import torch_device
from memtrain_cl.tuning import TILE_M, groups_share_rows, matmul_shape, matvec_shape
from memtrain_cl.tuning_cores import core_shape
from tests.operands import element_of, operand_of, tensor_of

memtrain_cl.torch_device.require_registered()

#: Half a unit in the last place of a result of each type.
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
#: One below, on and above what a tile, a panel or a vector holds.
SIZES = [(1, 2, 3), (5, 7, 3), (6, 64, 32), (64, 36, 68), (63, 65, 17), (130, 193, 97), (2, 1030, 260)]


def transposable(device: Device, tensor: torch.Tensor, transposed: bool, offset: int) -> Operand:
    """The tensor's values behind `offset` NaN, its last two dimensions swapped in memory where `transposed`."""
    if not transposed:
        return operand_of(device, tensor, offset)
    whole = operand_of(device, tensor.transpose(-1, -2).contiguous(), offset)
    *batch, rows, columns = range(tensor.ndim)
    order = [*batch, columns, rows]
    return whole.viewed(tensor.shape, [whole.strides[axis] for axis in order])


def check(
    got: Operand, a: torch.Tensor, b: torch.Tensor, add: Any = None, alpha: float = 1.0, beta: float = 1.0
) -> None:
    """Within float32's errors of a sum of K terms, and one rounding to the result's type."""
    want = alpha * (a.double() @ b.double())
    terms = abs(alpha) * (a.double().abs() @ b.double().abs())
    if add is not None and beta:
        want, terms = want + beta * add.double(), terms + abs(beta) * add.double().abs()
    found = tensor_of(got)
    bound = want.abs() * ROUNDING[found.dtype] * 1.01 + terms * (2.0**-23 * (4 + a.shape[-1] ** 0.5)) + 2.0**-24
    assert found.shape == want.shape
    assert bool(((found.double() - want).abs() <= bound).all())


def out_of(device: Device, shape: tuple[int, ...], dtype: torch.dtype) -> Operand:
    return operand_of(device, torch.full(shape, float("nan"), dtype=dtype), 7)


@pytest.mark.parametrize(
    ("left", "right", "dtype"),
    [
        (False, False, torch.float32),
        (True, False, torch.float32),
        (False, True, torch.float32),
        (True, True, torch.float32),
        (False, True, torch.bfloat16),
        (True, False, torch.float16),
    ],
)
def test_layouts_and_types(shaped: Device, left: bool, right: bool, dtype: torch.dtype) -> None:
    for M, N, K in SIZES:
        a, b = torch.randn(M, K).to(dtype), torch.randn(K, N).to(dtype)
        out = out_of(shaped, (M, N), dtype)
        # Wide loads need rows of whole fours that begin on one; an offset of 3 takes them away.
        offset = 8 if M % 4 == N % 4 == K % 4 == 0 else 3
        matmul(transposable(shaped, a, left, offset), transposable(shaped, b, right, 8), out)
        check(out, a, b)


#: One below, on and above blocks of 128 x 256 and 128 x 128 and stages of 64, in rows of whole chunks; parts of K.
CORE_SIZES = [(8, 8, 8), (120, 264, 72), (136, 128, 64), (264, 520, 136), (128, 256, 4160), (16, 8, 1000)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_rows_of_whole_chunks_of_sixteen_bits(device: Device, left: bool, right: bool, dtype: torch.dtype) -> None:
    for M, N, K in CORE_SIZES:
        a, b, add = torch.randn(2, M, K).to(dtype), torch.randn(2, K, N).to(dtype), torch.randn(N).to(dtype)
        # Few units let blocks be large.
        for units in (1, device.info.compute_units):
            one = device.with_capabilities(compute_units=units)
            out = out_of(one, (2, M, N), dtype)
            x, y = transposable(one, a, left, 16), transposable(one, b, right, 8)
            matmul(x, y, out, add=operand_of(one, add), alpha=0.5)
            check(out, a, b, add, 0.5)
            item = out_of(one, (M, N), dtype)
            matmul(transposable(one, a[1], left, 8), transposable(one, b[1], right, 0), item)
            check(item, a[1], b[1])


@pytest.mark.parametrize(("cores", "granted"), [("narrow", 99 << 10), ("mma", 220 << 10), ("wgmma", 220 << 10)])
@pytest.mark.parametrize("sizes", [(8, 8, 8), (129, 257, 100), (4096, 4096, 4096), (64, 64, 65536), (100_000, 8, 64)])
@pytest.mark.parametrize("batch", [1, 7])
def test_blocks_of_sixteen_bits_cover_the_result_and_fit(
    device: Device, cores: TensorCores, granted: int, sizes: tuple[int, int, int], batch: int
) -> None:
    M, N, K = sizes
    shape = core_shape(device.with_capabilities(tensor_cores=cores, compute_units=132).info, M, N, K, batch)
    down, across = (64 * warps for warps in shape.warps)
    assert shape.global_size[0] // shape.local_size[0] == -(-M // down) * -(-N // across)
    assert shape.local_size == (down * across // 128, 1, 1)
    assert shape.global_size[2] == batch * shape.splits
    assert shape.stages * 128 * (down + across) <= granted
    assert shape.k_per % 64 == 0
    assert (shape.splits - 1) * shape.k_per < K <= shape.splits * shape.k_per
    assert shape.splits == 1 or batch * shape.splits * shape.global_size[0] // shape.local_size[0] <= 132


ADDED: dict[str, Callable[[int, int, int], torch.Tensor]] = {
    "row": lambda Z, M, N: torch.randn(N),
    "column": lambda Z, M, N: torch.randn(M, 1),
    "one": lambda Z, M, N: torch.randn(()),
    "whole": lambda Z, M, N: torch.randn(Z, M, N),
    "item": lambda Z, M, N: torch.randn(Z, 1, 1),
}


@pytest.mark.parametrize("kind", ADDED)
def test_batches_and_what_is_added(shaped: Device, kind: str) -> None:
    for Z, M, N, K in ((3, 13, 21, 9), (2, 1, 40, 33), (2, 40, 1, 33), (1, 3, 5, 0)):
        a, b, add = torch.randn(Z, M, K), torch.randn(Z, K, N), ADDED[kind](Z, M, N)
        for alpha, beta in ((0.5, -2.0), (1.0, 1.0)):
            out = out_of(shaped, (Z, M, N), torch.float32)
            matmul(
                operand_of(shaped, a, 1),
                operand_of(shaped, b),
                out,
                add=operand_of(shaped, add, 2),
                alpha=alpha,
                beta=beta,
            )
            check(out, a, b, add, alpha, beta)
        void = torch.full_like(add, float("nan"))
        out = out_of(shaped, (Z, M, N), torch.float32)
        matmul(operand_of(shaped, a), operand_of(shaped, b), out, add=operand_of(shaped, void), alpha=3.0, beta=0.0)
        check(out, a, b, void, 3.0, 0.0)


def test_one_item_serves_a_whole_batch(shaped: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, add = torch.randn(5, 7, 6), torch.randn(6, 9), torch.randn(5, 1, 9)
    one = operand_of(shaped, b, 3).viewed((5, 6, 9), (0, 9, 1))
    for limit in (room._BATCH_LIMIT, 2):
        monkeypatch.setattr(room, "_BATCH_LIMIT", limit)
        out = out_of(shaped, (5, 7, 9), torch.float32)
        matmul(operand_of(shaped, a), one, out, add=operand_of(shaped, add))
        check(out, a, b.expand(5, 6, 9), add)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_more_rows_than_one_launch_takes(
    shaped: Device, batch: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_ROW_LIMIT", 5)
    a, b = torch.randn(*batch, 13, 6), torch.randn(*batch, 6, 9)
    for add in (torch.randn(13, 9), torch.randn(9), torch.randn(13, 1)):
        for transposed in (False, True):
            out = out_of(shaped, (*batch, 13, 9), torch.float32)
            x = transposable(shaped, a, transposed, 3)
            matmul(x, operand_of(shaped, b, 2), out, add=operand_of(shaped, add), alpha=0.5)
            check(out, a, b, add, 0.5)
    # A column with gaps is no vector to the kernels of vectors.
    column = operand_of(shaped, b, 2)
    column = column.viewed((*batch, 6, 1), column.strides)
    out = out_of(shaped, (*batch, 13, 1), torch.float32)
    matmul(operand_of(shaped, a), column, out)
    check(out, a, b[..., :1])


def test_few_tiles_and_a_long_sum(shaped: Device) -> None:
    shape = matmul_shape(shaped.with_capabilities(compute_units=64).info, 20, 30, 3000, may_split=True)
    wide = shaped.with_capabilities(compute_units=64)
    assert shape.splits > 1
    a, b, add = torch.randn(20, 3000), torch.randn(3000, 30), torch.randn(30)
    runs = []
    for _ in range(2):
        out = out_of(wide, (20, 30), torch.float32)
        matmul(operand_of(wide, a), operand_of(wide, b), out, add=operand_of(wide, add), beta=2.0)
        check(out, a, b, add, 1.0, 2.0)
        runs.append(tensor_of(out))
    assert torch.equal(*runs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors(shaped: Device, dtype: torch.dtype) -> None:
    """Matrix times vector and vector times matrix in both layouts, short, long, split."""
    for size, K in ((1, 1), (1, 70_001), (3, 31), (33, 40), (1030, 259), (2, 33_000)):
        matrix, vector, add = (torch.randn(shape).to(dtype) for shape in ((size, K), (K, 1), (size, 1)))
        for transposed in (False, True):
            out = out_of(shaped, (size, 1), dtype)
            m, v, c = (
                transposable(shaped, matrix, transposed, 3),
                operand_of(shaped, vector, 5),
                operand_of(shaped, add),
            )
            matmul(m, v, out, add=c, alpha=0.5)
            check(out, matrix, vector, add, 0.5)
            row = out_of(shaped, (1, size), dtype)
            matmul(v.viewed((1, K)), m.viewed((K, size), m.strides[::-1]), row)
            check(row, vector.t(), matrix.t())


@pytest.mark.parametrize(("left", "right", "dtype"), [(False, True, torch.float32), (True, False, torch.bfloat16)])
def test_packed_operands(
    device: Device, left: bool, right: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What CPUs do with operands far larger than these."""
    for name in ("_PACKED_SIZE", "_PACKED_LEAD", "_PACKED_USES"):
        monkeypatch.setattr(tuning, name, 1)
    room._packing.cache_clear()
    room.workspace_bytes.cache_clear()
    Z, M, N, K = 2, 801, 70, 201
    a, b, add = torch.randn(Z, M, K).to(dtype), torch.randn(Z, K, N).to(dtype), torch.randn(N).to(dtype)
    shape = matmul_shape(device.info, M, N, K, Z)
    assert tuning.packs(shape, M, N, K, K, N) == (not groups_share_rows(device.info),) * 2
    out = out_of(device, (Z, M, N), dtype)
    x, y, bias = transposable(device, a, left, 3), transposable(device, b, right, 5), operand_of(device, add)
    taken = taken_by(device, lambda: matmul(x, y, out, add=bias))
    check(out, a, b, add)
    assert taken == room.workspace_bytes(device.info, (Z, M, N, K), M if left else K, K if right else N)
    room._packing.cache_clear()
    room.workspace_bytes.cache_clear()


def taken_by(device: Device, work: Callable[[], object]) -> int:
    """Bytes of the device's memory that `work` takes at most, and gives back."""
    pool = pool_of(device)
    pool.reset_peak()
    before = pool.statistics().peak_allocated
    work()
    return pool.statistics().peak_allocated - before


@pytest.mark.parametrize("sizes", [(1, 3, 5, 8192), (1, 40, 70, 4096), (3, 20, 9, 2000), (1, 99, 99, 64), (1, 9, 1, 5)])
def test_what_a_product_works_on(shaped: Device, sizes: tuple[int, int, int, int]) -> None:
    Z, M, N, K = sizes
    a, b = operand_of(shaped, torch.randn(Z, M, K)), operand_of(shaped, torch.randn(Z, K, N))
    out = out_of(shaped, (Z, M, N), torch.float32)
    expected = room.workspace_bytes(shaped.info, sizes, K, N)
    assert taken_by(shaped, lambda: matmul(a, b, out)) == expected
    assert (expected > 0) == (matmul_shape(shaped.info, M, N, K, Z, may_split=True).splits > 1 and N > 1)


def test_a_vector_with_gaps(shaped: Device) -> None:
    a, x = torch.randn(5, 40), torch.randn(40, 3)
    out = out_of(shaped, (5, 1), torch.float32)
    matmul(operand_of(shaped, a), operand_of(shaped, x).viewed((40, 1), (3, 1)), out)
    check(out, a, x[:, :1])


def test_what_the_launcher_refuses(device: Device) -> None:
    def of(*shape: int) -> Operand:
        return empty_operand(device, shape, "float32")

    for a, b, out in (((2, 3), (4, 5), (2, 5)), ((2, 3), (3, 5), (5, 2)), ((1, 2, 3), (3, 5), (2, 5))):
        with pytest.raises(ValueError, match=r"expected \[.., M, K\] @ \[.., K, N\]"):
            matmul(of(*a), of(*b), of(*out))
    with pytest.raises(ValueError, match="expected a unit stride"):
        matmul(of(4, 6).viewed((2, 3), (12, 2)), of(3, 5), of(2, 5))
    with pytest.raises(ValueError, match="broadcast"):
        matmul(of(2, 3), of(3, 5), of(2, 5), add=of(4))
    assert matrix_layout(2, 3, 1 << 32, 1) is None
    matmul(of(0, 3), of(3, 5), of(0, 5))


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("local", [16 << 10, 32 << 10, 48 << 10, 256 << 10])
def test_shapes_cover_their_results(device: Device, kind: Any, local: int) -> None:
    for units, wide in ((1, 4), (132, 16)):
        info = device.with_capabilities(
            type=kind,
            local_mem_bytes=local,
            compute_units=units,
            native_vector_width=wide,
            max_work_group_size=1024,
            short_loops=False,
        ).info
        sizes = (1, 5, 64, 129, 1000, 8192)
        for M, N, K, batch, decodes in itertools.product(sizes, sizes, sizes, (1, 48), (False, True)):
            shape = matmul_shape(info, M, N, K, batch, decodes=decodes, may_split=not decodes)
            columns, rows = (
                groups // own for groups, own in zip(shape.global_size[:2], shape.local_size[:2], strict=True)
            )
            assert rows * (shape.tile or shape.per) >= M
            assert columns * (shape.tile or shape.columns) >= N
            assert (shape.splits - 1) * shape.k_per < K <= shape.splits * shape.k_per
            assert shape.global_size[2] == batch * shape.splits
            if kind == "cpu":
                sums = TILE_M * 64 if decodes else shape.held_rows * shape.tile_n
                held = shape.tile_k * (shape.tile_n + shape.tile_rows) + sums + shape.tile_rows * 2
                assert 4 * held <= local
                assert shape.columns <= shape.tile_n
                assert decodes or shape.per <= shape.held_rows
            vector = matvec_shape(info, decodes, M, K, batch)
            assert (vector.splits - 1) * vector.k_per < K <= vector.splits * vector.k_per


# ---- torch's operations ----


@pytest.fixture
def place(device: Device) -> Callable[[torch.Tensor], Any]:
    """Moves tensors to the device, with their strides."""
    where = torch_device(device)

    def move(tensor: torch.Tensor) -> Any:
        base = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
        return base.to(where).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return move


CALLS: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "mm": (torch.mm, ((4, 3), (3, 5))),
    "bmm": (torch.bmm, ((2, 4, 3), (2, 3, 5))),
    "mv": (torch.mv, ((4, 3), (3,))),
    "dot": (torch.dot, ((9,), (9,))),
    "vdot": (torch.vdot, ((9,), (9,))),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), ((5,), (4, 3), (3, 5))),
    "addmv": (lambda c, a, b: torch.addmv(c, a, b, beta=0.5, alpha=2), ((4,), (4, 3), (3,))),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5), ((4, 1), (2, 4, 3), (2, 3, 5))),
    "addbmm": (lambda c, a, b: torch.addbmm(c, a, b, beta=0.5), ((4, 5), (2, 4, 3), (2, 3, 5))),
    "linear": (torch.nn.functional.linear, ((2, 4, 3), (5, 3), (5,))),
    "matmul": (torch.matmul, ((2, 1, 4, 3), (6, 3, 5))),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_operations(place: Callable[[torch.Tensor], Any], name: str, dtype: torch.dtype) -> None:
    call, shapes = CALLS[name]
    given = [torch.randn(shape).to(dtype) for shape in shapes]
    # The CPU adds batches up in 16 bits; the device rounds once.
    want = call(*(tensor.float() for tensor in given)).to(dtype)
    with fallback.strict():
        got = call(*(place(tensor) for tensor in given))
    torch.testing.assert_close(got.cpu(), want, rtol=max(1e-5, 2 * ROUNDING[dtype]), atol=1e-5)


def test_transposed_matrices_are_not_copied(
    place: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[Operand] = []

    def counted(operand: Operand) -> Operand:
        if not operand.contiguous:
            copies.append(operand)
        return contiguous(operand)

    monkeypatch.setattr(handlers, "contiguous", counted)
    a, b = torch.randn(8, 12), torch.randn(12, 10)
    for left, right, expected in (
        (a.t().contiguous().t(), b.t().contiguous().t(), 0),
        (torch.randn(8, 20)[:, 3:15], torch.randn(20, 10)[4:16], 0),
        (torch.randn(8, 24)[:, ::2], b, 1),
        (torch.randn(1, 1).expand(8, 12), b, 1),
    ):
        copies.clear()
        torch.testing.assert_close((place(left) @ place(right)).cpu(), left @ right, rtol=1e-5, atol=1e-5)
        assert len(copies) == expected


def test_gradients_of_a_linear_layer(device: Device, place: Callable[[torch.Tensor], Any]) -> None:
    if device.info.index:
        pytest.skip("torch differentiates on opencl:0 alone")
    layer, x = torch.nn.Linear(12, 7), torch.randn(3, 5, 12)
    layer(x).square().sum().backward()
    wanted = [parameter.grad for parameter in layer.parameters()]
    weight, bias = (place(p.detach()).requires_grad_() for p in layer.parameters())
    with fallback.strict():
        torch.nn.functional.linear(place(x), weight, bias).square().sum().backward()
    for got, want in zip((weight, bias), wanted, strict=True):
        torch.testing.assert_close(got.grad.cpu(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("mm", ((2, 3), (4, 5))),
        ("mm", ((2, 3), (3,))),
        ("bmm", ((2, 3, 4), (3, 4, 5))),
        ("mv", ((2, 3), (4,))),
        ("dot", ((2,), (3,))),
        ("addmm", ((3,), (4, 3), (3, 5))),
        ("addmv", ((3,), (4, 3), (3,))),
        ("baddbmm", ((3,), (2, 4, 3), (2, 3, 5))),
        ("addbmm", ((4, 5), (2, 4, 3), (2, 2, 5))),
    ],
)
def test_shapes_that_torch_refuses(
    place: Callable[[torch.Tensor], Any], name: str, shapes: tuple[tuple[int, ...], ...]
) -> None:
    call, _ = CALLS[name]
    given = [torch.randn(shape) for shape in shapes]
    with pytest.raises(RuntimeError):
        call(*given)
    with fallback.strict(), pytest.raises(RuntimeError) as caught:
        call(*(place(tensor) for tensor in given))
    assert not isinstance(caught.value, fallback.FallbackRefused)


def test_mixed_and_whole_types(place: Callable[[torch.Tensor], Any]) -> None:
    a, b = torch.randn(2, 3), torch.randn(3, 4)
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.mm(place(a), place(b.half()))
    fallback.reset_fallbacks()
    counts = torch.arange(6).reshape(2, 3)
    with pytest.warns(fallback.FallbackWarning):
        got = torch.mm(place(counts), place(counts.t().contiguous()))
    assert torch.equal(got.cpu(), counts @ counts.t())


def test_nothing_to_sum_and_nothing_to_fill(place: Callable[[torch.Tensor], Any]) -> None:
    assert torch.equal(torch.mm(place(torch.ones(2, 0)), place(torch.ones(0, 3))).cpu(), torch.zeros(2, 3))
    added = torch.addmm(place(torch.ones(3)), place(torch.ones(2, 0)), place(torch.ones(0, 3)), beta=2)
    assert torch.equal(added.cpu(), torch.full((2, 3), 2.0))
    assert torch.mm(place(torch.ones(0, 2)), place(torch.ones(2, 3))).shape == (0, 3)
    assert float(torch.dot(place(torch.ones(0)), place(torch.ones(0)))) == 0.0
    assert (
        element_of(torch.bmm(place(torch.ones(2, 3, 0).half()), place(torch.ones(2, 0, 3).half())).cpu()) == "float16"
    )
