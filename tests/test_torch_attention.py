"""Attention on the device: the kernel pair against torch's formula in float64, and torch's own function on "opencl"."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from memtrain_cl.device import Device
from memtrain_cl.errors import UnsupportedDevice
from memtrain_cl.launchers import attention as launch
from memtrain_cl.operand import Operand, empty_operand
from memtrain_cl.torch_device.fallback import strict
from tests.opdb import op_infos
from tests.operands import like, operand_of, tensor_of
from tests.torch_op_db import sample_inputs

#: Largest error relative to the largest value: float32's sums of up to 200 products, and one rounding to 16 bits more.
TOLERANCES = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    assert found.shape == wanted.shape
    scale = float(wanted.abs().max()) if wanted.numel() else 1.0
    torch.testing.assert_close(
        found.double(), wanted.double(), rtol=0.0, atol=TOLERANCES[dtype] * max(scale, 1e-6), equal_nan=True
    )


def formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    dropped: torch.Tensor | None = None,
) -> torch.Tensor:
    """The kernel's header, with [T, S] stored."""
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    s = scale * q @ k.transpose(-2, -1)
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    p = torch.ops.aten._safe_softmax.default(s, -1)
    out: torch.Tensor = (p if dropped is None else p * dropped) @ v
    return out


def strided(device: Device, tensor: torch.Tensor, offset: int = 0) -> Operand:
    """[B, H, T, D] as a view of [B, T, H, D] behind `offset` elements."""
    return permuted(operand_of(device, tensor.transpose(1, 2).contiguous(), offset))


def permuted(operand: Operand) -> Operand:
    b, t, h, d = operand.shape
    s = operand.strides
    return operand.viewed((b, h, t, d), (s[0], s[2], s[1], s[3]), operand.offset)


def run_both(
    device: Device,
    sizes: tuple[int, ...],
    *,
    mask: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    make: Any = operand_of,
    offset: int = 0,
) -> None:
    """Forward and backward on the device and by formula, compared."""
    B, H, G, T, S, D, V = sizes
    q, k, v, g = (torch.randn(s).to(dtype) for s in ((B, H, T, D), (B, G, S, D), (B, G, S, V), (B, H, T, V)))
    Q, K, W, grad_out = (make(device, t, offset) for t in (q, k, v, g))
    M = None if mask is None else mask_operand(device, mask)
    out, level = like(device, g), empty_operand(device, (B, H, T), "float32")
    options: dict[str, Any] = {"scale": scale, "causal": causal, "dropout_p": dropout_p, "seed": 7}
    launch.attention(Q, K, W, M, out, level, **options)
    grads = (like(device, q), like(device, k), like(device, v))
    launch.attention_backward(grad_out, Q, K, W, M, out, level, grads, **options)
    dropped = None
    if dropout_p > 0.0:
        factors = empty_operand(device, (B, H, T, S), "float32")
        launch.dropped(factors, dropout_p=dropout_p, seed=7)
        dropped = tensor_of(factors).double()
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    wide = mask if mask is None or mask.dtype == torch.bool else mask.double()
    factor = D**-0.5 if scale is None else scale
    want = formula(leaves[0], leaves[1], leaves[2], wide, causal, factor, dropped)
    close(tensor_of(out), want.detach(), dtype)
    for found, wanted in zip(grads, torch.autograd.grad(want, leaves, g.double()), strict=True):
        close(tensor_of(found), wanted, dtype)


def mask_operand(device: Device, mask: torch.Tensor, offset: int = 1) -> Operand:
    if mask.dtype != torch.bool:
        return operand_of(device, mask, offset)
    bytes_of = operand_of(device, mask.to(torch.uint8), offset)
    return Operand(bytes_of.array, bytes_of.shape, bytes_of.strides, bytes_of.offset, "bool")


# B, H, key heads, T, S, D, V: each side of every block, in both shapes.
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1, 1, 1, 1, 1),
        (2, 2, 2, 63, 65, 31, 30),
        (1, 2, 1, 33, 97, 64, 64),
        (1, 4, 2, 64, 64, 32, 32),
        (1, 1, 1, 129, 17, 32, 128),
        (1, 1, 1, 16, 31, 160, 20),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_forward_and_backward(shaped: Device, sizes: tuple[int, ...], causal: bool) -> None:
    run_both(shaped, sizes, causal=causal)


