"""The table of torch's ops on the OpenCL platforms of this machine, and of others whose JSON is at hand.

`make_table` runs the listed ops (opdb_ops.py) in a process of its own a device, which is opencl:0 there, so that
gradients are compared too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from memtrain_cl.device import devices

ROOT = Path(__file__).resolve().parent.parent


def run_listed(limit: int, seconds: int) -> dict[str, Any]:
    """All listed ops on opencl:0, as JSON."""
    from tests.opdb import run_ops
    from tests.opdb_ops import BFLOAT16, FLOAT32

    info = devices()[0]
    place = torch.device("opencl:0")
    outcomes = {
        str(dtype).removeprefix("torch."): [
            asdict(outcome) for outcome in run_ops(list(names), place, dtype, limit, seconds=seconds)
        ]
        for dtype, names in ((torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16))
    }
    return {"device": info.label, "driver": info.driver_version, "torch": torch.__version__, "outcomes": outcomes}


def _child(label: str, limit: int, seconds: int) -> dict[str, Any]:
    code = f"import json\nfrom tests.opdb_table import run_listed\nprint(json.dumps(run_listed({limit}, {seconds})))"
    environment = {**os.environ, "MEMTRAIN_CL_DEVICE": label}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"the ops ended the process on {label} with exit code {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _cell(outcome: dict[str, Any] | None) -> str:
    if outcome is None:
        return ""
    refused = f", {outcome['refused']} refused" if outcome["refused"] else ""
    return f"{outcome['status']} ({outcome['samples']}{refused})"


def write_markdown(columns: list[dict[str, Any]]) -> str:
    """One table a type: a line an op, a column a device."""
    lines = ["# torch's ops on OpenCL", ""]
    lines += [
        "Samples of torch's own op tests (`op_db`) in strict mode, results and gradients beside the CPU's: ok means "
        "that all ran on the device and agreed; in brackets how many, and how many were refused with a TypeError "
        "because the device holds no such type. `python -m tests.opdb --table` makes this table.",
        "",
    ]
    titles = [column["device"].split(" | ") for column in columns]
    for number, (column, title) in enumerate(zip(columns, titles, strict=True), 1):
        lines.append(f"{number}. {', '.join(title)} (driver {column['driver']}), torch {column['torch']}")
    dtypes = list(dict.fromkeys(dtype for column in columns for dtype in column["outcomes"]))
    for dtype in dtypes:
        found = [{o["name"]: o for o in column["outcomes"].get(dtype, [])} for column in columns]
        names = list(dict.fromkeys(name for column in found for name in column))
        good = [sum(o["status"] == "ok" for o in column.values()) for column in found]
        lines += ["", f"## {dtype}", "", f"| op | {' | '.join(str(n) for n in range(1, len(columns) + 1))} |"]
        lines.append("|---" * (len(columns) + 1) + "|")
        lines.append(f"| of {len(names)} | {' | '.join(f'{count} ok' for count in good)} |")
        lines += [f"| {name} | {' | '.join(_cell(column.get(name)) for column in found)} |" for name in names]
    return "\n".join(lines) + "\n"


def make_table(out: str, merged: list[str], limit: int, seconds: int = 120) -> None:
    """Write `out` (Markdown) and its JSON beside it: every device of this machine, then those of the files `merged`."""
    columns = [_child(info.label, limit, seconds) for info in devices()]
    for file in merged:
        columns += json.loads(Path(file).read_text())
    target = Path(out)
    target.write_text(write_markdown(columns))
    target.with_suffix(".json").write_text(json.dumps(columns, indent=1) + "\n")
