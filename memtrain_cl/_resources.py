"""Find the files that are shipped beside the code: the OpenCL sources."""

from pathlib import Path

from memtrain_cl.errors import MemtrainError

_PACKAGE = Path(__file__).resolve().parent


def kernels_dir() -> Path:
    """The folder of the ``*.cl`` files: ``memtrain_cl/kernels`` of a wheel, else ``kernels`` of the repository.

    Raises MemtrainError when neither holds a ``.cl`` file.
    """
    candidates = (_PACKAGE / "kernels", _PACKAGE.parent / "kernels")
    for candidate in candidates:
        # The second place may be anything when the package lies in site-packages, so a folder counts by what it holds.
        if next(candidate.glob("*.cl"), None) is not None:
            return candidate
    raise MemtrainError(
        f"expected the OpenCL sources in {candidates[0]} or {candidates[1]}, got no .cl file in either; "
        "reinstall memtrain-cl"
    )
