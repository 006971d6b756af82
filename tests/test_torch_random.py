"""Random numbers of the torch device: bytes against NumPy, distributions, dropout, draws, and the generator's state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import memtrain_cl.torch_device
from memtrain_cl.device import Device
from memtrain_cl.faults import raise_pending
from memtrain_cl.launchers import random as launch
from memtrain_cl.operand import empty_operand
from memtrain_cl.torch_device import random
from memtrain_cl.torch_device.tensor import torch_device, wrap

memtrain_cl.torch_device.require_registered()

SIZES = (0, 1, 2, 255, 4099)
STREAM = 0xC0FFEE11

Array = Any


@pytest.fixture(autouse=True)
def _state() -> Iterator[None]:
    yield
    random.manual_seed_all(torch.initial_seed())


# ---- the same arithmetic in NumPy, an operation at a time ----


def hashed(x: Array) -> Array:
    x = x.astype(np.uint32)
    x = x ^ x >> np.uint32(16)
    x = x * np.uint32(0x7FEB352D)
    x = x ^ x >> np.uint32(15)
    x = x * np.uint32(0x846CA68B)
    return x ^ x >> np.uint32(16)


def bits(n: int, stream: int = STREAM, first: int = 0) -> Array:
    place = np.arange(first, first + n, dtype=np.uint64)
    low, high = place.astype(np.uint32), (place >> np.uint64(32)).astype(np.uint32)
    return hashed(np.uint32(stream) ^ hashed(low ^ hashed(high)))


def uniform(n: int, stream: int = STREAM) -> Array:
    return (bits(n, stream) & np.uint32(0xFFFFFF)).astype(np.float32) * np.float32(2.0**-24)


def open_uniform(n: int, stream: int = STREAM) -> Array:
    return ((bits(n, stream) & np.uint32(0xFFFFFF)) | np.uint32(1)).astype(np.float32) * np.float32(2.0**-24)


def horner(z: Array, *coefficients: float) -> Array:
    value = np.full_like(z, np.float32(coefficients[0]))
    for coefficient in coefficients[1:]:
        value = value * z
        value = value + np.float32(coefficient)
    return value


def log(u: Array) -> Array:
    moved = u.view(np.uint32) - np.uint32(0x3F3504F3)
    e = (moved.view(np.int32) >> np.int32(23)).astype(np.float32)
    f = ((moved & np.uint32(0x7FFFFF)) + np.uint32(0x3F3504F3)).view(np.float32)
    s = (f - np.float32(1)) / (f + np.float32(1))
    series = horner(s * s, 2 / 9, 2 / 7, 2 / 5, 2 / 3, 2)
    return e * np.float32(0.693359375) + (s * series + e * np.float32(-2.12194440e-4))


def cos_sin(v: Array) -> tuple[Array, Array]:
    quarters = v * np.float32(4)
    q = (quarters + np.float32(0.5)).astype(np.int32)
    x = (quarters - q.astype(np.float32)) * np.float32(math.pi / 2)
    z = x * x
    c = horner(z, 1 / 40320, -1 / 720, 1 / 24, -1 / 2, 1)
    s = horner(z, 1 / 362880, -1 / 5040, 1 / 120, -1 / 6, 1) * x
    cosines, sines = np.stack([c, -s, -c, s]), np.stack([s, c, -s, -c])
    at = np.arange(len(v))
    return cosines[q % 4, at], sines[q % 4, at]


def normal(n: int, mean: float, std: float) -> Array:
    even = n + n % 2
    radius = np.sqrt(np.float32(-2) * log(open_uniform(even)[::2].copy()))
    pair = cos_sin(uniform(even)[1::2].copy())
    z = np.stack([radius * pair[0], radius * pair[1]], 1).reshape(-1)[:n]
    return z * np.float32(std) + np.float32(mean)


def made(device: Device, n: int, dtype: torch.dtype, fill: Callable[..., None], *arguments: Any) -> torch.Tensor:
    """What a launcher makes, in a view that does not begin at its buffer's first element."""
    whole: Any = torch.zeros(n + 6, dtype=dtype, device=torch_device(device))
    fill(whole.operand.viewed((n,), offset=3), STREAM, *arguments)
    host: torch.Tensor = whole.cpu()
    assert not host[:3].any()
    assert not host[n + 3 :].any()
    return host[3 : n + 3]


def same(got: torch.Tensor, want: Array) -> None:
    expected = torch.from_numpy(np.ascontiguousarray(want)).to(got.dtype)
    assert torch.equal(got, expected)


# ---- bytes ----


