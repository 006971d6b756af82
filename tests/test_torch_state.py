"""A model's state: moves, types, state dicts, files, copies, and what users assign to parameters."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional

from tests.torch_home import HOME, adamw

pytestmark = pytest.mark.device


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))  # type: ignore[no-any-return]


def saved(value: Any, **options: Any) -> Any:
    """`value` through torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


# ---- moves ----


def test_modules_move_and_change_type() -> None:
    model = mlp()
    model.register_buffer("count", torch.tensor(3))
    parameters = list(model.parameters())
    model.to("opencl")
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        model.to(dtype)
        assert {(p.device, p.dtype) for p in model.parameters()} == {(HOME, dtype)}
    assert model.half()(torch.ones(1, 6, device=HOME).half()).dtype == torch.float16
    model.float().cpu()
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert model.count.device.type == "cpu"
    assert all(
        one is other and isinstance(one, nn.Parameter)
        for one, other in zip(model.parameters(), parameters, strict=True)
    )


def test_gradients_move_with_their_parameters() -> None:
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    model.to(HOME)
    assert model.weight.grad is not None
    assert model.weight.grad.device == HOME
    assert model.weight.grad.tolist() == [[1.0, 1.0]]
    model.cpu()
    assert model.weight.grad.device.type == "cpu"


def test_shared_parameters_stay_shared() -> None:
    model = Tied().to(HOME)
    assert model.head.weight is model.embed.weight
    assert len(list(model.parameters())) == 1
    model(torch.tensor([1, 2]).to(HOME)).sum().backward()
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embed.weight
    assert twin.head.weight is not model.head.weight
    assert model.half().head.weight is model.cpu().embed.weight


def test_a_parameter_with_living_views_does_not_move() -> None:
    model = nn.Linear(2, 2)
    row = model.weight[0]
    with pytest.raises(RuntimeError, match="views of it"):
        model.to(HOME)
    del row
    assert model.to(HOME).weight.device == HOME


def test_modules_are_made_on_the_device() -> None:
    assert nn.Linear(2, 2, device="opencl").weight.device == HOME
    with torch.device("opencl"):
        assert nn.Linear(2, 2).weight.device == HOME
    assert nn.Linear(2, 2, device="meta").to_empty(device=HOME).weight.device == HOME
    with pytest.raises(RuntimeError, match="lazy modules"):
        nn.LazyLinear(2).to(HOME)


@pytest.mark.parametrize("value", [3, 2.5, True, [1, 2], [[0.5]]])
def test_tensors_are_made_of_numbers(value: Any) -> None:
    made = torch.tensor(value, device="opencl")
    assert made.device == HOME
    assert made.dtype == torch.tensor(value).dtype
    assert made.tolist() == value


# ---- state dicts and files ----


def test_state_dicts_go_both_ways() -> None:
    torch.manual_seed(1)
    host, there = mlp(), mlp().to(HOME)
    there.load_state_dict(host.state_dict())
    assert all(p.device == HOME for p in there.parameters())
    with torch.no_grad():
        for p in there.parameters():
            p.mul_(2)
    host.load_state_dict(there.state_dict(), strict=True)
    for one, other in zip(host.parameters(), there.parameters(), strict=True):
        assert torch.equal(one, other.cpu())
    with pytest.raises(RuntimeError, match="Missing key"):
        there.load_state_dict({"0.weight": torch.zeros(8, 6)})
    with pytest.raises(RuntimeError, match="size mismatch"):
        there.load_state_dict({**host.state_dict(), "0.weight": torch.zeros(2, 2)})


@pytest.mark.parametrize(("source", "target"), [("cpu", "opencl:0"), ("opencl:0", "cpu"), ("opencl:0", "opencl:0")])
def test_training_resumes_elsewhere(source: str, target: str) -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, device: str, n: int = 3) -> list[float]:
        seen = []
        for _ in range(n):
            optimizer.zero_grad()
            loss = functional.mse_loss(model(torch.ones(2, 6, device=device)), torch.ones(2, 3, device=device))
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen

    first = mlp().to(source)
    optimizer = adamw(first.parameters())
    steps(first, optimizer, source)
    state = saved({"model": first.state_dict(), "optimizer": optimizer.state_dict()})
    second = mlp().to(target)
    resumed = adamw(second.parameters())
    second.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    assert next(iter(resumed.state.values()))["exp_avg"].device.type == torch.device(target).type
    assert steps(second, resumed, target) == pytest.approx(steps(first, optimizer, source), rel=1e-5)


def test_files_hold_cpu_tensors() -> None:
    x = torch.arange(6.0, device=HOME).view(2, 3)
    for loaded in (saved(x), saved(x, map_location="cpu"), pickle.loads(pickle.dumps(x))):
        assert type(loaded) is torch.Tensor
        assert loaded.device.type == "cpu"
        assert torch.equal(loaded, x.cpu())
    parameter = saved(nn.Parameter(x))
    assert isinstance(parameter, nn.Parameter)
    assert parameter.requires_grad


@pytest.mark.parametrize("location", ["opencl", "opencl:0", HOME])
def test_files_load_onto_the_device(location: Any) -> None:
    base = torch.arange(12.0).view(3, 4)
    values = {
        "base": base,
        "row": base[1],
        "turned": base.t(),
        "half": torch.ones(2).half(),
        "brain": torch.tensor([1.5, -2.0]).bfloat16(),
        "whole": torch.tensor(3),
        "none": torch.zeros(0, 3),
        "bool": torch.tensor([True, False]),
        "parameter": nn.Parameter(torch.ones(2)),
    }
    loaded = saved(values, map_location=location)
    for name, value in values.items():
        got = loaded[name]
        assert (got.device, got.dtype, got.stride()) == (HOME, value.dtype, value.stride()), name
        assert torch.equal(got.cpu(), value), name
    loaded["row"].add_(1)
    assert loaded["base"][1].tolist() == [5.0, 6.0, 7.0, 8.0]


