"""Counter layers and launchers on tensors of the torch device "opencl": the bytes of the host's way, without a copy."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import memtrain_cl.torch_device  # noqa: F401 (registers the device)
from memtrain_cl import ops, staging
from memtrain_cl.bridge import Crossing
from memtrain_cl.device import Device
from memtrain_cl.formats import CounterRule
from memtrain_cl.nn import CompactCounterLinear
from memtrain_cl.nn.layer_state import layer_state, load_layer_state
from memtrain_cl.torch_device.fallback import strict
from tests.layer_cases import IN, KINDS, OUT, assert_same, buffers, make

pytestmark = pytest.mark.device

M, N, R, C = 7, 40, 10, 8
RULE = CounterRule(C, True, lr=0.04, lr_scale=0.1)


@pytest.fixture
def trains(device: Device) -> torch.device:
    """The one device that torch differentiates on."""
    if device.info.index:
        pytest.skip("torch differentiates on opencl:0 alone")
    return torch.device("opencl", 0)


def arguments() -> dict[str, torch.Tensor]:
    codes = torch.randint(0, 45, (R, N), dtype=torch.uint8)
    return {
        "codes": codes,
        "state": ops.pack_codes(codes),
        "scale": torch.rand(R, 1) + 0.5,
        "v": torch.rand(R, 1),
        "grad_w": torch.randn(R, N),
        "totals": torch.zeros(3, dtype=torch.int64),
        "x": torch.randn(M, N),
        "grad_out": torch.randn(M, R),
    }


Arguments = dict[str, torch.Tensor]
LAUNCHERS: dict[str, Callable[[Arguments], Any]] = {
    "pack_codes": lambda a: ops.pack_codes(a["codes"]),
    "unpack_codes": lambda a: ops.unpack_codes(a["state"], N),
    "decode_dense": lambda a: ops.decode_dense(a["state"], a["scale"], N, C=C, packed=True),
    "row_statistics": lambda a: ops.row_statistics(a["state"], a["grad_w"], C=C, packed=True),
    "counter_update_": lambda a: ops.counter_update_(
        a["state"], a["scale"], a["v"], a["grad_w"], a["totals"], RULE, seed=9
    ),
    "counter_update_hashsr": lambda a: ops.counter_update_hashsr(
        a["codes"], a["scale"], a["v"], a["grad_w"], C=C, lr=0.1, lr_scale=0.1, rms_beta=0.9, rms_eps=1e-3, seed=4
    ),
    "counter_forward": lambda a: ops.counter_forward(a["x"], a["state"], a["scale"], C=C, packed=True),
    "counter_grad_input": lambda a: ops.counter_grad_input(a["grad_out"], a["state"], a["scale"], N, C=C, packed=True),
    "grad_weight": lambda a: ops.grad_weight(a["grad_out"], a["x"], 2, 5),
    "counter_backward_": lambda a: ops.counter_backward_(
        a["x"], a["grad_out"], a["state"], a["scale"], a["v"], a["totals"], RULE, seed=3, tile_rows=4
    ),
}


def padded(tensor: torch.Tensor) -> torch.Tensor:
    """The values of `tensor` as a view that begins later and skips elements."""
    roomy = torch.zeros(tensor.shape[0] + 1, 2 * tensor.shape[-1] if tensor.ndim > 1 else 1, dtype=tensor.dtype)
    roomy = roomy.to(tensor.device)
    view = roomy[1:, ::2] if tensor.ndim > 1 else roomy[1:, 0]
    view.copy_(tensor)
    return view


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("name", LAUNCHERS)
def test_launchers_give_the_bytes_of_the_hosts_way(place: torch.device, name: str, views: bool) -> None:
    host = arguments()
    there = {key: value.to(place) for key, value in host.items()}
    if views:
        there = {key: padded(value) for key, value in there.items()}
    with strict():
        result = LAUNCHERS[name](there)
    expected = LAUNCHERS[name](host)
    if expected is not None:
        assert result.device == place
        assert torch.equal(result.cpu(), expected)
    for key, value in host.items():
        assert torch.equal(there[key].cpu(), value), key


def test_visits_copy_nothing(place: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    there = {key: value.to(place) for key, value in arguments().items()}

    def refuse(*_: Any) -> None:
        raise AssertionError("bytes went to the host")

    monkeypatch.setattr(staging, "upload", refuse)
    monkeypatch.setattr(staging, "download", refuse)
    monkeypatch.setattr("memtrain_cl.bridge.wrap_host", refuse)
    for launcher in LAUNCHERS.values():
        launcher(there)


def test_updates_count_as_in_place(place: torch.device) -> None:
    there = {key: value.to(place) for key, value in arguments().items()}
    before = there["state"]._version
    LAUNCHERS["counter_update_"](there)
    assert there["state"]._version > before


@pytest.mark.parametrize("name", [name for name in LAUNCHERS if name not in ("pack_codes", "unpack_codes")])
def test_tensors_of_two_places_are_refused(place: torch.device, name: str) -> None:
    for lone in arguments():
        mixed = {key: value.to(place) if key == lone else value for key, value in arguments().items()}
        untouched = {key: value.cpu().clone() for key, value in mixed.items()}
        try:
            LAUNCHERS[name](mixed)
        except ValueError as error:
            assert "expected tensors on one device, got" in str(error)  # noqa: PT017 (some do not use this one)
        else:
            continue
        assert all(torch.equal(mixed[key].cpu(), untouched[key]) for key in mixed)


def test_a_visit_refuses_tensors_of_another_place(device: Device, place: torch.device) -> None:
    there = torch.zeros(3, device=place)
    with (
        pytest.raises(ValueError, match=f"expected a tensor on {place}, got one on cpu"),
        Crossing(device, there) as cross,
    ):
        cross.read(torch.zeros(3))


@pytest.mark.parametrize("size", [(0, N), (R, 0)])
def test_empty_tensors(place: torch.device, size: tuple[int, int]) -> None:
    x, grad_out = torch.zeros(M, size[1], device=place), torch.zeros(M, size[0], device=place)
    state = torch.zeros(size[0], size[1] // 4 * 3, dtype=torch.uint8, device=place)
    scale = torch.zeros(size[0], 1, device=place)
    assert ops.counter_forward(x, state, scale, C=C, packed=True).device == place
    assert ops.counter_grad_input(grad_out, state, scale, size[1], C=C, packed=True).shape == (M, size[1])
    assert ops.grad_weight(grad_out, x).device == place
    assert ops.decode_dense(state, scale, size[1], C=C, packed=True).device == place


# ---- layers ---------------------------------------------------------------------------------------------------------


def pair(kind: str, place: torch.device, **options: Any) -> tuple[CompactCounterLinear, CompactCounterLinear]:
    """Equal layers, on the host and on the device."""
    layer = make(kind, **options)
    return layer, copy.deepcopy(layer).to(place)


def step(layer: CompactCounterLinear, place: torch.device | str, number: int) -> torch.Tensor:
    """One step on data that depends on its number; the input's gradient."""
    chance = torch.Generator().manual_seed(number)
    x = torch.randn(5, IN, generator=chance).to(place).requires_grad_()
    layer(x).backward(torch.randn(5, OUT, generator=chance).to(place))
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("kind", KINDS)
def test_steps_end_with_the_bytes_of_the_host(trains: torch.device, kind: str) -> None:
    host, there = pair(kind, trains, tile_rows=5)
    for number in range(3):
        with strict():
            ours = step(there, trains, number)
        assert ours.device == trains
        assert torch.equal(ours.cpu(), step(host, "cpu", number))
    assert all(buffer.device == trains for buffer in there.buffers())
    assert_same({name: value.cpu() for name, value in there.state_dict().items()}, host.state_dict())
    assert int(there.update_events) == int(host.update_events) > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_and_more_dimensions(trains: torch.device, dtype: torch.dtype) -> None:
    host, there = pair("packed", trains)
    x = torch.randn(2, 3, IN).to(dtype)
    with strict():
        y = there(x.to(trains))
    assert y.dtype == dtype
    assert torch.equal(y.detach().cpu(), host(x).detach())


