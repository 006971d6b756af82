"""Operations by index on the torch device against torch on the CPU: values, order of sums, bounds, gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

import memtrain_cl.torch_device
from memtrain_cl.device import Device
from memtrain_cl.faults import raise_pending
from memtrain_cl.launchers import index as launch
from memtrain_cl.launchers.index_mask import positions
from memtrain_cl.launchers.index_plan import MOST_TURNS, SHORT_ON_GPU, make_plan
from memtrain_cl.torch_device.fallback import fallbacks, reset_fallbacks, strict
from memtrain_cl.torch_device.registry import TABLE
from memtrain_cl.torch_device.tensor import torch_device
from tests.torch_op_db import OpInfo, op_db, sample_inputs

memtrain_cl.torch_device.require_registered()

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    with strict():
        yield


def some(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape) * 10).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal up to the rounding of sums: float32's of a few terms, one rounding of the 16-bit types."""
    rtol = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(want.dtype, 0)
    torch.testing.assert_close(got.cpu(), want, rtol=rtol, atol=100 * rtol)


def operand(tensor: torch.Tensor, device: Device) -> Any:
    return tensor.to(torch_device(device)).operand  # type: ignore[attr-defined]


# ---- the kernels, in both shapes ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5,), (1, 3), (3, 7, 12), (2, 9, 1), (300, 5), (2, 3, 1030)])
def test_rows(shaped: Device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    home = torch_device(shaped)
    x = some(*shape, dtype=dtype)
    for dim in range(len(shape)):
        for kind in (torch.int64, torch.int32) if shape == (3, 7, 12) else (torch.int64,):
            index = torch.randint(0, shape[dim], (11,), dtype=kind)
            values = some(*shape[:dim], 11, *shape[dim + 1 :], dtype=dtype)
            got = x.to(home).index_select(dim, index.to(home))
            assert torch.equal(got.cpu(), x.index_select(dim, index))
            placed = x.clone()
            for k in range(11):
                placed.select(dim, int(index[k])).copy_(values.select(dim, k))
            where: Any = (*[slice(None)] * dim, index.to(home))
            put = x.to(home)
            put[where] = values.to(home)
            assert torch.equal(put.cpu(), placed)
        added = x.to(home).index_add(dim, index.to(home), values.to(home), alpha=2)
        exact = x.double().index_add(dim, index.long(), values.double(), alpha=2)
        close(added, exact.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "count"), [((5,), 9), ((3, 7, 12), 5), ((300, 5), 7), ((2, 3, 260), 4), ((4, 70), 500)]
)
def test_elements(shaped: Device, shape: tuple[int, ...], count: int, dtype: torch.dtype) -> None:
    home = torch_device(shaped)
    x = some(*shape, dtype=dtype)
    for dim in range(len(shape)):
        sizes = (*shape[:dim], count, *shape[dim + 1 :])
        index, values = torch.randint(0, shape[dim], sizes), some(*sizes, dtype=dtype)
        moved, at, given = x.to(home), index.to(home), values.to(home)
        assert torch.equal(moved.gather(dim, at).cpu(), x.gather(dim, index))
        close(moved.scatter_add(dim, at, given), x.double().scatter_add(dim, index, values.double()).to(dtype))
        placed = x.clone()
        for k in range(count):
            placed.scatter_(dim, index.narrow(dim, k, 1), values.narrow(dim, k, 1))
        assert torch.equal(moved.scatter(dim, at, given).cpu(), placed)
        assert torch.equal(moved.scatter(dim, at, 3).cpu(), x.scatter(dim, index, 3))
        assert torch.equal(
            moved.scatter_reduce(dim, at, given, "amax").cpu(), x.scatter_reduce(dim, index, values, "amax")
        )


@pytest.mark.parametrize(
    ("n", "size"),
    [
        *((1, 1), (63, 2), (64, 300), (65, 1 << 20), (1000, 256), (SHORT_ON_GPU, 50257), (SHORT_ON_GPU + 1, 300)),
        (MOST_TURNS, 1 << 17),
        (9000, 1 << 32),
    ],
)
def test_the_order_of_indices_is_stable(shaped: Device, n: int, size: int) -> None:
    index = torch.randint(0, size, (n,))
    plan = make_plan(operand(index, shaped), size)
    keys, order = index.sort(stable=True)
    found = [torch.from_numpy(array.numpy()[: 4 * n].copy()).view(torch.int32) for array in plan[:2]]
    assert torch.equal(found[0], keys.int())
    assert torch.equal(found[1], order.int())


