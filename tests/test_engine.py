"""The engine: logits and text as torch's model gives them, from files alone, and without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memtrain_cl.cli.generate import _write
from memtrain_cl.device import Device
from memtrain_cl.engine import Engine
from memtrain_cl.engine.context import rotary_angles
from memtrain_cl.engine.model import draw
from memtrain_cl.errors import CorruptFile, UnsupportedDevice
from memtrain_cl.export.container import RawTensor
from memtrain_cl.export.packed import read_engine
from memtrain_cl.lm.config import ModelConfig
from memtrain_cl.lm.exported import build_model
from memtrain_cl.lm.model import rope_tables
from tests.children import on_path
from tests.engine_cases import EVEN, ODD, exported, rewritten, some_bytes, torch_greedy, torch_logits, wide_logits

ROOT = Path(__file__).resolve().parent.parent
COUNTERS = [(EVEN, "counter"), (ODD, "counter")]
MODELS = [*COUNTERS, (EVEN, "dense")]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An engine file of a model with counter layers."""
    path = tmp_path / "model.safetensors"
    exported(path, EVEN)
    return path


def assert_close(got: np.ndarray, want: np.ndarray) -> None:
    """Within a few roundings of float32, of which a logit's way through the model has some dozens."""
    assert got.dtype == np.float32
    assert np.abs(got - want).max() <= 3e-6 * np.abs(want).max()


@pytest.mark.parametrize(("config", "linear"), COUNTERS)
def test_logits_are_float64_s_but_for_rounding_in_whatever_pieces_tokens_come(
    shaped: Device, tmp_path: Path, config: ModelConfig, linear: str
) -> None:
    path = tmp_path / "model.safetensors"
    exported(path, config, linear)
    tokens = some_bytes(config.seq)
    wide = wide_logits(read_engine(path), tokens)
    engine = Engine.load(path)
    assert engine.device is shaped
    assert_close(engine.logits(tokens), wide)
    context = engine.context()
    ends = (1, 2, 9, 10, config.seq - 1, config.seq)
    pieces = [context.extend(tokens[start:end], every=True) for start, end in zip((0, *ends), ends, strict=False)]
    assert_close(np.concatenate(pieces), wide)
    assert context.length == config.seq
    context.clear()
    assert_close(context.extend(tokens[:5]), wide[4])


@pytest.mark.parametrize(("config", "linear"), MODELS)
def test_logits_and_greedy_text_are_torch_s(device: Device, tmp_path: Path, config: ModelConfig, linear: str) -> None:
    path = tmp_path / "model.safetensors"
    live = exported(path, config, linear)
    engine, built = Engine.load(path), build_model(read_engine(path), path)
    tokens = some_bytes(config.seq)
    wide = wide_logits(read_engine(path), tokens)
    assert_close(torch_logits(built, tokens), wide)
    assert_close(engine.logits(tokens), wide)
    assert np.array_equal(torch_logits(built, tokens), torch_logits(live, tokens))
    count = config.seq - 3
    made = bytes(engine.generate(b"abc", count, 0.0))
    assert made == torch_greedy(built, b"abc", count)
    assert len(set(made)) > 2


def test_equal_seeds_draw_equal_text_of_any_length(device: Device, file: Path) -> None:
    engine = Engine.load(file)
    drawn = [bytes(engine.generate(b"line", 60, 1.0, seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    # A full context begins again with its newer half: 40 bytes, then 20 and what follows them.
    text = b"line" + bytes(engine.generate(b"line", 60, 0.0))
    assert text[41:45] == bytes(engine.generate(text[21:41], 4, 0.0))
    cut = [bytes(engine.generate(b"x" * before + text[:30], 5, 0.0)) for before in (100, 10)]
    assert cut[0] == cut[1]


def test_draws_follow_the_probabilities() -> None:
    chance = np.random.default_rng(0)
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], dtype=np.float32))
    counts = np.bincount([draw(logits, 0.5, chance) for _ in range(4000)], minlength=4)
    expected = np.array([16, 4, 1, 1]) / 22 * 4000
    assert float(((counts - expected) ** 2 / expected).sum()) < 16
    assert draw(np.array([1.0, 3.0, 3.0], np.float32), 0.0, chance) == 1
    assert draw(np.array([1.0, 3.0, 2.0], np.float32), 1e-300, chance) == 1
    for wrong in (np.nan, np.inf, -np.inf):
        with pytest.raises(ValueError, match="expected finite logits"):
            draw(np.array([1.0, wrong], np.float32), 0.0, chance)


