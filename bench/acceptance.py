"""The long checks: ``python -m bench.acceptance [PART ...]``, all of them unless some are named.

linears      the default configuration trained with counters, counters in int8, frozen counters and dense linears:
             counters must end within 5 % of dense linears' validation bits per byte
resume       a counter run stopped half-way and resumed must end with the bytes of one that ran through
agreement    the model must train on "opencl" as in torch on the host (agreement.py)
automagic    the model trained by Automagic from rates of 1e-8, 1e-6 and 1e-2 must end near one loss, and near AdamW's
             best (acceptance_automagic.py)
ops          torch's own samples of every operation with a kernel, as a table of this machine's platforms
files        damaged files of every format must be refused in a sentence or load as they declare, 500 corruptions a
             format (hostile_files.py)
hostile      public functions must give the oracle's answer to any tensor, 2000 tensors a function (hostile.py)
memory       recompute, few bits and reversible chains must cost no more time and hold no more bytes than is said,
             limits be met, forecasts hold, and models that just fit train (acceptance_memory.py)
moments      the model trained by Adam on compressed moments must end near one with dense moments
             (acceptance_moments.py)
statistics   what is drawn at random must be unbiased (acceptance_statistics.py)
teacher      layers must find a teacher's weights again in every mode (acceptance_teacher.py)
bench        every bench family, filed beside

Each part is filed when it is done, beside what other runs have filed of the others.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import memtrain_cl
from bench import (
    acceptance_automagic,
    acceptance_memory,
    acceptance_moments,
    acceptance_teacher,
    hostile,
    hostile_files,
)
from bench.__main__ import FAMILIES
from bench.acceptance_statistics import judge_all
from bench.agreement import EVERY, PLACE, all_hold, compare
from bench.harness import RESULTS, Bench, slug
from memtrain_cl.device import get_device, put_first, use_device
from memtrain_cl.export.atomic import atomic_path
from memtrain_cl.lm.files import METRICS, MODEL
from memtrain_cl.lm.run import plan_run, run_training

RESUME_STEPS = 40
#: How far counters may end above dense linears.
WITHIN = 0.05


def train(kind: str, out: Path, flags: dict[str, Any], device: str) -> dict[str, Any]:
    """One training run; what its summary says."""
    config, state = plan_run(out, flags, resume=False)
    started = time.monotonic()
    summary = run_training(config, out, state, quiet=True, device=device, place=PLACE).to_json()
    print(f"{kind}: {summary['val_bpb']:.4f} bits per byte in {time.monotonic() - started:.0f} s", flush=True)
    return {**summary, "seconds_in_all": round(time.monotonic() - started, 1)}


def compare_linears(device: str) -> dict[str, Any]:
    """The runs, how far each counter run ends above dense, and the share of the gap to frozen that it closes."""
    kinds: dict[str, dict[str, Any]] = {
        "counter": {},
        "counter int8": {"counter_compute": "int8"},
        "frozen": {"freeze_counters": True},
        "dense": {"linear": "dense"},
    }
    with tempfile.TemporaryDirectory() as folder:
        runs = {kind: train(kind, Path(folder) / kind, flags, device) for kind, flags in kinds.items()}
    bpb = {kind: run["val_bpb"] for kind, run in runs.items()}
    trained = ("counter", "counter int8")
    above = {kind: bpb[kind] / bpb["dense"] - 1 for kind in (*trained, "frozen")}
    closed = {kind: (bpb["frozen"] - bpb[kind]) / (bpb["frozen"] - bpb["dense"]) for kind in trained}
    fine = all(above[kind] <= WITHIN for kind in trained)
    return {"runs": runs, "above_dense": above, "gap_closed": closed, "ok": fine}


def compare_resume(device: str) -> dict[str, Any]:
    """Whether a run stopped by Ctrl-C half-way and resumed ends with the bytes of one that ran through."""
    with tempfile.TemporaryDirectory() as folder:
        return _stop_and_resume(Path(folder), device)


def _stop_and_resume(folder: Path, device: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "memtrain_cl.cli", "train", "--quiet", "--device", device]
    steps = ["--steps", str(RESUME_STEPS)]
    through, half = folder / "through", folder / "half"
    subprocess.run([*command, *steps, "--out", str(through)], check=True)
    stopped = subprocess.Popen([*command, *steps, "--out", str(half)])
    metrics = half / METRICS
    while stopped.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") < RESUME_STEPS // 2):
        time.sleep(0.05)
    stopped.send_signal(signal.SIGINT)
    code = stopped.wait()
    reached = metrics.read_text().count("\n")
    subprocess.run([*command, "--resume", "--out", str(half)], check=True)
    same = (through / MODEL).read_bytes() == (half / MODEL).read_bytes()
    return {"steps": RESUME_STEPS, "stopped_after": reached, "ok": same and code == 130 and reached < RESUME_STEPS}


def compare_agreement(device: str) -> dict[str, Any]:
    """What agreement.py compares on this device."""
    found = compare(None, set(EVERY))
    return {**found, "ok": all_hold(found)}


def judge_automagic(device: str) -> dict[str, Any]:
    """Where Automagic's rates and losses end; the picture of the rates lies beside."""
    return acceptance_automagic.run(PLACE, RESULTS / memtrain_cl.__version__ / f"automagic-{slug(device)}.png")


