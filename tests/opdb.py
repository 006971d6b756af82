"""torch's own op samples (torch.testing._internal, op_db) run against the device "opencl".

    python -m tests.opdb [NAME ...] [--dtype float32] [--samples N]     one line an op: ok, or what went wrong
    python -m tests.opdb --table --out FILE [--merge FILE.json ...]     the table that README links, see opdb_table.py

An op counts as having a kernel when all its samples run in strict mode, but those of types that the device does not
hold, which must raise TypeError. The tests take the list in opdb_ops.py.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map, tree_map_only

#: Error a result may have beside the CPU's, as torch's own tests allow between devices.
TOLERANCES = {torch.float32: (1e-4, 2e-5), torch.bfloat16: (1.6e-2, 1e-2), torch.float16: (2e-3, 2e-3)}
#: Ops that may be further off than that, and why.
WIDER: dict[str, tuple[float, float]] = {
    # Rows of one element have no variance: 1/sqrt(eps) = 316 multiplies the rounding of their gradients, which are 0.
    "native_layer_norm": (1e-4, 3e-4),
}
#: Ops that cannot be compared with the CPU, and why.
INCOMPARABLE = {
    **dict.fromkeys(
        ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
        "the result is uninitialised",
    ),
    **dict.fromkeys(
        (
            *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal"),
            *("normal.in_place", "normal.number_mean", "uniform", "rand_like", "randint", "randint_like", "randn"),
            *("randn_like", "pca_lowrank", "svd_lowrank", "nn.functional.alpha_dropout", "nn.functional.dropout"),
            *("nn.functional.dropout2d", "nn.functional.dropout3d", "nn.functional.feature_alpha_dropout.with_train"),
            "nn.functional.multi_head_attention_forward",  # it drops out in every sample
            *("nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d", "nn.functional.rrelu"),
        ),
        "the result is random",
    ),
    **dict.fromkeys(
        (
            *("jiterator_2inputs_2outputs", "jiterator_4inputs_with_extra_args", "jiterator_binary"),
            *("jiterator_binary_return_by_ref", "jiterator_unary"),
        ),
        "CUDA's alone",
    ),
}
#: Ops whose tensor arguments, but the first, belong on the CPU on every device.
HOST_ARGUMENTS = frozenset({"tensor_split"})


@dataclass(frozen=True)
class Outcome:
    """How an op did.

    status: ok; host (a sample fell back); refused (all samples are of types that the device does not hold); wrong;
    error; timeout. detail says where. samples: those that agreed; refused: those that were refused as they must be.
    """

    name: str
    status: str
    samples: int
    refused: int
    detail: str = ""
    seconds: float = 0.0


@functools.cache
def op_infos() -> dict[str, Any]:
    """Every OpInfo by its full name (name, or name.variant)."""
    from tests.torch_op_db import op_db

    return {info.full_name: info for info in op_db}


def to_device(value: Any, device: torch.device) -> Any:
    """The tensors in `value` on the device, with their strides and what lies around them; leaves stay leaves. Where
    `value` names the CPU, the device takes its place.
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach()
        moved = plain.to(device)
        if moved.layout is torch.strided and plain.nbytes < plain.untyped_storage().nbytes():
            whole = torch.empty(0, dtype=plain.dtype).set_(plain.untyped_storage())
            moved = whole.to(device).as_strided(plain.shape, plain.stride(), plain.storage_offset())
        return moved.detach().requires_grad_() if tensor.requires_grad else moved

    def move_any(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return move(leaf)
        return device if leaf == "cpu" or (isinstance(leaf, torch.device) and leaf.type == "cpu") else leaf

    return tree_map(move_any, value)


def samples_of(info: Any, dtype: torch.dtype, *, grad: bool, limit: int) -> Iterator[Any]:
    """At most `limit` of the op's samples on the CPU."""
    from tests.torch_op_db import sample_inputs

    torch.manual_seed(0)
    samples = sample_inputs(info, dtype, requires_grad=grad)
    # What drops out is random.
    yield from itertools.islice((s for s in samples if not s.kwargs.get("dropout_p")), limit)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of a nest of them."""
    found: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, found.append, value)
    return found


def is_held(value: Any) -> bool:
    """Whether the device holds every tensor and type in `value`."""
    from memtrain_cl.torch_device.tensor import DTYPES

    types: list[torch.dtype] = []
    tree_map_only(torch.dtype, types.append, value)
    tensors = tensors_in(value)
    return all(t in DTYPES for t in types) and all(t.dtype in DTYPES and t.layout is torch.strided for t in tensors)


def compare(got: Any, want: Any, tolerance: tuple[float, float]) -> None:
    """AssertionError unless the device's result equals the CPU's within (relative, absolute) errors."""
    got = tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), got)
    want = tree_map_only(torch.Tensor, lambda t: t.detach(), want)
    torch.testing.assert_close(got, want, equal_nan=True, rtol=tolerance[0], atol=tolerance[1])


def run_sample(info: Any, sample: Any, device: torch.device, dtype: torch.dtype, *, grad: bool) -> bool:
    """One sample, forward and (where grad) backward from a fixed gradient; AssertionError where the two part.

    False for a sample of types that the device does not hold, which it refused with TypeError.
    """
    tolerance = TOLERANCES.get(dtype, (0.0, 0.0))
    if dtype == torch.float32:
        tolerance = WIDER.get(info.full_name, tolerance)
    arguments = (sample.input, sample.args, sample.kwargs)
    want = info.op(arguments[0], *arguments[1], **arguments[2])
    if not (is_held(arguments) and is_held(want)):
        try:
            moved = to_device(arguments, device)
            info.op(moved[0], *moved[1], **moved[2])
        except TypeError:
            return False
        raise AssertionError("types that the device does not hold were not refused")
    moved = to_device(arguments, device)
    if info.name in HOST_ARGUMENTS:
        moved = (moved[0], *arguments[1:])
    got = info.op(moved[0], *moved[1], **moved[2])
    if sample.output_process_fn_grad is not None and grad:
        want, got = sample.output_process_fn_grad(want), sample.output_process_fn_grad(got)
    compare(got, want, tolerance)
    if not grad:
        return True
    outs = [(g, w) for g, w in zip(tensors_in(got), tensors_in(want), strict=True) if w.requires_grad]
    leaves = [(g, w) for g, w in zip(tensors_in(moved), tensors_in(arguments), strict=True) if w.requires_grad]
    if not outs or not leaves:
        return True
    seeds = [torch.randn(w.shape, generator=torch.Generator().manual_seed(1)).to(w.dtype) for _, w in outs]
    wanted = torch.autograd.grad([w for _, w in outs], [w for _, w in leaves], seeds, allow_unused=True)
    given = torch.autograd.grad(
        [g for g, _ in outs], [g for g, _ in leaves], [s.to(device) for s in seeds], allow_unused=True
    )
    for one, other in zip(given, wanted, strict=True):
        assert (one is None) == (other is None), "a gradient is missing on one side"
        if one is not None and other is not None:
            compare(one, other, tolerance)
    return True


class Expired(Exception):
    """An op took longer than it may."""


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Expired after so many seconds; 0 sets no limit. In the main thread alone."""
    if not seconds:
        yield
        return

    def expire(*_: object) -> None:
        raise Expired(f"more than {seconds} s")

    former = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


def run_op(
    info: Any, device: torch.device, dtype: torch.dtype, limit: int, *, forward: bool = False, seconds: int = 0
) -> Outcome:
    """At most `limit` samples of an op in strict mode; gradients too, on opencl:0 unless `forward`."""
    from memtrain_cl.torch_device.fallback import FallbackRefused, strict

    grad = not forward and dtype.is_floating_point and info.supports_autograd and device.index == 0
    done = {True: 0, False: 0}
    status, detail, started = "", "", time.perf_counter()
    try:
        with strict(), warnings.catch_warnings(), at_most(seconds):
            warnings.simplefilter("ignore")
            for sample in samples_of(info, dtype, grad=grad, limit=limit):
                done[run_sample(info, sample, device, dtype, grad=grad)] += 1
    except FallbackRefused as refusal:
        status, detail = "host", str(refusal).split(" has ")[0]
    except AssertionError as error:
        status, detail = "wrong", " ".join(str(error).split())[:300]
    except Expired as error:
        status, detail = "timeout", str(error)
    except Exception as error:  # noqa: BLE001 (any error is the outcome that this line reports)
        status, detail = "error", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    status = status or ("ok" if done[True] or not done[False] else "refused")
    return Outcome(info.full_name, status, done[True], done[False], detail, round(time.perf_counter() - started, 2))


def run_ops(
    names: list[str], device: torch.device, dtype: torch.dtype, limit: int, *, forward: bool = False, seconds: int = 0
) -> Iterator[Outcome]:
    """`run_op` of each of these that has samples of the type."""
    infos = op_infos()
    for name in names:
        if infos[name].supports_dtype(dtype, "cpu"):
            yield run_op(infos[name], device, dtype, limit, forward=forward, seconds=seconds)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="ops, by a part of their name (default: all)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--seconds", type=int, default=0, help="the most that an op may take (0: any)")
    parser.add_argument("--device", default="opencl:0")
    parser.add_argument("--forward", action="store_true", help="no gradients")
    parser.add_argument("--exact", action="store_true", help="names are whole")
    parser.add_argument("--table", action="store_true", help="run the listed ops on every device, write a table")
    parser.add_argument("--out", default="ops.md", help="where the table goes; its JSON goes beside it")
    parser.add_argument("--merge", nargs="*", default=[], help="JSON of tables made elsewhere, to be part of this one")
    options = parser.parse_args()
    if options.table:
        from tests.opdb_table import make_table

        make_table(options.out, options.merge, options.samples)
        return 0
    wanted = options.names or [""]
    names = [n for n in op_infos() if (n in wanted if options.exact else any(part in n for part in wanted))]
    failed = 0
    for o in run_ops(
        [name for name in names if name not in INCOMPARABLE],
        torch.device(options.device),
        getattr(torch, options.dtype),
        options.samples,
        forward=options.forward,
        seconds=options.seconds,
    ):
        failed += o.status in ("wrong", "error")
        print(f"{o.status:7} {o.name:45} {o.samples:4d} {o.refused:3d} {o.seconds:6.1f} s  {o.detail}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    import memtrain_cl.torch_device  # noqa: F401 (registers the device)

    sys.exit(main())