@pytest.mark.parametrize(
    ("prompt", "count", "temperature", "seed", "sentence"),
    [
        (b"", 1, 1.0, 0, "prompt"),
        (b"a", 0, 1.0, 0, "at least 1 byte"),
        (b"a", 1, -1.0, 0, "temperature"),
        (b"a", 1, float("nan"), 0, "temperature"),
        (b"a", 1, 1.0, -1, "seed"),
    ],
)
def test_generation_checks_its_arguments_at_once(
    device: Device, file: Path, prompt: bytes, count: int, temperature: float, seed: int, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        Engine.load(file).generate(prompt, count, temperature, seed)


def test_tokens_that_do_not_fit_are_refused(device: Device, file: Path) -> None:
    engine = Engine.load(file)
    wrong: list[tuple[Any, str]] = [
        (b"", "at least one token"),
        ([[1, 2]], "a list"),
        ([0.5], "a list"),
        ([256], r"0\.\.255, got 256 to 256"),
        ([3, -1], "got -1 to 3"),
        (b"x" * 41, "at most 40 bytes of context, got 41"),
    ]
    for tokens, sentence in wrong:
        with pytest.raises(ValueError, match=sentence):
            engine.logits(tokens)
    context = engine.context(4)
    context.extend(b"abc")
    with pytest.raises(ValueError, match="at most 4 bytes of context, got 5"):
        context.extend(b"de")
    assert_close(context.extend(np.array([100])), engine.context().extend(b"abcd"))
    assert context.length == 4
    for capacity in (0, 41):
        with pytest.raises(ValueError, match=r"1\.\.40"):
            engine.context(capacity)


def test_a_context_of_a_length_that_no_device_holds_is_refused(device: Device, file: Path) -> None:
    rewritten(file, model={"seq": 2**31 - 1})
    engine = Engine.load(file)
    assert engine.logits(b"abc").shape == (3, 256)
    with pytest.raises(UnsupportedDevice, match=r"a buffer of \d+ bytes was asked for"):
        engine.context()


def test_angles_are_those_of_the_trained_model() -> None:
    config = ModelConfig(seq=4000, rope_theta=5e5)
    cosine, sine = (table[:, : config.head_dim // 2].numpy() for table in rope_tables(config, 0, 4000))
    ours = rotary_angles(config, 4000)
    # A frequency that torch rounds otherwise turns by 4000 roundings more or less at the end.
    assert np.abs(ours - np.stack([cosine, sine], axis=-1)).max() < 4000 * 2.0**-23
    assert np.array_equal(ours[0], np.stack([np.ones(32), np.zeros(32)], axis=-1))


@pytest.mark.parametrize("linear", ["counter", "dense"])
def test_tensors_of_16_bits_are_read_as_the_float32_that_they_are(device: Device, tmp_path: Path, linear: str) -> None:
    path = tmp_path / "model.safetensors"
    exported(path, ODD, linear)
    tensors = read_engine(path).tensors
    narrow: dict[str, Any] = {}
    for name, tensor in tensors.items():
        assert isinstance(tensor, np.ndarray)
        # bfloat16 by cutting: any of its values will do.
        high = (tensor.view(np.uint32) >> 16).astype("<u2")
        of_half = "head" in name or "norm" in name
        narrow[name] = (
            tensor.astype(np.float16) if of_half else RawTensor("BF16", tensor.shape, high.reshape(-1).view(np.uint8))
        )
    rewritten(path, tensors=narrow)
    logits = Engine.load(path).logits(some_bytes(9))
    same = {
        name: value.astype(np.float32)
        if isinstance(value, np.ndarray)
        else (value.data.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(value.shape)
        for name, value in narrow.items()
    }
    rewritten(path, tensors=same)
    assert np.array_equal(Engine.load(path).logits(some_bytes(9)), logits)


def test_counter_weights_stay_packed(device: Device, file: Path) -> None:
    layers = read_engine(file).layers
    held = Engine.load(file).context()._weights
    states = [getattr(block, name).state for block in held.blocks for name in ("qkv", "output", "gate_up", "down")]
    assert sum(state.nbytes for state in states) == sum(layer.state.nbytes for layer in layers.values())
    for index, names in ((0, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")), (3, ("mlp.down_proj",))):
        expected = b"".join(layers[f"model.layers.0.{name}"].state.tobytes() for name in names)
        assert states[index].numpy().tobytes() == expected


def test_files_that_hold_no_such_model_are_corrupt(device: Device, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    exported(path, ODD)
    whole = path.read_bytes()
    layer = read_engine(path).layers["model.layers.0.mlp.down_proj"]
    name = "model.layers.0.mlp.down_proj"
    wrong: list[tuple[dict[str, dict[str, Any]], str]] = [
        ({"model": {"linear": "dense"}}, "linears of the kind dense"),
        ({"model": {"C": 11}}, "C = 11, got 8"),
        ({"model": {"architecture": "other"}}, "got architecture 'other'"),
        ({"model": {"seq": None}}, "seq"),
        ({"model": {"rope_theta": 1e-300}}, "rope_theta as a positive number within float32"),
        ({"model": {"norm_eps": 10**300}}, "norm_eps as a positive number within float32"),
        ({"model": {"hidden": 48}}, "48"),
        ({"layers": {name: None}, "tensors": {f"{name}.weight": np.zeros((36, 44), np.float32)}}, "kind counter"),
        ({"layers": {name: None}}, "parts"),
        ({"layers": {name: None, "other": layer}}, "expected F32"),
        ({"tensors": {"lm_head.weight": np.zeros((256, 36), np.int32)}}, "lm_head.weight"),
        ({"tensors": {"model.norm.weight": np.zeros(35, np.float32)}}, "model.norm.weight"),
    ]
    for changes, sentence in wrong:
        path.write_bytes(whole)
        rewritten(path, **changes)
        for load in (Engine.load, lambda path: build_model(read_engine(path), path)):
            with pytest.raises(CorruptFile, match=rf"model\.safetensors: (expected|layer|tensor).*{sentence}"):
                load(path)
    path.write_bytes(whole[:-1])
    with pytest.raises(CorruptFile, match=r"model\.safetensors"):
        Engine.load(path)
    with pytest.raises(FileNotFoundError):
        Engine.load(tmp_path / "missing")


def test_an_unknown_device_is_named(file: Path) -> None:
    with pytest.raises(UnsupportedDevice, match="no such device"):
        Engine.load(file, "no such device")


def test_the_kind_of_products_in_training_is_no_matter(device: Device, file: Path) -> None:
    logits = Engine.load(file).logits(b"abc")
    rewritten(file, model={"counter_compute": "int8"})
    assert np.array_equal(Engine.load(file).logits(b"abc"), logits)


def test_a_terminal_is_shown_text_that_does_not_command_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _write([b"a\xc3", b"\xa9\x1b[2J", b"\n\t", b"\xff", b"\xe2\x82"])
    assert capsys.readouterr().out == "a\u00e9\ufffd[2J\n\t\ufffd\ufffd\n"


_WITHOUT_TORCH = """
import sys

def run(path):
    from memtrain_cl.cli import main
    from memtrain_cl.engine import Engine

    engine = Engine.load(path)
    assert engine.logits(b"abc").shape == (3, 256)
    text = bytes(engine.generate(b"abc", 50, 0.8, 7))
    assert main(["generate", path, "--prompt", "abc", "--bytes", "50", "--seed", "7"]) == 0
    sys.stdout.flush()
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()

run({counter!r})
assert "torch" not in sys.modules
sys.modules["torch"] = None  # importing it fails from here on
run({dense!r})
"""


def test_neither_engine_nor_command_import_torch(device: Device, tmp_path: Path) -> None:
    paths = {linear: str(tmp_path / f"{linear}.safetensors") for linear in ("counter", "dense")}
    for linear, path in paths.items():
        exported(Path(path), EVEN, linear)
    environment = {**os.environ, "PYTHONPATH": on_path(ROOT), "MEMTRAIN_CL_DEVICE": str(device.info.index)}
    command = [sys.executable, "-c", _WITHOUT_TORCH.format(**paths)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    for output in (done.stdout[:103], done.stdout[103:]):
        by_command, by_engine = output[:53], output[53:]
        assert by_command == b"abc" + by_engine
        assert len(by_engine) == 50
