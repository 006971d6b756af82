"""Automagic's steps: published runs, every place to the bit, hard gradients, and the learning rate that is shown."""

from __future__ import annotations

import copy
import itertools
import json
import math
from typing import Any

import pytest
import torch

from memtrain_cl import memory_report, ops, reference
from memtrain_cl.automagic_rule import AutomagicStep, AutomagicTensor
from memtrain_cl.device import Device
from memtrain_cl.optim import Automagic
from memtrain_cl.optim.automagic_group import RateGroup, middle_rate
from memtrain_cl.program import Kernel
from tests.adam_cases import DTYPES, advance, give, rooms, same_bits, values
from tests.automagic_cases import GOLDEN, oracle, parameters, published

RUNS = GOLDEN["automagic"]


@pytest.mark.parametrize("case", RUNS, ids=[case["name"] for case in RUNS])
def test_published_runs(device: Device, case: dict[str, Any]) -> None:
    ends = []
    for room in rooms(device).values():
        start, gradients = published(case, room.place)
        p = torch.nn.Parameter(start)
        options: dict[str, Any] = {"weight_decay": case["weight_decay"], "polarity_history": case["H"]}
        optimizer = Automagic([p], lr=case["lr0"], fused=False, ops=room.ops, **options)
        rates = []
        for grad in gradients:
            p.grad = grad
            optimizer.step()
            rates.append(optimizer.param_groups[0]["lr"])
        # Their sums run in another order.
        assert rates == pytest.approx(case["lr_after_each_step"], rel=1e-6)
        want = torch.tensor(case["param_final"])
        torch.testing.assert_close(p.detach().cpu().flatten(), want, rtol=0, atol=1e-7)
        ends.append((rates, p.detach().cpu()))
    for rates, weights in ends:
        assert rates == ends[0][0]
        assert torch.equal(weights, ends[0][1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_place_gives_the_same_bits(device: Device, dtype: torch.dtype) -> None:
    runs: dict[str, Automagic] = {}
    for name, room in rooms(device).items():
        mine = parameters(dtype, room.place)
        if dtype != torch.float32:  # each way to hold a tensor is a program to build
            mine = [mine[1], mine[3]]
        half = len(mine) // 2
        groups = [{"params": mine[:half], "weight_decay": 0.1}, {"params": mine[half:], "polarity_history": 3}]
        runs[name] = Automagic(groups, lr=1e-2, fused=False, ops=room.ops)
        advance(runs[name], 0, 9)
        mine[0].grad.view(-1)[3], mine[half].grad.view(-1)[5] = math.nan, -math.inf
        runs[name].step()
        advance(runs[name], 10, 2)
    for name, run in runs.items():
        assert same_bits(run, runs["reference"]), name
        assert run.get_learning_rates() == runs["reference"].get_learning_rates()
    assert runs["reference"].skipped_elements() == {"0": 1, str(half): 1}
    first, second = runs["reference"].get_learning_rates()
    assert len({first, second, 1e-2}) == 3


def test_one_kernel_order_whatever_else_is_in_the_group(device: Device) -> None:
    """The group's votes are its tensors', in their order, given in one call or one by one."""
    results = []
    for fused in (False, True):
        mine = parameters()
        optimizer = Automagic(mine, lr=1e-2, fused=fused, polarity_history=2)
        for step in range(4):
            give(mine, step)
            if fused:
                for place in reversed(list(optimizer._places())):  # as backward reaches them
                    optimizer._update([place])
                optimizer._conclude()
            else:
                optimizer.step()
        results.append((optimizer.get_learning_rates(), [p.detach().clone() for p in mine]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


# ---- votes and bounds ------------------------------------------------------------------------------------------------


def test_signs_that_agree_lengthen_and_signs_that_turn_shorten() -> None:
    for sign, want in ((1, 1e-3 * math.e**6), (-1, 1e-3 * math.e**-6)):
        p = torch.nn.Parameter(torch.zeros(3, 16))
        optimizer = oracle([p], lr=1e-3, polarity_history=3)
        for step in range(8):
            p.grad = torch.full_like(p, float(sign**step))
            optimizer.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(want, rel=1e-5)


def test_rates_stay_in_their_bounds() -> None:
    p = torch.nn.Parameter(torch.zeros(4))
    optimizer = oracle([p], lr=1e-3, polarity_history=2, max_lr=3e-3, min_lr=1e-3)
    for sign, want in ((1.0, 3e-3), (-1.0, 1e-3)):
        for step in range(6):
            p.grad = torch.full_like(p, sign**step)
            optimizer.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(want, rel=1e-6)


def test_updates_are_clipped_together_and_one_by_one() -> None:
    p = torch.nn.Parameter(torch.zeros(1000))
    optimizer = oracle([p], lr=1.0, betas=(0.0, 0.0), eps=1e-30, clip_threshold=0.5)
    p.grad = values(1000)
    p.grad[0] = 1e6
    optimizer.step()
    # With beta2 = 0 every update has the length 1, of which half is left.
    torch.testing.assert_close(p.detach(), -0.5 * torch.sign(p.grad), rtol=1e-5, atol=1e-6)


def test_one_infinite_element_changes_nothing_but_its_count(device: Device) -> None:
    for room, wrong in itertools.product(rooms(device).values(), (math.inf, math.nan, -1e30)):
        pair = []
        for number in (wrong, 0.0):
            p = torch.nn.Parameter(values(4, 64).to(room.place))
            optimizer = Automagic([("weight", p)], lr=1e-2, polarity_history=2, fused=False, ops=room.ops)
            for step in range(3):
                p.grad = values(4, 64, seed=step + 1).to(room.place)
                p.grad[1, 2] = number
                optimizer.step()
            pair.append(optimizer)
        first, second = ([group["params"][0].detach().cpu() for group in one.param_groups] for one in pair)
        assert torch.equal(first[0], second[0])
        assert bool(torch.isfinite(first[0]).all())
        assert pair[0].get_learning_rates() == pair[1].get_learning_rates()
        assert (pair[0].skipped_elements(), pair[1].skipped_elements()) == ({"weight": 3}, {})


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_zero_gradient_changes_nothing(device: Device, dtype: torch.dtype) -> None:
    for room in rooms(device).values():
        mine = parameters(dtype, room.place)
        before = [p.detach().clone() for p in mine]
        optimizer = Automagic(mine, lr=1.0, fused=False, ops=room.ops)
        for p in mine:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        assert all(torch.equal(p, old) for p, old in zip(mine, before, strict=True))


def test_low_precision_weights_keep_moving(device: Device) -> None:
    """At lr 1e-4 plain bfloat16 weights of 1 stand still; these go as far as float32's in the mean, each by itself."""
    for room in rooms(device).values():
        mine = [torch.nn.Parameter(torch.ones(16, 32, dtype=torch.bfloat16, device=room.place)) for _ in range(2)]
        optimizer = Automagic(mine, lr=1e-4, max_lr=1e-4, min_lr=1e-4, fused=False, ops=room.ops)
        for _ in range(50):
            for p in mine:
                p.grad = torch.ones_like(p)
            optimizer.step()
        assert float(mine[0].detach().float().mean()) == pytest.approx(1 - 50 * 1e-4, abs=2e-3)
        assert not torch.equal(mine[0].cpu(), mine[1].cpu())


# ---- the learning rate that is shown ---------------------------------------------------------------------------------


def test_the_rate_that_is_read_is_the_one_in_use(device: Device) -> None:
    """Without votes, weights of zero under a gradient of ones show it: they move by it."""
    for room in rooms(device).values():
        p = torch.nn.Parameter(torch.zeros(4, device=room.place))
        optimizer = Automagic([p], lr=1e-3, betas=(0.0, 0.0), polarity_history=2, fused=False, ops=room.ops)
        for step in range(10):
            before = p.detach().clone()
            shown = optimizer.param_groups[0]["lr"]
            if step == 6:
                optimizer.param_groups[0]["lr"] = shown = 0.5
            p.grad = torch.ones_like(p) * (-1) ** (step % 3)
            optimizer.step()
            assert float((p.detach() - before).abs().max()) == pytest.approx(shown, rel=1e-5)
        assert type(optimizer.param_groups[0]["lr"]) is float
        rate = optimizer.param_groups[0]["lr"]
        assert optimizer.get_learning_rates() == [rate]
        assert optimizer.get_avg_learning_rate() == pytest.approx(rate)
        assert optimizer.state[p]["lr"].item() == rate


def test_steps_wait_for_nobody(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step launches kernels; the rate crosses when somebody looks, whichever way, and not before."""
    place = rooms(device).get("opencl")
    if place is None:
        pytest.skip("torch differentiates on opencl:0 alone")
    p = torch.nn.Parameter(torch.zeros(300, 48, device=place.place))
    optimizer = Automagic([p], lr=1e-3, polarity_history=2, fused=False)
    p.grad = torch.ones_like(p)
    optimizer.step()
    reads: list[int] = []
    item = torch.Tensor.item

    def read(self: torch.Tensor) -> Any:
        reads.append(1)
        return item(self)

    monkeypatch.setattr(torch.Tensor, "item", read)
    launched: list[str] = []
    enqueue = Kernel.enqueue

    def watched(self: Kernel, *arguments: Any) -> Any:
        launched.append(self.label)
        return enqueue(self, *arguments)

    monkeypatch.setattr(Kernel, "enqueue", watched)
    for _ in range(3):
        optimizer.step()
    assert not reads
    assert len(launched) == 3 * 6  # zeros, what is measured, added up, applied, tallied, and the rate
    group = optimizer.param_groups[0]
    looks: tuple[Any, ...] = (
        lambda: group["lr"],
        lambda: group.get("lr"),
        lambda: dict(group)["lr"],
        lambda: {**group}["lr"],
        lambda: dict(group.items())["lr"],
        lambda: group.copy()["lr"],
        lambda: copy.deepcopy(group)["lr"],
        lambda: json.loads(json.dumps({name: group[name] for name in group if name != "params"}))["lr"],
        lambda: optimizer.state_dict()["param_groups"][0]["lr"],
        lambda: next(value for name, value in zip(group, group.values(), strict=True) if name == "lr"),
    )
    for look in looks:
        reads.clear()
        optimizer.step()
        assert look() == optimizer.state[p]["lr"].item()
        assert reads
        assert repr(group["lr"]) in repr(group)


def test_groups_are_dicts() -> None:
    group = RateGroup({"lr": 1e-3, "params": []})
    group.update(lr=2e-3, name="all")
    assert group == {"lr": 2e-3, "params": [], "name": "all"}
    assert group.setdefault("lr", 1.0) == 2e-3
    assert group.setdefault("initial_lr", 1.0) == 1.0
    assert (group.get("missing"), group.get("missing", 3)) == (None, 3)
    group["lr"] = torch.tensor(0.25)
    assert type(group["lr"]) is float


SCHEDULES: dict[str, Any] = {
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "Cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "Warmup": lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
}


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_what_a_schedule_writes_is_the_next_rate(schedule: str) -> None:
    p = torch.nn.Parameter(torch.zeros(4))
    optimizer = oracle([p], lr=1e-2, betas=(0.0, 0.0), polarity_history=64)
    own = SCHEDULES[schedule](optimizer)
    for _ in range(8):
        before, rate = p.detach().clone(), optimizer.param_groups[0]["lr"]
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert float((before - p.detach()).max()) == pytest.approx(rate, rel=1e-4)
        own.step()
        assert own.get_last_lr() == [optimizer.param_groups[0]["lr"]]


def test_the_geometric_median() -> None:
    assert middle_rate([3e-3]) == 3e-3
    assert middle_rate([1e-8, 1e-3, 1.0]) == 1e-3
    assert middle_rate([1e-4, 1e-2]) == pytest.approx(1e-3)
    assert middle_rate([0.1, 0.1]) == 0.1


# ---- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("history", "planes"), [(8, 1), (2, 1), (9, 2), (64, 8), (1000, 8), (0, 1)])
def test_bytes_of_state_are_what_is_claimed(history: int, planes: int) -> None:
    model = torch.nn.Linear(1000, 300)
    optimizer = oracle(model.parameters(), polarity_history=history)
    for p in model.parameters():
        p.grad = p.detach().clone()
    optimizer.step()
    report = memory_report(model, optimizer)
    # Codes, a scale a row, signs, and the count and the rate.
    assert report.optimizer["weight"].nbytes == 300_000 * (1 + planes) + 4 * 300 + 8
    assert report.optimizer["bias"].nbytes == 300 * (4 + planes) + 8
    assert (report.optimizer["weight"].method, report.optimizer["bias"].method) == ("int8", "dense")
    assert optimizer.state[model.weight]["signs"].shape == (planes, 300_000)


def test_methods_are_readable() -> None:
    mine = parameters()
    optimizer = oracle(mine)
    assert optimizer.method_of(mine[0]) is None
    advance(optimizer, 0, 1)
    methods = [optimizer.method_of(p) for p in mine]
    assert methods == ["rotated int8", "rotated int8", "int8", "dense", "dense", None]


# ---- launchers refuse ------------------------------------------------------------------------------------------------


def _tensor(**changes: Any) -> AutomagicTensor:
    parts: dict[str, Any] = {
        "param": torch.zeros(3, 16),
        "grad": torch.zeros(3, 16),
        "exp_avg_sq": torch.zeros(3, 16, dtype=torch.int8),
        "scale": torch.ones(3),
        "signs": torch.zeros(1, 48, dtype=torch.uint8),
        "skipped": torch.zeros(1, dtype=torch.int32),
        "rule": AutomagicStep(),
    }
    return AutomagicTensor(**{**parts, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"param": torch.zeros(3, 16).double()}, TypeError, "expected param of dtype"),
        ({"grad": torch.zeros(3, 16).half()}, TypeError, "expected grad of dtype torch.float32, got"),
        ({"grad": torch.zeros(16, 3)}, ValueError, r"expected grad of shape \[3, 16\]"),
        ({"exp_avg_sq": torch.zeros(3, 16)}, TypeError, "expected exp_avg_sq of dtype torch.int8"),
        ({"scale": None}, ValueError, "expected scale from two dimensions on"),
        ({"scale": torch.ones(4)}, ValueError, r"expected scale of shape \[3\]"),
        ({"signs": torch.zeros(2, 48, dtype=torch.uint8)}, ValueError, r"expected signs of shape \[1, 48\]"),
        ({"skipped": torch.zeros(1)}, TypeError, "expected skipped of dtype torch.int32"),
        ({"place": 2}, ValueError, r"expected place as an integer in 0\.\.1"),
        ({"seed": -1}, ValueError, "expected seed as an integer"),
    ],
)
def test_wrong_parts_are_refused(device: Device, changes: Any, error: type[Exception], message: str) -> None:
    lr, tally = torch.ones(1), torch.zeros(2, 2)
    with pytest.raises(error, match=message):
        ops.automagic_step_([_tensor(), _tensor(**changes)], lr, tally)
    with pytest.raises(ValueError, match="expected each parameter once"):
        ops.automagic_step_([one := _tensor(), one], lr, tally)
    with pytest.raises(TypeError, match="expected tensors as AutomagicTensor, got str"):
        ops.automagic_step_(["weights"], lr, tally)  # type: ignore[list-item]


def test_other_launches_are_refused(device: Device) -> None:
    for low, high in ((0.0, 1.0), (2.0, 1.0), (1.0, math.inf)):
        with pytest.raises(ValueError, match=r"expected 2\^-126 <= min_lr <= max_lr"):
            ops.automagic_rate_(torch.ones(1), torch.zeros(1, 2), low, high)
    with pytest.raises(ValueError, match="expected a tally of one tensor or more"):
        ops.automagic_rate_(torch.ones(1), torch.zeros(0, 2), 1e-3, 1.0)
    total = torch.zeros(3, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"expected total of dtype torch\.bfloat16 or torch\.float16"):
        ops.add_rounded_(torch.zeros(3), torch.zeros(3), 0)
    with pytest.raises(ValueError, match=r"expected grad of shape \[3\]"):
        ops.add_rounded_(total, torch.zeros(4), 0)
    with pytest.raises(ValueError, match="expected a seed"):
        ops.add_rounded_(total, torch.zeros(3), 1 << 32)


def test_sums_of_short_numbers_are_unbiased(device: Device) -> None:
    for room in (ops, reference):
        total = torch.ones(4096, dtype=torch.bfloat16)
        room.add_rounded_(total, torch.full((4096,), 2.0**-10), 5)
        # The next number is 2^-7 away: a chance of one eighth.
        assert float(total.float().mean()) == pytest.approx(1 + 2.0**-10, abs=5 * 2.0**-7 * math.sqrt(0.11) / 64)
        assert set(total.float().tolist()) == {1.0, 1.0 + 2.0**-7}