@pytest.mark.parametrize("n", [1, 7, 255, 2047, 2048, 2049, 70001])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_places_of_a_mask(shaped: Device, n: int, share: float) -> None:
    mask = torch.rand(n + 1) < share
    moved = mask.to(torch_device(shaped))[1:]
    found = positions(moved.operand)  # type: ignore[attr-defined]
    assert found.size == int(mask[1:].sum())
    assert torch.equal(moved.nonzero().cpu(), mask[1:].nonzero())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width", "tokens"), [(256, 96, 700), (50, 33, 64), (1, 8, 130), (4000, 64, 512)])
def test_embedding(shaped: Device, rows: int, width: int, tokens: int, dtype: torch.dtype) -> None:
    home = torch_device(shaped)
    weight, index = some(rows, width, dtype=dtype), (torch.rand(2, tokens // 2) ** 3 * rows).long()
    got = torch.nn.functional.embedding(index.to(home), weight.to(home))
    assert torch.equal(got.cpu(), weight[index])
    grad = some(*index.shape, width, dtype=dtype)
    for padding in (-1, 0):
        summed = torch.ops.aten.embedding_dense_backward(grad.to(home), index.to(home), rows, padding, False)
        plain = torch.ops.aten.embedding_dense_backward(grad.float(), index, rows, padding, False)
        # Added in the order of the tokens, as the CPU does: the same bytes, and once rounded for 16 bits.
        assert torch.equal(summed.cpu(), plain.to(dtype))


def test_sums_follow_the_order_of_the_source(shaped: Device) -> None:
    home = torch_device(shaped)
    values = torch.tensor([1e8, 1.0, -1e8, 1.0]).repeat(40)
    index = torch.zeros(160, dtype=torch.int64)
    want = torch.zeros(2).index_add(0, index, values)
    assert torch.equal(torch.zeros(2, device=home).index_add(0, index.to(home), values.to(home)).cpu(), want)
    assert torch.equal(torch.zeros(2, device=home).scatter_add(0, index.to(home), values.to(home)).cpu(), want)
    got = torch.zeros(2, device=home).index_put((index.to(home),), values.to(home), accumulate=True)
    assert torch.equal(got.cpu(), want)


# ---- lists of indices ----

LISTS: list[tuple[Any, ...]] = [
    (torch.tensor([1, -1, 0]),),
    (None, torch.tensor([[1, 2], [3, -4]])),
    (torch.tensor([0, 1]), torch.tensor([2, 3])),
    (torch.tensor([[0], [1]]), None, torch.tensor([1, 2, 5])),
    (None, torch.tensor([1, 0, 1]), torch.tensor(4)),
    (torch.tensor([True, False, True]),),
    (None, torch.tensor([True, False, True, True])),
    (torch.rand(3, 4) < 0.5,),
    (torch.rand(3, 4, 6) < 0.5,),
    (torch.tensor([True, False, True]), None, torch.tensor([5, 1])),
    (None, torch.rand(4, 6) < 0.5),
    (torch.tensor([], dtype=torch.int64),),
    (torch.zeros(3, 4, dtype=torch.bool),),
    (torch.tensor([1, 2], dtype=torch.int32), torch.tensor([0, 1])),
]


@pytest.mark.parametrize("indices", LISTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_lists(device: Device, indices: tuple[Any, ...], dtype: torch.dtype) -> None:
    home = torch_device(device)
    x = some(3, 4, 6, dtype=dtype)
    moved = tree_map_only(torch.Tensor, lambda t: t.to(home), indices)
    key, moved_key = (tuple(slice(None) if i is None else i for i in part) for part in (indices, moved))
    want = x[key]
    assert torch.equal(x.to(home)[moved_key].cpu(), want)
    for values in (some(*want.shape, dtype=dtype), some(*want.shape[-1:], dtype=dtype), torch.tensor(7, dtype=dtype)):
        put, added = x.to(home), x.to(home)
        put[moved_key] = values.to(home)
        placed = torch.ops.aten.index_put(x, list(indices), values)
        assert torch.equal(put.cpu(), placed)
        torch.ops.aten.index_put_(added, list(moved), values.to(home), True)
        close(added, torch.ops.aten.index_put(x.double(), list(indices), values.double(), True).to(dtype))


def test_masks(device: Device) -> None:
    home = torch_device(device)
    x, mask = some(5, 6), torch.rand(5, 6) < 0.5
    moved, seen = x.to(home), mask.to(home)
    assert torch.equal(moved.masked_select(seen[:1]).cpu(), x.masked_select(mask[:1]))
    source = some(40)
    assert torch.equal(moved.masked_scatter(seen, source.to(home)).cpu(), x.masked_scatter(mask, source))
    part = moved.clone()
    part.mT.masked_scatter_(seen.mT, source.to(home))
    assert torch.equal(part.cpu(), x.mT.masked_scatter(mask.mT, source).mT)
    with pytest.raises(RuntimeError, match="at least"):
        moved.masked_scatter(seen, source[:2].to(home))
    assert torch.equal(torch.where(seen)[1].cpu(), torch.where(mask)[1])
    for empty in (torch.zeros(0, 3), torch.zeros(3, 0), torch.zeros(())):
        assert empty.to(home).nonzero().shape == empty.nonzero().shape


# ---- what is refused ----


@pytest.mark.parametrize(
    ("call", "size"),
    [
        (lambda x, i: torch.nn.functional.embedding(i, x), 4),
        (lambda x, i: x.index_select(0, i), 4),
        (lambda x, i: x[i], 4),
        (lambda x, i: x[:, i], 6),
        (lambda x, i: x[i, i], 4),
        (lambda x, i: x.gather(0, i[:, None]), 4),
        (lambda x, i: x.scatter(0, i[:, None], 1.0), 4),
        (lambda x, i: x.scatter(1, i[None], x[:1, : len(i)]), 6),
        (lambda x, i: x.scatter_add(0, i[:, None], x[: len(i)]), 4),
        (lambda x, i: x.index_add(0, i, x[: len(i)]), 4),
        (lambda x, i: x.index_copy(0, i, x[: len(i)]), 4),
        (lambda x, i: x.index_fill(0, i, 1.0), 4),
        (lambda x, i: x.take(i), 24),
    ],
)
def test_indices_outside(shaped: Device, call: Callable[..., Any], size: int) -> None:
    home = torch_device(shaped)
    for wrong in (size, -size - 1, 1 << 40):
        index = torch.tensor([0, wrong, 1])
        with pytest.raises((IndexError, RuntimeError)):
            call(some(4, 6), index)
        call(some(4, 6).to(home), index.to(home))
        with pytest.raises(IndexError, match=f"index {wrong} is out of bounds for dimension with size {size}"):
            raise_pending(shaped)
        raise_pending(shaped)


def test_a_number_asked_for_meets_the_error(device: Device) -> None:
    x = some(4).to(torch_device(device))
    wrong = x[torch.tensor([9]).to(x.device)]
    with pytest.raises(IndexError, match="index 9"):
        wrong.cpu()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda x: x.index_select(2, torch.zeros(1, dtype=torch.int64, device=x.device)), IndexError),
        (lambda x: x.index_select(0, torch.zeros(1, device=x.device)), RuntimeError),
        (lambda x: x.gather(0, torch.zeros(1, dtype=torch.int64, device=x.device)), RuntimeError),
        (lambda x: x.scatter_add(0, torch.zeros(9, 9, dtype=torch.int64, device=x.device), x), RuntimeError),
        (lambda x: x[torch.ones(3, dtype=torch.bool, device=x.device)], IndexError),
        (lambda x: x[torch.ones(3, device=x.device)], IndexError),
        (lambda x: x[:0][torch.zeros(3, dtype=torch.int64, device=x.device)], IndexError),
        (lambda x: x.index_put((x[0].long(),), x[:3], accumulate=True), RuntimeError),
        (lambda x: x.expand(2, 4, 6).index_add_(1, x[0, :1].long(), x.expand(2, 4, 6)[:, :1]), RuntimeError),
        (lambda x: torch.nn.functional.embedding(x[0].int().short(), x), (RuntimeError, IndexError)),
    ],
)
def test_shapes_and_types_are_refused_at_once(device: Device, call: Callable[..., Any], error: Any) -> None:
    x = torch.zeros(4, 6)
    with pytest.raises(error):
        call(x)
    with pytest.raises(error):
        call(x.to(torch_device(device)))