def table_of_ops(device: str) -> dict[str, Any]:
    """The table of torch's ops, written beside; ok where none is wrong anywhere."""
    table = RESULTS / memtrain_cl.__version__ / "ops.md"
    subprocess.run([sys.executable, "-W", "ignore", "-m", "tests.opdb", "--table", "--out", str(table)], check=True)
    columns = json.loads(table.with_suffix(".json").read_text())
    outcomes = [outcome for column in columns for found in column["outcomes"].values() for outcome in found]
    wrong = [outcome["name"] for outcome in outcomes if outcome["status"] not in ("ok", "refused")]
    return {"table": table.name, "wrong": wrong, "ok": not wrong}


def judge_estimators(device: str) -> dict[str, Any]:
    """The verdicts on what is drawn at random."""
    verdicts = judge_all()
    return {
        "estimators": [{**asdict(verdict), "ok": verdict.ok} for verdict in verdicts],
        "ok": all(verdict.ok for verdict in verdicts),
    }


def measure(device: str) -> dict[str, Any]:
    """Every bench family, written beside."""
    bench = Bench(get_device(0))
    for family in FAMILIES.values():
        family(bench)
    return {"file": bench.write(None).name, "ok": True}


PARTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "linears": compare_linears,
    "resume": compare_resume,
    "agreement": compare_agreement,
    "automagic": judge_automagic,
    "ops": table_of_ops,
    "files": lambda device: hostile_files.run(),
    "hostile": lambda device: hostile.run(),
    "memory": lambda device: acceptance_memory.run(),
    "moments": lambda device: acceptance_moments.run(),
    "statistics": judge_estimators,
    "teacher": lambda device: acceptance_teacher.run(),
    "bench": measure,
}


def file_part(target: Path, device: str, name: str, result: dict[str, Any]) -> None:
    """Put a part's result into the file, in the place of an earlier one."""
    body = json.loads(target.read_text()) if target.exists() else {}
    parts = {**body.get("parts", {}), name: {"date": time.strftime("%Y-%m-%d"), **result}}
    ordered = {part: parts[part] for part in PARTS if part in parts}
    with atomic_path(target) as temporary:
        text = json.dumps({"version": memtrain_cl.__version__, "device": device, "parts": ordered}, indent=1)
        temporary.write_text(text + "\n")


def main() -> None:
    """Run the parts, file them, and exit 1 when a criterion does not hold."""
    parser = argparse.ArgumentParser(prog="python -m bench.acceptance", description="The long checks.")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--device", help="index of a device, or a part of its name")
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"expected parts of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    # torch differentiates on opencl:0 alone.
    name = put_first(options.device).label
    device = get_device(0)
    target = RESULTS / memtrain_cl.__version__ / f"acceptance-{slug(f'{device.info.platform} {device.info.name}')}.json"
    failed = []
    with use_device(device):
        for part in options.parts or PARTS:
            result = PARTS[part](name)
            file_part(target, name, part, result)
            print(f"{part}: {'holds' if result['ok'] else 'DOES NOT HOLD'}", flush=True)
            failed += [] if result["ok"] else [part]
    print(f"wrote {target}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
