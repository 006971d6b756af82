"""The long checks, once an issue: ``python -m bench.acceptance`` trains the default model three ways and measures this machine.

1. counters, frozen counters (everything else learning) and dense linears, each at the default configuration: the counters must close at
   least a third of the gap between frozen and dense in validation bits per byte;
2. a counter run stopped half-way and resumed must end with the bytes of one that ran through;
3. every bench family, filed beside.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import memtrain_cl
from bench.__main__ import FAMILIES
from bench.harness import RESULTS, Bench, slug
from memtrain_cl.device import get_device, use_device
from memtrain_cl.export.atomic import atomic_path
from memtrain_cl.lm.config import TrainConfig
from memtrain_cl.lm.run import MODEL, plan_run, run_training

RESUME_STEPS = 20


def train(kind: str, out: Path, flags: dict[str, Any], device: str) -> dict[str, Any]:
    """One training run; what its summary says."""
    config, state = plan_run(out, flags, resume=False)
    started = time.monotonic()
    summary = run_training(config, out, state, quiet=True, device=device).to_json()
    print(f"{kind}: {summary['val_bpb']:.4f} bits per byte in {time.monotonic() - started:.0f} s", flush=True)
    return {**summary, "seconds_in_all": round(time.monotonic() - started, 1)}


def compare_linears(folder: Path, device: str) -> dict[str, Any]:
    """The three runs, and the share of the gap between frozen and dense that the counters close."""
    kinds: dict[str, dict[str, Any]] = {
        "counter": {},
        "frozen": {"freeze_counters": True},
        "dense": {"linear": "dense"},
    }
    runs = {kind: train(kind, folder / kind, flags, device) for kind, flags in kinds.items()}
    bpb = {kind: run["val_bpb"] for kind, run in runs.items()}
    closed = (bpb["frozen"] - bpb["counter"]) / (bpb["frozen"] - bpb["dense"])
    return {"runs": runs, "gap_closed": closed, "ok": bpb["frozen"] > bpb["dense"] and closed >= 1 / 3}


def compare_resume(folder: Path, device: str) -> dict[str, Any]:
    """Whether a run resumed half-way ends with the same exported bytes."""
    train("through", folder / "through", {"steps": RESUME_STEPS}, device)
    # The schedule depends on the number of steps, so the first half is the same run, stopped: a copy of its configuration.
    half = folder / "half"
    config, _ = plan_run(half, {"steps": RESUME_STEPS}, resume=False)
    run_until(config, half, RESUME_STEPS // 2, device)
    config, state = plan_run(half, {}, resume=True)
    run_training(config, half, state, quiet=True, device=device)
    same = (folder / "through" / MODEL).read_bytes() == (half / MODEL).read_bytes()
    return {"steps": RESUME_STEPS, "ok": same}


def run_until(config: TrainConfig, out: Path, step: int, device: str) -> None:
    """A run that a signal stops after `step` steps."""
    import signal

    from memtrain_cl.lm import run as run_module

    class StopAt(run_module.Trainer):
        def train_step(self) -> float:
            loss = super().train_step()
            if self.step == step:
                signal.raise_signal(signal.SIGINT)
            return loss

    original = run_module.Trainer
    run_module.Trainer = StopAt  # type: ignore[misc]
    try:
        run_training(replace(config), out, None, quiet=True, device=device)
    except run_module.Interrupted:
        return
    finally:
        run_module.Trainer = original  # type: ignore[misc]
    raise RuntimeError(f"expected the run to stop after step {step}")


def main() -> None:
    """Run everything, file it, and exit 1 when a criterion does not hold."""
    parser = argparse.ArgumentParser(prog="python -m bench.acceptance", description="The long checks; see the module's text.")
    parser.add_argument("--device", help="index of a device, or a part of its name")
    device = get_device(parser.parse_args().device)
    name = device.info.label
    with use_device(device), tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        linears = compare_linears(folder, name)
        print(f"counters close {linears['gap_closed']:.2f} of the gap between frozen and dense (at least 0.33 is asked)")
        resume = compare_resume(folder / "resume", name)
        print(f"a resumed run ends with the same bytes: {resume['ok']}")
        bench = Bench(device)
        for family in FAMILIES.values():
            family(bench)
        print(f"wrote {bench.write(None)}")
    target = RESULTS / memtrain_cl.__version__ / f"acceptance-{slug(f'{device.info.platform} {device.info.name}')}.json"
    body = {"version": memtrain_cl.__version__, "date": time.strftime("%Y-%m-%d"), "device": name, "linears": linears, "resume": resume}
    with atomic_path(target) as temporary:
        temporary.write_text(json.dumps(body, indent=1) + "\n")
    print(f"wrote {target}")
    sys.exit(0 if linears["ok"] and resume["ok"] else 1)


if __name__ == "__main__":
    main()
