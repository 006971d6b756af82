"""CompressedAdam's steps: published values, torch's Adam and AdamW, every place to the bit, hard gradients."""

from __future__ import annotations

import copy
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from memtrain_cl import memory_report, reference
from memtrain_cl.adam_rule import EPS_MIN, LONGEST_STEP, SKIPS, AdamStep
from memtrain_cl.device import Device
from memtrain_cl.optim import CompressedAdam
from memtrain_cl.runtimes import import_pyopencl
from tests.adam_cases import DTYPES, METHODS, advance, give, oracle, parameters, rooms, same_bits, values
from tests.nn_cases import room_of

GOLDEN = json.loads((Path(__file__).parent / "golden" / "moments.json").read_text())["compressed_adam"]["runs"]
LR = 1e-2


@pytest.mark.parametrize("method", list(GOLDEN))
def test_published_values(device: Device, method: str) -> None:
    for room in rooms(device).values():
        p = torch.nn.Parameter(torch.linspace(-1, 1, 16).to(room.place))
        optimizer = CompressedAdam([p], lr=LR, compression_method=method, int8_block_size=8, ops=room.ops)
        for step in range(5):
            p.grad = torch.sin(torch.arange(16.0) * (step + 1)).to(room.place)
            optimizer.step()
        want = torch.tensor(GOLDEN[method]["param_after_5"])
        torch.testing.assert_close(p.detach().cpu(), want, rtol=0, atol=2e-7)
        parts = memory_report(torch.nn.ParameterList([p]), optimizer).optimizer["0"].parts
        assert sum(size for name, size in parts.items() if name != "skipped") == GOLDEN[method]["nbytes"]
        assert optimizer.method_of(p) == GOLDEN[method]["methods"][0]


@pytest.mark.parametrize(("decoupled", "maximize"), [(False, False), (True, True)], ids=["Adam", "AdamW"])
def test_dense_moments_follow_torch(device: Device, decoupled: bool, maximize: bool) -> None:
    options: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.1, "maximize": maximize}
    torchs = parameters()
    truth = (torch.optim.AdamW if decoupled else torch.optim.Adam)(torchs, **options)
    advance(truth, 0, 200)
    for room in rooms(device).values():
        mine = parameters(place=room.place)
        dense: dict[str, Any] = {"compression_method": "dense", "decoupled_weight_decay": decoupled, "ops": room.ops}
        advance(CompressedAdam(mine, **options, **dense), 0, 200)
        for got, want in zip(mine, torchs, strict=True):
            apart = (got.detach().cpu() - want.detach()).norm()
            assert apart <= 1e-6 * want.detach().norm(), (room, want.shape)


ADAM = {"weight_decay": 0.1}
ADAMW = {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True, "skip": "block"}


@pytest.mark.parametrize(
    ("method", "dtype", "variant"),
    [
        ("int8", torch.float32, ADAMW),
        ("int8", torch.bfloat16, ADAM),
        ("dynamic", torch.float16, ADAMW),
        ("stochastic", torch.bfloat16, ADAMW),
        ("profile", torch.bfloat16, ADAM),
        ("dense", torch.float16, ADAM),
    ],
)
def test_every_place_gives_the_same_bits(
    device: Device, method: str, dtype: torch.dtype, variant: dict[str, Any]
) -> None:
    runs: dict[str, CompressedAdam] = {}
    for name, room in rooms(device).items():
        mine = parameters(dtype, room.place)
        runs[name] = CompressedAdam(mine, lr=LR, ops=room.ops, **METHODS[method], **variant)
        advance(runs[name], 0, 3)
        mine[0].grad[0, 0] = math.nan
        runs[name].step()
        advance(runs[name], 4, 2)
    for name, run in runs.items():
        assert same_bits(run, runs["reference"]), name
    assert runs["reference"].skipped_updates() == {"0": (1, 4)}