# ---- layouts, empty sizes ----


def test_strides_and_offsets(device: Device) -> None:
    home = torch_device(device)
    whole = some(9, 10, 11)
    index = torch.tensor([3, 0, 3])
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        *(lambda t: t[1:8:2], lambda t: t.mT, lambda t: t.permute(2, 0, 1)[3:], lambda t: t[2:, 3:, 4:])
    ]
    for view in views:
        x, y = view(whole), view(whole.to(home))
        at = index.to(home)
        assert torch.equal(y.index_select(1, at).cpu(), x.index_select(1, index))
        assert torch.equal(y[at, :, at].cpu(), x[index, :, index])
        assert torch.equal(y.flip(0, 2).cpu(), x.flip(0, 2))
        assert torch.equal(y.roll((2, -1), (0, 2)).cpu(), x.roll((2, -1), (0, 2)))
        fresh, moved = whole.clone(), whole.to(home)
        view(fresh).index_fill_(1, index, 5.0)
        view(moved).index_fill_(1, at, 5.0)
        view(fresh)[:, index[:2]] = 6.0
        view(moved)[:, at[:2]] = 6.0
        view(fresh)[view(fresh) > 4] = -1.0
        view(moved)[view(moved) > 4] = -1.0
        assert torch.equal(moved.cpu(), fresh)
    table = whole.to(home)[:, :, 0]
    assert torch.equal(table[torch.tensor([[8, 0]]).to(home)].cpu(), whole[:, :, 0][torch.tensor([[8, 0]])])


