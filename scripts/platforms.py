"""Run the device tests once on each OpenCL platform, then the kernels under Oclgrind's checkers.

    python scripts/platforms.py [--require-all] [--no-install] [--after-test] [--brief] [--jobs N] [pytest arguments]

Two platforms come from pip (Intel's CPU runtime, PoCL 3.0), three from apt (PoCL, rusticl on llvmpipe, Oclgrind). What
is missing is installed where apt-get and root are there and named in one line elsewhere. Exit code 1 when a platform
that is present fails, or, with --require-all, when one is left out. Each has a process of its own, in which its device
is torch's "opencl:0".
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from memtrain_cl.cases import cases_of, declared_kernels

ROOT = Path(__file__).resolve().parent.parent
#: Debian packages, and the platform that each one brings.
APT_PACKAGES = {
    "ocl-icd-libopencl1": "the system's OpenCL loader",
    "pocl-opencl-icd": "PoCL (apt)",
    "mesa-opencl-icd": "rusticl (apt)",
    "oclgrind": "Oclgrind",
}
#: One of these lines in Oclgrind's output is a fault; its exit code is 0 either way.
OCLGRIND_REPORT = re.compile(
    r"Invalid (?:read|write|access)"
    r"|data race at"
    r"|Uninitialized (?:value|address|data)"
    r"|depends on uninitialized"
    r"|divergence detected"
    r"|Unaligned address"
    r"|FATAL"
    r"|suppressing further errors"
    r"|^\tKernel: ",
    re.MULTILINE,
)
#: The tests that put every kernel, and what builds and launches kernels, to the test: what a brief run repeats.
KERNEL_TESTS = tuple(f"tests/test_{name}.py" for name in ("cases", "engine", "exact", "golden_counter", "program"))
#: The test that compares platforms with each other.
COMPARISON = "tests/test_platforms.py"
#: A kernel that is wrong on purpose: it proves that the checkers see the kernels before their silence counts.
CANARY = """
import numpy as np, pyopencl as cl
context = cl.Context(cl.get_platforms()[0].get_devices())
queue = cl.CommandQueue(context)
source = "kernel void canary(global const float *x, global float *y) { uint i = get_global_id(0); y[i] = x[i + 1]; }"
x = cl.Buffer(context, cl.mem_flags.COPY_HOST_PTR, hostbuf=np.ones(4, np.float32))
y = cl.Buffer(context, cl.mem_flags.READ_WRITE, 16)
cl.Kernel(cl.Program(context, source).build(), "canary")(queue, (4,), (4,), x, y)
queue.finish()
"""


@dataclass(frozen=True)
class Platform:
    """A platform to test on: `pattern` finds it in "platform | version | device".

    briefly: which of the files' tests a brief run takes.   files: those that it collects, none for all.
    """

    title: str
    pattern: str
    source: str
    briefly: str = "device and not (other_shape and large)"
    files: tuple[str, ...] = KERNEL_TESTS


PLATFORMS = (
    Platform(
        "Intel CPU runtime (pip)", r"^Intel\(R\) OpenCL \|", "pip: intel-opencl-rt, intel-cmplr-lib-rt", "device", ()
    ),
    # In the shape that a device would not choose, the first platform runs every case, and small ones have to do for the
    # others in a brief run: compiling for the large ones took a third of its time. PoCL 3.0 takes up to a minute for a
    # kernel of those that GPUs run, so that the other PoCL stands for it there.
    Platform(
        "PoCL 3.0 (pip)",
        r"PoCL 3\.0-rc2 ",
        "pip: pocl-binary-distribution",
        "device and not other_shape",
    ),
    Platform("PoCL (apt)", r"PoCL (?!3\.0-rc2 )", "apt: pocl-opencl-icd"),
    Platform("rusticl (apt)", r"^rusticl \|", "apt: mesa-opencl-icd"),
)


@dataclass(frozen=True)
class Outcome:
    """One line of the closing table."""

    title: str
    status: str  # "ok", "FAILED" or "left out"
    detail: str


def missing_packages() -> list[str]:
    """Those of APT_PACKAGES that dpkg does not list as installed; all of them where there is no dpkg."""
    if shutil.which("dpkg-query") is None:
        return list(APT_PACKAGES)
    query = ["dpkg-query", "--show", "--showformat", "${db:Status-Status}"]
    found = {name: subprocess.run([*query, name], capture_output=True, text=True).stdout for name in APT_PACKAGES}
    return [name for name, status in found.items() if status != "installed"]


def install_apt_packages() -> None:
    """Install what is missing, one package at a time: one that the distribution lacks must not stop the others."""
    missing = missing_packages()
    if not missing:
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        print(f"not installed: {', '.join(missing)} (installing them takes apt-get and root)", flush=True)
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-qq"], env=environment)
    for name in missing:
        command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", name]
        if subprocess.run(command, env=environment, stdout=subprocess.DEVNULL).returncode:
            print(f"not installed: {name}, which brings {APT_PACKAGES[name]} (apt-get failed)", flush=True)


def device_environment() -> dict[str, str]:
    """The environment that makes every platform visible, whatever the caller's narrows it to."""
    environment = {**os.environ, "RUSTICL_ENABLE": "llvmpipe"}
    for name in ("OCL_ICD_VENDORS", "MEMTRAIN_CL_DEVICE", "PYOPENCL_CTX"):
        environment.pop(name, None)
    return environment