def test_seeds_and_places_of_parameters_make_the_noise(device: Device) -> None:
    """Two equal tensors in one step are rounded differently, and so is one under another seed."""
    for room in rooms(device).values():
        mine = [torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16, device=room.place)) for _ in range(3)]
        options: dict[str, Any] = {"lr": 1e-3, "compression_method": "int8", "ops": room.ops}
        groups: list[dict[str, Any]] = [{"params": mine[:2]}, {"params": mine[2:], "seed": 1}]
        optimizer = CompressedAdam(groups, **options)
        for parameter in mine:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        one, two, other = (parameter.detach().float().cpu() for parameter in mine)
        assert not torch.equal(one, two)
        assert not torch.equal(two, other)
        for rounded in (one, two, other):
            # Between 1 and the number below it, 2^-8 away: a mean of 4096 draws of chance 1e-3 * 2^8.
            assert float(rounded.mean()) == pytest.approx(1 - 1e-3, abs=5 * 2**-8 * math.sqrt(0.2) / 64)


def test_low_precision_weights_keep_moving(device: Device) -> None:
    """At lr 1e-4 plain bfloat16 weights of 1 stand still, since the next number is 2^-8 away."""
    plain = torch.nn.Parameter(torch.ones(512, dtype=torch.bfloat16))
    stuck = torch.optim.Adam([plain], lr=1e-4)
    for room in rooms(device).values():
        mine = torch.nn.Parameter(torch.ones(512, dtype=torch.bfloat16, device=room.place))
        optimizer = CompressedAdam([mine], lr=1e-4, compression_method="int8", ops=room.ops)
        for _ in range(100):
            mine.grad = torch.ones_like(mine)
            optimizer.step()
        assert float(mine.detach().float().mean()) == pytest.approx(1 - 100 * 1e-4, abs=2e-3)
    plain.grad = torch.ones_like(plain)
    for _ in range(100):
        stuck.step()
    assert torch.equal(plain, torch.ones_like(plain))


@pytest.mark.parametrize("decoupled", [False, True], ids=["Adam", "AdamW"])
def test_one_step_with_decay(device: Device, decoupled: bool) -> None:
    for room, (method, options) in itertools.product(rooms(device).values(), METHODS.items()):
        if room.ops is not reference and method not in ("int8", "dense"):
            continue
        p, q = (torch.nn.Parameter(torch.ones(3, device=place)) for place in (room.place, "cpu"))
        decay: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
        mine = CompressedAdam([p], decoupled_weight_decay=decoupled, ops=room.ops, **decay, **options)
        truth = (torch.optim.AdamW if decoupled else torch.optim.Adam)([q], **decay)
        for parameter, optimizer in ((p, mine), (q, truth)):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-6, atol=0, msg=method)


@pytest.mark.parametrize("method", list(METHODS))
def test_a_zero_gradient_changes_nothing(device: Device, method: str) -> None:
    """Not in float16 either, where eps is below the least number; nor do elements beside others that move."""
    for room, dtype in itertools.product(rooms(device).values(), DTYPES):
        if room.ops is not reference and dtype != (torch.float16 if method == "int8" else torch.float32):
            continue
        p = torch.nn.Parameter(values(200).to(dtype).to(room.place))
        before = p.detach().clone()
        optimizer = CompressedAdam([p], lr=LR, ops=room.ops, **METHODS[method])
        for step in range(4):
            p.grad = torch.zeros_like(p)
            if step:
                p.grad[::2] = 1e-3 * step
            optimizer.step()
            assert torch.equal(p[1::2], before[1::2])
            assert torch.equal(p[::2], before[::2]) == (step == 0)


