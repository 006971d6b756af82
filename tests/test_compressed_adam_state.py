"""CompressedAdam's state: saved, loaded, refused, copied; and what users of torch's optimizers do with one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memtrain_cl import reference
from memtrain_cl.device import Device
from memtrain_cl.errors import CorruptFile
from memtrain_cl.export.optimizer import load_optimizer, save_optimizer
from memtrain_cl.optim import CompressedAdam
from tests.adam_cases import (
    DTYPES,
    METHODS,
    advance,
    give,
    oracle,
    parameters,
    rooms,
    same_bits,
    through_safetensors,
    through_torch,
    values,
)

#: Everything that has a stream, a schedule or a choice of its own.
RUNS: dict[str, dict[str, Any]] = {
    **METHODS,
    "auto": {"compression_method": "auto", "min_size_for_g4": 64, "refit_every": 2, "g4_gof_threshold": 0.5},
}
#: Those that are tried in every place.
DEVICES = ("int8", "auto")
Save = Callable[[torch.optim.Optimizer, Path], Any]


@pytest.mark.parametrize("method", list(RUNS))
@pytest.mark.parametrize("save", [through_torch, through_safetensors])
def test_resumed_runs_go_on_bit_for_bit(device: Device, tmp_path: Path, method: str, save: Save) -> None:
    for name, room in rooms(device).items():
        # State is saved and loaded by the same lines everywhere; what the device makes of it, one type shows.
        if name != "reference" and (save is through_safetensors or (name == "opencl" and method not in DEVICES)):
            continue
        for dtype in DTYPES if name == "reference" else (torch.float32,):
            options = {"lr": 1e-2, "ops": room.ops, **RUNS[method]}
            live = CompressedAdam(parameters(dtype, room.place), **options)
            give(live.param_groups[0]["params"][:1], 0)
            live.step()  # so that parameters are at different steps
            advance(live, 1, 4)
            state = save(live, tmp_path / "state")
            resumed, bare = (CompressedAdam(copy.deepcopy(live.param_groups[0]["params"]), **options) for _ in "12")
            resumed.load_state_dict(state)
            assert same_bits(live, resumed)
            for optimizer in (live, resumed, bare):
                advance(optimizer, 5, 3)
            assert same_bits(live, resumed)
            assert not torch.equal(live.param_groups[0]["params"][0], bare.param_groups[0]["params"][0])


def test_a_parameter_without_a_gradient_is_told_by_its_place(tmp_path: Path) -> None:
    def made() -> list[Any]:
        return [torch.nn.Parameter(values(4, seed=seed)) for seed in range(3)]

    live = oracle(made())
    live.param_groups[0]["params"][1].requires_grad_(False)
    for place in (0, 2):
        live.param_groups[0]["params"][place].grad = values(4, seed=place + 7)
    live.step()
    state = through_torch(live, tmp_path / "state")
    assert state["state"].keys() == {0, 2}
    resumed = oracle(made())
    resumed.load_state_dict(state)
    held = [resumed.state.get(parameter) for parameter in resumed.param_groups[0]["params"]]
    assert [part is None for part in held] == [False, True, False]
    assert same_moments(held[2], live.state[live.param_groups[0]["params"][2]])


def same_moments(left: Any, right: Any) -> bool:
    return all(torch.equal(left[name], right[name]) for name in ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize(
    ("saved", "own", "message"),
    [
        ({"int8_block_size": 2048}, {"int8_block_size": 256}, "expected a state with int8_block_size=256, .* got 2048"),
        ({"code": "linear"}, {"code": "dynamic"}, "expected a state with code='dynamic', .* got 'linear'"),
        ({"compression_method": "dense"}, {}, "expected a state with compression_method='auto', .* got 'dense'"),
        ({"profile_block_size": 64}, {}, "expected a state with profile_block_size=256, .* got 64"),
    ],
)
def test_a_state_of_another_layout_is_refused(saved: dict[str, Any], own: dict[str, Any], message: str) -> None:
    other, mine = oracle(parameters(), **saved), oracle(parameters(), **own)
    advance(other, 0, 1)
    advance(mine, 0, 1)
    before = copy.deepcopy(mine)
    with pytest.raises(ValueError, match=message):
        mine.load_state_dict(other.state_dict())
    assert same_bits(mine, before)


def test_profiles_load_under_either_name() -> None:
    other, mine = oracle(parameters(), compression_method="g4"), oracle(parameters(), compression_method="profile")
    advance(other, 0, 1)
    mine.load_state_dict(other.state_dict())
    assert mine.methods() == other.methods()


def test_groups_of_schedules_make_another_optimizer() -> None:
    first = oracle(parameters())
    torch.optim.lr_scheduler.OneCycleLR(first, 1e-2, total_steps=3)
    torch.optim.swa_utils.SWALR(first, 1e-3)
    second = oracle(first.param_groups)
    assert second.param_groups[0]["max_momentum"] == first.param_groups[0]["max_momentum"]


def damage(state: dict[str, Any], **changes: Any) -> dict[str, Any]:
    changed = copy.deepcopy(state)
    for name, value in changes.items():
        changed["state"][0][name] = value
    return changed


def test_a_state_that_does_not_fit_is_refused_by_name() -> None:
    mine = oracle([("weight", torch.nn.Parameter(values(7, 30)))])
    advance(mine, 0, 1)
    state, before = mine.state_dict(), copy.deepcopy(mine)
    adamw = torch.optim.AdamW(parameters()[:1])
    advance(adamw, 0, 1)
    refused: list[tuple[dict[str, Any], str]] = [
        (adamw.state_dict(), "expected the state of a CompressedAdam, got groups without code"),
        (damage(state, exp_avg=torch.zeros(7, 30)), r"expected 'exp_avg' of parameter weight as torch.int8 \[7, 30\]"),
        (damage(state, exp_avg_sq_scale=torch.ones(2)), r"'exp_avg_sq_scale' of parameter weight as .* \[1\]"),
        (damage(state, exp_avg_sq=None), "'exp_avg_sq' of parameter weight as torch.int8 .* got None"),
        (damage(state, code=2), "expected moments of parameter weight in the code linear or profile, got dynamic"),
        (damage(state, code=9), "in the code linear or profile, got 9"),
        (damage(state, block_size=256), "expected blocks of 2048 in the state of parameter weight, got 256"),
        (damage(state, step=-1), "expected 'step' in the state of parameter weight"),
        (damage(state, seed=True), "expected 'seed' in the state of parameter weight"),
        ({**state, "state": {5: {}}}, r"expected state of parameters \[0\], got one of 5"),
        ({**state, "state": {0: 3}}, "expected the state of parameter weight as a mapping, got int"),
        ({**state, "param_groups": [{}]}, "expected parameter groups with their parameters' numbers"),
        ({**state, "param_groups": state["param_groups"] * 2}, r"expected groups of \[1\] parameters, got \[1, 1\]"),
    ]
    for wrong, message in refused:
        with pytest.raises(ValueError, match=message):
            mine.load_state_dict(wrong)
        assert same_bits(mine, before)


def test_hooks_of_loading_are_called() -> None:
    live, mine = oracle(parameters()), oracle(parameters())
    advance(live, 0, 1)
    seen: list[str] = []
    mine.register_load_state_dict_pre_hook(lambda optimizer, state: seen.append("before"))
    mine.register_load_state_dict_post_hook(lambda optimizer: seen.append("after"))
    mine.load_state_dict(live.state_dict())
    assert seen == ["before", "after"]
    mine.register_load_state_dict_pre_hook(lambda optimizer, state: {**state, "state": {}})
    mine.load_state_dict(live.state_dict())
    assert not mine.state


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_go_on_by_themselves(copied: Callable[[Any], Any]) -> None:
    for options in RUNS.values():
        model = torch.nn.Linear(20, 20)
        optimizer = oracle(model.named_parameters(), lr=1e-2, **options)
        advance(optimizer, 0, 3)
        twin_model, twin = copied((model, optimizer))
        assert next(iter(twin_model.parameters())) is twin.param_groups[0]["params"][0]
        assert twin.ops is reference
        for each in (optimizer, twin):
            advance(each, 3, 2)
        assert same_bits(optimizer, twin)
        advance(twin, 5, 1)
        assert not same_bits(optimizer, twin)


def test_a_model_and_its_optimizer_save_whole(tmp_path: Path) -> None:
    model = torch.nn.Linear(20, 20)
    optimizer = oracle(model.parameters())
    advance(optimizer, 0, 2)
    torch.save((model, optimizer), tmp_path / "both")
    again = torch.load(tmp_path / "both", weights_only=False)[1]
    assert same_bits(optimizer, again)


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_file_of_any_optimizer(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    live, resumed = (torch.optim.AdamW(parameters(), lr=torch.tensor(1e-3), amsgrad=True) for _ in "12")
    advance(live, 0, 2)
    for parameter, own in zip(resumed.param_groups[0]["params"], live.param_groups[0]["params"], strict=True):
        parameter.data.copy_(own.data)
    save_optimizer(live, path)
    written = path.read_bytes()
    load_optimizer(resumed, path)
    assert same_bits(live, resumed)
    assert resumed.param_groups[0]["betas"] == (0.9, 0.999)
    save_optimizer(resumed, path)
    assert path.read_bytes() == written
    assert sorted(tmp_path.iterdir()) == [path]


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    mine = oracle(parameters())
    advance(mine, 0, 1)
    save_optimizer(mine, path)
    whole, before = path.read_bytes(), copy.deepcopy(mine)
    size = int.from_bytes(whole[:8], "little")
    for place in (*range(0, 8 + size, 37), *range(8 + size, len(whole), 97)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(CorruptFile):
            load_optimizer(mine, path)
    for cut in (0, 7, size // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(CorruptFile):
            load_optimizer(mine, path)
    assert same_bits(mine, before)


def test_what_a_file_cannot_hold_is_refused(tmp_path: Path) -> None:
    mine = oracle(parameters())
    advance(mine, 0, 1)
    mine.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match=r"expected finite numbers .* in param_groups.0.lr"):
        save_optimizer(mine, tmp_path / "state")
    mine.param_groups[0]["lr"] = 1e-3
    scale = next(iter(mine.state.values()))["exp_avg_scale"]
    kept, scale[0] = scale.clone(), float("nan")
    with pytest.raises(ValueError, match=r"expected finite numbers .* in state.0.exp_avg_scale"):
        save_optimizer(mine, tmp_path / "state")
    scale.copy_(kept)
    mine.param_groups[0]["lr"] = object()
    with pytest.raises(ValueError, match=r"expected tensors and plain values .* in param_groups.0.lr"):
        save_optimizer(mine, tmp_path / "state")
    assert not list(tmp_path.iterdir())


# ---- what users of torch's optimizers do -----------------------------------------------------------------------------


def regression() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = values(64, 16)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2)), x, x[:, :2] * 0.5


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x) - y).square().mean()
    return loss


@pytest.mark.parametrize("method", list(RUNS))
def test_a_plain_loop_learns(device: Device, method: str) -> None:
    for name, room in rooms(device).items():
        if name != "reference" and method not in DEVICES:
            continue
        model, x, y = regression()
        model, x, y = model.to(room.place), x.to(room.place), y.to(room.place)
        optimizer = CompressedAdam(model.parameters(), lr=1e-2, ops=room.ops, **RUNS[method])
        first = loss_of(model, x, y).item()
        for _ in range(40):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        assert loss_of(model, x, y).item() < 0.25 * first


def test_closures_and_rates_in_tensors() -> None:
    model, x, y = regression()
    twin = copy.deepcopy(model)
    optimizer = oracle(model.parameters(), lr=torch.tensor(1e-2))
    plain = oracle(twin.parameters(), lr=float(torch.tensor(1e-2)))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    want = loss_of(twin, x, y)
    want.backward()
    plain.step()
    assert torch.equal(torch.as_tensor(optimizer.step(closure)), want)  # type: ignore[arg-type]
    assert same_bits(optimizer, plain)


SCHEDULES: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=12),
    lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_rule_dense_steps_as_torch_s(schedule: Callable[[torch.optim.Optimizer], Any]) -> None:
    mine, theirs = parameters(), parameters()
    optimizers = (oracle(mine, lr=1e-2, compression_method="dense"), torch.optim.Adam(theirs, lr=1e-2))
    for optimizer in optimizers:
        own = schedule(optimizer)
        for step in range(10):
            advance(optimizer, step, 1)
            own.step(*([1.0] if isinstance(own, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
        # Loaded again it goes on from the schedule's rate.
        optimizer.load_state_dict(optimizer.state_dict())
        advance(optimizer, 10, 1)
    for got, want in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_gradscaler_s_skipped_step_is_none() -> None:
    for method in METHODS.values():
        model, x, y = regression()
        optimizer = oracle(model.parameters(), lr=1e-2, **method)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, x, y)).backward()
            if step == 1:
                next(model.parameters()).grad.view(-1)[0] = torch.inf  # type: ignore[union-attr]
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = copy.deepcopy(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert same_bits(optimizer, before) == (step == 1)
        assert scaler.get_scale() == 2.0
        assert {state["step"] for state in optimizer.state.values()} == {2}
        assert optimizer.skipped_updates() == {}


class Tied(torch.nn.Module):
    """An embedding whose weight is the output's, and another."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(10, 8), torch.nn.EmbeddingBag(4, 8)
        self.middle = torch.nn.Linear(8, 8)
        self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)
        self.out = torch.nn.Linear(8, 10, bias=False)
        self.out.weight = self.words.weight


def test_groups_hold_embeddings_dense() -> None:
    model = Tied()
    groups = CompressedAdam.groups(model, code="dynamic", int8_block_size=256)
    optimizer = oracle(groups, compression_method="int8")
    advance(optimizer, 0, 1)
    assert optimizer.methods() == {
        "words.weight": "dense",
        "places.weight": "dense",
        "middle.weight": "int8-dynamic",
        "middle.bias": "int8-dynamic",
    }
    assert [state["exp_avg"].dtype for state in optimizer.state.values()] == [torch.float32] * 2 + [torch.uint8] * 2
    assert len(CompressedAdam.groups(torch.nn.Linear(2, 2))) == 1
    with pytest.raises(ValueError, match="got codes"):
        oracle(CompressedAdam.groups(model, codes="dynamic"))
