"""Automagic in training: steps in backward, sums of gradients, options, quantised parameters."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memtrain_cl.device import Device
from memtrain_cl.optim import Automagic
from memtrain_cl.optim.fused_backward import FreedGradient
from tests.adam_cases import give, rooms, same_bits, values
from tests.automagic_cases import loss_of, model_of, oracle, parameters

LR = 1e-3


# ---- steps in backward -----------------------------------------------------------------------------------------------


def test_the_bits_are_those_of_steps_after_backward(device: Device) -> None:
    for name, room in rooms(device).items():
        runs = []
        for fused in (True, False):
            model = model_of(torch.bfloat16, room.place)
            optimizer = Automagic(model.parameters(), lr=LR, polarity_history=2, fused=fused, ops=room.ops)
            rates = []
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                trained = [p for p in model.parameters() if p.requires_grad]
                assert all(isinstance(p.grad, FreedGradient) == fused for p in trained)
                optimizer.step()
                rates += optimizer.get_learning_rates()
            runs.append((optimizer, rates))
        assert same_bits(runs[0][0], runs[1][0]), name
        assert runs[0][1] == runs[1][1]
        assert len(set(rates)) == 4


def test_training_lowers_the_loss(device: Device) -> None:
    for room in rooms(device).values():
        model = model_of(place=room.place)
        # The same batch again and again has gradients that agree for long, so that votes overshoot without a bound.
        optimizer = Automagic(model.parameters(), lr=1e-4, max_lr=1e-2, ops=room.ops)
        first, before = loss_of(model, 0).item(), copy.deepcopy(model.state_dict())
        for _ in range(60):
            loss_of(model, 0).backward()
            optimizer.step()
        assert loss_of(model, 0).item() < 0.1 * first
        after = model.state_dict()
        assert [torch.equal(after[name], before[name]) for name in before] == [False, False, True, True, False, False]
        assert optimizer.get_learning_rates()[0] > 1e-4


def test_backward_passes_accumulate_in_both_modes() -> None:
    """With short gradients each sum is rounded stochastically, the same in both; with long ones it is torch's."""
    for dtype in (torch.float32, torch.bfloat16):
        runs = []
        for options in ({"fused": True, "accumulate": 3}, {"fused": False}):
            model = model_of(dtype)
            optimizer = oracle(model.parameters(), lr=LR, **options)
            for step in range(2):
                optimizer.zero_grad()
                for part in range(3):
                    (loss_of(model, 3 * step + part) / 3).backward()
                optimizer.step()
            runs.append(optimizer)
        assert same_bits(*runs)


def test_short_gradients_add_up_to_their_sum() -> None:
    """A hundred gradients of 2^-10 beside one of 1: torch's bfloat16 sum stays 1, ours grows as it should."""
    p = torch.nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    makers: list[tuple[Callable[..., torch.optim.Optimizer], float]] = [(torch.optim.SGD, 1.0), (oracle, 1 + 0.1)]
    for make, want in [*makers, makers[0]]:
        optimizer = make([p])
        p.grad = torch.ones_like(p)
        for _ in range(100):
            (p * 2.0**-10).sum().backward()
        assert float(p.grad.float().mean()) == pytest.approx(want, abs=4e-3)
        optimizer.zero_grad()
        assert p.grad is None
        del optimizer  # with its hooks
        gc.collect()


def test_clipping_in_both_modes() -> None:
    """Alone, a gradient's length makes no difference; beside the mean of former ones it does."""
    runs = []
    for fused in (True, False):
        model = model_of()
        optimizer = oracle(model.parameters(), lr=LR, fused=fused, **({"max_grad_norm": 1e-2} if fused else {}))
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if not fused:
                for p in model.parameters():
                    if p.grad is not None:
                        torch.nn.utils.clip_grad_norm_([p], 1e-2)
            optimizer.step()
        runs.append(model)
    for got, want in zip(runs[0].parameters(), runs[1].parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_what_backward_s_steps_cannot_do_is_refused_where_it_is_written() -> None:
    model = model_of()
    optimizer = oracle(model.parameters(), fused=True)
    with pytest.raises(RuntimeError, match="expected a backward before step"):
        optimizer.step()
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="expected no use of a gradient after backward"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match=r"expected step\(\) after the backward .* accumulate=, or with fused=False"):
        loss_of(model, 1).backward()
    with pytest.raises(RuntimeError, match=r"expected step\(\) without a closure with fused=True"):
        optimizer.step(lambda: 0.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    with pytest.raises(RuntimeError, match="expected no GradScaler with fused=True"):
        scaler.step(optimizer)
    with pytest.raises(ValueError, match="expected a parameter that no optimizer steps in backward"):
        oracle(model.parameters(), fused=True)
    optimizer.release_backward()
    before = copy.deepcopy(model.state_dict())
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.step()
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])


