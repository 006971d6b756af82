"""Stock models of torch and of Hugging Face: ten steps on the device follow the host's losses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import memtrain_cl
from memtrain_cl.torch_device.fallback import FallbackWarning
from tests.torch_home import HOME, assert_same_losses

pytestmark = pytest.mark.device

VOCABULARY = 19


@pytest.fixture(autouse=True)
def _counts() -> Iterator[None]:
    memtrain_cl.reset_fallbacks()
    yield
    memtrain_cl.reset_fallbacks()


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


# ---- a GPT of torch's own modules ----


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(functional.gelu(self.up(self.second_norm(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    def __init__(self, width: int = 16, length: int = 9) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(Block(width, 2), Block(width, 2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.tokens(x) + self.places(places))))  # type: ignore[no-any-return]


def next_token_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def test_gpt_in_strict_mode() -> None:
    batches = [(tokens(2, 9, seed=n),) for n in range(10)]
    with memtrain_cl.strict():
        assert_same_losses(
            GPT,
            next_token_loss,
            batches,
            rtol=1e-4,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
            clip=lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0),
        )


# ---- torch.nn ----


class Labeller(nn.Module):
    """A label a token, read off an encoder."""

    def __init__(self, batch_first: bool, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.0, batch_first=batch_first, norm_first=norm_first, activation="gelu"
        )
        self.embed, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor, **masks: Any) -> torch.Tensor:
        return self.head(self.encoder(self.embed(x), **masks))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("batch_first", "norm_first"), [(True, False), (False, True)])
def test_transformer_encoder(batch_first: bool, norm_first: bool) -> None:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(x).flatten(0, 1), y.flatten())

    batches = [(tokens(3, 7, seed=n), tokens(3, 7, seed=100 + n)) for n in range(10)]
    with memtrain_cl.strict():
        assert_same_losses(lambda: Labeller(batch_first, norm_first), loss, batches)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize(("nested", "norm_first"), [(False, False), (False, True), (True, False)])
def test_encoder_in_inference(nested: bool, norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    x = torch.randn(3, 7, 16)
    padding = torch.arange(7) >= torch.tensor([[5], [7], [2]])
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    masks: list[dict[str, Any]] = [{}, {"src_key_padding_mask": padding}, {"mask": causal, "is_causal": True}]
    for mask in masks:
        with torch.no_grad(), memtrain_cl.strict():
            expected = model.to("cpu")(x, **mask)
            moved = {key: m.to(HOME) if isinstance(m, torch.Tensor) else m for key, m in mask.items()}
            got = model.to(HOME)(x.to(HOME), **moved).cpu()
        seen = ~padding if "src_key_padding_mask" in mask else torch.ones_like(padding)
        torch.testing.assert_close(got[seen], expected[seen], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("average", [False, True])
def test_attention_weights_in_inference(average: bool) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        expected = attention(x, x, x, average_attn_weights=average)
        attention.to(HOME)
        y = x.to(HOME)
        got = attention(y, y, y, average_attn_weights=average)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-6)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.two = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm, self.second_norm = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x + self.second_norm(self.two(functional.relu(self.norm(self.one(x))))))


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), Residual(8), nn.Flatten(),
        nn.Linear(8 * 4 * 4, 5),
    )  # fmt: skip


def class_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), y)


def pictures(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(n)
    return torch.randn(4, 3, 8, 8, generator=chance), torch.randint(0, 5, (4,), generator=chance)


@pytest.mark.filterwarnings("ignore::memtrain_cl.torch_device.fallback.FallbackWarning")
def test_resnet_counts_what_runs_on_the_host() -> None:
    assert_same_losses(resnet, class_loss, [pictures(n) for n in range(10)])
    calls = {fallback.name: fallback.calls for fallback in memtrain_cl.fallbacks()}
    assert calls["aten.convolution.default"] == 30
    assert calls["aten.convolution_backward.default"] == 30
    assert not [name for name in calls if "norm" in name or "mm" in name or "relu" in name]


def test_fallbacks_warn_once_and_strict_refuses() -> None:
    convolve = nn.Conv1d(2, 3, 3).to(HOME)
    x = torch.randn(1, 2, 8).to(HOME)

    def twice() -> None:
        convolve(x)
        convolve(x)

    with pytest.warns(FallbackWarning, match="convolution") as seen:
        twice()
    assert len(seen) == 1
    assert [(f.name, f.calls) for f in memtrain_cl.fallbacks()] == [("aten.convolution.default", 2)]
    with memtrain_cl.strict(), pytest.raises(NotImplementedError, match=r"convolution.*strict"):
        convolve(x)


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("bias", [True, False])
def test_recurrent(cell: Any, bias: bool) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = cell(5, 6, num_layers=2, batch_first=True, bias=bias), nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.cell(x)[0][:, -1])  # type: ignore[no-any-return]

    chance = torch.Generator().manual_seed(2)
    batches = [(torch.randn(3, 4, 5, generator=chance), torch.randint(0, 4, (3,), generator=chance)) for _ in range(4)]
    with memtrain_cl.strict():
        assert_same_losses(Reader, class_loss, batches)


# ---- Hugging Face ----


def hugging_face(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="the extra 'hf' (transformers) is not installed")
    if name == "gpt2":
        sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **still))  # type: ignore[no-any-return]
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


def own_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(input_ids=x, labels=x).loss  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_hugging_face_trains(name: str) -> None:
    with memtrain_cl.strict():
        assert_same_losses(lambda: hugging_face(name), own_loss, [(tokens(2, 8, seed=n),) for n in range(10)])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::memtrain_cl.torch_device.fallback.FallbackWarning")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_hugging_face_generates(name: str) -> None:
    model = hugging_face(name).eval()
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    prompt = tokens(1, 5)
    attended = torch.ones_like(prompt)
    expected = model.generate(prompt, attention_mask=attended, **options)  # type: ignore[operator]
    model.to(HOME)
    got = model.generate(prompt.to(HOME), attention_mask=attended.to(HOME), **options)  # type: ignore[operator]
    assert torch.equal(got.cpu(), expected)
