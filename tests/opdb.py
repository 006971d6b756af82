"""torch's own op samples (torch.testing._internal, op_db) run against the device "opencl".

    python -m tests.opdb [NAME ...] [--dtype float32] [--samples N]     one line an op: ok, or what went wrong
    python -m tests.opdb --table                                        the table that README links, see `write_table`

An op counts as having a kernel when all its samples run in strict mode. The tests take the list in opdb_ops.py.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

#: Error a result may have beside the CPU's, as torch's own tests allow between devices.
TOLERANCES = {
    torch.float32: {"rtol": 1e-4, "atol": 2e-5},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
}


@dataclass(frozen=True)
class Outcome:
    """How an op did. status: ok, host (a sample fell back), wrong, error; detail says where."""

    name: str
    status: str
    samples: int
    detail: str = ""


def op_infos() -> dict[str, Any]:
    """Every OpInfo by its full name (name, or name.variant)."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {info.full_name: info for info in op_db}


def to_device(value: Any, device: torch.device) -> Any:
    """The tensors in `value` on the device; leaves stay leaves."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.detach().to(device)
        return moved.requires_grad_() if tensor.requires_grad else moved

    return tree_map_only(torch.Tensor, move, value)


def samples_of(info: Any, dtype: torch.dtype, *, grad: bool, limit: int) -> Iterator[Any]:
    """At most `limit` of the op's samples on the CPU."""
    torch.manual_seed(0)
    yield from itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=grad), limit)


def compare(got: Any, want: Any, dtype: torch.dtype) -> None:
    """AssertionError unless the device's result equals the CPU's."""
    got = tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), got)
    want = tree_map_only(torch.Tensor, lambda t: t.detach(), want)
    torch.testing.assert_close(got, want, equal_nan=True, **TOLERANCES.get(dtype, {"rtol": 0, "atol": 0}))


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, found.append, value)
    return found


def run_sample(info: Any, sample: Any, device: torch.device, dtype: torch.dtype, *, grad: bool) -> None:
    """One sample, forward and (where grad) backward from a fixed gradient; AssertionError where the two part."""
    arguments = (sample.input, sample.args, sample.kwargs)
    moved = to_device(arguments, device)
    want = info.op(arguments[0], *arguments[1], **arguments[2])
    got = info.op(moved[0], *moved[1], **moved[2])
    if sample.output_process_fn_grad is not None and grad:
        want, got = sample.output_process_fn_grad(want), sample.output_process_fn_grad(got)
    compare(got, want, dtype)
    if not grad:
        return
    outs = [(g, w) for g, w in zip(_tensors(got), _tensors(want), strict=True) if w.requires_grad]
    leaves = [(g, w) for g, w in zip(_tensors(moved), _tensors(arguments), strict=True) if w.requires_grad]
    if not outs or not leaves:
        return
    seeds = [torch.randn(w.shape, generator=torch.Generator().manual_seed(1)).to(w.dtype) for _, w in outs]
    wanted = torch.autograd.grad([w for _, w in outs], [w for _, w in leaves], seeds, allow_unused=True)
    given = torch.autograd.grad(
        [g for g, _ in outs], [g for g, _ in leaves], [s.to(device) for s in seeds], allow_unused=True
    )
    for one, other in zip(given, wanted, strict=True):
        assert (one is None) == (other is None), "a gradient is missing on one side"
        if one is not None and other is not None:
            compare(one, other, dtype)


def run_op(info: Any, device: torch.device, dtype: torch.dtype, limit: int, *, forward: bool = False) -> Outcome:
    """All samples of an op in strict mode."""
    from memtrain_cl.torch_device.fallback import FallbackRefused, strict

    grad = not forward and dtype.is_floating_point and info.supports_autograd and device.index == 0
    done = 0
    try:
        with strict(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for sample in samples_of(info, dtype, grad=grad, limit=limit):
                run_sample(info, sample, device, dtype, grad=grad)
                done += 1
    except FallbackRefused as refusal:
        return Outcome(info.full_name, "host", done, str(refusal).split(" has ")[0])
    except AssertionError as error:
        return Outcome(info.full_name, "wrong", done, " ".join(str(error).split())[:300])
    except Exception as error:  # noqa: BLE001 (any error is the outcome that this line reports)
        return Outcome(info.full_name, "error", done, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return Outcome(info.full_name, "ok", done)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="ops, by a part of their name (default: all)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--device", default="opencl:0")
    parser.add_argument("--forward", action="store_true", help="no gradients")
    parser.add_argument("--exact", action="store_true", help="names are whole")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    failed = 0
    for name, info in op_infos().items():
        wanted = name in options.names if options.exact else any(part in name for part in options.names or [""])
        if not wanted or not info.supports_dtype(dtype, "cpu"):
            continue
        started = time.perf_counter()
        outcome = run_op(info, torch.device(options.device), dtype, options.samples, forward=options.forward)
        failed += outcome.status in ("wrong", "error")
        seconds = time.perf_counter() - started
        print(f"{outcome.status:6} {name:45} {outcome.samples:4d} {seconds:6.1f} s  {outcome.detail}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    import memtrain_cl.torch_device  # noqa: F401 (registers the device)

    sys.exit(main())