@pytest.mark.parametrize("method", list(METHODS))
def test_a_gradient_that_is_not_finite_is_left_out(device: Device, method: str) -> None:
    """Nor one beyond 2^63, whose square is not. The step's number goes on, as torch's without a scaler."""
    places = rooms(device)
    cases = [(places["reference"], wrong, skip) for wrong in (math.nan, math.inf, -1e30) for skip in SKIPS]
    cases += [(room, -math.inf, skip) for room, skip in zip(places.values(), SKIPS, strict=False)]
    for room, wrong, skip in cases:
        mine = parameters(place=room.place)
        optimizer = CompressedAdam(mine, lr=LR, skip=skip, ops=room.ops, **METHODS[method])
        advance(optimizer, 0, 1)
        before = {name: tensor.clone() for name, tensor in dict(tensors_of(optimizer, mine[0])).items()}
        give(mine, 1)
        mine[0].grad.view(-1)[100] = wrong
        optimizer.step()
        after = dict(tensors_of(optimizer, mine[0]))
        parts = skip == "block" and method != "dense"
        for name, tensor in after.items():
            if tensor.numel() == mine[0].numel():
                tensor, old = tensor.reshape(-1), before[name].reshape(-1)
                kept = slice(64, 128) if parts else slice(None)
                assert torch.equal(tensor[kept], old[kept]), name
                assert torch.equal(tensor, old) != parts, name
        assert all(bool(torch.isfinite(tensor.float()).all()) for tensor in after.values())
        assert optimizer.skipped_updates() == {"0": (1, 2)}
        assert [optimizer.state[p]["step"] for p in mine[:3]] == [2, 2, 2]
        advance(optimizer, 2, 1)
        assert not torch.equal(mine[0].detach().cpu(), after["param"])


def tensors_of(optimizer: CompressedAdam, parameter: torch.Tensor) -> Any:
    yield "param", parameter.detach().cpu().clone()
    for name, value in optimizer.state[parameter].items():
        if isinstance(value, torch.Tensor) and name != "skipped":
            yield name, value.cpu().clone()


IDLE_SIZES = (1.0, 1e-3, 1e-6, 0.0)


def idle_run(optimizer: torch.optim.Optimizer, p: torch.Tensor, sizes: torch.Tensor, steps: int) -> float:
    """The longest step of an element, on gradients sizes*(1 + 0.1*n)."""
    chance = torch.Generator().manual_seed(7)
    longest = 0.0
    for _ in range(steps):
        p.grad = sizes * (1 + 0.1 * torch.randn(len(sizes), generator=chance))
        before = p.detach().clone()
        optimizer.step()
        longest = max(longest, float((p.detach() - before).abs().max()))
    return longest


@pytest.mark.parametrize("code", ["linear", "dynamic"])
def test_small_weights_beside_large_ones_neither_stop_nor_jump(code: str) -> None:
    """One block with gradients of very different sizes: an idle weight stays, none steps over 3 lr, and those down to
    1/100 (linear) or 1/10,000 (dynamic) of the largest go as far as dense Adam's, within a tenth.
    """
    steps, lr = 1000, 1e-3
    sizes = torch.tensor([*IDLE_SIZES, 1e-1, 1e-2, *([1e-4] if code == "dynamic" else [])]).repeat(2)
    p, q = (torch.nn.Parameter(torch.ones(len(sizes))) for _ in range(2))
    mine = oracle([p], lr=lr, compression_method="int8", code=code)
    assert idle_run(mine, p, sizes, steps) <= 3 * lr
    idle_run(torch.optim.Adam([q], lr=lr), q, sizes, steps)
    assert torch.equal(p[sizes == 0], torch.ones(2))
    ways, dense = (p - 1).detach().abs(), (q - 1).detach().abs()
    covered = sizes >= (1e-4 if code == "dynamic" else 1e-2)
    assert (ways - dense).abs()[covered].max() <= 0.1 * dense[covered].max()
    assert ((ways - dense).abs() <= 0.1 * dense)[covered].all()


def test_codes_that_are_stuck_step_no_longer_than_dense_adam_s_can(device: Device) -> None:
    """A spike leaves codes that do not decay beside a steady gradient. Steps stay within the bound."""
    for room, options in itertools.product(rooms(device).values(), METHODS.values()):
        p = torch.nn.Parameter(torch.zeros(64, device=room.place))
        optimizer = CompressedAdam([p], lr=1e-3, ops=room.ops, **options)
        for step in range(1, 12):
            p.grad = torch.zeros_like(p)
            p.grad[0] = 1.0
            p.grad[1:] = 10.0 ** torch.linspace(-30, 3, 63) * (step == 1)
            before = p.detach().clone()
            optimizer.step()
            assert float((p.detach() - before).abs().max()) <= AdamStep(1e-3, step=step).bound * (1 + 1e-5)


