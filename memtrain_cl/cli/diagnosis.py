"""What `memtrain-cl doctor` finds out.

Drivers are asked in child processes (``python -m memtrain_cl.cli.diagnosis inventory``, ``... probe INDEX``), each of
which prints one line of JSON: a driver that crashes is a line of the report and not the end of it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import memtrain_cl
from memtrain_cl import runtimes
from memtrain_cl._resources import kernels_dir
from memtrain_cl.errors import MemtrainError

#: Seconds that a driver may take to answer.
PATIENCE = 180
PACKAGES = (
    "pyopencl",
    "numpy",
    "torch",
    "mako",
    "scipy",
    "safetensors",
    "typer",
    "intel-opencl-rt",
    "intel-cmplr-lib-rt",
    "pocl-binary-distribution",
)
#: Environment variables that change which devices there are, how programs are built, or where they are kept.
VARIABLES = (
    "MEMTRAIN_CL_DEVICE",
    "CL_CONFIG_USE_VECTORIZER",
    "CUDA_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
    "OCL_ICD_FILENAMES",
    "OCL_ICD_VENDORS",
    "OPENCL_VENDOR_PATH",
    "POCL_CACHE_DIR",
    "POCL_DEVICES",
    "PYOPENCL_BUILD_OPTIONS",
    "PYOPENCL_COMPILER_OUTPUT",
    "PYOPENCL_CTX",
    "PYOPENCL_NO_CACHE",
    "RUSTICL_ENABLE",
    "XDG_CACHE_HOME",
)


@dataclass(frozen=True)
class Problem:
    """What is wrong, in one sentence, and the command or setting that mends it."""

    what: str
    mend: str


@dataclass
class Report:
    """Everything that a bug report needs. `chosen`: index of the device used by default; `why`: the reason.

    devices: the fields of DeviceInfo, and `verdict`: "" for exact arithmetic, else what is wrong with the device.
    """

    memtrain_cl: str
    python: str
    executable: str
    system: str
    packages: dict[str, str | None]
    environment: dict[str, str]
    kernels: str = ""
    cache: list[str] = field(default_factory=list)
    intel_runtime: str | None = None
    notes: list[str] = field(default_factory=list)
    platforms: list[dict[str, Any]] = field(default_factory=list)
    devices: list[dict[str, Any]] = field(default_factory=list)
    chosen: int | None = None
    why: str = ""
    problems: list[Problem] = field(default_factory=list)

    @property
    def fault(self) -> str | None:
        """Why no device can be used as things are, in one sentence; None when one can."""
        if self.chosen is None:
            return self.why.partition("; the devices are:")[0]
        verdict = str(self.devices[self.chosen]["verdict"])
        return f"the device that would be used, {self.devices[self.chosen]['name']}, {verdict}" if verdict else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def ask(*question: str) -> dict[str, Any] | str:
    """The answer of a child process to "inventory" or "probe INDEX", or a phrase that says how the child ended."""
    command = [sys.executable, "-P", "-m", "memtrain_cl.cli.diagnosis", *question]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return f"did not answer within {PATIENCE} seconds"
    if done.returncode < 0:
        return f"crashed ({signal.Signals(-done.returncode).name})"
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return f"failed ({last[0]})"
    answer: dict[str, Any] = json.loads(lines[-1])  # a driver may have printed lines before
    return answer


def examine() -> Report:
    """The whole report. It opens no device in this process."""
    report = Report(
        memtrain_cl=memtrain_cl.__version__,
        python=platform.python_version(),
        executable=sys.executable,
        system=f"{platform.platform()}, {os.cpu_count()} CPUs",
        packages={name: _version(name) for name in PACKAGES},
        environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
        cache=[str(folder) for folder in runtimes.cache_folders()],
    )
    library = runtimes.intel_library()
    report.intel_runtime = None if library is None else str(library)
    try:
        report.kernels = str(kernels_dir())
    except MemtrainError as error:
        report.problems.append(Problem(str(error), "pip install --force-reinstall memtrain-cl"))
    _examine_environment(report)
    _examine_devices(report)
    return report


def _examine_environment(report: Report) -> None:
    from memtrain_cl.program import relaxed_options

    vendors = report.environment.get("OCL_ICD_VENDORS")
    if vendors and not os.path.exists(vendors):
        what = f"OCL_ICD_VENDORS names {vendors!r}, which does not exist, so the system's drivers are not found"
        report.problems.append(Problem(what, "unset OCL_ICD_VENDORS"))
    if refused := relaxed_options():
        what = f"PYOPENCL_BUILD_OPTIONS holds {' '.join(refused)}, with which no kernel is built"
        report.problems.append(Problem(what, "unset PYOPENCL_BUILD_OPTIONS"))


def _examine_devices(report: Report) -> None:
    found = ask("inventory")
    if isinstance(found, str):
        report.why = f"listing the OpenCL devices {found}"
        mend = "OCL_ICD_VENDORS=FOLDER memtrain-cl doctor, with one .icd file a FOLDER, tells which driver is at fault"
        report.problems.append(Problem(report.why, mend))
        return
    report.notes, report.platforms, report.devices = found["notes"], found["platforms"], found["devices"]
    report.chosen, report.why = found["chosen"], found["why"]
    for note in report.notes:
        what, _, mend = note.partition("; mend it with: ")
        report.problems.append(Problem(what, mend))
    if report.chosen is None:
        report.problems.append(_no_choice(report))
    for entry in report.devices:
        answer = ask("probe", str(entry["index"]))
        entry["verdict"] = answer if isinstance(answer, str) else answer["verdict"]
        if entry["verdict"]:
            others = [other["index"] for other in report.devices if other["index"] != entry["index"]]
            mend = f"export MEMTRAIN_CL_DEVICE={others[0]} (another device)" if others else "update the device's driver"
            report.problems.append(Problem(f"device {entry['index']}, {entry['name']}, {entry['verdict']}", mend))


def _no_choice(report: Report) -> Problem:
    for name in ("MEMTRAIN_CL_DEVICE", "PYOPENCL_CTX"):
        if report.devices and report.environment.get(name):
            return Problem(report.why.partition(";")[0], f"unset {name}")
    if report.packages["pyopencl"] is None:
        return Problem("pyopencl is not installed", "pip install pyopencl")
    from memtrain_cl.device import INSTALL_HINT

    return Problem(report.why.partition(";")[0], INSTALL_HINT.removeprefix("install one with: "))


# ---- in the child process -------------------------------------------------------------------------------------------


def _inventory() -> Mapping[str, Any]:
    from memtrain_cl.device import choose, devices, platforms

    chosen, why, infos, names = None, "", [], []
    try:
        infos, names = devices(), platforms()
        info, why = choose()
        chosen = info.index
    except MemtrainError as error:
        why = str(error)
    return {
        "notes": runtimes.notes(),
        "platforms": [{"name": name, "version": version, "devices": count} for name, version, count in names],
        "devices": [asdict(info) for info in infos],
        "chosen": chosen,
        "why": why,
    }


def _probe(index: int) -> Mapping[str, Any]:
    from memtrain_cl.device import get_device
    from memtrain_cl.probe import faults

    try:
        wrong = faults(get_device(index))
    except MemtrainError as error:
        return {"verdict": f"does not run the probe: {str(error).splitlines()[0]}"}
    return {"verdict": f"computes otherwise than IEEE 754 in: {', '.join(wrong)}" if wrong else ""}


if __name__ == "__main__":
    print(json.dumps(_inventory() if sys.argv[1] == "inventory" else _probe(int(sys.argv[2]))))