@pytest.mark.parametrize("n", SIZES)
def test_numbers_are_those_of_numpy(device: Device, n: int) -> None:
    same(made(device, n, torch.float32, launch.uniform), uniform(n))
    same(made(device, n, torch.float32, launch.normal, 0.5, 3.0), normal(n, 0.5, 3.0))
    exponentials = -log(open_uniform(n)) / np.float32(1.5)
    same(made(device, n, torch.float32, launch.exponential, 1.5), exponentials)
    same(made(device, n, torch.bool, launch.bernoulli, 0.3), uniform(n) < np.float32(0.3))
    order = np.argsort(bits(n), kind="stable")
    same(made(device, n, torch.int64, launch.permutation), order)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_hold_the_rounded_numbers(device: Device, dtype: torch.dtype) -> None:
    same(made(device, 4099, dtype, launch.normal, 0.5, 3.0), normal(4099, 0.5, 3.0))
    rounded = torch.from_numpy(uniform(4099)).to(dtype)
    rounded[rounded == 1] = 0
    got = made(device, 4099, dtype, launch.uniform)
    assert torch.equal(got, rounded)
    assert got.max() < 1


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 7), (-5, 1000), (-(1 << 63), 1 << 63), (0, 1 << 63), (-3, (1 << 40) + 1)]
)
def test_whole_numbers(device: Device, low: int, high: int) -> None:
    n = 1001
    wide = [(int(a) << 32) | int(b) for a, b in zip(bits(n), bits(n, STREAM ^ 0x9E3779B9), strict=True)]
    want = torch.tensor([low + ((high - low) * b >> 64) for b in wide])
    assert torch.equal(made(device, n, torch.int64, launch.integers, low, high), want)
    if high <= 1 << 15:
        for dtype in (torch.int16, torch.int32, torch.float32):
            assert torch.equal(made(device, n, dtype, launch.integers, low, high), want.to(dtype))
    with pytest.raises(ValueError, match="low < high"):
        made(device, n, torch.int64, launch.integers, high, low)


def test_polynomials_are_near_the_functions() -> None:
    u = np.concatenate([np.arange(1, 1 << 24, 4099), [(1 << 24) - 1]]).astype(np.float32) * np.float32(2.0**-24)
    exact = np.log(u.astype(np.float64))
    assert np.abs((log(u) - exact) / exact).max() < 3e-7
    cosine, sine = cos_sin(u)
    angle = 2 * np.pi * u.astype(np.float64)
    assert np.abs(cosine - np.cos(angle)).max() < 2e-7
    assert np.abs(sine - np.sin(angle)).max() < 2e-7


# ---- distributions ----


def test_distributions(device: Device) -> None:
    home, n = torch_device(device), 1 << 16
    u = torch.rand(n, device=home).cpu().sort().values
    # Kolmogorov's distance of n numbers is above 1.95/sqrt(n) once in a thousand times.
    assert (u - (torch.arange(n) + 0.5) / n).abs().max() < 1.95 / math.sqrt(n)
    z = torch.randn(n, device=home).cpu()
    below = torch.special.ndtr(z.double().sort().values)
    assert (below - (torch.arange(n) + 0.5) / n).abs().max() < 1.95 / math.sqrt(n)
    assert abs(torch.corrcoef(torch.stack([z[::2], z[1::2]]))[0, 1]) < 4 / math.sqrt(n / 2)
    e = torch.empty(n, device=home).exponential_(2.0).cpu()
    assert e.min() > 0
    assert abs(e.mean() - 0.5) < 4 * 0.5 / math.sqrt(n)
    counts = torch.randint(0, 10, (n,), device=home).cpu().bincount(minlength=10)
    assert ((counts - n / 10).abs() < 5 * math.sqrt(n / 10)).all()


def test_operations_get_streams_of_their_own(device: Device) -> None:
    home = torch_device(device)
    first, second = torch.rand(1000, device=home).cpu(), torch.rand(1000, device=home).cpu()
    assert not torch.equal(first, second)
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.15
    assert len({random.next_seed(device) for _ in range(10000)}) == 10000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dropout(device: Device, dtype: torch.dtype) -> None:
    x = torch.randn(3, 2001).to(dtype)
    for p in (0.0, 0.1, 0.75, 1.0):
        moved = x.to(torch_device(device))
        stream = random.get_rng_state(device.info.index)
        y, mask = torch.native_dropout(moved, p, True)
        random.set_rng_state(stream, device.info.index)
        kept = torch.from_numpy(uniform(x.numel(), random.next_seed(device)) < np.float32(1 - p)).view_as(x)
        scale = np.float32(1 / (1 - p)) if p < 1 else np.float32(0)
        assert torch.equal(mask.cpu(), kept)
        want = torch.where(kept, (x.float() * float(scale)), 0).to(dtype)
        assert torch.equal(y.cpu(), want)
        grad = torch.ops.aten.native_dropout_backward(moved.mT, mask.mT, float(scale))
        assert torch.equal(grad.cpu(), want.mT)
    y, mask = torch.native_dropout(x.to(torch_device(device)), 0.5, False)
    assert torch.equal(y.cpu(), x)
    assert mask.cpu().all()