def test_a_source_that_is_the_target(device: Device) -> None:
    x = some(6, 3)
    index = torch.tensor([5, 4, 3])
    y = x.to(torch_device(device))
    y[index.to(y.device)] = y[:3]
    y.index_add_(0, index.to(y.device), y[:3])
    want = x.clone()
    want[index] = x[:3]
    want.index_add_(0, index, want[:3].clone())
    assert torch.equal(y.cpu(), want)


def test_empty(device: Device) -> None:
    home = torch_device(device)
    none = torch.zeros(0, dtype=torch.int64, device=home)
    x = torch.ones(3, 4, device=home)
    assert x[none].shape == (0, 4)
    assert x.index_select(1, none).shape == (3, 0)
    assert x.gather(1, none.view(0, 1)).shape == (0, 1)
    assert torch.nn.functional.embedding(none, x).shape == (0, 4)
    assert torch.ops.aten.embedding_dense_backward(x[:0], none, 5, -1, False).cpu().eq(0).all()
    changes: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda y: y.index_add_(0, none, y[:0]),
        lambda y: y.index_copy_(0, none, y[:0]),
        lambda y: y.index_fill_(0, none, 9),
        lambda y: y.scatter_(0, none.view(0, 1), y),
        lambda y: y.index_put_((none,), y[:0]),
    ]
    for change in changes:
        assert torch.equal(change(x.clone()).cpu(), torch.ones(3, 4))
    assert x[:0].index_select(1, torch.tensor([1], device=home)).shape == (0, 1)


# ---- torch's own samples ----

NAMES = {
    *("nn.functional.embedding", "gather", "scatter", "scatter_add", "scatter_reduce", "index_select", "index_add"),
    *("index_copy", "index_fill", "index_put", "take", "put", "take_along_dim", "masked_select", "masked_scatter"),
    *("nonzero", "argwhere", "flip", "roll", "bucketize", "searchsorted", "constant_pad_nd", "repeat_interleave"),
    *("__getitem__", "fliplr", "flipud"),
}
OPS = [op for op in op_db if op.name in NAMES and op.variant_test_name not in ("mean",)]


def tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else [t for t in result if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("op", OPS, ids=[f"{op.name}-{op.variant_test_name}".strip("-") for op in OPS])
@pytest.mark.filterwarnings(
    "ignore::memtrain_cl.torch_device.fallback.FallbackWarning", "ignore:The reduce argument|torch.searchsorted"
)
def test_samples(op: OpInfo) -> None:
    reset_fallbacks()
    with strict(False):
        for dtype in (torch.float32, torch.bfloat16):
            differentiable = dtype == torch.float32 and op.supports_autograd
            samples = [s for s in sample_inputs(op, dtype, requires_grad=differentiable) if offered(s.kwargs)]
            # Hundreds of samples of one kind teach nothing more.
            for sample in samples[:: 1 + len(samples) // 25]:
                compare(op, sample, differentiable)
    # What these operations are made of may lack a kernel; they themselves may not.
    assert not {fallback.name for fallback in fallbacks()} & {str(overload) for overload in TABLE}


def offered(options: dict[str, Any]) -> bool:
    """Whether the device has a kernel for an operation of these options."""
    refused = [options.get("max_norm"), options.get("scale_grad_by_freq"), options.get("sparse")]
    return not any(refused) and options.get("include_self", True)


def compare(op: OpInfo, sample: Any, differentiable: bool) -> None:
    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("opencl:0").requires_grad_(tensor.requires_grad)

    call = (sample.input, sample.args, sample.kwargs)
    moved = tree_map_only(torch.Tensor, move, call)
    want = tensors(op(call[0], *call[1], **call[2]))
    got = tensors(op(moved[0], *moved[1], **moved[2]))
    for one, other in zip(want, got, strict=True):
        assert other.device.type == "opencl"
        close(other.detach(), one.detach())
    if differentiable and want[0].requires_grad:
        leaves = [t for t in tensors((call[0], *call[1])) if t.requires_grad]
        moved_leaves = [t for t in tensors((moved[0], *moved[1])) if t.requires_grad]
        upstream = torch.randn_like(want[0])
        grads = torch.autograd.grad(got[0], moved_leaves, upstream.to("opencl:0"), allow_unused=True)
        for one, other in zip(torch.autograd.grad(want[0], leaves, upstream, allow_unused=True), grads, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                close(other, one)


def test_launchers_refuse_what_they_cannot_count() -> None:
    with pytest.raises(ValueError, match=r"2\^31"):
        launch._tile(memtrain_cl.device.get_device().info, 1 << 31, 1)
