"""CounterController: schedules reach layers that have no Parameters, and the logged rate is the one in use."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from memtrain_cl import CounterController, reference
from memtrain_cl.nn import CompactCounterLinear
from tests.layer_cases import IN, OUT, make, train

Scheduler = Callable[[torch.optim.Optimizer], Any]
SCHEDULES: dict[str, Scheduler] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=10, cycle_momentum=False),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, cycle_momentum=False),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "chain": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]),
}


def model_of_two(**options: Any) -> Any:
    first = make(ops=reference, **options)
    return torch.nn.Sequential(first, make("rms", OUT, 4, ops=reference, **{"lr": 0.25, **options}))


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_step_the_layers_as_any_optimizer(name: str) -> None:
    model, parameter = model_of_two(), torch.nn.Parameter(torch.zeros(1))
    controller = CounterController(model, lr=0.5)
    other = torch.optim.SGD([parameter], lr=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours, theirs = SCHEDULES[name](controller), SCHEDULES[name](other)
        for step in range(5):
            assert controller.param_groups[0]["lr"] == other.param_groups[0]["lr"] == model[0].lr == model[1].lr
            train(model, start=step)
            parameter.grad = torch.ones(1)
            for optimizer, schedule in ((controller, ours), (other, theirs)):
                optimizer.step()
                schedule.step()
        assert ours.get_last_lr() == theirs.get_last_lr()
    assert model[0].rule().lr == model[0].lr != 0.5


def test_a_plateau_lowers_the_rate() -> None:
    layer = make(ops=reference)
    controller = CounterController([layer])
    schedule = lr_scheduler.ReduceLROnPlateau(controller, factor=0.5, patience=0)
    for _ in range(3):
        schedule.step(1.0)
    assert layer.lr == 0.125 == controller.param_groups[0]["lr"]


def test_a_scheduled_step_is_the_step_of_that_rate() -> None:
    layer, plain = make(ops=reference), make(ops=reference)
    plain.load_state_dict(layer.state_dict())
    controller = CounterController(layer)
    schedule = lr_scheduler.StepLR(controller, 1, 0.5)
    for step in range(4):
        plain.lr = 0.5 * 0.5**step
        for each in (layer, plain):
            train(each, start=step)
        controller.step()
        schedule.step()
    assert torch.equal(layer.state, plain.state)
    assert torch.equal(layer.scale, plain.scale)


def test_groups_and_their_own_rates() -> None:
    model = model_of_two()
    controller = CounterController(model)
    assert [group["lr"] for group in controller.param_groups] == [0.5, 0.25]
    assert [controller.layers(group) for group in (0, 1)] == [[model[0]], [model[1]]]
    assert len(CounterController(model, lr=0.1).param_groups) == 1
    controller = CounterController([{"layers": model[0], "lr": 0.3}, {"layers": [model[1]], "lr_scale": 0.0}], lr=0.2)
    assert (model[0].lr, model[1].lr, model[0].lr_scale, model[1].lr_scale) == (0.3, 0.2, 0.01, 0.0)
    extra = make(ops=reference)
    controller.add_param_group({"layers": extra, "lr": 0.7})
    assert extra.lr == controller.param_groups[2]["lr"] == 0.7
    assert "lr: 0.7" in repr(controller)


def test_the_layers_rate_is_the_groups() -> None:
    model = model_of_two()
    controller = CounterController(model, lr=0.5)
    model[0].lr = 0.125
    assert controller.param_groups[0]["lr"] == model[1].lr == 0.125
    controller.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="expected lr as a finite number"):
        model(torch.randn(2, IN))
    later = CounterController(model[0], lr=0.75)
    assert (model[0].lr, model[1].lr) == (0.75, -1.0)
    controller.add_param_group({"layers": make(ops=reference)})
    assert model[0].lr == 0.75 == later.param_groups[0]["lr"], "the last controller is followed"
    model[0].follow(None)
    later.param_groups[0]["lr"] = 0.1
    assert model[0].lr == 0.75


def test_its_state_goes_through_a_file() -> None:
    def training() -> tuple[Any, CounterController, Any]:
        model = model_of_two()
        controller = CounterController(model)
        return model, controller, lr_scheduler.CosineAnnealingLR(controller, 10)

    def go_on(model: torch.nn.Module, controller: CounterController, schedule: Any, start: int) -> None:
        for step in range(start, start + 5):
            train(model, start=step)
            controller.step()
            controller.zero_grad()
            schedule.step()

    live, resumed = training(), training()
    go_on(*live, 0)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in live], file)
    file.seek(0)
    for part, state in zip(resumed, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    for parts in (live, resumed):
        go_on(*parts, 5)
    assert live[0][0].lr == resumed[0][0].lr != 0.5
    assert torch.equal(live[0][0].state, resumed[0][0].state)


def test_copies_of_layers_and_of_controllers() -> None:
    model = model_of_two()
    controller = CounterController(model)
    controller.param_groups[0]["lr"] = 0.0625
    alone = copy.deepcopy(model)
    assert alone[0].lr == 0.0625
    alone[0].lr = 0.5
    assert model[0].lr == 0.0625, "a copy of a layer follows nobody"
    for twin_model, twin in (copy.deepcopy((model, controller)), pickle.loads(pickle.dumps((model, controller)))):
        twin.param_groups[0]["lr"] = 0.75
        assert (twin_model[0].lr, model[0].lr) == (0.75, 0.0625)
        assert twin.layers(1) == [twin_model[1]]


def test_what_it_refuses() -> None:
    layer = make(ops=reference)
    faults: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (torch.nn.Linear(2, 2), {}, ValueError, "at least one counter layer, got none"),
        ([], {}, ValueError, "at least one counter layer"),
        ([{"lr": 0.1}], {}, ValueError, "at least one counter layer"),
        ([layer, 3], {}, TypeError, "expected modules, got int"),
        ([{"layers": layer}, {"layers": [layer]}], {}, ValueError, "each counter layer in one group"),
        (layer, {"lr": -0.1}, ValueError, "expected lr as a number"),
        (layer, {"lr": torch.tensor(0.1)}, ValueError, "expected lr as a number"),
        (layer, {"lr_scale": float("nan")}, ValueError, "expected lr_scale as a number"),
    ]
    for layers, rates, kind, message in faults:
        with pytest.raises(kind, match=message):
            CounterController(layers, **rates)
    assert layer.lr == 0.5
    controller = CounterController(layer)
    with pytest.raises(ValueError, match="each counter layer in one group"):
        controller.add_param_group({"layers": layer})
    with pytest.raises(ValueError, match="different number of parameter groups"):
        controller.load_state_dict(CounterController(model_of_two()).state_dict())


def test_a_closure_is_the_step() -> None:
    layer = make(ops=reference)
    controller = CounterController(layer)

    def closure() -> float:
        loss = layer(torch.ones(2, IN)).square().sum()
        loss.backward()
        return float(loss.item())

    with torch.no_grad():
        assert controller.step(closure) > 0
    assert controller.step() is None
    assert layer.step == 1


def test_a_shared_layer_is_taken_once() -> None:
    layer = make(ops=reference)
    controller = CounterController(torch.nn.ModuleList([layer, torch.nn.Sequential(layer)]))
    assert controller.layers() == [layer]
    assert isinstance(controller.layers()[0], CompactCounterLinear)
