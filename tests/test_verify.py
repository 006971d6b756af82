"""`memtrain-cl verify`: a row a kernel, also for kernels that are wrong, do not build, or end the process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memtrain_cl import cases, verify
from memtrain_cl.cases import declared_kernels
from memtrain_cl.cli import main
from memtrain_cl.comparison import Comparison
from memtrain_cl.device import Device, devices, get_device
from memtrain_cl.verify import named_kernels, shapes_of, verify_device, verify_kernel
from tests.children import on_path
from tests.large_kernels import LARGE

ROOT = Path(__file__).resolve().parent.parent
KEYS = {"kernel", "platform", "device", "ok", "max_error", "mismatches"}


def run_verify(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, run from the package and the kernels in `folder`."""
    environment = {**os.environ, "PYTHONPATH": on_path(folder)}
    command = [sys.executable, "-m", "memtrain_cl.cli", "verify", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def copy_of_the_package(tmp_path: Path) -> Path:
    for name in ("memtrain_cl", "kernels"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.device
def test_each_kind_of_broken_kernel_makes_its_row(copy_of_the_package: Path) -> None:
    kernels, package = copy_of_the_package / "kernels", copy_of_the_package / "memtrain_cl"
    ternary = (kernels / "ternary.cl").read_text()
    lowered = ternary.replace("reached + 0x7f7f7f7fu", "reached + 0x7e7e7e7eu")
    assert lowered != ternary
    (kernels / "ternary.cl").write_text(lowered)
    with (kernels / "proxy.cl").open("a") as file:
        file.write("\n#error broken on purpose\n")
    with (package / "verify.py").open("a") as file:
        file.write('\n\nimport os\n\nCHECKS["unpack_codes"] = lambda case: os.abort()\n')
    # Those of the broken files, which are of few programs, and one that is sound.
    named = ("codec", "proxy", "softmax", "ternary")
    done = run_verify(copy_of_the_package, "--small", "--json", "--device", str(get_device().info.index), *named)
    assert done.returncode == 1, done.stderr
    rows = {row["kernel"]: row for row in json.loads(done.stdout)}
    assert list(rows) == [kernel for file, kernel in declared_kernels() if file in named]
    assert all(row.keys() >= KEYS for row in rows.values())
    # A case launches both kernels of the file that does not build.
    broken = {"decode_ternary", "decode_ternary_transposed", "proxy_moments", "square_lanes", "unpack_codes"}
    assert {kernel for kernel, row in rows.items() if not row["ok"]} == broken
    decode, moments, unpack = rows["decode_ternary"], rows["proxy_moments"], rows["unpack_codes"]
    assert decode["mismatches"] > 0
    assert decode["max_error"] >= 1
    assert "refresh_cache_-9x12" in decode["detail"]
    assert (moments["max_error"], moments["mismatches"]) == (None, None)
    assert "proxy.cl did not build" in moments["detail"]
    assert unpack["detail"] == "the process was ended by SIGABRT"


@pytest.mark.device
def test_sound_kernels_make_a_table_and_exit_code_0() -> None:
    info = get_device().info
    # tests/test_cases.py runs the cases of all; of these some have none that is small.
    named = ("codec", "index", "sort_tiles")
    done = run_verify(ROOT, "--small", "--device", str(info.index), *named)
    assert done.returncode == 0, done.stdout + done.stderr
    head, *lines = done.stdout.splitlines()
    assert head.split() == ["kernel", "platform", "device", "ok", "max_error", "mismatches"]
    assert [line.split()[0] for line in lines] == [kernel for _, kernel in named_kernels(named)]
    for line in lines:
        assert info.platform in line
        assert info.name in line
        assert line.split()[-3] == "yes"
        # What begins at sizes that are no small case.
        assert line.split()[-1] == ("-" if line.split()[0] in LARGE else "0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "no such device"], "got 'no such device'; the devices are"),
        (["--device", "99"], "got '99'"),
        (["--device", "0", "--all"], "expected --device or --all, got both"),
        (["--bogus"], "No such option"),
    ],
)
def test_bad_input_ends_with_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_all_devices_are_asked_in_turn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[str, bool]] = []

    def one_row(info: Any, kernels: list[tuple[str, str]], *, small: bool) -> Any:
        assert kernels == declared_kernels()
        asked.append((info.label, small))
        ok = info.index > 0
        yield verify.Row("k", "f", info.platform, "", info.name, ok, 0.0, 0, 1, "" if ok else "why\nand more")

    monkeypatch.setattr(verify, "verify_device", one_row)
    assert main(["verify", "--all", "--small"]) == 1
    assert asked == [(info.label, True) for info in devices()]
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "    why", "the first line of the reason, below its row"
    assert len(lines) == 2 + len(devices())
    assert main(["verify", "--json", "--device", str(len(devices()) - 1)]) == (1 if len(devices()) == 1 else 0)
    (row,) = json.loads(capsys.readouterr().out)
    assert row["device"] == devices()[-1].name


def test_kernels_are_chosen_by_their_names_or_their_file_s() -> None:
    assert verify.named_kernels([]) == declared_kernels()
    assert verify.named_kernels(["sum_parts"]) == [("matvec", "sum_parts")]
    assert verify.named_kernels(["codec", "sum_parts"]) == [
        pair for pair in declared_kernels() if pair[0] == "codec" or pair[1] == "sum_parts"
    ]
    with pytest.raises(ValueError, match=r"names of kernels or of their files, got other, sum_part$"):
        verify.named_kernels(["sum_part", "codec", "other"])


def test_a_kernel_without_cases_is_not_ok(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "CASES", [])
    row = verify_kernel(device, "matmul", "matmul")
    assert (row.ok, row.max_error, row.mismatches, row.cases) == (False, None, None, 0)
    assert row.detail == "no case in memtrain_cl/cases.py"


def test_checks_that_raise_are_rows(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(case: object) -> Comparison:
        raise RuntimeError("out of luck")

    monkeypatch.setitem(verify.CHECKS, "faults", fail)
    row = verify_kernel(device, "probe", "arithmetic_probe")
    assert (row.ok, row.max_error, row.mismatches) == (False, None, None)
    count = len(shapes_of(device))
    assert row.detail == f"{count} checks failed; the first: faults-65536, native: out of luck"


def test_both_shapes_are_checked(device: Device) -> None:
    shapes = shapes_of(device)
    assert shapes["native"] is device
    kinds = {twin.info.type for twin in shapes.values()}
    assert {"cpu", "gpu"} <= kinds


@pytest.mark.device
def test_a_driver_that_dies_at_once_fails_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    info = get_device().info
    monkeypatch.setattr(verify, "_child", os.abort)  # takes no arguments: the child fails before its first kernel
    rows = list(verify_device(info))
    assert [row.kernel for row in rows] == [kernel for _, kernel in declared_kernels()]
    assert {row.ok for row in rows} == {False}
    assert {row.detail for row in rows} == {"the process ended with exit code 1"}
