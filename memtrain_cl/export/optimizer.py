"""The state of an optimizer as a safetensors file: its tensors by name, the rest of its state_dict as JSON beside them.

    <path>          a tensor, named by where it stands in the state_dict: "state.0.exp_avg"
    metadata        one key, JSON {"format": 1, "state_dict": tree, "sha256": {"<path>": hex of its bytes},
                    "header_sha256": hex of the rest of this JSON and of each tensor's name, dtype and shape}

In the tree a dict is {"dict": [[key, value], ...]}, a tuple {"tuple": [...]}, a tensor {"tensor": "<path>"}; lists,
words, finite numbers, true, false and null are themselves. So it serves every optimizer of torch's kind.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memtrain_cl.export.container import (
    Container,
    Tensor,
    code_and_shape,
    tensor_bytes,
    tensor_from_bytes,
    write_container,
)
from memtrain_cl.export.hostile import corrupt, strict_json
from memtrain_cl.export.packed import to_tensor, to_torch

if TYPE_CHECKING:
    import torch

KEY = "memtrain_cl.optimizer"
FORMAT = 1

Path = str | os.PathLike[str]


def save_optimizer(optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Writes `optimizer.state_dict()`; a kill at any moment leaves the old file or the new one, whole.

    ValueError, and no file, for what is neither a dense tensor nor a plain value, and for numbers that are not finite
    in the groups; OSError when the disk refuses.
    """
    tensors: dict[str, Tensor] = {}
    tree = _packed(optimizer.state_dict(), "", tensors)
    sums = {name: hashlib.sha256(tensor_bytes(tensor).data).hexdigest() for name, tensor in tensors.items()}
    content = {"format": FORMAT, "state_dict": tree, "sha256": sums}
    header = {name: code_and_shape(tensor) for name, tensor in tensors.items()}
    text = json.dumps({**content, "header_sha256": _sum_of(content, header)}, allow_nan=False)
    write_container(path, tensors, text, KEY)


def _sum_of(content: dict[str, Any], header: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    plain = [content, {name: [code, list(shape)] for name, (code, shape) in header.items()}]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def load_optimizer(optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Loads a file of `save_optimizer` into an optimizer of the same kind and parameters.

    CorruptFile for a file that does not hold what it says, OSError when there is none, and the errors of the
    optimizer's `load_state_dict`; the optimizer has not changed then.
    """
    optimizer.load_state_dict(read_optimizer(path))


def read_optimizer(path: Path) -> dict[str, Any]:
    """The state_dict in a file, its tensors on the host. Errors as `load_optimizer`'s."""
    with Container(path) as container:
        text = container.metadata.get(KEY)
        if text is None:
            raise corrupt(path, "__metadata__", f"the key {KEY!r} of an optimizer's file", sorted(container.metadata))
        content = strict_json(text, path, KEY)
        if not isinstance(content, dict) or content.keys() != {"format", "state_dict", "sha256", "header_sha256"}:
            raise corrupt(path, KEY, "format, state_dict, sha256 and header_sha256", content)
        if content["format"] != FORMAT:
            raise corrupt(path, f"{KEY}: format", str(FORMAT), content["format"])
        total = content.pop("header_sha256")
        header = {name: (entry.code, entry.shape) for name, entry in container.entries.items()}
        found = _sum_of(content, header)
        if found != total:
            raise corrupt(path, "header_sha256", str(total), found)
        sums = content["sha256"]
        if not isinstance(sums, dict) or sums.keys() != container.entries.keys():
            raise corrupt(path, f"{KEY}: sha256", f"sums of {sorted(container.entries)}", sums)
        tensors = {}
        for name, entry in container.entries.items():
            data = container.bytes_of(name)
            found = hashlib.sha256(data.data).hexdigest()
            if found != sums[name]:
                raise corrupt(path, f"sha256 of tensor {name}", str(sums[name]), found)
            tensors[name] = to_torch(tensor_from_bytes(entry.code, entry.shape, data))
    try:
        state = _unpacked(content["state_dict"], tensors, path)
    except RecursionError:
        raise corrupt(path, f"{KEY}: state_dict", "less nesting", text) from None
    if not isinstance(state, dict) or not {"state", "param_groups"} <= state.keys() or tensors:
        raise corrupt(path, f"{KEY}: state_dict", "state and param_groups that name each tensor once", text)
    return state


def _packed(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        if where in tensors:
            raise ValueError(f"expected distinct names of tensors in an optimizer's state, got {where!r} twice")
        if value.is_floating_point() and not torch.isfinite(value.detach().cpu()).all():
            raise ValueError(f"expected finite numbers in an optimizer's state, got others in {where}")
        tensors[where] = to_tensor(where, value)
        return {"tensor": where}
    if isinstance(value, dict):
        items = value.items()
        return {"dict": [[_plain(key, where), _packed(inner, _inside(where, key), tensors)] for key, inner in items]}
    if isinstance(value, list | tuple):
        packed = [_packed(inner, _inside(where, place), tensors) for place, inner in enumerate(value)]
        return {"tuple": packed} if isinstance(value, tuple) else packed
    return _plain(value, where)


def _inside(where: str, key: Any) -> str:
    return f"{where}.{key}" if where else str(key)


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"expected finite numbers in an optimizer's state, got {value} in {where}")
    if value is not None and type(value) not in (bool, int, float, str):
        raise ValueError(f"expected tensors and plain values in an optimizer's state, got {value!r} in {where}")
    return value


def _unpacked(tree: Any, tensors: dict[str, torch.Tensor], path: Path) -> Any:
    """The value of a tree; takes out of `tensors` what it names."""
    if isinstance(tree, list):
        return [_unpacked(inner, tensors, path) for inner in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items() if len(tree) == 1 else ((None, None),)
    if kind == "tensor" and isinstance(content, str) and content in tensors:
        return tensors.pop(content)
    if kind == "tuple" and isinstance(content, list):
        return tuple(_unpacked(inner, tensors, path) for inner in content)
    if kind == "dict" and isinstance(content, list):
        pairs = [pair for pair in content if isinstance(pair, list) and len(pair) == 2]
        if len(pairs) == len(content) and not any(isinstance(key, list | dict) for key, _ in pairs):
            return {key: _unpacked(inner, tensors, path) for key, inner in pairs}
    raise corrupt(path, f"{KEY}: state_dict", "a dict, a tuple or a tensor of the file", tree)