def test_dropout_in_a_model(device: Device) -> None:
    x = torch.ones(64, 64).to(torch_device(device))
    y = torch.nn.functional.dropout(x, 0.25).cpu()
    assert abs((y == 0).float().mean() - 0.25) < 0.03
    assert torch.equal(y.unique(), torch.tensor([0, 1 / 0.75]))
    assert torch.equal(torch.nn.functional.dropout(x, 0.25, training=False).cpu(), x.cpu())


def test_bernoulli(device: Device) -> None:
    home = torch_device(device)
    p = torch.linspace(0, 1, 5).repeat(2000).to(home)
    drawn = torch.bernoulli(p).cpu().view(2000, 5).mean(0)
    assert drawn[0] == 0
    assert drawn[4] == 1
    assert ((drawn - torch.linspace(0, 1, 5)).abs() < 0.05).all()
    x = torch.empty(100, 5, dtype=torch.int32).to(home)
    assert torch.equal(x.bernoulli_(p[:5])[:, 4].cpu(), torch.ones(100, dtype=torch.int32))
    assert set(x.bernoulli_(0.5).cpu().unique().tolist()) == {0, 1}
    with pytest.raises(RuntimeError, match="p to be in"):
        x.bernoulli_(1.5)


def test_multinomial(device: Device) -> None:
    home = torch_device(device)
    weights = torch.tensor([[1.0, 0, 3, 4], [0, 5, 0, 0]])
    drawn = torch.multinomial(weights.to(home), 8000, replacement=True).cpu()
    assert drawn.dtype == torch.int64
    share = drawn[0].bincount(minlength=4) / 8000
    assert ((share - weights[0] / 8).abs() < 0.03).all()
    assert share[1] == 0
    assert (drawn[1] == 1).all()
    once = torch.multinomial(torch.rand(50, 300).to(home), 300).cpu()
    assert torch.equal(once.sort(1).values, torch.arange(300).expand(50, 300))
    rows = torch.rand(64, 256)
    assert torch.multinomial(rows.to(home, torch.bfloat16), 1).shape == (64, 1)
    assert torch.multinomial(rows[0].to(home), 3).shape == (3,)


def test_multinomial_does_not_depend_on_the_kernels_shape(shaped: Device) -> None:
    weights = torch.rand(9, 300)
    out = empty_operand(shaped, (9, 4), "int64")
    launch.draw(weights.to(torch_device(shaped)).operand, out, STREAM)  # type: ignore[attr-defined]
    q = -log(open_uniform(9 * 4 * 300)).reshape(9, 4, 300)
    same(wrap(out).cpu(), (weights.numpy()[:, None] / q).argmax(-1))


@pytest.mark.parametrize(
    ("weights", "message"),
    [([1.0, -1.0], "element < 0"), ([1.0, math.nan], "element < 0"), ([math.inf, 1.0], "inf"), ([0.0, 0.0], "sum of")],
)
def test_weights_that_are_none(device: Device, weights: list[float], message: str) -> None:
    for samples, replacement in ((1, True), (2, False)):
        torch.multinomial(torch.tensor([[1.0, 2.0], weights]).to(torch_device(device)), samples, replacement)
        with pytest.raises(RuntimeError, match=message):
            raise_pending(device)
        raise_pending(device)


# ---- forms that end in these ----