@pytest.mark.parametrize(("dtype", "offset"), [(torch.float16, 0), (torch.bfloat16, 3)])
def test_16_bit_types(shaped: Device, dtype: torch.dtype, offset: int) -> None:
    run_both(shaped, (1, 2, 1, 65, 40, 32, 24), dtype=dtype, causal=True, make=strided, offset=offset)
    run_both(shaped, (1, 1, 1, 20, 40, 28, 20), dtype=dtype, offset=offset)


@pytest.mark.parametrize("offset", [0, 1, 4])
def test_strides_and_offsets(shaped: Device, offset: int) -> None:
    run_both(shaped, (2, 3, 3, 40, 70, 32, 32), make=strided, offset=offset)


@pytest.mark.parametrize("shape", [(40, 70), (2, 1, 40, 70), (1, 3, 1, 70), (2, 3, 40, 1), (3, 40, 70)])
def test_float_masks_broadcast(shaped: Device, shape: tuple[int, ...]) -> None:
    run_both(shaped, (2, 3, 3, 40, 70, 32, 32), mask=torch.randn(shape), scale=0.3)


def test_bool_mask_with_rows_that_see_nothing(shaped: Device) -> None:
    mask = torch.rand(2, 1, 70, 70) > 0.4
    mask[:, :, 5] = False
    mask[1, :, 66:] = False
    mask[:, :, 9, :64] = False  # a whole block before the first key that is seen
    run_both(shaped, (2, 2, 1, 70, 70, 32, 32), mask=mask)


def test_mask_of_infinities_and_causality_together(shaped: Device) -> None:
    mask = torch.randn(33, 40).masked_fill(torch.rand(33, 40) > 0.5, -torch.inf)
    run_both(shaped, (1, 2, 2, 33, 40, 32, 32), mask=mask, causal=True)


@pytest.mark.parametrize("dropout_p", [0.3, 1.0])
def test_dropout_makes_the_same_choices_in_backward(shaped: Device, dropout_p: float) -> None:
    run_both(shaped, (1, 2, 2, 33, 70, 32, 32), dropout_p=dropout_p, causal=dropout_p < 1.0)


