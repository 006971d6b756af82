"""What the package promises before any kernel runs: laziness, import directions, shipped files, pins."""

from __future__ import annotations

import ast
import graphlib
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import memtrain_cl
from memtrain_cl import _resources
from memtrain_cl.errors import MemtrainError
from tests.children import on_path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "memtrain_cl"

#: A room imports rooms of its own level or below. `reference` stands beside this order: see REFERENCE_IMPORTS.
LEVELS = {
    "adam_rule": 0,
    "automagic_rule": 0,
    "budget": 0,
    "code_maps": 0,
    "elements": 0,
    "errors": 0,
    "formats": 0,
    "_resources": 0,
    "runtimes": 0,
    "saved_tensors": 0,
    "array": 1,
    "device": 1,
    "dlpack": 1,
    "memory": 1,
    "operand": 1,
    "bridge": 2,
    "faults": 2,
    "homes": 2,
    "probe": 2,
    "program": 2,
    "sharing": 2,
    "staging": 2,
    "tuning": 2,
    "tuning_cores": 2,
    "tuning_decode": 2,
    "tuning_int8": 2,
    "inline_assembly": 2,
    "launchers": 3,
    "ops": 3,
    "case": 3,
    "cases": 3,
    "cases_adam": 3,
    "cases_aten": 3,
    "cases_automagic": 3,
    "cases_blockwise": 3,
    "cases_engine": 3,
    "cases_fp8": 3,
    "cases_hadamard": 3,
    "cases_int8": 3,
    "cases_profile": 3,
    "cases_stochastic": 3,
    "torch_device": 4,
    "_autoload": 4,
    "comparison": 4,
    "operation": 4,
    "verify": 4,
    "activation_rules": 4,
    "activation_store": 4,
    "activations": 4,
    "meter": 4,
    "recompute_plan": 4,
    "recompute_choice": 0,
    "recompute_policy": 4,
    "recompute_regions": 4,
    "verify_adam": 4,
    "verify_aten": 4,
    "verify_engine": 4,
    "verify_automagic": 4,
    "verify_blockwise": 4,
    "fp8": 4,
    "verify_fp8": 4,
    "verify_random": 4,
    "verify_hadamard": 4,
    "verify_int8": 4,
    "verify_profile": 4,
    "verify_stochastic": 4,
    "nn": 4,
    "optim": 4,
    "export": 5,
    "lm": 5,
    "engine": 5,
    "cli": 6,
}
REFERENCE_IMPORTS = {"adam_rule", "automagic_rule", "code_maps", "errors", "formats", "reference"}
#: The oracle checks the launchers and must not lean on them, nor they on it; commands compare the two, a layer packs
#: its first state with the oracle's codec, since making a layer opens no device.
REFERENCE_USERS = {
    "cli",
    "nn",
    "reference",
    "verify",
    "verify_adam",
    "verify_automagic",
    "verify_blockwise",
    "verify_fp8",
    "verify_hadamard",
    "verify_int8",
    "verify_profile",
    "verify_stochastic",
}
MAX_LINES = 500