def test_files_that_cannot_load_onto_the_device() -> None:
    with pytest.raises(TypeError, match="float64"):
        saved(torch.zeros(2, dtype=torch.float64), map_location="opencl")
    with pytest.raises(RuntimeError, match="device_count"):
        saved(torch.zeros(2), map_location="opencl:99")
    file = io.BytesIO()
    torch.save(torch.zeros(2), file, _use_new_zipfile_serialization=False)
    file.seek(0)
    with pytest.raises(RuntimeError, match=r"before 1\.6"):
        torch.load(file, weights_only=True, map_location="opencl")


def test_safetensors(tmp_path: Path) -> None:
    model, path = mlp().to(HOME), tmp_path / "model.safetensors"
    safetensors.torch.save_file(model.state_dict(), path)
    loaded = safetensors.torch.load_file(path)
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], value.cpu()) for name, value in model.state_dict().items())
    tied = Tied().to(HOME)
    with pytest.raises(RuntimeError, match="share memory"):
        safetensors.torch.save_file(tied.state_dict(), path)
    safetensors.torch.save_model(tied, str(path))
    other = Tied().to(HOME)
    safetensors.torch.load_model(other, str(path))
    assert torch.equal(other.head.weight, tied.embed.weight)


def test_storages_tell_shared_bytes() -> None:
    x = torch.arange(6.0, device=HOME)
    storage = x.untyped_storage()
    assert storage.nbytes() == len(storage) == 24
    assert x[2:].untyped_storage().data_ptr() == storage.data_ptr() != 0
    assert x[2:].data_ptr() - x.data_ptr() == 8
    assert x.clone().untyped_storage().data_ptr() != storage.data_ptr()
    y = torch.zeros(0, device=HOME).set_(storage, 1, (2, 2), (2, 1))
    assert y.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    with pytest.raises(RuntimeError, match="out of bounds"):
        y.set_(storage, 4, (3,), (1,))
    with pytest.raises(RuntimeError, match="cannot reach the bytes"):
        storage.tolist()


# ---- copies and assignments ----


def test_deep_copies_are_apart() -> None:
    model = mlp().to(HOME)
    model(torch.ones(1, 6, device=HOME)).sum().backward()
    twin = copy.deepcopy(model)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert isinstance(other, nn.Parameter)
        assert other.requires_grad
        assert other.is_leaf
        assert torch.equal(one, other)
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
        with torch.no_grad():
            other.add_(1)
        assert not torch.equal(one, other)
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(model(torch.ones(1, 6, device=HOME)))


def test_data_is_assigned() -> None:
    p = nn.Parameter(torch.ones(3, device=HOME))
    p.data = torch.full((2, 2), 2.0, device=HOME)
    p.data.add_(1)
    assert p.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    p.data = p.data.half()
    assert p.dtype == torch.float16
    assert isinstance(p, nn.Parameter)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        p.data = torch.zeros(3)


def test_gradients_are_assigned() -> None:
    p = nn.Parameter(torch.ones(3, device=HOME))
    p.grad = torch.tensor([1.0, 2.0, 3.0], device=HOME)
    (p * 2).sum().backward()
    assert p.grad.tolist() == [3.0, 4.0, 5.0]
    for wrong in (torch.ones(3), torch.ones(2, device=HOME), torch.ones(3, device=HOME).half()):
        with pytest.raises(RuntimeError, match="assign a gradient"):
            p.grad = wrong
    p.grad = None


def test_history_is_cut_and_begun() -> None:
    x = torch.ones(3, device=HOME, requires_grad=True)
    y = x * 2
    y.detach_()
    assert not y.requires_grad
    z = x.detach()
    z.add_(1)
    assert x.tolist() == [2.0, 2.0, 2.0]
    x.requires_grad_(False)
    assert not (x * 2).requires_grad
    with torch.inference_mode():
        assert (x * 2).is_inference()


def test_views_change_in_place_as_on_the_host() -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.requires_grad_()
        y = x * 2
        y[1].mul_(3)
        y[:, 0].add_(y[:, 1])
        y.view(4, 3)[0].zero_()
        y.t()[2, 1] = 7
        y.square().sum().backward()
        assert x.grad is not None
        return y.detach().cpu(), x.grad.cpu()

    x = torch.randn(3, 4)
    for one, other in zip(run(x.to(HOME)), run(x.clone()), strict=True):
        torch.testing.assert_close(one, other)


def test_printing() -> None:
    x = torch.tensor([1.0, 2.5], device=HOME)
    assert repr(x) == "tensor([1.0000, 2.5000], device='opencl:0')"
    assert repr(x.clone().requires_grad_()).endswith("device='opencl:0', requires_grad=True)")
    assert "grad_fn=<MulBackward0>" in repr(x.clone().requires_grad_() * 2)
    assert "Parameter containing" in repr(nn.Parameter(torch.ones(1))).replace("\n", " ")
    assert f"{x[1]:.2f} {x.sum().item():.1f}" == "2.50 3.5"
    assert "size=(0,)" in repr(torch.zeros(0, device=HOME)) or "[]" in repr(torch.zeros(0, device=HOME))
    with pytest.raises(TypeError, match="format"):
        f"{x:.2f}"