def device_labels(environment: dict[str, str]) -> list[str]:
    """One "platform | version | device" line a device, asked in a child process: a broken driver may end it."""
    code = "import json; from memtrain_cl import devices; print(json.dumps([info.label for info in devices()]))"
    listing = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        raise SystemExit(f"listing the OpenCL devices failed:\n{listing.stderr}")
    labels: list[str] = json.loads(listing.stdout)
    return labels


def run_pytest(title: str, environment: dict[str, str], marker: str, extra: Sequence[str]) -> Outcome:
    """Run the tests that carry the marker; no test at all is a failure."""
    print(f"\n=== {title} {environment.get('MEMTRAIN_CL_DEVICE', '')}", flush=True)
    start = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-m", marker, *extra]
    code = subprocess.run(command, env=environment, cwd=ROOT).returncode
    seconds = f"{time.monotonic() - start:.0f} s"
    if code == 0:
        return Outcome(title, "ok", seconds)
    reason = f"ended by signal {-code}" if code < 0 else f"pytest exit code {code}"
    return Outcome(title, "FAILED", f"{reason}, {seconds}")


def find_reports(log: str) -> list[str]:
    """The lines of Oclgrind's output that report a fault."""
    return [line for line in log.splitlines() if OCLGRIND_REPORT.search(line)]


