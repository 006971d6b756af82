"""Memory of the device: flat over many steps, freed with its tensors, refused beyond the limit; and other refusals."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import memtrain_cl
from tests.torch_home import HOME

pytestmark = pytest.mark.device

MIB = 1 << 20


@pytest.fixture
def limited() -> Iterator[Callable[[int], None]]:
    """Sets a limit of bytes beyond what is held; the old one comes back afterwards."""
    gc.collect()
    memtrain_cl.empty_cache()
    module = torch.get_device_module("opencl")
    before = module.memory_stats()["limit"]
    yield lambda more: module.set_memory_limit(memtrain_cl.memory_allocated() + more)
    module.set_memory_limit(before)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_thousand_steps_hold_the_same_memory() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).to(HOME)
    steps = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    x, y = torch.randn(8, 6).to(HOME), torch.zeros(8, dtype=torch.int64).to(HOME)

    def run(n: int) -> tuple[int, int, int]:
        for _ in range(n):
            steps.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            steps.step()
        memtrain_cl.synchronize()
        gc.collect()
        return memtrain_cl.memory_allocated(), memtrain_cl.memory_reserved(), resident()

    # Rounds of one length: kernels that wait in the queue take the driver's memory as well.
    rounds = [run(250) for _ in range(4)]
    assert len({numbers[:2] for numbers in rounds}) == 1
    assert rounds[3][2] - rounds[1][2] < MIB


def test_a_dropped_tensor_frees_its_bytes() -> None:
    gc.collect()
    before = memtrain_cl.memory_allocated()
    x = torch.empty(MIB, dtype=torch.uint8, device=HOME)
    view = x[10:20]
    assert memtrain_cl.memory_allocated() - before == MIB
    del x
    assert memtrain_cl.memory_allocated() - before == MIB, "a view keeps the bytes"
    del view
    assert memtrain_cl.memory_allocated() == before
    assert memtrain_cl.memory_reserved() >= before + MIB
    memtrain_cl.empty_cache()
    assert memtrain_cl.memory_reserved() < before + MIB


def test_a_graph_and_its_gradients_free_their_bytes() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(HOME)
    gc.collect()
    before = memtrain_cl.memory_allocated()
    loss = model(torch.ones(256, 64, device=HOME)).sum()
    assert memtrain_cl.memory_allocated() > before + 256 * 64 * 4
    loss.backward()
    model.zero_grad()
    del loss
    assert memtrain_cl.memory_allocated() == before
    model.cpu()
    assert memtrain_cl.memory_allocated() < before


def test_peaks() -> None:
    gc.collect()
    memtrain_cl.reset_peak_memory_stats()
    before = memtrain_cl.max_memory_allocated()
    assert before == memtrain_cl.memory_allocated()
    x = torch.empty(MIB, dtype=torch.uint8, device=HOME)
    del x
    assert memtrain_cl.max_memory_allocated() - before == MIB
    memtrain_cl.reset_peak_memory_stats()
    assert memtrain_cl.max_memory_allocated() == before


def test_summary_names_device_and_numbers() -> None:
    x = torch.empty(MIB, dtype=torch.uint8, device=HOME)
    text = memtrain_cl.memory_summary()
    assert f"{memtrain_cl.memory_allocated():,d}" in text
    assert "opencl:0" in text
    assert "limit" in text
    del x


def test_out_of_memory_says_three_numbers_and_the_next_step_works(limited: Callable[[int], None]) -> None:
    model = nn.Linear(4, 4).to(HOME)
    x = torch.ones(2, 4, device=HOME)
    limited(MIB)
    held = memtrain_cl.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(4 * MIB, dtype=torch.uint8, device=HOME)
    text = str(caught.value)
    assert isinstance(caught.value, memtrain_cl.errors.OutOfMemory)
    assert f"{4 * MIB} bytes were asked for" in text
    assert f"{held} are held" in text
    assert f"limit is {held + MIB}" in text
    model(x).sum().backward()
    assert memtrain_cl.memory_allocated() > held


def test_cache_gives_way_to_a_request_that_fits(limited: Callable[[int], None]) -> None:
    limited(4 * MIB)
    for size in (1, 2, 3):
        x = torch.empty(size * MIB, dtype=torch.uint8, device=HOME)
        assert x.numel() == size * MIB
        del x
    with pytest.raises(ValueError, match="positive number of bytes"):
        torch.get_device_module("opencl").set_memory_limit(0)


def test_out_of_memory_in_a_copy_from_the_host(limited: Callable[[int], None]) -> None:
    limited(MIB)
    for attempt in (lambda: torch.zeros(MIB).to(HOME), lambda: nn.Linear(1024, 1024).to(HOME)):
        with pytest.raises(torch.OutOfMemoryError, match="bytes were asked for"):
            attempt()
    assert torch.ones(3).to(HOME).sum().item() == 3


# ---- what the device does not hold or do ----


REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "float64": lambda x: x.double(),
    "float64-factory": lambda x: torch.zeros(2, dtype=torch.float64, device=HOME),
    "float64-move": lambda x: torch.zeros(2, dtype=torch.float64).to(HOME),
    "float64-sum": lambda x: x.sum(dtype=torch.float64),
    "float64-module": lambda x: nn.Linear(2, 2).to(HOME).double(),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "complex": lambda x: x.to(torch.complex64),
    "complex-factory": lambda x: torch.randn(2, dtype=torch.complex64, device=HOME),
    "complex-pair": lambda x: torch.complex(x, x),
    "complex-view": lambda x: torch.view_as_complex(x),
    "complex-number": lambda x: torch.mul(x, 1j),
    "fft": lambda x: torch.fft.fft(x),
    "sparse": lambda x: x.to_sparse(),
    "sparse-rows": lambda x: x.to_sparse_csr(),
    "sparse-move": lambda x: torch.eye(2).to_sparse().to(HOME),
    "nested": lambda x: torch.nested.nested_tensor([x, x], device=HOME) + 1,
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "autocast": lambda x: torch.autocast("opencl").__enter__(),
    "autocast-half": lambda x: torch.autocast("opencl", dtype=torch.float16).__enter__(),
    "numpy": lambda x: x.numpy(),
    "dlpack": lambda x: x.__dlpack__(),
    "pin": lambda x: x.pin_memory(),
    "elsewhere": lambda x: x + torch.ones(2),
    "storage": lambda x: x.untyped_storage().cpu(),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR", "ignore:torch.quantize")
def test_refusals_are_sentences(name: str) -> None:
    x = torch.ones(2, 2, device=HOME)
    with pytest.raises((TypeError, RuntimeError, BufferError)) as caught:
        REFUSED[name](x)
    text = str(caught.value)
    assert "opencl" in text or "device type" in text, text
    assert "INTERNAL" not in text
    assert x.sum().item() == 4


def test_autocast_switched_off_is_fine() -> None:
    x = torch.ones(2, 2, device=HOME)
    with torch.autocast("opencl", enabled=False):
        assert (x @ x).dtype == torch.float32


@pytest.mark.filterwarnings("ignore")
def test_compiled_models_are_refused_or_right() -> None:
    """torch.compile has no code for the device: what it passes by runs as ever, what it takes raises."""
    model = nn.Linear(3, 2).to(HOME)
    x = torch.ones(4, 3, device=HOME)
    expected = model(x)
    assert torch.equal(torch.compile(model)(x), expected)
    with pytest.raises(Exception, match="opencl"):
        torch.compile(lambda n: torch.ones(n, device=HOME) * 2)(3)
    assert torch.equal(model(x), expected)