def test_a_gradient_is_applied_on_any_device(place: torch.device) -> None:
    host, there = pair("packed", place)
    gradient = torch.randn(OUT, IN)
    host.apply_update_from_grad_w(gradient)
    with strict():
        there.apply_update_from_grad_w(gradient.to(place))
    assert_same({name: value.cpu() for name, value in buffers(there).items()}, buffers(host))
    assert torch.equal(there.dense_weight().cpu(), host.dense_weight())
    with pytest.raises(ValueError, match="expected tensors on one device"):
        there.apply_update_from_grad_w(gradient)


def test_a_second_backward_is_refused(trains: torch.device) -> None:
    layer = make().to(trains)
    y, grad_out = layer(torch.randn(2, IN).to(trains)), torch.randn(2, OUT).to(trains)
    y.backward(grad_out, retain_graph=True)
    with pytest.raises(RuntimeError, match="already been updated"):
        y.backward(grad_out)


def test_a_layer_saves_loads_copies_and_comes_back(place: torch.device) -> None:
    host, there = pair("packed", place)
    gradient = torch.randn(OUT, IN)
    for layer, at in ((host, "cpu"), (there, place)):
        layer.apply_update_from_grad_w(gradient.to(at))
    expected = host.state_dict()

    file = io.BytesIO()
    torch.save(there.state_dict(), file)
    file.seek(0)
    fresh = make()
    fresh.load_state_dict(torch.load(file))
    assert_same(fresh.state_dict(), expected)

    again = make().to(place)
    again.load_state_dict(expected)
    assert again.state.device == place
    assert_same({name: value.cpu() for name, value in again.state_dict().items()}, expected)

    twin = copy.deepcopy(there)
    assert twin.state.device == place
    twin.apply_update_from_grad_w(gradient.to(place))
    assert not torch.equal(twin.state.cpu(), there.state.cpu()), "a copy has memory of its own"

    assert_same(pickle.loads(pickle.dumps(there)).to("cpu").state_dict(), expected)
    back = there.to("cpu")
    assert back.state.device.type == "cpu"
    assert_same(back.state_dict(), expected)


def test_exporters_read_a_layer_on_the_device(place: torch.device) -> None:
    host, there = pair("packed", place)
    ours, right = layer_state(there), layer_state(host)
    for name in ("state", "scale", "v", "s_base"):
        assert (getattr(ours, name) == getattr(right, name)).all()
    load_layer_state(there, right)
    assert torch.equal(there.state.cpu(), host.state)


def test_a_layer_made_on_the_device_is_the_hosts(place: torch.device) -> None:
    torch.manual_seed(8)
    host = make()
    torch.manual_seed(8)
    with place:
        there = make()
    assert there.state.device == place
    assert there.seed == host.seed
    assert_same({name: value.cpu() for name, value in there.state_dict().items()}, host.state_dict())
