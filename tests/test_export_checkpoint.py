"""PyTorch checkpoints of counter layers: what must be told, what is refused, and archives made to harm."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memtrain_cl.reference
from memtrain_cl.errors import CorruptFile
from memtrain_cl.export.checkpoint import read_checkpoint
from memtrain_cl.export.packed import load_into, write_engine
from memtrain_cl.export.torch_archive import load_archive
from memtrain_cl.nn import CompactCounterLinear, PackedRMSCounterLinear, RMSCounterLinear, layer_from_state
from tests.export_cases import GOLDEN, golden_layer, less_memory_than, pack

State = dict[str, Any]
#: What a checkpoint of memtrain-cl train holds beside the model, as far as it matters here.
RUN: State = {"format": 1, "config": {"model": {"C": 11}}, "corpus": "", "step": 3, "torch_rng": None}


def published(name: str = "l", *, packed: bool = False, moments: bool = True, **changes: Any) -> State:
    """The golden layer as the published package saves it."""
    codes = np.array(GOLDEN["codes"], np.uint8)
    scale, v = (torch.tensor(GOLDEN[key], dtype=torch.float32)[:, None] for key in ("scale", "v"))
    parts = {"state": torch.from_numpy(pack(codes) if packed else codes), "scale": scale}
    parts |= {"v": v, "s_base": scale.clone()} if moments else {}
    return {f"{name}.{key}": value for key, value in {**parts, **changes}.items() if value is not None}


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


@pytest.mark.parametrize("packed", [False, True])
def test_a_published_checkpoint_becomes_layers_and_tensors(tmp_path: Path, packed: bool) -> None:
    head = torch.arange(6.0).reshape(2, 3).T.bfloat16()
    path = saved(tmp_path / "c.pt", {**published("a.b", packed=packed), "head": head, "n": torch.tensor(3)})
    engine = read_checkpoint(path, C=11, in_features=8, seed=5)
    layer, golden = engine.layers["a.b"], golden_layer()
    assert (layer.in_features, layer.out_features, layer.C, layer.step) == (8, 2, 11, 0)
    assert layer.kind == ("PackedRMSCounterLinear" if packed else "RMSCounterLinear")
    assert layer.state.tobytes() == golden.state.tobytes()
    assert layer.scale.tobytes() == golden.scale.tobytes()
    assert layer.v is not None
    assert layer.v.tolist() == GOLDEN["v"]
    assert layer.s_base is not None
    assert engine.tensors.keys() == {"head", "n"}
    write_engine(tmp_path / "m", engine.layers, engine.tensors, engine.model)


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model"])
def test_a_state_dict_may_lie_one_level_down(tmp_path: Path, key: str) -> None:
    path = saved(tmp_path / "c.pt", {key: published(), "epoch": 3, "optimizer": {"state": {}, "lr": [0.1, None]}})
    assert read_checkpoint(path, C=11).layers.keys() == {"l"}


def test_layers_without_moments_and_layers_by_pattern(tmp_path: Path) -> None:
    state = {**published("x.a", moments=False), **published("x.b", packed=True), **published("y")}
    path = saved(tmp_path / "c.pt", state)
    engine = read_checkpoint(path, C={"*": 11}, in_features={"*": 4, "x.*": 8, "y": 8}, seed=1)
    kinds = {name: layer.kind for name, layer in engine.layers.items()}
    assert kinds == {"x.a": "CompactCounterLinear", "x.b": "PackedRMSCounterLinear", "y": "RMSCounterLinear"}
    assert engine.layers["x.a"].v is None
    assert len({layer.seed for layer in engine.layers.values()}) == 3
    with pytest.raises(ValueError, match=r"'y': expected C, which the file does not say"):
        read_checkpoint(path, C={"x.*": 11}, in_features=8)


def test_what_the_width_of_a_state_means_must_be_told_where_it_may_mean_two(tmp_path: Path) -> None:
    state = torch.zeros(1, 576, dtype=torch.uint8)
    row = torch.ones(1, 1)
    path = saved(tmp_path / "c.pt", {"state": state, "scale": row, "v": row})
    with pytest.raises(ValueError, match=r"in_features, which .* say: 576 columns are 576 codes or 768 packed ones"):
        read_checkpoint(path, C=11)
    assert read_checkpoint(path, C=11, in_features=576).layers[""].kind == "RMSCounterLinear"
    assert read_checkpoint(path, C=11, in_features=768).layers[""].kind == "PackedRMSCounterLinear"
    with pytest.raises(ValueError, match="expected in_features of 576 or 768 for 576 columns, got 512"):
        read_checkpoint(path, C=11, in_features=512)
    # 8 columns cannot be packed ones.
    path = saved(tmp_path / "c.pt", published())
    assert read_checkpoint(path, C=11).layers["l"].in_features == 8
    with pytest.raises(ValueError, match="expected one in_features, got 12 by the call, 8 by the state's width"):
        read_checkpoint(path, C=11, in_features=12)


@pytest.mark.parametrize("kind", [CompactCounterLinear, RMSCounterLinear, PackedRMSCounterLinear])
def test_a_state_dict_of_ours_says_more_and_training_goes_on(tmp_path: Path, kind: type[CompactCounterLinear]) -> None:
    torch.manual_seed(3)
    layer = kind(8, 5, C=9, lr=0.3, decimate_updates=True, ops=memtrain_cl.reference)
    x, grad = torch.randn(3, 8), torch.randn(3, 5)
    layer(x).backward(grad)
    path = saved(tmp_path / "c.pt", layer.state_dict())
    read = read_checkpoint(path, in_features=8).layers[""]
    assert (read.C, read.seed, read.step, read.kind) == (9, layer.seed, 1, kind.__name__)
    assert read.clock == (int(layer.clock[0]), int(layer.clock[1]))
    made = layer_from_state(read_checkpoint(path, model=layer).layers[""], ops=memtrain_cl.reference)
    assert made.hyper() == layer.hyper()
    for one in (layer, made):
        for _ in range(3):
            one(x).backward(grad)
    assert torch.equal(made.state, layer.state)
    assert torch.equal(made.scale, layer.scale)
    with pytest.raises(ValueError, match="expected one C, got 10 by the call, 9 by the file"):
        read_checkpoint(path, C=10, in_features=8)


def test_a_model_says_C_and_in_features(tmp_path: Path) -> None:
    def make(seed: int, C: int = 11) -> nn.Module:
        torch.manual_seed(seed)
        layers = {"q": PackedRMSCounterLinear(768, 2, C=C, lr=0.7, ops=memtrain_cl.reference), "n": nn.LayerNorm(768)}
        return nn.ModuleDict(layers)

    model = make(1)
    plain = {name: value for name, value in model.state_dict().items() if not name.endswith((".seed", ".step"))}
    path = saved(tmp_path / "c.pt", plain)
    other = make(2)
    load_into(other, read_checkpoint(path, model=other))
    for name, value in plain.items():
        assert torch.equal(other.state_dict()[name], value)
    with pytest.raises(ValueError, match=r"layer 'q': expected one C, got 11 by the call, 7 by the model"):
        read_checkpoint(path, C=11, model=make(1, 7))
    with pytest.raises(ValueError, match="'q' in the file only"):
        read_checkpoint(path, model=nn.Linear(2, 2))
    flat = nn.ModuleDict({"q": RMSCounterLinear(768, 2, C=11, ops=memtrain_cl.reference)})
    with pytest.raises(ValueError, match="expected a RMSCounterLinear in the file, got a PackedRMSCounterLinear"):
        read_checkpoint(path, model=flat)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (published(state=torch.full((2, 8), 63, dtype=torch.uint8)), r"l\.state: expected codes below 63 .*'63 at 0'"),
        (published(state=torch.zeros(2, 8, 1, dtype=torch.uint8)), r"l\.state: expected \[out, columns\]"),
        (published(scale=torch.ones(3, 1)), r"l\.scale: expected float32 \[2, 1\], got 'float32 \[3, 1\]'"),
        (published(scale=torch.ones(2, 1).double()), r"l\.scale: expected float32 \[2, 1\], got 'float64 "),
        (published(scale=torch.tensor([[1.0], [0.0]])), r"l\.scale: expected finite values > 0, got '0.0 in row 1'"),
        (published(v=torch.tensor([[1.0], [float("nan")]])), r"l\.v: expected finite values >= 0"),
        (published(v=None), r"l\.v: expected the moments"),
        (published(scale=None), r"l\.scale: expected the scale of a layer with a state, got 'none'"),
        ({**published(), "l.seed": torch.tensor(-1)}, r"l\.seed: expected an int64 >= 0"),
        ({**published(), "l.step": torch.tensor(1.0)}, r"l\.step"),
        ({**published(), "l.clock": torch.tensor([3, 0, 0, 0])}, r"l\.clock"),
        ({**published(), "x": 5}, "entry x: expected a tensor under a name, got 'int'"),
        (dict([*published().items(), (5, torch.zeros(1))]), "entry 5: expected a tensor under a name"),
        ({**RUN, "config": {}, "model": published()}, "config: expected a model with its C"),
        ([1, 2], "content: expected a state_dict, got 'list'"),
        (
            {"x": torch.zeros(4).expand(3, 4)},
            r"expected tensors within their storages, here 4 elements, got '\[3, 4\]'",
        ),
        ({"x": torch.eye(2).to_sparse()}, "expected the names of dense tensors"),
        (torch.nn.Linear(2, 2), "expected the names of dense tensors"),
    ],
)
def test_faults_are_named(tmp_path: Path, content: Any, message: str) -> None:
    path = saved(tmp_path / "c.pt", content)
    with pytest.raises(CorruptFile, match=message) as caught:
        read_checkpoint(path, C=11)
    assert str(caught.value).startswith(f"{path}: ")


def test_what_a_checkpoint_is_not(tmp_path: Path) -> None:
    for content, message in [
        ({"x": torch.zeros(1)}, "expected counter layers"),
        ({**RUN, "model": published()}, "memtrain-cl export takes it"),
        (published(state=torch.zeros(2, 10, dtype=torch.uint8)), "in fours"),
        ({**published(), "l.accumulation": torch.zeros(4)}, "sum of gradients"),
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            read_checkpoint(saved(tmp_path / "c.pt", content), C=11)
        assert not isinstance(caught.value, CorruptFile)
    with pytest.raises(ValueError, match=r"layer 'l': expected C .* 1\.\.11"):
        read_checkpoint(saved(tmp_path / "c.pt", published()), C=20)
    with pytest.raises(FileNotFoundError):
        read_checkpoint(tmp_path / "missing", C=11)


def rezipped(path: Path, changes: dict[str, bytes]) -> bytes:
    """The archive with some members' bytes changed, and their checksums with them."""
    file = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(file, "w") as new:
        for member in old.infolist():
            new.writestr(member, changes.get(member.filename, old.read(member)))
    return file.getvalue()


