"""What is kept of activations, beside the time of a step: in full, in few bits, run again, chosen, reversible.

The byte-level model with 12 layers of width 256, 8 sequences of 512, as `memtrain-cl train` trains it; all ways in
turn, so that a busy machine slows all alike. Bytes are the allocator's.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bench.harness import Bench, Row
from memtrain_cl.device import get_device, use_device
from memtrain_cl.lm.bill import Bill
from memtrain_cl.lm.config import MIB, ModelConfig, TrainConfig
from memtrain_cl.lm.measure import measure, random_corpus
from memtrain_cl.lm.model import Attention, FeedForward, RMSNorm, rope_tables
from memtrain_cl.lm.trainer import Trainer
from memtrain_cl.meter import metered, seconds_of, synchronize
from memtrain_cl.nn import ReversibleCouplingBlock, ReversibleSequence

CONFIG = TrainConfig(ModelConfig(layers=12, dim=256, heads=4, seq=512), batch=8)
DEPTHS = (4, 16, 64)
#: "auto" may hold what lies this far between recomputing everything and keeping everything.
SHARE = 0.5


@dataclass(frozen=True)
class Setting:
    """A way to train, its memory, and the seconds of its steps."""

    activations: str
    bill: Bill
    seconds: float
    limit: int = 0
    chosen: tuple[str, ...] = ()


def settings(place: str, linear: str = "counter", turns: int = 3) -> dict[str, Setting]:
    """Every value of --activations, "auto" under a limit."""
    base = replace(CONFIG, model=replace(CONFIG.model, linear=linear))
    configs = {kept: replace(base, activations=kept) for kept in ("fp", "8", "4", "recompute")}
    bills = {kept: measure(config, place) for kept, config in configs.items()}
    limit = round(bills["recompute"].peak + SHARE * (bills["fp"].peak - bills["recompute"].peak))
    configs["auto"] = replace(base, activations="auto", memory_limit=limit / MIB)
    # A third step decides, and a fourth is measured.
    bills["auto"] = measure(configs["auto"], place, steps=3)
    trainers: dict[str, Trainer] = {}
    # The chosen one first: its limit is for a device that holds it alone, also while it measures and decides.
    for kept in ("auto", *(kept for kept in configs if kept != "auto")):
        config = configs[kept]
        trainers[kept] = trainer = Trainer(config, random_corpus(config.model.seq), None, place)
        for _ in range(3):
            trainer.train_step()
        trainer.keeping.release()
    times: dict[str, list[float]] = {kept: [] for kept in trainers}
    for _ in range(turns):
        for kept, trainer in trainers.items():
            seconds, _ = seconds_of(trainer.train_step, trainer.device)
            times[kept].append(seconds)
    plan = trainers["auto"].keeping.plan
    return {
        kept: Setting(
            kept,
            bills[kept],
            statistics.median(times[kept]),
            limit if kept == "auto" else 0,
            plan.actions if plan is not None and kept == "auto" else (),
        )
        for kept in configs
    }


class _Part(nn.Module):
    """A normed part of a block, as F or G."""

    def __init__(self, config: ModelConfig, part: nn.Module, *more: Any) -> None:
        super().__init__()
        self.norm, self.part, self.more = RMSNorm(config.dim, config.norm_eps), part, more

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.part(self.norm(x), *self.more)
        return y


def reversible(place: str, depth: int, *, anchor_every: int = 0) -> tuple[int, int, float]:
    """(bytes that the forward keeps, most bytes alive beside the layers, seconds) of a step of counter layers."""
    torch.manual_seed(0)
    config = replace(CONFIG.model, layers=depth)
    cos, sin = (table.to(place) for table in rope_tables(config, 0, config.seq))
    blocks = [
        ReversibleCouplingBlock(
            _Part(config, Attention(config, index, 0.5, None), cos, sin, None),
            _Part(config, FeedForward(config, 0.5, None)),
        )
        for index in range(depth)
    ]
    chain = ReversibleSequence(blocks, anchor_every=anchor_every).to(place)
    xs = [torch.randn(CONFIG.batch, config.seq, config.dim).to(place) for _ in range(2)]
    device = xs[0].device
    for _ in range(2):
        for parameter in chain.parameters():
            parameter.grad = None
        synchronize(device)
        with metered(device) as meter:
            before = meter.now()
            started = time.perf_counter()
            y1, y2 = chain(*xs)
            kept = meter.now() - before
            (y1 * y2).mean().backward()
            synchronize(device)
            seconds, peak = time.perf_counter() - started, meter.peak() - before
        del y1, y2
    return kept, peak, seconds


def run(bench: Bench) -> None:
    """Steps in each setting, and reversible chains of more and more layers."""
    import memtrain_cl.torch_device  # noqa: F401 (registers the device)

    if bench.device.info.index:
        return  # torch differentiates on opencl:0 alone
    place = "opencl:0"
    # Not the bench's own twin of the device, whose queue measures kernels: tensors named by an index are not on that.
    with use_device(get_device(0)):
        found = settings(place)
        full = found["fp"]
        for kept, setting in found.items():
            activations, peak = setting.bill.pools["activations"], setting.bill.peak
            chosen = {action: setting.chosen.count(action) for action in dict.fromkeys(setting.chosen)}
            limit = f", limit {setting.limit / MIB:.1f} MiB: {chosen}" if setting.limit else ""
            name = f"step, activations {kept} ({activations / MIB:.1f} MiB kept, peak {peak / MIB:.1f} MiB{limit})"
            peers = {"activations fp": full.seconds * 1e6}
            bench.add(Row("recompute", name, setting.seconds * 1e6, error="checked by the tests", peers=peers))
        for depth in DEPTHS:
            kept_bytes, peak, seconds = reversible(place, depth)
            name = f"reversible, {depth} layers ({kept_bytes / MIB:.1f} MiB kept, peak {peak / MIB:.1f} MiB)"
            bench.add(Row("recompute", name, seconds * 1e6, error="checked by the tests"))
