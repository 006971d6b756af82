"""Reversible chains: the plain chain's gradients, memory that depth does not move, one update of counter layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from memtrain_cl import saved_activations
from memtrain_cl.device import Device
from memtrain_cl.meter import metered, saved_bytes
from memtrain_cl.nn import ReversibleCouplingBlock, ReversibleSequence, ReversibleSequential
from tests.nn_cases import bytes_of, layers_of, room_of, twin

WIDTH = 20
DEPTH = 6


def part() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))


def chain(depth: int = DEPTH, anchor_every: int = 0) -> ReversibleSequence:
    torch.manual_seed(0)
    blocks = [ReversibleCouplingBlock(part(), part()) for _ in range(depth)]
    return ReversibleSequence(blocks, anchor_every=anchor_every)


def plain(sequence: ReversibleSequence, x1: torch.Tensor, x2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    for block in sequence.blocks:
        x1, x2 = block(x1, x2)
    return x1, x2


def inputs(place: torch.device | str = "cpu", *, grad: bool = True) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(1)
    return [torch.randn(7, WIDTH, generator=chance).to(place).requires_grad_(grad) for _ in range(2)]


def gradients(module: nn.Module, forward: Any, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    y1, y2 = forward(*xs)
    weight = torch.linspace(-1, 1, WIDTH).to(xs[0].device)
    loss = (y1 * weight).square().sum() + (y2 * y1).sum()
    wanted = [*(x for x in xs if x.requires_grad), *module.parameters()]
    return [loss.detach().cpu(), *(grad.cpu() for grad in torch.autograd.grad(loss, wanted))]


def assert_near(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert float((one - other).norm() / other.norm().clamp_min(1e-9)) < 1e-5


def test_the_inverse_is_one() -> None:
    block = ReversibleCouplingBlock(part(), part())
    xs = inputs(grad=False)
    with torch.no_grad():
        back = block.inverse(*block(*xs))
    assert_near(list(back), xs)


@pytest.mark.parametrize("anchor_every", [0, 1, 2, 4, 100])
def test_gradients_are_the_plain_chains(anchor_every: int) -> None:
    sequence = chain(anchor_every=anchor_every)
    for grad in (True, False):
        xs = inputs(grad=grad)
        expected = gradients(sequence, lambda *x: plain(sequence, *x), xs)
        assert_near(gradients(sequence, sequence, xs), expected)


def test_on_the_device(device: Device) -> None:
    place = room_of("opencl", device).place
    sequence = chain(anchor_every=4).to(place)
    xs = inputs(place)
    expected = gradients(sequence, lambda *x: plain(sequence, *x), xs)
    got = gradients(sequence, sequence, xs)
    assert_near(got, expected)
    sequence(*xs)[0].sum().backward()
    with pytest.raises(RuntimeError, match="without chance"):
        ReversibleSequence([ReversibleCouplingBlock(nn.Dropout(0.5), part())]).to(place)(*xs)


def test_bytes_kept_do_not_grow_with_depth() -> None:
    pair = 2 * 7 * WIDTH * 4
    for depth in (1, 4, 16):
        for every, pairs in ((0, 1), (4, 1 + (depth - 1) // 4)):
            sequence, xs = chain(depth, every), inputs()
            with saved_bytes() as kept:
                ys = sequence(*xs)
            assert kept.nbytes == pairs * pair
            del ys


def test_the_most_that_lives_does_not_grow_with_depth() -> None:
    peaks = []
    for depth in (4, 32):
        sequence, xs = chain(depth), inputs()
        for parameter in sequence.parameters():
            parameter.requires_grad_(False)
        with metered(torch.device("cpu")) as meter:
            y1, y2 = sequence(*xs)
            (y1 * y2).sum().backward()
            peaks.append(meter.peak())
    assert peaks[1] <= 1.05 * peaks[0]


def test_one_tensor_in_halves() -> None:
    sequence = chain(3)
    whole = ReversibleSequential(*sequence.blocks, dim=1)
    x = torch.cat(inputs(grad=False), dim=1).requires_grad_()
    expected = torch.cat(plain(sequence, *x.chunk(2, dim=1)), dim=1)
    got = whole(x)
    torch.testing.assert_close(got, expected)
    (want,) = torch.autograd.grad(expected.square().sum(), x)
    torch.testing.assert_close(torch.autograd.grad(got.square().sum(), x)[0], want, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"expected an even size along dimension 1, got \[7, 3\]"):
        whole(torch.zeros(7, 3))


@pytest.mark.parametrize("name", ["reference", "opencl"])
@pytest.mark.parametrize("anchor_every", [0, 2])
def test_counter_layers_update_once(device: Device, name: str, anchor_every: int) -> None:
    room = room_of(name, device)
    torch.manual_seed(0)
    blocks = [
        ReversibleCouplingBlock(
            nn.Sequential(nn.LayerNorm(WIDTH), room.make(out_features=WIDTH)), room.make(out_features=WIDTH)
        )
        for _ in range(4)
    ]
    sequence = ReversibleSequence(blocks, anchor_every=anchor_every).to(room.place)
    other = twin(sequence)
    for _ in range(2):
        xs = inputs(room.place, grad=False)
        for own, forward in ((sequence, sequence), (other, lambda *x: plain(other, *x))):
            y1, y2 = forward(*xs)
            (y1 * y2).sum().backward()
            assert all(parameter.grad is not None for parameter in own.parameters())
    assert [layer.step for layer in layers_of(sequence)] == [2] * 8
    agree(sequence, other)


def agree(one: nn.Module, other: nn.Module) -> None:
    """Codes of the two differ where a gradient that rounding moved crossed a threshold, and hardly anywhere."""
    apart = total = 0
    mine, theirs = bytes_of(one), bytes_of(other)
    for name, value in mine.items():
        if name.endswith(".state"):
            apart += int((value != theirs[name]).sum())
            total += value.numel()
    assert total > 2000
    assert apart <= total // 500


def test_a_layer_that_stands_in_several_blocks(device: Device) -> None:
    room = room_of("reference", device)
    torch.manual_seed(0)
    shared = room.make(out_features=WIDTH, reuse=True)
    sequence = ReversibleSequence([ReversibleCouplingBlock(shared, part()) for _ in range(3)])
    other = twin(sequence)
    xs = inputs(grad=False)
    for forward in (sequence, lambda *x: plain(other, *x)):
        y1, y2 = forward(*xs)
        (y1 * y2).sum().backward()
    assert [layer.step for layer in layers_of(sequence)] == [1] == [layer.step for layer in layers_of(other)]


def test_what_would_differ_in_the_second_run_raises() -> None:
    xs = inputs()
    noisy = ReversibleSequence([ReversibleCouplingBlock(nn.Sequential(part(), nn.Dropout(0.1)), part())])
    with pytest.raises(RuntimeError, match="expected F and G without chance"):
        noisy(*xs)
    noisy.eval()(*xs)[0].sum().backward()
    normed = ReversibleSequence([ReversibleCouplingBlock(nn.BatchNorm1d(WIDTH), part())])
    with pytest.raises(RuntimeError, match=r"without batch norms in training, got blocks\.0\.f"):
        normed(*xs)
    sequence = chain(2)
    y1, _ = sequence(*xs)
    with torch.no_grad():
        next(sequence.parameters()).add_(1)
    with pytest.raises(RuntimeError, match="a parameter of a reversible chain has been changed"):
        y1.sum().backward()


def test_what_goes_around_it() -> None:
    sequence, xs = chain(3), inputs()
    expected = gradients(sequence, lambda *x: plain(sequence, *x), xs)
    # Its results are what the way back begins with: they are never rounded.
    with saved_activations(2, min_numel=0) as report:
        y1, y2 = sequence(*xs)
    assert report.packed == 0
    assert copy.deepcopy(sequence)(*xs)[0].shape == y1.shape
    assert_near(gradients(sequence, sequence, xs), expected)
    next(sequence.parameters()).requires_grad_(False)
    sequence(*xs)[1].sum().backward()
    assert next(sequence.parameters()).grad is None
    with torch.no_grad():
        assert torch.equal(sequence(*xs)[1], y2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y1, y2 = sequence(*xs)
    assert y1.dtype == torch.float32
    (y1 * y2).sum().backward()


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match="expected blocks as ReversibleCouplingBlock, got Linear"):
        ReversibleSequence([nn.Linear(2, 2)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="expected anchor_every as an integer >= 0, got -1"):
        chain(1, -1)
    with pytest.raises(ValueError, match="expected x1 and x2 alike"):
        chain(1)(torch.zeros(7, WIDTH), torch.zeros(6, WIDTH))
    with pytest.raises(ValueError, match=r"expected F to give torch.float32 \[7, 20\], got torch.float32 \[7, 3\]"):
        ReversibleCouplingBlock(nn.Linear(WIDTH, 3), part())(*inputs())
    assert chain(0)(*inputs())[0].shape == (7, WIDTH)