def under_oclgrind(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command on Oclgrind's simulated device with the race and uninitialised-value checkers on."""
    # Its --log option would be cleared by each child process, so the reports are read from the output instead.
    environment = {
        **device_environment(),
        "PYOPENCL_NO_CACHE": "1",
        "MEMTRAIN_CL_DEVICE": "Oclgrind",
        # Its optimiser makes vectors through lanes without a value, which its checker then reports, or faults on.
        "PYOPENCL_BUILD_OPTIONS": "-cl-opt-disable",
    }
    wrapped = ["oclgrind", "--data-races", "--uninitialized", *command]
    return subprocess.run(
        wrapped,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def kernels_with_all_cases() -> list[str]:
    """Names for `verify`, which together run each small case of each kernel, those of most cases first.

    A case that launches several kernels is a case of each, and `verify` runs it for each that it is asked for: on a
    simulator one run of it has to do. Some kernels bear the name of their file, which stands for all kernels there.
    """
    small = {pair: {case.name for case in cases_of(*pair, small=True)} for pair in declared_kernels()}
    run_by = {name: set().union(*(small[pair] for pair in small if name in pair)) for _, name in small}
    names: list[str] = []
    seen: set[str] = set()
    for name in sorted(run_by, key=lambda name: -len(run_by[name])):
        if not run_by[name] <= seen:
            names.append(name)
            seen |= run_by[name]
    return names


def run_oclgrind(jobs: int) -> Outcome:
    """Every kernel at small shapes under the checkers, in `jobs` processes, after one that they must report."""
    title = "Oclgrind"
    print(f"\n=== {title}", flush=True)
    start = time.monotonic()
    canary = under_oclgrind([sys.executable, "-c", CANARY])
    if not find_reports(canary.stdout):
        print(canary.stdout)
        return Outcome(title, "FAILED", "a kernel that reads out of bounds went unreported")
    program = str(Path(sys.executable).with_name("memtrain-cl"))
    kernels = kernels_with_all_cases()
    parts = [kernels[place::jobs] for place in range(min(jobs, len(kernels)))]
    with ThreadPoolExecutor(len(parts)) as threads:
        command = [program, "verify", "--small", "--device", "Oclgrind"]
        runs = list(threads.map(lambda part: under_oclgrind([*command, *part]), parts))
    seconds = f"{time.monotonic() - start:.0f} s"
    for verify in runs:
        print(verify.stdout, flush=True)
        if verify.returncode:
            return Outcome(title, "FAILED", f"verify exit code {verify.returncode}, {seconds}")
        if "Oclgrind" not in verify.stdout:
            return Outcome(title, "FAILED", "verify did not run on Oclgrind")
    reports = find_reports("\n".join(verify.stdout for verify in runs))
    if reports:
        return Outcome(title, "FAILED", f"{len(reports)} report lines, the first: {reports[0].strip()}")
    return Outcome(title, "ok", f"no report, {seconds}")


def run_all(extra: Sequence[str], jobs: int, *, after_test: bool, brief: bool) -> list[Outcome]:
    """One outcome a platform, in the order of PLATFORMS, then the comparison of all of them, then Oclgrind.

    after_test: `make test` has just run on the first of PLATFORMS.   brief: of the others' tests, those about kernels.
    """
    environment = device_environment()
    labels = device_labels(environment)
    outcomes: list[Outcome] = []
    for platform in PLATFORMS:
        label = next((label for label in labels if re.search(platform.pattern, label)), None)
        if label is None:
            outcomes.append(Outcome(platform.title, "left out", f"no such device here ({platform.source})"))
            continue
        if after_test and platform is PLATFORMS[0]:
            outcomes.append(Outcome(platform.title, "ok", "make test ran here"))
            continue
        own = {**environment, "MEMTRAIN_CL_DEVICE": label}
        marker, files = (platform.briefly, platform.files) if brief else ("device", ())
        shared = ["-n", str(jobs), "--dist", "worksteal"]
        outcomes.append(run_pytest(platform.title, own, marker, [*shared, *extra, *files]))
    if len(labels) > 1:
        outcomes.append(run_pytest("all platforms compared", environment, "platforms", [*extra, COMPARISON]))
    if shutil.which("oclgrind"):
        outcomes.append(run_oclgrind(jobs))
    else:
        outcomes.append(Outcome("Oclgrind", "left out", "not installed (apt: oclgrind)"))
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, run, print the table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--require-all", action="store_true", help="a platform that is left out is a failure")
    parser.add_argument("--no-install", action="store_true", help="use the platforms that are there")
    parser.add_argument("--after-test", action="store_true", help="leave out what `make test` has just run on")
    parser.add_argument(
        "--brief",
        action="store_true",
        help="tests of kernels alone on all platforms but the first, and in fewer shapes where compiling takes minutes",
    )
    parser.add_argument("--jobs", type=int, default=2, help="test processes at a time (default: 2)")
    options, extra = parser.parse_known_args(arguments)
    if not options.no_install:
        install_apt_packages()
    outcomes = run_all(extra, options.jobs, after_test=options.after_test, brief=options.brief)
    print()
    for outcome in outcomes:
        print(f"{outcome.status:9} {outcome.title}: {outcome.detail}")
    bad = {"FAILED", "left out"} if options.require_all else {"FAILED"}
    return int(any(outcome.status in bad for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
