"""OpenCL runtimes that pip installed, made visible to the loader without any environment variable.

The loader reads ``OCL_ICD_VENDORS`` once, at the first platform query of the process; `prepare` must run before it.
Intel's CPU runtime ships an ``.icd`` file that points at a folder which does not exist on the user's machine, and
libraries that do not find each other unless they are loaded first. PoCL's wheel drops its ``.icd`` beside pyopencl's
own loader, which always reads it. Once ``OCL_ICD_VENDORS`` is set the loader does not look into the system's folder, so
the folder made here also holds what it would have found there. What a user has put into ``OCL_ICD_VENDORS`` is
respected and extended by the Intel runtime.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType

import platformdirs

from memtrain_cl.errors import UnsupportedDevice

_SYSTEM_VENDORS = Path("/etc/OpenCL/vendors")
#: Loaded in this order before Intel's runtime, whose own lookup path does not reach a virtual environment.
_INTEL_FIRST = ("libintlc.so.5", "libirng.so", "libsvml.so", "libimf.so", "libtbb.so.12", "libtbbmalloc.so.2")

_lock = threading.Lock()
_prepared = False
_notes: list[str] = []


def intel_library() -> Path | None:
    """The Intel CPU runtime's library inside this Python environment, or None."""
    candidate = Path(sys.prefix) / "lib" / "libintelocl.so"
    return candidate if sys.platform == "linux" and candidate.exists() else None


def notes() -> list[str]:
    """What went wrong while runtimes were made visible, a sentence each (shown by ``memtrain-cl doctor``)."""
    return list(_notes)


def _icd_sources(user_folder: str | None) -> list[Path]:
    if user_folder is not None:
        folder = Path(user_folder)
        return sorted(folder.glob("*.icd")) if folder.is_dir() else [folder]
    return sorted(_SYSTEM_VENDORS.glob("*.icd"))


def _load_intel_dependencies(library: Path) -> None:
    for name in _INTEL_FIRST:
        ctypes.CDLL(str(library.parent / name), mode=ctypes.RTLD_GLOBAL)


def prepare() -> None:
    """Make pip-installed runtimes visible; idempotent, and a no-op where there is nothing to add.

    Raises nothing for a broken Intel installation: the other drivers must stay usable, so the fault becomes a note. So
    does a cache folder that cannot be written, without which pyopencl would not work at all.
    """
    global _prepared
    with _lock:
        if not _prepared:
            _prepared = True
            _guard_cache()
            library = intel_library()
            if library is not None:
                _add_intel(library)


def _add_intel(library: Path) -> None:
    try:
        _load_intel_dependencies(library)
    except OSError as error:
        _notes.append(
            f"Intel's CPU runtime is installed but does not load ({error}); "
            "mend it with: pip install intel-opencl-rt intel-cmplr-lib-rt"
        )
        return
    user_folder = os.environ.get("OCL_ICD_VENDORS")
    folder = Path(tempfile.mkdtemp(prefix="memtrain-cl-icd-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for number, source in enumerate(_icd_sources(user_folder)):
        try:
            content = source.read_text().strip()
        except (OSError, UnicodeDecodeError):
            continue  # the loader skips what it cannot read, too
        # A number keeps two files of one name apart; a relative library name inside stays relative to its icd.
        beside = source.parent / content
        text = str(beside) if not os.path.isabs(content) and beside.exists() else content
        # A child process inherits the parent's folder, which names Intel's library already.
        if text != str(library):
            (folder / f"{number:02d}-{source.name}").write_text(text + "\n")
    (folder / "intel-cpu.icd").write_text(f"{library}\n")
    os.environ["OCL_ICD_VENDORS"] = str(folder)


def cache_folders() -> list[Path]:
    """Where pyopencl keeps compiled programs, and the code that launches them, between runs."""
    return [Path(platformdirs.user_cache_dir(name, name)) for name in ("pyopencl", "pytools")]


def _guard_cache() -> None:
    # Where pyopencl cannot write its cache it ends with an OSError, or with a KeyError for want of this variable.
    os.environ.setdefault("PYOPENCL_CACHE_FAILURE_FATAL", "")
    for folder in cache_folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                continue
        os.environ["PYOPENCL_NO_CACHE"] = "1"
        _notes.append(
            f"compiled programs are not kept between runs, because {folder} cannot be written; "
            "mend it with: export XDG_CACHE_HOME=FOLDER, a folder that can be"
        )
        return


def share_cores() -> None:
    """Let torch's idle CPU threads sleep instead of spin; to be called before torch is imported, no use after that.

    A step goes back and forth between torch's thread pool and the OpenCL runtime's on the same cores, and a pool that
    spins for work takes them from the other: on two shared cores a training step took four times as long. A value that
    the user has set stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def import_pyopencl() -> ModuleType:
    """pyopencl, imported after the runtimes are visible; UnsupportedDevice with the mending command where it cannot
    load.
    """
    prepare()
    try:
        import pyopencl
    except (ImportError, OSError) as error:
        raise UnsupportedDevice(f"pyopencl does not load ({error}); install it with: pip install pyopencl") from error
    return pyopencl