def test_forms(device: Device) -> None:
    home = torch_device(device)
    x = torch.zeros(40, 60).to(home)
    x[:, ::2].normal_()
    host = x.cpu()
    assert (host[:, 1::2] == 0).all()
    assert (host[:, ::2] != 0).all()
    assert torch.randn_like(x).shape == x.shape
    assert torch.rand_like(x, dtype=torch.bfloat16).dtype == torch.bfloat16
    means, spread = torch.full((1000,), 5.0).to(home), torch.full((1000,), 0.1).to(home)
    for made_ in (torch.normal(means, 0.1), torch.normal(5.0, spread), torch.normal(means, spread)):
        assert abs(made_.cpu().mean() - 5) < 0.02
        assert abs(made_.cpu().std() - 0.1) < 0.02
    assert torch.randint(3, 5, (100,), device=home).cpu().unique().tolist() == [3, 4]
    assert torch.randint_like(x, 2).dtype == torch.float32
    whole = torch.empty(1000, dtype=torch.int8).to(home).random_().cpu()
    assert whole.min() >= 0
    assert whole.max() > 100
    for n in (0, 1, 300):
        assert torch.equal(torch.randperm(n, device=home).cpu().sort().values, torch.arange(n))
    assert torch.randperm(100, device=home, dtype=torch.uint8).dtype == torch.uint8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x.uniform_(2, 1), "from=2"),
        (lambda x: x.normal_(0, -1), "std"),
        (lambda x: x.exponential_(0), "lambda"),
        (lambda x: x.random_(3, 3), "less than"),
        (lambda x: x.to(torch.uint8).random_(0, 300), "within 0..255"),
        (lambda x: torch.randperm(300, device=x.device, dtype=torch.uint8), "too large"),
        (lambda x: torch.multinomial(x, 9), "without replacement"),
        (lambda x: x.expand(3, 8).normal_(), "single memory location"),
    ],
)
def test_refusals(device: Device, call: Callable[[torch.Tensor], Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(torch.ones(1, 8).to(torch_device(device)))


# ---- the generator ----


def test_state(device: Device) -> None:
    home, index = torch_device(device), device.info.index
    torch.manual_seed(5)
    assert random.initial_seed(index) == 5
    first = torch.rand(100, device=home).cpu()
    state = random.get_rng_state(index)
    assert state.dtype == torch.uint8
    second = torch.rand(100, device=home).cpu()
    random.set_rng_state(state, index)
    assert torch.equal(torch.rand(100, device=home).cpu(), second)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(100, device=home).cpu(), first)
    torch.manual_seed(6)
    assert not torch.equal(torch.rand(100, device=home).cpu(), first)
    with pytest.raises(RuntimeError, match=r"shape \[16\]"):
        random.set_rng_state(state[:8], index)
    with pytest.raises(TypeError, match="uint8"):
        random.set_rng_state(state.int(), index)
    with pytest.raises(RuntimeError, match="64 bits"):
        random.manual_seed(1 << 64, index)


def test_streams_follow_from_seed_and_offset(device: Device) -> None:
    for seed in (0, 7, (1 << 40) + 3):
        random.manual_seed(seed, device.info.index)
        halves = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
        root = hashed(halves[1:] ^ hashed(halves[:1] + np.uint32(0x9E3779B9)))
        want = hashed(np.arange(5, dtype=np.uint32) ^ hashed(root))
        assert [random.next_seed(device) for _ in range(5)] == want.tolist()
    random.manual_seed(-1, device.info.index)
    assert random.initial_seed(device.info.index) == (1 << 64) - 1
    streams = set()
    for seed in range(1000):
        random.manual_seed(seed, device.info.index)
        streams.add(random.next_seed(device))
    assert len(streams) == 1000


def test_a_cpu_generator_gives_the_stream(device: Device) -> None:
    home = torch_device(device)
    generator = torch.Generator()
    generator.manual_seed(3)
    state = random.get_rng_state(device.info.index)
    first = torch.empty(50, device=home).normal_(generator=generator).cpu()
    assert not torch.equal(torch.empty(50, device=home).normal_(generator=generator).cpu(), first)
    generator.manual_seed(3)
    assert torch.equal(torch.empty(50, device=home).normal_(generator=generator).cpu(), first)
    assert torch.equal(random.get_rng_state(device.info.index), state)


def test_fork_rng_restores_the_state() -> None:
    torch.manual_seed(1)
    with torch.random.fork_rng(devices=[0], device_type="opencl"):
        inside = torch.rand(10, device="opencl:0").cpu()
    assert torch.equal(torch.rand(10, device="opencl:0").cpu(), inside)


def test_recomputed_dropout_is_the_same() -> None:
    x = torch.ones(1000).to("opencl:0").requires_grad_()

    def drop(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(values, 0.5) * 2

    for reentrant in (False, True):
        x.grad = None
        y = checkpoint(drop, x, use_reentrant=reentrant)
        y.backward(torch.ones_like(y))
        assert x.grad is not None
        assert torch.equal(x.grad.cpu(), y.detach().cpu())


def test_offsets_beyond_32_bits_differ() -> None:
    near, far = bits(4), bits(4, first=1 << 32)
    assert not (near == far).any()
