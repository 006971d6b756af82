"""Exported models in llama.cpp itself, which `make llamacpp` builds; skipped where it is not installed.

llama.cpp multiplies ternary weights with activations in Q8_K: blocks of 256 numbers x of one row, as integers
q = min(127, round(x * i)) with i = -127 / m of the number m of the largest magnitude (so m itself becomes -127), ties
to even, and one float32 scale 1/i.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memtrain_cl.device import Device
from memtrain_cl.export.gguf import KINDS, Kind, write_gguf
from memtrain_cl.export.packed import EngineFile, load_into, read_engine
from memtrain_cl.lm.config import ModelConfig
from memtrain_cl.lm.data import load_corpus
from memtrain_cl.lm.files import MODEL
from memtrain_cl.lm.model import CausalLM
from memtrain_cl.lm.run import plan_run, run_training
from tests.gguf_cases import codes_of, model_file

llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama.cpp, which `make llamacpp` builds")
pytestmark = pytest.mark.llamacpp

LENGTH = 96
#: Trained until it writes words, so that choices are no accident of noise; each linear's rows are blocks of 256.
FLAGS = {"steps": 200, "layers": 2, "dim": 256, "hidden": 768, "seq": LENGTH, "batch": 8, "seed": 1}
GREEDY = 64


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained model, as file and as it runs here, and text that it has not seen: bytes [windows, LENGTH]."""

    file: EngineFile
    model: CausalLM
    text: np.ndarray


def config_of(file: EngineFile) -> ModelConfig:
    return ModelConfig.from_json({name: value for name, value in file.model.items() if name != "architecture"})


@pytest.fixture(scope="module")
def trained(_opened: Device, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    out = tmp_path_factory.mktemp("run")
    config, state = plan_run(out, FLAGS, resume=False)
    run_training(config, out, state, quiet=True)
    file = read_engine(out / MODEL)
    model = CausalLM(config.model).eval()
    load_into(model, file)
    unseen = load_corpus(config.text, LENGTH).valid[: 12 * 5000].reshape(12, 5000)[:, :LENGTH]
    return Trained(file, model, unseen)


def q8_k(x: torch.Tensor) -> torch.Tensor:
    """What the numbers x [..., n * 256] are in llama.cpp's products."""
    blocks = x.numpy().reshape(-1, 256)
    most = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    inverse = np.float32(-127) / np.where(most == 0, np.float32(1), most)
    quanta = np.minimum(np.rint(inverse * blocks), 127).astype(np.float32)
    return torch.from_numpy((quanta * (1 / inverse)).reshape(x.shape))


def as_written(file: EngineFile, *, quantised: bool) -> CausalLM:
    """The model with the numbers of the GGUF file as float32 weights, and activations in Q8_K before ternary ones."""

    def half(values: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(values).astype(np.float16 if values.ndim == 2 else np.float32)).float()

    model = CausalLM(replace(config_of(file), linear="dense")).eval()
    weights = {name: half(tensor) for name, tensor in file.tensors.items()}
    for name, layer in file.layers.items():
        weights[f"{name}.weight"] = torch.from_numpy(codes_of(layer)) * half(layer.scale[:, None])
    model.load_state_dict(weights)
    for module in model.model.layers.modules() if quantised else ():
        if isinstance(module, torch.nn.Linear) and module.in_features % 256 == 0:
            module.register_forward_pre_hook(lambda _, inputs: (q8_k(inputs[0]),))
    return model


@contextmanager
def llama(file: EngineFile, kind: Kind, folder: Path) -> Iterator[Any]:
    """The export, loaded by llama.cpp, with attention in float32."""
    path = folder / f"{kind}.gguf"
    write_gguf(path, file, kind)
    float32 = 0
    options = {"type_k": float32, "type_v": float32, "logits_all": True, "n_threads": 2, "verbose": False}
    length = config_of(file).seq
    with closing(llama_cpp.Llama(str(path), n_ctx=length, n_batch=length, **options)) as model:
        yield model


def their_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    model.reset()
    model.eval(tokens.tolist())
    return np.array(model.scores[: len(tokens)])


@torch.no_grad()
def our_logits(model: CausalLM, tokens: np.ndarray) -> np.ndarray:
    logits: np.ndarray = model(torch.from_numpy(tokens.astype(np.int64))[None])[0].numpy()
    return logits


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("kind", KINDS)
def test_any_bytes_are_tokens_and_back(kind: Kind, tmp_path: Path) -> None:
    with llama(model_file(layers=1), kind, tmp_path) as model:
        text = bytes(range(256)) + "\u2581 naïve  \u00e9\n".encode()
        tokens = model.tokenize(text, add_bos=True, special=True)
        assert tokens == list(text)
        assert model.detokenize(tokens) == text
        assert [model.token_bos(), model.token_eos()] == [-1, -1]


def test_float16_agrees_in_logits_and_greedy_bytes(trained: Trained, tmp_path: Path) -> None:
    with llama(trained.file, "f16", tmp_path) as model:
        errors = [error(their_logits(model, tokens), our_logits(trained.model, tokens)) for tokens in trained.text]
        print(f"f16: relative error {max(errors):.2e}")
        assert max(errors) < 1e-2
        theirs, ours = trained.text[0, : LENGTH - GREEDY], trained.text[0, : LENGTH - GREEDY]
        for _ in range(GREEDY):
            theirs = np.append(theirs, their_logits(model, theirs)[-1].argmax())
            ours = np.append(ours, our_logits(trained.model, ours)[-1].argmax())
        print(f"f16: {bytes(ours[-GREEDY:].astype(np.uint8))!r}")
        assert theirs.tolist() == ours.tolist()
        assert len(set(ours[-GREEDY:].tolist())) > 3


@pytest.mark.parametrize("kind", ["tq2_0", "tq1_0"])
def test_ternary_agrees_under_the_same_quantisation(trained: Trained, kind: Kind, tmp_path: Path) -> None:
    quantised = as_written(trained.file, quantised=True)
    with llama(trained.file, kind, tmp_path) as model:
        theirs = [their_logits(model, tokens) for tokens in trained.text]
    same = [error(found, our_logits(quantised, tokens)) for found, tokens in zip(theirs, trained.text, strict=True)]
    exact = [our_logits(trained.model, tokens) for tokens in trained.text]
    apart = [error(found, expected) for found, expected in zip(theirs, exact, strict=True)]
    agreed = np.mean(
        [found.argmax(axis=1) == expected.argmax(axis=1) for found, expected in zip(theirs, exact, strict=True)]
    )
    print(f"{kind}: relative error {max(same):.2e}, {max(apart):.2e} without Q8_K; {agreed:.1%} of choices agree")
    assert max(same) < 1e-2
    assert np.mean(same) < np.mean(apart) / 2  # what is left is not the quantisation, so this is theirs
    assert agreed >= 0.95


@pytest.mark.parametrize(("linear", "hidden"), [("counter", 704), ("dense", 512)])
def test_tensors_left_in_float16_load(linear: str, hidden: int, tmp_path: Path) -> None:
    file = model_file(linear, hidden=hidden)
    tokens = np.arange(32, 64)
    with llama(file, "tq2_0", tmp_path) as model:
        found = their_logits(model, tokens)
    assert error(found, our_logits(as_written(file, quantised=linear == "counter"), tokens)) < 1e-2