def test_dropout_hashes_seed_and_element(device: Device) -> None:
    def mixed(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
        x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    factors = empty_operand(device, (1, 1, 20, 50), "float32")
    launch.dropped(factors, dropout_p=0.25, seed=0xDEADBEEF)
    want = [1 / 0.75 if (mixed(0xDEADBEEF ^ mixed(i)) & 0xFFFFFF) >= 0.25 * 2**24 else 0.0 for i in range(1000)]
    assert torch.equal(tensor_of(factors).flatten(), torch.tensor(want))
    assert 0.7 < sum(factor > 0 for factor in want) / 1000 < 0.8


def test_results_repeat_to_the_bit(shaped: Device) -> None:
    q, g = torch.randn(1, 4, 130, 32), torch.randn(1, 4, 130, 32)
    k = torch.randn(1, 2, 130, 32)
    Q, K, grad_out = (operand_of(shaped, t) for t in (q, k, g))
    seen = []
    for _ in range(2):
        out, level = like(shaped, q), empty_operand(shaped, (1, 4, 130), "float32")
        grads = (like(shaped, q), like(shaped, k), like(shaped, k))
        launch.attention(Q, K, K, None, out, level)
        launch.attention_backward(grad_out, Q, K, K, None, out, level, grads)
        seen.append([tensor_of(operand) for operand in (out, *grads)])
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


@pytest.mark.parametrize("wanted", [w for w in itertools.product([True, False], repeat=3) if any(w)])
def test_gradients_that_nobody_wants_are_left_out(shaped: Device, wanted: tuple[bool, ...]) -> None:
    q, g = torch.randn(1, 2, 20, 32), torch.randn(1, 2, 20, 32)
    Q, grad_out = operand_of(shaped, q), operand_of(shaped, g)
    out, level = like(shaped, q), empty_operand(shaped, (1, 2, 20), "float32")
    launch.attention(Q, Q, Q, None, out, level)
    whole = (like(shaped, q), like(shaped, q), like(shaped, q))
    launch.attention_backward(grad_out, Q, Q, Q, None, out, level, whole)
    some = tuple(like(shaped, q) if want else None for want in wanted)
    launch.attention_backward(grad_out, Q, Q, Q, None, out, level, some)  # type: ignore[arg-type]
    for found, want in zip(some, whole, strict=True):
        assert found is None or torch.equal(tensor_of(found), tensor_of(want))


def test_launcher_refuses_what_it_cannot_do(device: Device) -> None:
    x = operand_of(device, torch.randn(1, 2, 4, 8))
    level = empty_operand(device, (1, 2, 4), "float32")
    half = like(device, torch.randn(1, 2, 4, 8), "float16")
    with pytest.raises(TypeError, match="one floating element"):
        launch.attention(x, half, x, None, x, level)
    with pytest.raises(ValueError, match="key"):
        launch.attention(x, operand_of(device, torch.randn(1, 3, 4, 8)), x, None, x, level)
    narrow = x.viewed((1, 2, 4, 4), (64, 32, 8, 2))
    with pytest.raises(ValueError, match="neighbours"):
        launch.attention(narrow, narrow, x, None, x, level)
    with pytest.raises(ValueError, match="broadcasts"):
        launch.attention(x, x, x, operand_of(device, torch.randn(3, 4)), x, level)
    with pytest.raises(ValueError, match="dropout_p"):
        launch.attention(x, x, x, None, x, level, dropout_p=1.5)
    with pytest.raises(UnsupportedDevice, match="2\\^31"):
        launch.attention(x.viewed((1, 2, 1 << 31, 8)), x, x, None, x, level)


Both = Callable[..., None]


@pytest.fixture
def compare(device: Device) -> Both:
    """Runs torch's function on the device, in strict mode, and by its composition on the CPU: results, gradients, and
    (second) the gradients of these. torch differentiates on opencl:0 alone: elsewhere results are all.
    """
    name = f"opencl:{device.info.index}"

    def move(value: Any, place: str) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        moved = value.detach().to(place)
        return moved.requires_grad_() if value.requires_grad and not device.info.index else moved

    def results(place: str, tensors: Sequence[Any], options: dict[str, Any], second: bool) -> list[torch.Tensor]:
        inputs = [move(tensor, place) for tensor in tensors]
        kwargs = {key: move(value, place) for key, value in options.items()}
        with sdpa_kernel(SDPBackend.MATH):
            out = scaled_dot_product_attention(*inputs, **kwargs)
        found = [out]
        leaves = [t for t in (*inputs, *kwargs.values()) if isinstance(t, torch.Tensor) and t.requires_grad]
        if leaves:
            found += torch.autograd.grad(out.square().sum(), leaves, create_graph=second)
        if leaves and second:
            total = torch.stack([grad.square().sum() for grad in found[1:]]).sum()
            found += torch.autograd.grad(total, leaves)
        return [tensor.detach().cpu() for tensor in found]

    def both(*tensors: Any, second: bool = False, **options: Any) -> None:
        wanted = results("cpu", tensors, options, second)
        with strict():
            found = results(name, tensors, options, second)
        for got, want in zip(found, wanted, strict=True):
            assert got.dtype == want.dtype
            close(got, want, got.dtype)

    return both


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


@pytest.mark.parametrize("heads", [(), (3,), (2, 3), (2, 2, 3)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": -0.5}])
def test_ranks(compare: Both, heads: tuple[int, ...], options: dict[str, Any]) -> None:
    compare(leaf(*heads, 9, 8), leaf(*heads, 11, 8), leaf(*heads, 11, 12), **options)


def test_batches_that_broadcast(compare: Both) -> None:
    compare(leaf(2, 3, 9, 8), leaf(1, 3, 11, 8), leaf(3, 11, 12))
    compare(leaf(3, 9, 8), leaf(2, 3, 11, 8), leaf(2, 3, 11, 8), is_causal=True)


def test_grouped_heads(compare: Both) -> None:
    compare(leaf(2, 6, 9, 8), leaf(2, 2, 11, 8), leaf(2, 2, 11, 8), enable_gqa=True)
    compare(leaf(6, 9, 8), leaf(3, 11, 8), leaf(3, 11, 8), enable_gqa=True, is_causal=True)
    compare(leaf(2, 6, 9, 8), leaf(2, 2, 11, 8), leaf(2, 3, 11, 8), enable_gqa=True)


@pytest.mark.parametrize("shape", [(9, 11), (3, 1, 11), (2, 1, 9, 11), (11,)])
def test_masks(compare: Both, shape: tuple[int, ...]) -> None:
    q, k, v = leaf(2, 3, 9, 8), leaf(2, 3, 11, 8), leaf(2, 3, 11, 8)
    seen = torch.rand(shape) > 0.3
    compare(q, k, v, attn_mask=seen)
    compare(q, k, v, attn_mask=torch.randn(shape))
    compare(q, k, v, attn_mask=leaf(*shape))
    compare(q, k, v, attn_mask=torch.zeros_like(seen))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves(compare: Both, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 2, size, 16).to(dtype) for size in (9, 33, 33))
    compare(q, k, v, is_causal=True)
    compare(q, k, v, attn_mask=torch.randn(9, 33).to(dtype))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": torch.eye(7) == 0}, {"scale": 0.2}])
def test_gradients_of_gradients(compare: Both, options: dict[str, Any]) -> None:
    compare(leaf(1, 2, 7, 8), leaf(1, 2, 7, 8), leaf(1, 2, 7, 8), second=True, **options)
    compare(leaf(1, 4, 7, 8), leaf(1, 2, 7, 8), leaf(1, 2, 7, 8), second=True, enable_gqa=True, **options)


@pytest.mark.parametrize("sizes", [(0, 2, 3, 3, 4), (2, 0, 3, 3, 4), (2, 2, 0, 3, 4), (2, 2, 3, 0, 4), (2, 2, 3, 3, 0)])
def test_empty(compare: Both, sizes: tuple[int, ...]) -> None:
    b, h, t, s, d = sizes
    compare(leaf(b, h, t, d), leaf(b, h, s, d), leaf(b, h, s, 5))
    compare(leaf(b, h, t, 5), leaf(b, h, s, 5), leaf(b, h, s, d))


def gradients_of(sample: Any, change: Callable[[torch.Tensor], torch.Tensor], grad: bool) -> list[torch.Tensor]:
    """The output of a sample of torch's own whose tensors are changed, and the gradients of those that want one."""

    def changed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return change(value.detach()).requires_grad_(value.requires_grad)

    given = [changed(value) for value in (sample.input, *sample.args)]
    named = {name: changed(value) for name, value in sample.kwargs.items()}
    out = scaled_dot_product_attention(*given, **named)
    leaves = [t for t in (*given, *named.values()) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not (grad and leaves):
        return [out.detach().cpu().double()]
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(out, leaves, seed.to(out))
    return [t.detach().cpu().double() for t in (out, *grads)]


def largest_score(sample: Any) -> float:
    """A bound of the scores' magnitudes: longest query times longest key, and what a mask adds."""
    q, k = sample.input, sample.args[0]
    scale = float(sample.kwargs.get("scale") or q.shape[-1] ** -0.5)
    most = abs(scale) * float(q.detach().norm(dim=-1).max()) * float(k.detach().norm(dim=-1).max())
    mask = sample.kwargs.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        most += float(mask.detach().nan_to_num(0.0, 0.0, 0.0).abs().max())
    return most


def test_samples_of_torch(device: Device) -> None:
    """Beside the results in float64: a score is rounded before its exponential is taken, which scores of 100 feel."""
    info = op_infos()["nn.functional.scaled_dot_product_attention"]
    place = torch.device("opencl", device.info.index)
    grad = not device.info.index
    samples = [s for s in sample_inputs(info, torch.float32, requires_grad=grad) if not s.kwargs["dropout_p"]]

    def widened(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor.clone()

    for sample in samples:
        with strict():
            got = gradients_of(sample, lambda tensor: tensor.to(place), grad)
        error = TOLERANCES[torch.float32] + 2.0**-23 * largest_score(sample)
        for found, wanted in zip(got, gradients_of(sample, widened, grad), strict=True):
            scale = float(wanted.nan_to_num().abs().max())
            torch.testing.assert_close(found, wanted, rtol=0.0, atol=error * scale, equal_nan=True)
    assert len(samples) > 10


def test_heads_inside_of_rows_come_back_so(device: Device) -> None:
    """As linear layers make them: nothing is copied on the way in, and the result can be viewed as rows."""
    x = torch.randn(2, 9, 3, 8).to(f"opencl:{device.info.index}").transpose(1, 2)
    out = scaled_dot_product_attention(x, x, x)
    assert out.stride() == x.stride()
    assert out.transpose(1, 2).reshape(2, 9, 24).data_ptr() == out.data_ptr()


def test_dropout_of_torch(device: Device) -> None:
    """Forward and backward draw alike, seeds repeat, calls differ; the mean stays."""
    place = f"opencl:{device.info.index}"
    q, k = torch.randn(1, 2, 40, 16).to(place), torch.randn(1, 2, 60, 16).to(place)
    v = torch.eye(60).expand(1, 2, 60, 60).contiguous().to(place)
    if not device.info.index:
        v.requires_grad_()
    torch.manual_seed(3)
    weights = scaled_dot_product_attention(q, k, v, dropout_p=0.4)
    other = scaled_dot_product_attention(q, k, v, dropout_p=0.4).detach().cpu()
    torch.manual_seed(3)
    assert torch.equal(scaled_dot_product_attention(q, k, v, dropout_p=0.4).detach().cpu(), weights.detach().cpu())
    assert not torch.equal(other, weights.detach().cpu())
    plain = scaled_dot_product_attention(q, k, v).detach().cpu()
    kept = weights.detach().cpu() != 0
    close(weights.detach().cpu(), torch.where(kept, plain / 0.6, torch.zeros(())))
    assert 0.57 < float(kept.float().mean()) < 0.63
    if not device.info.index:
        upstream = torch.randn(1, 2, 40, 60)
        (grad,) = torch.autograd.grad(weights, v, upstream.to(place))
        close(grad.cpu(), weights.detach().cpu().transpose(-2, -1) @ upstream)


def test_gradients_of_gradients_with_dropout(device: Device) -> None:
    if device.info.index:
        pytest.skip("torch differentiates on opencl:0 alone")
    q, k, v = (torch.randn(1, 2, 6, 8).to("opencl:0").requires_grad_() for _ in range(3))

    def gradients(create_graph: bool) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(5)
        out = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        return torch.autograd.grad(out.square().sum(), (q, k, v), create_graph=create_graph)

    for composed, fused in zip(gradients(True), gradients(False), strict=True):
        assert composed.requires_grad
        close(composed.detach().cpu(), fused.cpu())


def test_errors_are_those_of_torch(device: Device) -> None:
    place = f"opencl:{device.info.index}"
    x = torch.randn(1, 2, 4, 8).to(place)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, x.half(), x), {}),
        ((x, x[..., :4], x), {}),
        ((x, x[:, :, :3], x), {}),
        ((x, torch.randn(1, 3, 4, 8).to(place), x), {}),
        ((x, x, x), {"attn_mask": torch.zeros(4, 4, dtype=torch.int32).to(place)}),
        ((x, x, x), {"attn_mask": torch.zeros(3, 4).to(place)}),
        ((x, x, x), {"attn_mask": torch.zeros(4, 4).to(place), "is_causal": True}),
        ((x, x, x), {"dropout_p": 1.5}),
        ((x, x, x.cpu()), {}),
        ((x, x, x), {"attn_mask": torch.zeros(4, 4)}),
    ]
    for args, kwargs in wrong:
        with pytest.raises(RuntimeError):
            scaled_dot_product_attention(*args, **kwargs)