def test_the_bound_is_that_of_dense_adam() -> None:
    assert AdamStep(1.0).bound == pytest.approx(1.0)
    assert AdamStep(1.0, step=10**6).bound == pytest.approx(0.1 / math.sqrt(0.001 * (1 - 0.81 / 0.999)))
    assert AdamStep(1.0, beta1=0.0, beta2=0.0, step=9).bound == pytest.approx(1.0)
    assert AdamStep(1.0, beta2=0.0, step=2).bound == LONGEST_STEP
    assert AdamStep(2.0, beta1=0.9, beta2=0.81, step=50).bound <= 2 * LONGEST_STEP
    worst = 0.0
    for seed in range(20):  # gradients that grow make the longest steps
        p = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.Adam([p], lr=1.0)
        grown = 10.0 ** (values(1, seed=seed).abs() * 0.2)
        for step in range(1, 40):
            p.grad = torch.full((1,), float(grown**step) * 1e-6)
            before = float(p.detach())
            optimizer.step()
            ratio = abs(float(p.detach()) - before) / AdamStep(1.0, step=step).bound
            worst = max(worst, ratio)
    assert 0.5 < worst <= 1.001


@pytest.mark.parametrize("method", list(METHODS))
def test_empty_parameters_and_those_without_gradients(method: str) -> None:
    mine = [torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.empty(0))]
    optimizer = oracle(mine, lr=LR, **METHODS[method])
    mine[0].grad, mine[2].grad = torch.ones(4), torch.empty(0)
    optimizer.step()
    assert bool((mine[0] < 1).all())
    assert torch.equal(mine[1], torch.ones(3))
    assert [optimizer.method_of(p) is None for p in mine] == [False, True, True]


def test_bytes_of_state_are_what_is_claimed(device: Device) -> None:
    n, blocks = 1_000_000, {"int8": -(-1_000_000 // 2048), "profile": -(-1_000_000 // 256)}
    claims = {"int8": 2 * n + 8 * blocks["int8"], "profile": 2 * n + 16 * blocks["profile"], "dense": 8 * n}
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(values(1000, 1000)) for name in claims})
    groups = [{"params": [(name, model[name])], "compression_method": name} for name in claims]
    optimizer = CompressedAdam(groups)
    for parameter in model.values():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    report = memory_report(model, optimizer)
    for name, claim in claims.items():
        state = report.optimizer[name]
        assert (state.method, state.nbytes) == (name, claim + 8)
        held = [value.untyped_storage().nbytes() for value in tensors_held(optimizer.state[model[name]])]
        assert sum(held) == claim + 8
        assert report.totals[f"optimizer {name}"] == claim + 8
    assert report.totals["optimizer"] == sum(claims.values()) + 24
    assert report.totals["model"] == report.totals["parameters"] == 12 * n
    assert memory_report(model, torch.optim.AdamW(model.values())).optimizer == {}
    assert memory_report(model).optimizer == {}
    assert "optimizer profile" in str(report)


def tensors_held(state: dict[str, Any]) -> list[torch.Tensor]:
    return [value for value in state.values() if isinstance(value, torch.Tensor)]