def pickled(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read("c/data.pkl")


class Call:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pickle.dumps(Call(eval, "1"), 2), "expected the names of dense tensors and dictionaries, got '.*eval'"),
        (pickle.dumps(Call(bytearray, 2**40), 2), "expected the names"),
        (pickle.dumps(Call(torch.FloatTensor, 2**40), 2), "expected the names"),
        (pickle.dumps(Call(torch.UntypedStorage, 2**40), 2), "expected the names"),
        (pickle.dumps({"a": 1}, 4), "expected pickle protocol 2"),
        (b"\x80\x02C\x01a.", "expected containers, plain values and dense tensors, got 'SHORT_BINBYTES'"),
        (b"\x80\x02X\xff\xff\xff\x7fabc.", "expected a whole pickle"),
        (b"\x80\x02}r\xff\xff\xff\x7f.", "state_dict|counter layers"),
        (b"\x80\x02a.", "expected a whole pickle"),
        (b"\x80\x02h\x00.", "expected a whole pickle"),
        (b"\x80\x02)R.", "expected a whole pickle"),
        (b"\x80\x02ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsNsb.", "expected the metadata of a dictionary"),
        (b"\x80\x02}}b.", "expected the metadata of a dictionary"),
        (b"\x80\x02NQ.", "expected a whole pickle"),
        (b"\x80\x02" + b"(" * 3000, "expected a whole pickle"),
        (b"", "expected a whole pickle"),
        (b"\x80\x02ccollecti\\ons\nOrderedDict\n.", "expected"),
    ],
)
def test_pickles_made_to_harm_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = saved(tmp_path / "c.pt", published())
    path.write_bytes(rezipped(path, {"c/data.pkl": data}))
    with less_memory_than(2_000_000), pytest.raises(ValueError, match=message):
        read_checkpoint(path, C=11)


