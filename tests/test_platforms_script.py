"""scripts/platforms.py: what counts as a fault under Oclgrind, and which outcome fails the run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from memtrain_cl.cases import CASES, cases_of
from memtrain_cl.verify import named_kernels
from scripts import platforms
from scripts.platforms import Outcome, find_reports

REPORTS = [
    "Invalid read of size 4 at global memory address 0x1000000000020",
    "Invalid write of size 1 at local memory address 0x1000000000020",
    "Read-write data race at global memory address 0x2000000000000",
    "Write-write data race at local memory address 0x2000000000000",
    "Uninitialized value written to global memory address 0x2000000000000",
    "Controlflow depends on uninitialized value",
    "Work-group divergence detected (barrier):",
    "OCLGRIND FATAL ERROR (Memory.cpp:300)",
    "\tKernel: counter_update",
]
LABELS = [
    "Portable Computing Language | OpenCL 3.0 PoCL 3.1+debian  Linux, None+Asserts | pthread-haswell-Intel(R) Xeon(R)",
    "Portable Computing Language | OpenCL 3.0 PoCL 3.0-rc2  Linux, RelWithDebInfo, RELOC | pthread-Intel(R) Xeon(R)",
    "Intel(R) OpenCL | OpenCL 3.1 LINUX | Intel(R) Xeon(R)",
    "rusticl | OpenCL 3.0  | llvmpipe (LLVM 15.0.6, 256 bits)",
]


@pytest.mark.parametrize("line", REPORTS)
def test_each_kind_of_report_is_found(line: str) -> None:
    assert find_reports(f"ok\n{line}\nok") == [line]


def test_a_clean_log_has_no_report() -> None:
    assert find_reports("kernel          platform  ok\ncounter_update  Oclgrind  ok  max_error 0\n") == []


Run = tuple[str, str, tuple[str, ...]]


def stub_runs(monkeypatch: pytest.MonkeyPatch, labels: list[str], failing: str = "") -> list[Run]:
    """Replace everything that starts a program; the returned list fills with (selector, marker, files) of each run."""
    runs: list[Run] = []

    def run_pytest(title: str, environment: dict[str, str], marker: str, extra: list[str]) -> Outcome:
        files = tuple(argument for argument in extra if argument.startswith("tests/"))
        runs.append((environment.get("MEMTRAIN_CL_DEVICE", ""), marker, files))
        return Outcome(title, "FAILED" if failing and failing in title else "ok", "")

    monkeypatch.setattr(platforms, "device_labels", lambda environment: labels)
    monkeypatch.setattr(platforms, "run_pytest", run_pytest)
    monkeypatch.setattr(platforms, "run_oclgrind", lambda jobs: Outcome("Oclgrind", "ok", ""))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    return runs


def test_every_platform_gets_its_own_run_and_then_all_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = stub_runs(monkeypatch, LABELS)
    assert platforms.main(["--no-install", "--require-all"]) == 0
    intel, pocl_pip, pocl_apt, rusticl = LABELS[2], LABELS[1], LABELS[0], LABELS[3]
    devices = [(label, "device", ()) for label in (intel, pocl_pip, pocl_apt, rusticl)]
    assert runs == [*devices, ("", "platforms", (platforms.COMPARISON,))]


def test_what_make_test_ran_on_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = stub_runs(monkeypatch, LABELS)
    assert platforms.main(["--no-install", "--require-all", "--after-test"]) == 0
    assert LABELS[2] not in [label for label, _, _ in runs]
    assert len(runs) == len(LABELS)


def test_a_brief_run_leaves_out_what_is_no_test_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = stub_runs(monkeypatch, LABELS)
    assert platforms.main(["--no-install", "--require-all", "--brief"]) == 0
    shapes = "device and not (other_shape and large)"
    markers = ["device", "device and not other_shape", shapes, shapes, "platforms"]
    assert [marker for _, marker, _ in runs] == markers
    assert [files for _, _, files in runs] == [(), *[platforms.KERNEL_TESTS] * 3, (platforms.COMPARISON,)]
    assert all((platforms.ROOT / name).is_file() for _, _, files in runs for name in files)


def test_a_failing_platform_fails_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stub_runs(monkeypatch, LABELS, failing="rusticl")
    assert platforms.main(["--no-install"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_a_missing_platform_is_named_and_fails_only_when_required(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub_runs(monkeypatch, LABELS[2:])
    assert platforms.main(["--no-install"]) == 0
    assert "left out  PoCL 3.0 (pip)" in capsys.readouterr().out
    assert platforms.main(["--no-install", "--require-all"]) == 1


@pytest.mark.parametrize(("apt", "user"), [(None, 0), ("/usr/bin/apt-get", 1000)])
def test_without_apt_or_root_one_line_says_what_is_not_installed(
    apt: str | None, user: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(platforms, "missing_packages", lambda: ["pocl-opencl-icd", "oclgrind"])
    monkeypatch.setattr(shutil, "which", lambda name: apt)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    platforms.install_apt_packages()
    assert capsys.readouterr().out.splitlines() == [
        "not installed: pocl-opencl-icd, oclgrind (installing them takes apt-get and root)"
    ]


def test_a_package_that_apt_lacks_does_not_stop_the_next(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 100 if command[-1] == "oclgrind" else 0)

    monkeypatch.setattr(platforms, "missing_packages", lambda: ["oclgrind", "pocl-opencl-icd"])
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(subprocess, "run", run)
    platforms.install_apt_packages()
    assert [command[-1] for command in commands] == ["-qq", "oclgrind", "pocl-opencl-icd"]
    assert capsys.readouterr().out == "not installed: oclgrind, which brings Oclgrind (apt-get failed)\n"


def test_oclgrind_s_processes_share_all_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def answer(command: list[str]) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, REPORTS[0] if "-c" in command else "codec  Oclgrind  yes")

    monkeypatch.setattr(platforms, "under_oclgrind", answer)
    assert platforms.run_oclgrind(2).status == "ok"
    parts = [command[command.index("Oclgrind") + 1 :] for command in asked[1:]]
    assert len(parts) == 2
    asked_for = [pair for part in parts for pair in named_kernels(part)]
    assert len(asked_for) == len(set(asked_for))
    run = [case.name for pair in asked_for for case in cases_of(*pair, small=True)]
    assert set(run) == {case.name for case in CASES if case.small}
    assert len(run) < 1.1 * len(set(run)), "hardly a case runs twice"


@pytest.mark.skipif(shutil.which("oclgrind") is None, reason="Oclgrind is not installed")
def test_oclgrind_reports_the_canary() -> None:
    done = platforms.under_oclgrind([sys.executable, "-c", platforms.CANARY])
    assert any(line.startswith("Invalid read of size 4") for line in find_reports(done.stdout))
