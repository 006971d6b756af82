"""`memtrain-cl budget`: the tables, what is measured beside, the picture, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from memtrain_cl.device import Device
from memtrain_cl.lm.bill import REGIMES, weights_of, widest_with
from memtrain_cl.lm.config import ModelConfig
from memtrain_cl.lm.model import CausalLM
from tests.test_cli_train import assert_one_sentence, run_cli

SHAPE = ("--layers", 1, "--dim", 64, "--seq", 32, "--batch", 2)


def numbers(line: str) -> list[float]:
    return [float(word) for word in line.split() if word.replace(".", "").isdigit()]


def test_measured_stands_beside_forecast(device: Device, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "bill.png"
    code, out, error = run_cli(capsys, "budget", *SHAPE, "--measure", "--device", device.info.index, "--plot", picture)
    assert (code, error) == (0, "")
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = out.splitlines()
    assert lines[0].startswith("by formula, GiB")
    assert "BF16 AdamW-style" in out
    for name in REGIMES:
        at = next(index for index, line in enumerate(lines) if line.startswith(f"{name} ") and "forecast" in line)
        forecast, measured = numbers(lines[at]), numbers(lines[at + 1])
        assert "measured" in lines[at + 1]
        assert len(forecast) >= 6
        for one, other in zip(forecast[-6:-2], measured[-6:-2], strict=True):
            assert one == pytest.approx(other, rel=0.02, abs=0.011)
        assert forecast[-1] == pytest.approx(measured[-1], rel=0.15, abs=0.02)


def test_the_widest_and_the_number_of_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_cli(capsys, "budget", *SHAPE[:2], *SHAPE[4:], "--params", 0.2, "--memory", 0.004)
    assert code == 0
    rows = out.split("widest in 0.004 GiB")[1].splitlines()[1:]
    widths = {row[:28].strip(): numbers(row)[-1] for row in rows if row}
    assert widths.keys() == REGIMES.keys()
    assert all(0 < peak <= 0.004 * 1024 for peak in widths.values())
    config = widest_with(ModelConfig(layers=1, heads=4), 200_000)
    assert f"1 layers of {config.dim}, 2 x 32 tokens, MiB" in out
    assert weights_of(config) <= 200_000
    assert weights_of(ModelConfig(layers=1, dim=config.dim + 8)) > 200_000
    model = CausalLM(ModelConfig(layers=1, dim=config.dim, linear="dense"))
    assert sum(parameter.numel() for parameter in model.parameters()) == weights_of(config)
    code, out, _ = run_cli(capsys, "budget", *SHAPE, "--memory", 0.0001)
    assert out.count(" none") == len(REGIMES)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--layers", "0"], ["layers >= 1, got 0"]),
        (["--batch", "0"], ["--batch", "got 0"]),
        (["--memory", "-1"], ["--memory", "got -1"]),
        (["--params", "nan"], ["--params", "nan"]),
        (["--params", "0.00001"], ["parameters for 12 layers, got 10"]),
    ],
)
def test_unusable_input_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], parts: list[str]
) -> None:
    code, out, error = run_cli(capsys, "budget", *arguments)
    assert out == ""
    assert_one_sentence(code, error, *parts)
