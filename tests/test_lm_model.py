"""The model: names, RoPE, causality, the cache, copies."""

from __future__ import annotations

import copy
import io
from dataclasses import replace

import pytest
import torch

from memtrain_cl.lm.config import ModelConfig, TrainConfig
from memtrain_cl.lm.model import CausalLM, KVCache, apply_rope, counter_layers, linear_layers, rope_tables

DENSE = ModelConfig(layers=2, dim=32, heads=2, seq=24, linear="dense")
KINDS = [pytest.param("dense"), pytest.param("counter", marks=pytest.mark.device)]


def make_model(linear: str = "dense") -> CausalLM:
    torch.manual_seed(0)
    return CausalLM(replace(DENSE, linear=linear)).eval()


def some_bytes(length: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(1))


def test_rope_is_a_rotation_of_pairs_by_position() -> None:
    cos, sin = rope_tables(DENSE, start=3, length=5)
    x = torch.randn(2, 2, 5, DENSE.head_dim, generator=torch.Generator().manual_seed(0))
    half = DENSE.head_dim // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    position = torch.arange(3, 8, dtype=torch.float64)[:, None]
    frequency = DENSE.rope_theta ** (-torch.arange(half, dtype=torch.float64) * 2 / DENSE.head_dim)
    turned = pairs * torch.exp(1j * position * frequency)
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(apply_rope(x, cos, sin).double(), expected, rtol=1e-5, atol=1e-6)


def test_rope_products_depend_on_distance_only() -> None:
    query, key = torch.randn(2, DENSE.head_dim, generator=torch.Generator().manual_seed(0)).unbind()

    def score(at: int, distance: int) -> float:
        def turn(x: torch.Tensor, position: int) -> torch.Tensor:
            return apply_rope(x[None], *rope_tables(DENSE, position, 1))[0]

        return float(turn(query, at + distance) @ turn(key, at))

    assert score(0, 4) == pytest.approx(score(13, 4), abs=1e-5)
    assert score(0, 4) != pytest.approx(score(0, 5), abs=1e-3)


@pytest.mark.parametrize("linear", KINDS)
def test_cached_logits_equal_uncached_ones(linear: str) -> None:
    model = make_model(linear)
    tokens = some_bytes(24)
    with torch.no_grad():
        whole = model(tokens)
        cache = KVCache(model.config, batch=2, capacity=24)
        pieces = [model(tokens[:, start:stop], cache) for start, stop in ((0, 7), (7, 8), (8, 19), (19, 24))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-4, atol=1e-5)


def test_later_bytes_do_not_change_earlier_logits() -> None:
    model = make_model()
    tokens = some_bytes(10)
    changed = tokens.clone()
    changed[:, 6] ^= 1
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.equal(before[:, 6:], after[:, 6:])


def test_too_long_a_context_is_refused() -> None:
    model = make_model()
    with pytest.raises(ValueError, match="at most 24 bytes of context, got 25"):
        model(some_bytes(25))
    with pytest.raises(ValueError, match="at most 4 bytes of context, got 5"):
        model(some_bytes(5), KVCache(model.config, batch=2, capacity=4))


def test_names_are_those_of_llama_checkpoints() -> None:
    names = set(make_model().state_dict())
    block = "model.layers.1."
    assert {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        block + "input_layernorm.weight",
        block + "post_attention_layernorm.weight",
        block + "self_attn.q_proj.weight",
        block + "self_attn.k_proj.weight",
        block + "self_attn.v_proj.weight",
        block + "self_attn.o_proj.weight",
        block + "mlp.gate_proj.weight",
        block + "mlp.up_proj.weight",
        block + "mlp.down_proj.weight",
    } <= names
    assert len(names) == 3 + 2 * 9


@pytest.mark.device
def test_counter_model_has_float_parameters_for_the_rest_alone() -> None:
    model = make_model("counter")
    assert len(counter_layers(model)) == 2 * 7
    assert linear_layers(model) == counter_layers(model)
    assert {name.rsplit(".", 2)[-2] for name, _ in model.named_parameters()} == {
        "embed_tokens",
        "input_layernorm",
        "post_attention_layernorm",
        "norm",
        "lm_head",
    }


@pytest.mark.parametrize("linear", KINDS)
def test_model_can_be_copied_and_pickled(linear: str) -> None:
    model = make_model(linear)
    tokens = some_bytes(8)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    with torch.no_grad():
        logits = model(tokens)
        assert torch.equal(copy.deepcopy(model)(tokens), logits)
        assert torch.equal(torch.load(buffer, weights_only=False)(tokens), logits)


def test_width_of_the_feed_forward_part_follows_dim() -> None:
    assert ModelConfig(dim=256).hidden == 704
    assert ModelConfig(dim=192).hidden == 512
    assert ModelConfig(dim=256, hidden=1024).hidden == 1024
    assert TrainConfig().with_flags({"dim": 192}).model.hidden == 512


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"dim": 254}, "divisible by 4"),
        ({"dim": 256, "heads": 3}, "dim divisible by heads"),
        ({"dim": 36, "heads": 12}, "even head width"),
        ({"layers": 0}, "layers >= 1, got 0"),
        ({"heads": 0}, "heads >= 1"),
        ({"seq": 0}, "seq >= 1"),
        ({"C": 12}, r"1\.\.11"),
        ({"C": 0}, r"1\.\.11"),
        ({"counter_lr": 0.0}, "counter_lr to be a positive number"),
        ({"counter_lr": float("nan")}, "counter_lr to be a positive number"),
        ({"counter_eps": 0.0}, "counter_eps to be a positive number"),
        ({"rope_theta": 1e39}, "rope_theta as a positive number within float32"),
        ({"norm_eps": 1e-39}, "norm_eps as a positive number within float32"),
        ({"counter_compute": "fp4"}, "one of fp, int8"),
        ({"linear": "sparse"}, "counter, dense"),
        ({"steps": 0}, "steps >= 1"),
        ({"batch": 0}, "batch >= 1"),
        ({"lr": -1.0}, "lr to be a positive number"),
        ({"lr": 10**400}, "lr to be a positive number"),
        ({"seed": -1}, "seed"),
        ({"linear": "dense", "freeze_counters": True}, "no counter to freeze"),
    ],
)
def test_values_out_of_range_are_refused(flags: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        TrainConfig().with_flags(flags)


def test_configuration_survives_json_and_names_what_is_wrong() -> None:
    config = TrainConfig().with_flags({"dim": 64, "text": ("a", "b"), "lr": 1.0})
    assert TrainConfig.from_json(config.to_json()) == config
    broken = config.to_json()
    for change, sentence in (
        ({"dim": "64"}, "'dim' to be int"),
        ({"dim": True}, "'dim' to be int"),
        ({"extra": 1}, "'extra'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            TrainConfig.from_json({**broken, "model": {**broken["model"], **change}})
    del broken["steps"]
    with pytest.raises(ValueError, match="'steps' of TrainConfig"):
        TrainConfig.from_json(broken)


def test_a_context_of_any_length_costs_what_is_used() -> None:
    torch.manual_seed(0)
    short = CausalLM(DENSE).eval()
    endless = CausalLM(replace(DENSE, seq=10**12)).eval()
    endless.load_state_dict(short.state_dict())
    for length in (5, 3, 9, DENSE.seq):
        tokens = torch.arange(length)[None] % 256
        torch.testing.assert_close(endless(tokens), short(tokens), rtol=0, atol=0)