def test_auto_chooses_by_size_and_receipt(device: Device) -> None:
    """From 4096 elements on, where both moments of a tensor fit a profile; what does not is held in int8."""
    for name, room in rooms(device).items():
        mine = [torch.nn.Parameter(values(size).to(room.place)) for size in (4095, 4096, 4097)]
        options: dict[str, Any] = {"refit_every": 3, "betas": (0.9, 0.9), "ops": room.ops}
        optimizer = CompressedAdam(mine, g4_gof_threshold=0.12, **options)
        advance(optimizer, 0, 1)
        assert set(optimizer.methods().values()) <= {"int8", "profile"}
        advance(optimizer, 1, 12)
        assert optimizer.methods() == {"0": "int8", "1": "profile", "2": "profile"}, name
        for parameter in mine:  # one value in a thousand, so that no distribution fits
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad[::1000] = 1e3
        for _ in range(6):
            optimizer.step()
        assert optimizer.methods() == {"0": "int8", "1": "int8", "2": "int8"}, name


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"lr": -1.0}, "expected lr"),
    ({"lr": math.nan}, "expected lr"),
    ({"lr": True}, "expected lr"),
    ({"betas": (0.9, 1.0)}, "expected betas"),
    ({"betas": 0.9}, "expected betas"),
    ({"eps": 0.0}, "expected eps"),
    ({"weight_decay": -0.1}, "expected weight_decay"),
    ({"compression_method": "int4"}, "expected compression_method as one of auto, int8"),
    ({"code": "log"}, "expected code as one of linear, dynamic"),
    ({"int8_block_size": 0}, "expected int8_block_size"),
    ({"profile_block_size": 257}, "expected profile_block_size"),
    ({"moment_rounding": "up"}, "expected moment_rounding"),
    ({"refit_every": 0}, "expected refit_every"),
    ({"skip": "row"}, "expected skip"),
    ({"seed": -1}, "expected seed"),
    ({"capturable": True}, "expected capturable=False"),
    ({"differentiable": True}, "expected differentiable=False"),
    ({"maximize": 1}, "expected maximize"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        oracle(parameters(), **options)
    optimizer = oracle(parameters())
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": parameters(), **options})
    assert len(optimizer.param_groups) == 1


def test_what_cannot_be_stepped_is_refused() -> None:
    mine = parameters()
    with pytest.raises(ValueError, match=r"in a parameter group, got compression\b"):
        oracle([{"params": mine, "compression": "dense"}])
    for dtype in (torch.float64, torch.complex64):
        with pytest.raises(TypeError, match=r"expected parameters of torch.float32"):
            oracle([torch.nn.Parameter(torch.ones(3, dtype=dtype))])
        with pytest.raises(TypeError, match=r"expected parameters of torch.float32"):
            oracle([{"params": torch.nn.Parameter(torch.ones(3, dtype=dtype))}])
    optimizer = oracle(mine, foreach=True)
    give(mine, 0)
    before = [parameter.detach().clone() for parameter in mine]
    embedding = torch.nn.Embedding(4, 3, sparse=True)
    optimizer.add_param_group({"params": [embedding.weight]})
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="expected dense gradients, got one of layout"):
        optimizer.step()
    embedding.weight.grad = None
    optimizer.param_groups[0]["lr"] = math.nan
    with pytest.raises(ValueError, match="expected lr"):
        optimizer.step()
    assert all(torch.equal(parameter, old) for parameter, old in zip(mine, before, strict=True))
    assert not optimizer.state


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 2e6}, "expected lr"),
        ({"eps": EPS_MIN / 2}, "expected eps"),
        ({"beta2": 1.0}, "expected beta2"),
        ({"step": 0}, "expected step"),
        ({"code": "int8"}, "expected code"),
        ({"code": "profile"}, "expected block_size in 1..256"),
        ({"skip": "none"}, "expected skip"),
    ],
    ids=str,
)
def test_the_rule_is_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdamStep(**{"lr": 1e-3, **options})


