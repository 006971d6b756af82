"""`memtrain-cl` itself: the list of commands, train, generate, and a sentence for every unusable input."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memtrain_cl.cli import COMMANDS, main
from memtrain_cl.lm.config import TrainConfig

TINY = ["--layers", "1", "--dim", "32", "--heads", "2", "--seq", "32", "--batch", "4"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("".join(f"line {n} says {n * n % 97}\n" for n in range(400)))
    return file


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def assert_one_sentence(code: int, error: str, *parts: str) -> None:
    assert code == 2, error
    assert error.startswith("memtrain-cl: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error
    for part in parts:
        assert part in error


def in_new_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_help_lists_the_commands_and_imports_no_torch() -> None:
    out = in_new_process(
        "import sys; from memtrain_cl.cli import main; code = main(['--help']); print(code, 'torch' in sys.modules)"
    )
    assert out.endswith("0 False\n")
    for command in COMMANDS:
        assert f" {command} " in out


def test_no_command_is_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["memtrain-cl"])
    assert main() == 0
    assert "Usage" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import memtrain_cl

    assert run_cli(capsys, "--version") == (0, f"memtrain-cl {memtrain_cl.__version__}\n", "")


def test_help_of_train_states_the_defaults_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_cli(capsys, "train", "--help")
    assert code == 0
    lines = out.splitlines()
    values = {**TrainConfig().to_json(), **TrainConfig().model.to_json()}
    shown = ["steps", "layers", "dim", "heads", "seq", "batch", "lr", "counter_lr", "C", "linear", "seed"]
    for name in [*shown, "counter_eps", "counter_compute"]:
        option = f"--{name.replace('_', '-')} "
        at = next(index for index, line in enumerate(lines) if option in line)
        assert f"[default: {values[name]}]" in " ".join(lines[at : at + 3]), name


def test_train_then_resume(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path) -> None:
    out = tmp_path / "run"
    code, table, progress = run_cli(
        capsys, "train", "--text", text, *TINY, "--steps", 4, "--linear", "dense", "--out", out
    )
    assert code == 0, progress
    assert "bits per byte" in table
    assert "12.0" in table
    assert any("exported bytes = live state" in line and "yes" in line for line in table.splitlines())
    assert "step 4/4" in progress
    code, table, progress = run_cli(capsys, "train", "--resume", "--steps", 6, "--out", out, "--quiet")
    assert (code, table, progress) == (0, "", "")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all("loss" in row for row in rows)


def test_generate_continues_the_prompt_and_follows_the_seed(
    capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path, text: Path
) -> None:
    out = tmp_path / "run"
    run = ["train", "--text", str(text), *TINY, "--steps", "4", "--linear", "dense", "--out", str(out), "--quiet"]
    assert main(run) == 0
    made = []
    for seed in ("1", "1", "2"):
        model = str(out / "model.safetensors")
        assert main(["generate", model, "--prompt", "line", "--bytes", "20", "--seed", seed]) == 0
        made.append(capfdbinary.readouterr().out)
    assert made[0] == made[1] != made[2]
    assert all(output.startswith(b"line") and len(output) == 24 for output in made)


@pytest.mark.device
def test_counter_run_prints_its_measured_bytes(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path) -> None:
    code, table, error = run_cli(capsys, "train", "--text", text, *TINY, "--steps", 2, "--out", tmp_path / "run")
    assert code == 0, error
    weights, rows = 4 * 32 * 32 + 3 * 32 * 96, 4 * 32 + 2 * 96 + 32
    assert f"{0.75 + 12 * rows / weights:.3f} bytes a linear weight" in table
    assert f"{weights:,} weights" in table


def test_text_takes_several_paths(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path) -> None:
    more = tmp_path / "more.txt"
    more.write_text("abc\n" * 100)
    arguments = ["train", "--text", text, more, *TINY, "--steps", 1, "--linear", "dense", "--out", tmp_path / "run"]
    code, _, progress = run_cli(capsys, *arguments)
    assert code == 0
    assert progress.startswith("2 files of ")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--text", "missing.txt"], ["missing.txt", "does not exist"]),
        (["--text", "empty.txt"], ["empty.txt", "empty file"]),
        (["--text", "short.txt"], ["short.txt", "33 bytes"]),
        (["--text", "folder"], ["folder", "no file that holds any"]),
        (["--dim", "30"], ["dim", "divisible by 4"]),
        (["--heads", "5"], ["dim=32, heads=5"]),
        (["--steps", "0"], ["steps >= 1, got 0"]),
        (["--steps", "many"], ["--steps", "integer"]),
        (["--C", "12"], ["1..11", "12"]),
        (["--linear", "sparse"], ["--linear", "sparse"]),
        (["--lr", "nan"], ["lr"]),
        (["--resume"], ["checkpoint", "run"]),
        (["--no-such-flag"], ["--no-such-flag"]),
        (["--linear", "dense", "--freeze-counters"], ["freeze"]),
    ],
)
def test_unusable_input_to_train_is_one_sentence_and_leaves_no_files(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    parts: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("short.txt").write_text("x" * 33)
    Path("folder").mkdir()
    before = sorted(tmp_path.iterdir())
    if "--linear" not in arguments:
        arguments = [*arguments, "--linear", "dense"]  # which needs no device
    code, out, error = run_cli(capsys, "train", *TINY, "--out", "run", *arguments)
    assert out == ""
    assert_one_sentence(code, error, *parts)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.device
def test_unknown_device_lists_the_choices(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path) -> None:
    code, _, error = run_cli(capsys, "train", "--text", text, "--device", "nonsense", "--out", tmp_path / "run")
    assert code == 2
    assert error.startswith("memtrain-cl: ")
    assert "nonsense" in error
    assert "0: " in error
    assert not (tmp_path / "run").exists()


def test_out_that_is_a_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path) -> None:
    code, _, error = run_cli(capsys, "train", "--text", text, *TINY, "--linear", "dense", "--steps", 1, "--out", text)
    assert_one_sentence(code, error, str(text))
    assert text.read_text().startswith("line 0")


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run_cli(capsys, "trian")
    assert_one_sentence(code, error, "trian")


def test_damaged_models_are_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path) -> None:
    out = tmp_path / "run"
    code, *_ = run_cli(
        capsys, "train", "--text", text, *TINY, "--steps", 1, "--linear", "dense", "--out", out, "--quiet"
    )
    assert code == 0
    model = out / "model.safetensors"
    whole = model.read_bytes()
    for size in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        model.write_bytes(whole[:size])
        code, made, error = run_cli(capsys, "generate", model)
        assert made == ""
        assert_one_sentence(code, error, "model.safetensors")
    code, _, error = run_cli(capsys, "generate", tmp_path / "missing.safetensors")
    assert_one_sentence(code, error, "missing.safetensors")
    model.write_bytes(whole)
    code, _, error = run_cli(capsys, "generate", model, "--bytes", "0")
    assert_one_sentence(code, error, "at least 1 byte")


def test_a_description_that_the_tensors_do_not_bear_out_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path
) -> None:
    from memtrain_cl.export.packed import read_engine, write_engine

    out = tmp_path / "run"
    run_cli(capsys, "train", "--text", text, *TINY, "--steps", 1, "--linear", "dense", "--out", out, "--quiet")
    engine = read_engine(out / "model.safetensors")
    forged = tmp_path / "forged.safetensors"
    for change in (
        {"layers": 10**12},
        {"dim": 4 * 10**9},
        {"hidden": 4 * 10**9},
        {"architecture": "other"},
        {"vocab": 10**9},
        {"heads": "two"},
        {"linear": "counter"},
    ):
        write_engine(forged, engine.layers, engine.tensors, {**engine.model, **change})
        code, _, error = run_cli(capsys, "generate", forged)
        assert_one_sentence(code, error, "forged.safetensors: ", "expected")


def test_the_feed_forward_part_has_the_width_that_is_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: Path
) -> None:
    from memtrain_cl.export.packed import read_engine

    out = tmp_path / "run"
    flags = ("--linear", "dense", "--hidden", 20, "--out", out, "--quiet")
    assert run_cli(capsys, "train", "--text", text, *TINY, "--steps", 1, *flags)[0] == 0
    assert read_engine(out / "model.safetensors").tensors["model.layers.0.mlp.up_proj.weight"].shape[0] == 20
    code, _, error = run_cli(capsys, "train", "--text", text, *TINY, "--hidden", 21, "--out", tmp_path / "other")
    assert_one_sentence(code, error, "expected hidden divisible by 4")


def test_ctrl_c_finishes_the_step_saves_and_tells_how_to_go_on(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "memtrain_cl.cli", "train", "--text", str(text), *TINY, "--linear", "dense"]
    process = subprocess.Popen([*command, "--steps", "1000000", "--out", str(out)], stderr=subprocess.PIPE, text=True)
    try:
        metrics = out / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while not (metrics.exists() and metrics.stat().st_size):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert f"memtrain-cl train --resume --out {out}" in error
    assert "Traceback" not in error

    from memtrain_cl.lm.checkpoint import load_checkpoint

    step = load_checkpoint(out / "checkpoint.pt")[1]["step"]
    rows = metrics.read_text().splitlines()
    assert len(rows) == step >= 1
    assert f"after step {step} of 1000000" in error
    assert not (out / "model.safetensors").exists()
