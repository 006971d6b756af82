"""`memtrain-cl devices` and `doctor`: what they print, and that a driver that crashes is a line of the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from memtrain_cl.cli import diagnosis, main
from memtrain_cl.cli.diagnosis import Report, examine
from memtrain_cl.device import devices
from tests.children import on_path

#: A machine of two devices, whose drivers answer as the case says.
FOUND = {
    "notes": ["the driver's library is broken; mend it with: pip install it"],
    "platforms": [{"name": "One", "version": "1", "devices": 2}, {"name": "Clover", "version": "1.1", "devices": 0}],
    "devices": [{"index": 0, "name": "first", "platform": "One"}, {"index": 1, "name": "second", "platform": "One"}],
    "chosen": 1,
    "why": "it is the better one",
}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, ...], Any]:
    """What the child processes say, by question; a test changes it."""
    sound = {"verdict": ""}
    given: dict[tuple[str, ...], Any] = {
        ("inventory",): json.loads(json.dumps(FOUND)),
        ("probe", "0"): sound,
        ("probe", "1"): sound,
    }
    monkeypatch.setattr(diagnosis, "ask", lambda *question: given[question])
    for name in ("MEMTRAIN_CL_DEVICE", "PYOPENCL_CTX", "PYOPENCL_BUILD_OPTIONS", "OCL_ICD_VENDORS"):
        monkeypatch.delenv(name, raising=False)
    return given


def problems(report: Report) -> dict[str, str]:
    return {problem.what: problem.mend for problem in report.problems}


# ---- devices --------------------------------------------------------------------------------------------------------


def test_devices_lists_all_and_stars_the_chosen_one(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("MEMTRAIN_CL_DEVICE", "0")
    assert main(["devices"]) == 0
    out = capsys.readouterr().out.splitlines()
    infos = devices()
    assert len(out) == 1 + len(infos) + 1
    for info, line in zip(infos, out[1:], strict=False):
        mark = "*" if info.index == 0 else " "
        assert line.startswith(f"{info.index}{mark} ")
        assert info.name in line
        assert info.platform in line
    assert out[-1] == f"* {infos[0].name} is used when none is named: MEMTRAIN_CL_DEVICE is '0'."


def test_devices_as_json_holds_every_field(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("MEMTRAIN_CL_DEVICE", "0")
    assert main(["devices", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows == [{**asdict(info), "chosen": info.index == 0} for info in devices()]


def test_devices_are_listed_also_when_the_choice_fails(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("MEMTRAIN_CL_DEVICE", "nothing of the kind")
    assert main(["devices"]) == 2
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1 + len(devices())
    assert captured.err.startswith("memtrain-cl: MEMTRAIN_CL_DEVICE expected")


# ---- doctor ---------------------------------------------------------------------------------------------------------


def test_doctor_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    infos = devices()
    assert [entry["name"] for entry in report["devices"]] == [info.name for info in infos]
    assert all(isinstance(entry["verdict"], str) for entry in report["devices"])
    assert report["devices"][report["chosen"]]["verdict"] == ""
    assert report["packages"]["pyopencl"]
    assert (report["usable"], report["executable"]) == (True, sys.executable)
    assert Path(report["kernels"], "probe.cl").is_file()
    assert sum(platform["devices"] for platform in report["platforms"]) == len(infos)


def test_a_sound_machine_is_told_as_such(answers: dict[Any, Any], capsys: pytest.CaptureFixture[str]) -> None:
    answers["inventory",]["notes"] = []
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "device 0        first (One): exact arithmetic" in out
    assert "chosen          device 1: it is the better one" in out
    assert "platform        Clover, 1.1: 0 devices" in out
    assert "problems        none" in out


@pytest.mark.parametrize("verdict", ["crashed (SIGSEGV)", {"verdict": "computes otherwise than IEEE 754 in: division"}])
def test_a_device_that_is_not_chosen_may_fail(answers: dict[Any, Any], verdict: Any, capsys: Any) -> None:
    answers["probe", "0"] = verdict
    text = verdict if isinstance(verdict, str) else verdict["verdict"]
    report = examine()
    assert report.fault is None
    assert problems(report)[f"device 0, first, {text}"] == "export MEMTRAIN_CL_DEVICE=1 (another device)"
    assert problems(report)["the driver's library is broken"] == "pip install it"
    assert main(["doctor"]) == 0
    assert f"first (One): {text}" in capsys.readouterr().out


def test_the_chosen_device_must_work(answers: dict[Any, Any], capsys: pytest.CaptureFixture[str]) -> None:
    answers["probe", "1"] = "crashed (SIGABRT)"
    assert main(["doctor"]) == 2
    captured = capsys.readouterr()
    assert "exact arithmetic" in captured.out
    assert captured.err == "memtrain-cl: the device that would be used, second, crashed (SIGABRT)\n"


def test_a_driver_that_crashes_when_it_is_listed(answers: dict[Any, Any], capsys: Any) -> None:
    answers["inventory",] = "crashed (SIGSEGV)"
    assert main(["doctor"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "memtrain-cl: listing the OpenCL devices crashed (SIGSEGV)\n"
    assert "OCL_ICD_VENDORS=FOLDER" in captured.out


def test_settings_that_stand_in_the_way_are_named(answers: dict[Any, Any], monkeypatch: Any) -> None:
    monkeypatch.setenv("OCL_ICD_VENDORS", "/no/such/folder")
    monkeypatch.setenv("PYOPENCL_BUILD_OPTIONS", "-DX=1 -cl-fast-relaxed-math")
    monkeypatch.setenv("MEMTRAIN_CL_DEVICE", "elsewhere")
    answers["inventory",] |= {"chosen": None, "why": "MEMTRAIN_CL_DEVICE expected x, got y; the devices are:\n  0: z"}
    report = examine()
    assert report.fault == "MEMTRAIN_CL_DEVICE expected x, got y"
    mends = problems(report).values()
    assert {"unset OCL_ICD_VENDORS", "unset PYOPENCL_BUILD_OPTIONS", "unset MEMTRAIN_CL_DEVICE"} <= set(mends)


CRASH = """
import memtrain_cl.probe, os
memtrain_cl.probe.faults = lambda device: os.abort()
"""
TALK = """
import memtrain_cl.probe
memtrain_cl.probe.faults = lambda device: print("a driver's own words") or ["division (3 of 65536)"]
"""
RAISE = """
import memtrain_cl.device
memtrain_cl.device.devices = None
"""


@pytest.mark.parametrize(
    ("site", "question", "answer"),
    [
        (CRASH, ("probe", "0"), "crashed (SIGABRT)"),
        (TALK, ("probe", "0"), {"verdict": "computes otherwise than IEEE 754 in: division (3 of 65536)"}),
        (RAISE, ("inventory",), "failed (TypeError: 'NoneType' object is not callable)"),
        ("", ("probe", "99"), None),
    ],
)
def test_children_that_end_in_any_way_are_answers(
    site: str, question: tuple[str, ...], answer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(site)
    monkeypatch.setenv("PYTHONPATH", on_path(tmp_path))
    got = diagnosis.ask(*question)
    if answer is None:
        assert isinstance(got, dict)
        assert "expected the index of a device" in got["verdict"]
    else:
        assert got == answer


def test_a_child_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", on_path(tmp_path))
    monkeypatch.setattr(diagnosis, "PATIENCE", 0.5)
    assert diagnosis.ask("inventory") == "did not answer within 0.5 seconds"


def test_doctor_loads_no_driver_in_its_own_process() -> None:
    code = (
        "import sys\nfrom memtrain_cl.cli.diagnosis import examine\nexamine()\n"
        "print('pyopencl' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["False", "False"], done.stderr