def test_storages_are_as_large_as_their_members(tmp_path: Path) -> None:
    path = saved(tmp_path / "c.pt", {"a": torch.arange(4, dtype=torch.uint8)})
    pickle_of, short = pickled(path), b"K\x04tq\x07"
    assert short in pickle_of
    for count in (2**31 - 1, 5, 3):
        changed = pickle_of.replace(short, b"J" + count.to_bytes(4, "little") + short[2:])
        path.write_bytes(rezipped(path, {"c/data.pkl": changed}))
        with pytest.raises(CorruptFile, match=f"member c/data/0: expected {count} bytes, got 4"):
            load_archive(path)
        path = saved(tmp_path / "c.pt", {"a": torch.arange(4, dtype=torch.uint8)})


def test_many_views_of_one_storage_do_not_become_many_copies(tmp_path: Path) -> None:
    square = torch.zeros(300, 300)
    path = saved(tmp_path / "c.pt", {**published(), **{f"t{i}": square.T for i in range(50)}})
    with pytest.raises(CorruptFile, match="expected at most 4 times the file's"):
        read_checkpoint(path, C=11)


def test_archives_are_checked(tmp_path: Path) -> None:
    path = saved(tmp_path / "c.pt", published())
    whole = path.read_bytes()
    data = bytearray(whole)
    data[data.index(np.float32(GOLDEN["v"][0]).tobytes())] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptFile, match="CRC"):
        read_checkpoint(path, C=11)
    path.write_bytes(b"PK" + whole[2:-30])
    with pytest.raises(CorruptFile, match="zip directory"):
        read_checkpoint(path, C=11)
    path.write_bytes(whole)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("C/data.pkl", b"")
    with pytest.raises(CorruptFile, match=r"one data\.pkl"):
        read_checkpoint(path, C=11)
    path.write_bytes(whole)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("c/DATA/0", b"")
    with pytest.raises(CorruptFile, match="differ by more than case"):
        read_checkpoint(path, C=11)