def run_python(code: str, *, cwd: Path = ROOT, path: Path = ROOT) -> str:
    """Output of a fresh interpreter that imports the package from `path`."""
    environment = {**os.environ, "PYTHONPATH": on_path(path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def room_of(module: str) -> str | None:
    """`memtrain_cl.ops.counter` -> `ops`; None for foreign modules and for the package itself."""
    parts = module.split(".")
    return parts[1] if parts[0] == "memtrain_cl" and len(parts) > 1 else None


def imported_rooms(path: Path) -> set[str]:
    """Rooms that a source file imports, at any depth of the file."""
    package = ["memtrain_cl", *path.relative_to(PACKAGE).parent.parts]
    rooms: set[str | None] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            rooms.update(room_of(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            # `from memtrain_cl import ops` names the room in the list, `from memtrain_cl.ops import counter` before it.
            rooms.update(room_of(f"{module}.{alias.name}") for alias in node.names)
    return {room for room in rooms if room is not None}


def room_graph() -> dict[str, set[str]]:
    """Each room and the rooms that its files import."""
    graph: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room != "__init__":
            graph.setdefault(room, set()).update(imported_rooms(path))
    return graph


def test_import_is_lazy() -> None:
    heavy = "{'torch', 'pyopencl', 'numpy'} & set(sys.modules)"
    assert run_python(f"import sys, memtrain_cl; print({heavy}, 'devices' in dir(memtrain_cl))") == "set() True"


@pytest.mark.parametrize("name", memtrain_cl.__all__)
def test_public_name_resolves(name: str) -> None:
    assert getattr(memtrain_cl, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        memtrain_cl.__getattr__("no_such_name")


def test_imports_point_one_way() -> None:
    graph = room_graph()
    unknown = set(graph) - set(LEVELS) - {"reference"}
    assert not unknown, f"give each new room a level in LEVELS: {sorted(unknown)}"
    wrong = [
        f"{room} -> {target}"
        for room, targets in graph.items()
        for target in targets - {"reference"}
        if room != "reference" and LEVELS[target] > LEVELS[room]
    ]
    assert not wrong
    assert graph["reference"] <= REFERENCE_IMPORTS
    assert {room for room, targets in graph.items() if "reference" in targets} <= REFERENCE_USERS


def test_rooms_import_without_cycles() -> None:
    graph = {room: targets - {room} for room, targets in room_graph().items()}
    order = list(graphlib.TopologicalSorter(graph).static_order())  # CycleError names the circle
    assert order.index("errors") < order.index("cli")


def needs_torch(path: Path) -> bool:
    """Whether importing a source file imports torch by itself: at its top, not within functions."""
    names: list[str] = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module or "")
    return any(name.split(".")[0] == "torch" for name in names)


def test_launchers_stand_on_rooms_without_torch() -> None:
    graph = room_graph()
    reached, new = set(), {"launchers"}
    while new:
        reached |= new
        new = {target for room in new for target in graph[room]} - reached
    files = [path for room in reached for path in (PACKAGE / f"{room}.py", *(PACKAGE / room).rglob("*.py"))]
    assert {path for path in files if path.exists() and needs_torch(path)} == set()
    assert needs_torch(PACKAGE / "bridge.py")
    assert "tuning" in reached


def test_import_of_a_room_is_seen_in_every_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "nn").mkdir()
    source = tmp_path / "nn" / "layer.py"
    source.write_text(
        "import memtrain_cl.array\nfrom memtrain_cl import ops\nfrom memtrain_cl.lm.model import Model\n"
        "from .. import errors\nfrom ..device import Device\nfrom . import counter\nimport torch\n"
        "def late():\n    from memtrain_cl.cli import main\n"
    )
    assert imported_rooms(source) == {"array", "ops", "lm", "errors", "device", "nn", "cli"}


def test_kernels_of_this_checkout() -> None:
    assert _resources.kernels_dir() == ROOT / "kernels"


def test_missing_kernels_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_resources, "_PACKAGE", tmp_path / "memtrain_cl")
    (tmp_path / "kernels").mkdir()  # a foreign folder of that name, without OpenCL sources
    with pytest.raises(MemtrainError, match="reinstall memtrain-cl"):
        _resources.kernels_dir()


def test_wheel_ships_what_the_package_needs(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="the build backend comes with the extra 'test'")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"memtrain_cl-{memtrain_cl.__version__}-py3-none-any")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert {path.name for path in site.iterdir()} == {"memtrain_cl", f"memtrain_cl-{memtrain_cl.__version__}.dist-info"}
    assert (site / "memtrain_cl" / "py.typed").is_file()
    sources = {path.relative_to(ROOT / "kernels") for path in (ROOT / "kernels").rglob("*.cl")}
    assert {path.relative_to(site / "memtrain_cl/kernels") for path in site.rglob("*.cl")} == sources
    modules = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")}
    assert {path.relative_to(site / "memtrain_cl") for path in site.rglob("*.py")} == modules
    code = "from memtrain_cl._resources import kernels_dir; print(kernels_dir())"
    assert run_python(code, cwd=tmp_path, path=site) == str(site / "memtrain_cl" / "kernels")


def test_every_requirement_is_pinned_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    for requirement in map(Requirement, texts):
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin is not None, f"constraints.txt lacks {requirement.name}"
        assert requirement.specifier.contains(pin), f"{requirement} does not admit its pin {pin}"


def test_files_stay_small() -> None:
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "kernels").rglob("*.cl")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}