def test_a_step_on_the_device_waits_for_nothing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an optimizer's first step, which makes the state, nor later ones, with gradients finite or not."""
    if device.info.index:
        pytest.skip("torch differentiates on opencl:0 alone")
    place = room_of("opencl", device).place

    def made() -> tuple[CompressedAdam, list[tuple[torch.Tensor, torch.Tensor]]]:
        groups = [{"params": parameters(place=place), **options} for options in METHODS.values()]
        optimizer = CompressedAdam(groups, lr=LR, max_grad_norm=1.0, fused_backward=True)
        pairs = [(parameter, torch.ones_like(parameter)) for group in groups for parameter in group["params"]]
        pairs[0][1].view(-1)[3] = math.nan
        return optimizer, pairs

    def train(optimizer: CompressedAdam, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for _ in range(3):
            for parameter, grad in pairs:
                (parameter * grad).sum().backward()
            optimizer.step()

    train(*made())  # checks the device, and sends it maps and tables, once a process
    optimizer, pairs = made()
    cl = import_pyopencl()
    waits: list[str] = []

    def watched(name: str, call: Any) -> Any:
        def watching(*arguments: Any, **options: Any) -> Any:
            if options.get("is_blocking", True):
                waits.append(name)
            return call(*arguments, **options)

        return watching

    for owner, name in (
        (Device, "synchronize"),
        (cl.Event, "wait"),
        (cl.CommandQueue, "finish"),
        (cl, "enqueue_map_buffer"),
        (cl, "enqueue_copy"),
    ):
        monkeypatch.setattr(owner, name, watched(name, getattr(owner, name)))
    train(optimizer, pairs)
    assert not waits
    assert optimizer.skipped_updates() == {"0": (3, 3)}
    assert waits


def test_options_that_no_longer_fit_the_state_are_refused() -> None:
    """A group's layout that is changed after its first step would else be left aside, or read codes in other blocks."""
    for options, change, message in (
        ({"compression_method": "int8"}, {"compression_method": "dense"}, "in the code linear, got dense"),
        ({"compression_method": "auto"}, {"code": "dynamic"}, "in the code linear, got dynamic or profile"),
        ({"compression_method": "int8"}, {"int8_block_size": 64}, "block size .* 2048, got 64"),
        ({"compression_method": "g4"}, {"profile_block_size": 64}, "block size .* 256, got 64"),
    ):
        mine = parameters()
        optimizer = oracle(mine, **options)
        advance(optimizer, 0, 1)
        before = copy.deepcopy(optimizer)
        optimizer.param_groups[0].update(change)
        with pytest.raises(ValueError, match=message):
            advance(optimizer, 1, 1)
        assert same_bits(optimizer, before)


def test_a_model_that_moved_takes_its_state_along_by_loading_it(device: Device) -> None:
    if device.info.index:
        pytest.skip("torch differentiates on opencl:0 alone")
    model = torch.nn.Linear(30, 7)
    twin = copy.deepcopy(model)
    moving, staying = (CompressedAdam(it.parameters(), compression_method="int8") for it in (model, twin))
    for optimizer in (moving, staying):
        advance(optimizer, 0, 2)
    model.to("opencl")
    with pytest.raises(ValueError, match=r"expected tensors on one device, got param on opencl:0, .* exp_avg on cpu"):
        advance(moving, 2, 1)
    moving.load_state_dict(moving.state_dict())
    for optimizer in (moving, staying):
        advance(optimizer, 2, 2)
    assert same_bits(moving, staying)


def test_strided_parameters_and_gradients(device: Device) -> None:
    """Elements count in the order of their indices, whatever their memory's."""
    for room, options in itertools.product(rooms(device).values(), METHODS.values()):
        base = values(40, 12)
        plain = torch.nn.Parameter(base.t().contiguous().to(room.place))
        strided = torch.nn.Parameter(base.to(room.place).t())
        optimizers = [CompressedAdam([p], lr=LR, ops=room.ops, **options) for p in (plain, strided)]
        for step in range(2):
            grad = values(12, 40, seed=step).to(room.place)
            plain.grad, strided.grad = grad, grad.t().contiguous().t()
            for optimizer in optimizers:
                optimizer.step()
        assert torch.equal(plain.detach().cpu(), strided.detach().cpu())


def test_float32_gradients_of_low_precision_weights(device: Device) -> None:
    for room in rooms(device).values():
        optimizers = []
        for widened in (False, True):
            mine = torch.nn.Parameter(values(300).to(torch.bfloat16).to(room.place))
            if widened:
                mine.grad_dtype = None
            optimizer = CompressedAdam([mine], lr=LR, compression_method="int8", ops=room.ops)
            grad = values(300, seed=3).to(torch.bfloat16).to(room.place)
            mine.grad = grad.float() if widened else grad
            optimizer.step()
            optimizers.append(optimizer)
        assert same_bits(*optimizers)