def test_a_gradscaler_s_skipped_step_is_none() -> None:
    model = model_of()
    optimizer = oracle(model.parameters(), lr=LR)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if step == 1:
            next(model.parameters()).grad.view(-1)[0] = torch.inf  # type: ignore[union-attr]
        before = copy.deepcopy(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert same_bits(optimizer, before) == (step == 1)
    assert {state["step"] for state in optimizer.state.values()} == {2}
    assert optimizer.skipped_elements() == {}


def test_a_closure_is_called_first() -> None:
    model = model_of()
    optimizer = oracle(model.parameters(), lr=LR)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    want = loss_of(model, 0).item()
    loss: Any = optimizer.step(closure)  # type: ignore[arg-type]
    assert loss.item() == want
    assert loss_of(model, 0).item() != want


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"betas": (0.9, 0.999)}, "expected betas .*Automagic has no first moment"),
        ({"betas": (0.0, 1.0)}, "expected betas"),
        ({"lr": -1.0}, "expected lr"),
        ({"lr": math.nan}, "expected lr"),
        ({"min_lr": 0.0}, "expected min_lr"),
        ({"min_lr": 1.0, "max_lr": 0.5}, "expected min_lr <= max_lr"),
        ({"eps": 0.0}, "expected eps"),
        ({"clip_threshold": 0.0}, "expected clip_threshold"),
        ({"weight_decay": -0.1}, "expected weight_decay"),
        ({"polarity_history": 4.0}, "expected polarity_history as an integer"),
        ({"seed": -1}, "expected seed"),
    ],
    ids=str,
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        oracle(parameters(), **options)
    optimizer = oracle(parameters())
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": parameters(), **options})
    assert len(optimizer.param_groups) == 1


def test_what_cannot_be_stepped_is_refused() -> None:
    mine = parameters()
    with pytest.raises(ValueError, match="in a parameter group, got momentum"):
        oracle([{"params": mine, "momentum": 0.9}])
    with pytest.raises(TypeError, match=r"expected parameters of torch\.float32"):
        oracle([torch.nn.Parameter(torch.ones(3, dtype=torch.float64))])
    for wrong in ({"accumulate": 2}, {"max_grad_norm": 1.0}):
        with pytest.raises(ValueError, match="expected accumulate and max_grad_norm with fused=True alone"):
            oracle(mine, **wrong)
    for wrong in ({"accumulate": 0}, {"max_grad_norm": 0.0}, {"fused": 1}):
        with pytest.raises(ValueError, match=f"expected {next(iter(wrong))}"):
            oracle(mine, **{"fused": True, **wrong})
    optimizer = oracle(mine)
    give(mine, 0)
    before = [p.detach().clone() for p in mine]
    embedding = torch.nn.Embedding(4, 3, sparse=True)
    optimizer.add_param_group({"params": [embedding.weight]})
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="expected dense gradients, got one of layout"):
        optimizer.step()
    embedding.weight.grad = None
    for name, value in (("lr", math.nan), ("max_lr", 1e-40), ("betas", (0.5, 0.9)), ("eps", -1.0)):
        kept = optimizer.param_groups[0][name]
        optimizer.param_groups[0][name] = value
        with pytest.raises(ValueError, match=f"expected {name}"):
            optimizer.step()
        optimizer.param_groups[0][name] = kept
    assert all(torch.equal(p, old) for p, old in zip(mine, before, strict=True))
    assert not optimizer.state


def test_a_sparse_gradient_is_refused_in_backward() -> None:
    embedding = torch.nn.Embedding(4, 3, sparse=True)
    oracle(embedding.parameters(), fused=True)
    with pytest.raises(RuntimeError, match="expected dense gradients, got one of layout"):
        embedding(torch.tensor([1])).sum().backward()


def test_history_is_taken_into_its_range() -> None:
    for asked, held in ((-5, 2), (2, 2), (8, 8), (64, 64), (65, 64)):
        assert oracle(parameters(), polarity_history=asked).param_groups[0]["polarity_history"] == held


def test_a_group_on_two_places_is_refused(device: Device) -> None:
    room = rooms(device).get("opencl")
    if room is None:
        pytest.skip("torch differentiates on opencl:0 alone")
    pair = [torch.nn.Parameter(torch.ones(3, device=place)) for place in ("cpu", room.place)]
    optimizer = Automagic(pair, fused=False)
    for p in pair:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="expected a group's parameters on one device, got cpu, opencl:0"):
        optimizer.step()
    assert all(torch.equal(p.cpu(), torch.ones(3)) for p in pair)
    Automagic([{"params": [p]} for p in pair], fused=False).step()


def test_strided_parameters_and_gradients(device: Device) -> None:
    for room in rooms(device).values():
        base = values(48, 12).to(room.place)
        pair = [torch.nn.Parameter(base.t().contiguous()), torch.nn.Parameter(base.t())]
        for p in pair:
            optimizer = Automagic([p], lr=LR, fused=False, ops=room.ops)
            for step in range(2):
                grad = values(12, 48, seed=step).to(room.place)
                p.grad = grad if p is pair[0] else grad.t().contiguous().t()
                optimizer.step()
        assert torch.equal(pair[0].cpu(), pair[1].cpu())


# ---- quantised parameters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore")
def test_quantised_parameters_learn(dtype: torch.dtype) -> None:
    quanto = pytest.importorskip("optimum.quanto", reason="quantised parameters are an extra")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 8)).to(dtype)
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)
    weight: Any = model[0].weight.requires_grad_(True)
    assert isinstance(weight, quanto.QBytesTensor)
    for fused in (False, True):
        optimizer = oracle(model.parameters(), lr=1e-3, max_lr=3e-3, fused=fused)
        x = values(64, 32).to(dtype)
        first = (model(x) - x[:, :8]).float().square().mean().item()
        before, codes = weight.dequantize().detach().clone(), weight._data
        for _ in range(40):
            optimizer.zero_grad()
            (model(x) - x[:, :8]).float().square().mean().backward()
            optimizer.step()
        assert (model(x) - x[:, :8]).float().square().mean().item() < 0.9 * first
        assert not torch.equal(weight.dequantize(), before)
        assert weight._data is codes
        assert int(weight._data.abs().max()) == 127
        optimizer.release_backward()
