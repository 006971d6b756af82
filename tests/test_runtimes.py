"""Runtimes that pip installed are found without a setting, beside what the system or the user has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memtrain_cl import runtimes
from memtrain_cl.errors import UnsupportedDevice


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The module as before its first use, with an Intel runtime whose libraries load; the path of its library."""
    library = tmp_path / "env" / "lib" / "libintelocl.so"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(runtimes, "_prepared", False)
    monkeypatch.setattr(runtimes, "_notes", [])
    monkeypatch.setattr(runtimes, "intel_library", lambda: library)
    monkeypatch.setattr(runtimes, "_load_intel_dependencies", lambda _library: None)
    monkeypatch.setattr(runtimes, "_SYSTEM_VENDORS", tmp_path / "system")
    for name in ("OCL_ICD_VENDORS", "PYOPENCL_NO_CACHE"):
        # Set and then deleted, so that monkeypatch takes back what `prepare` sets.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return library


def listed() -> set[str]:
    """The libraries that the prepared folder names."""
    return {file.read_text().strip() for file in Path(os.environ["OCL_ICD_VENDORS"]).glob("*.icd")}


def test_the_systems_drivers_stay_visible(fresh: Path, tmp_path: Path) -> None:
    (tmp_path / "system").mkdir()
    (tmp_path / "system" / "a.icd").write_text("libA.so.1\n")
    (tmp_path / "system" / "b.icd").write_text("/opt/libB.so")
    runtimes.prepare()
    assert listed() == {"libA.so.1", "/opt/libB.so", str(fresh)}
    assert runtimes.notes() == []


def test_what_the_user_has_set_is_extended_not_replaced(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "system").mkdir()
    (tmp_path / "system" / "a.icd").write_text("libA.so.1\n")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "beside.icd").write_text("libbeside.so\n")
    (mine / "libbeside.so").touch()
    monkeypatch.setenv("OCL_ICD_VENDORS", str(mine))
    runtimes.prepare()
    assert listed() == {str(mine / "libbeside.so"), str(fresh)}


def test_one_icd_file_may_be_named(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only.icd").write_text("libonly.so\n")
    monkeypatch.setenv("OCL_ICD_VENDORS", str(tmp_path / "only.icd"))
    runtimes.prepare()
    assert listed() == {"libonly.so", str(fresh)}


def test_files_that_no_loader_could_read_are_left_out(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "binary.icd").write_bytes(b"\xff\xfe\x00")
    (mine / "folder.icd").mkdir()
    (mine / "nowhere.icd").symlink_to(tmp_path / "gone.icd")
    monkeypatch.setenv("OCL_ICD_VENDORS", str(mine))
    runtimes.prepare()
    assert listed() == {str(fresh)}


def test_a_folder_that_is_not_there_hides_nothing_of_pips(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCL_ICD_VENDORS", "/no/such/folder")
    runtimes.prepare()
    assert listed() == {str(fresh)}


def test_it_happens_once(fresh: Path) -> None:
    runtimes.prepare()
    folder = os.environ["OCL_ICD_VENDORS"]
    runtimes.prepare()
    assert os.environ["OCL_ICD_VENDORS"] == folder


def test_a_child_process_lists_intels_runtime_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtimes.prepare()
    monkeypatch.setattr(runtimes, "_prepared", False)
    runtimes.prepare()
    texts = [file.read_text() for file in Path(os.environ["OCL_ICD_VENDORS"]).glob("*.icd")]
    assert texts == [f"{fresh}\n"]


def test_without_intels_runtime_the_environment_is_left_alone(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "intel_library", lambda: None)
    runtimes.prepare()
    assert "OCL_ICD_VENDORS" not in os.environ


def test_a_broken_runtime_is_a_note_with_the_command(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_library: Path) -> None:
        raise OSError("libimf.so: cannot open shared object file")

    monkeypatch.setattr(runtimes, "_load_intel_dependencies", fail)
    runtimes.prepare()
    assert "OCL_ICD_VENDORS" not in os.environ
    (note,) = runtimes.notes()
    assert "libimf.so" in note
    assert "pip install intel-opencl-rt intel-cmplr-lib-rt" in note


def test_a_cache_that_cannot_be_written_is_done_without(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(runtimes, "cache_folders", lambda: [tmp_path / "good", tmp_path / "file" / "bad"])
    runtimes.prepare()
    assert os.environ["PYOPENCL_NO_CACHE"] == "1"
    (note,) = runtimes.notes()
    assert str(tmp_path / "file" / "bad") in note
    assert "XDG_CACHE_HOME" in note


def test_a_cache_that_can_be_written_is_used(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "cache_folders", lambda: [tmp_path / "good"])
    runtimes.prepare()
    assert "PYOPENCL_NO_CACHE" not in os.environ
    assert (tmp_path / "good").is_dir()


@pytest.mark.parametrize("cause", [ImportError("no module"), OSError("libOpenCL.so.1: cannot open")])
def test_pyopencl_that_does_not_load_names_the_command(cause: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        @staticmethod
        def find_spec(name: str, *_rest: object) -> None:
            if name == "pyopencl":
                raise cause

    monkeypatch.delitem(sys.modules, "pyopencl", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    with pytest.raises(UnsupportedDevice, match=r"pyopencl does not load.*pip install pyopencl"):
        runtimes.import_pyopencl()


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    merged = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], env=merged, capture_output=True, text=True, timeout=300)


LABELS = "import json, memtrain_cl; print(json.dumps([info.label for info in memtrain_cl.devices()]))"


def test_pips_runtimes_are_found_where_the_system_has_none(tmp_path: Path) -> None:
    done = python(LABELS, OCL_ICD_VENDORS=str(tmp_path))
    labels = json.loads(done.stdout)
    if runtimes.intel_library() is not None:
        assert sum("Intel(R) OpenCL" in label for label in labels) == 1
    assert all("PoCL 3.0-rc2" in label or "Intel(R) OpenCL" in label for label in labels)


def test_every_process_lists_the_devices_in_one_order() -> None:
    code = f"{LABELS}\nimport subprocess, sys\nsubprocess.run([sys.executable, '-c', {LABELS!r}], check=True)"
    first, second = python(code).stdout.splitlines()
    assert json.loads(first) == json.loads(second)


@pytest.mark.device
def test_kernels_run_where_no_cache_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code = (
        "from memtrain_cl import get_device, runtimes\nfrom memtrain_cl.probe import faults\n"
        "print(faults(get_device()), len(runtimes.notes()))"
    )
    # PoCL has a cache of its own, without which it offers no device: this is about pyopencl's.
    done = python(code, XDG_CACHE_HOME=str(tmp_path / "file"), POCL_CACHE_DIR=str(tmp_path))
    assert done.stdout.split() == ["[]", "1"], done.stderr
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr
