"""Check every kernel of a device against the torch reference, over the table of `memtrain_cl.cases`.

Each device is checked in a child process, because a driver may end the process instead of reporting an error; the
kernel that was running then gets its row, and a fresh child goes on with the rest. Every kernel runs in each of its
shapes (`shapes_of`), whatever the device would choose for itself.
"""

from __future__ import annotations

import math
import multiprocessing
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from memtrain_cl import ops, reference
from memtrain_cl.case import Case
from memtrain_cl.cases import PRODUCT_TOLERANCE, cases_of, declared_kernels, make_rule
from memtrain_cl.comparison import Comparison, compare_exact, compare_product, generator
from memtrain_cl.device import Device, DeviceInfo, devices, get_device, use_device
from memtrain_cl.formats import code_count
from memtrain_cl.probe import faults
from memtrain_cl.tuning import groups_share_rows
from memtrain_cl.verify_adam import CHECKS as OF_ADAM
from memtrain_cl.verify_automagic import CHECKS as OF_AUTOMAGIC
from memtrain_cl.verify_blockwise import CHECKS as OF_BLOCKS
from memtrain_cl.verify_engine import CHECKS as OF_ENGINE
from memtrain_cl.verify_fp8 import CHECKS as OF_FP8
from memtrain_cl.verify_hadamard import CHECKS as OF_ROTATIONS
from memtrain_cl.verify_int8 import CHECKS as OF_CODES
from memtrain_cl.verify_profile import CHECKS as OF_PROFILES
from memtrain_cl.verify_stochastic import CHECKS as OF_ROWS


@dataclass(frozen=True)
class Row:
    """The verdict on one kernel of one device, over all its cases and shapes.

    max_error and mismatches are None where no comparison came about. detail: why the kernel is not ok, "" where it is.
    """

    kernel: str
    file: str
    platform: str
    platform_version: str
    device: str
    ok: bool
    max_error: float | None
    mismatches: int | None
    cases: int
    detail: str


# ---- one case ----


def layer_tensors(case: Case, chance: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """state, scale and v of a case's layer; every code occurs in layers that are large enough."""
    rows, columns, C = case.shape["rows"], case.shape["columns"], case.options.get("C", 1)
    codes = torch.randint(0, code_count(C), (rows, columns), generator=chance, dtype=torch.uint8)
    scale = 0.02 * 50.0 ** torch.rand(rows, 1, generator=chance)
    v = 10.0 ** (-8.0 * torch.rand(rows, 1, generator=chance))
    return reference.pack_codes(codes) if case.options.get("packed") else codes, scale, v


def gradient(rows: int, columns: int, chance: torch.Generator) -> torch.Tensor:
    """A gradient whose rows have magnitudes from 1e-4 to 1; from eight rows on, seven of them are hard ones."""
    grad = torch.randn(rows, columns, generator=chance) * 10.0 ** (-4.0 * torch.rand(rows, 1, generator=chance))
    if rows >= 8:
        grad[0, columns // 2] = math.nan
        grad[1, columns - 1] = -math.inf
        grad[2] = 0.0
        grad[3] *= 1e-38 / grad[3].abs().max()  # subnormal, all of them or nearly
        grad[4] *= 1e30  # finite, but not so its squares
        grad[5] = grad[5].sign() * 1e17
        grad[6] *= 1e-19  # squares that are subnormal
    return grad


def check_codec(case: Case) -> Comparison:
    """pack_codes and unpack_codes: bytes."""
    rows, columns = case.shape["rows"], case.shape["columns"]
    codes = torch.randint(0, 64, (rows, columns), generator=generator(case), dtype=torch.uint8)
    if case.op == "pack_codes":
        return compare_exact(ops.pack_codes(codes), reference.pack_codes(codes))
    packed = reference.pack_codes(codes)
    return compare_exact(ops.unpack_codes(packed, columns), reference.unpack_codes(packed, columns))


def check_decode(case: Case) -> Comparison:
    """decode_dense: bytes."""
    state, scale, _ = layer_tensors(case, generator(case))
    columns, C, packed = case.shape["columns"], case.options["C"], case.options["packed"]
    got, want = (room.decode_dense(state, scale, columns, C=C, packed=packed) for room in (ops, reference))
    return compare_exact(got, want)


def check_statistics(case: Case) -> Comparison:
    """row_statistics: bytes, NaN aside, whose bits differ between processors."""
    chance = generator(case)
    state, _, _ = layer_tensors(case, chance)
    grad = gradient(case.shape["rows"], case.shape["columns"], chance)
    C, packed = case.options["C"], case.options["packed"]
    got, want = (room.row_statistics(state, grad, C=C, packed=packed) for room in (ops, reference))
    nan = torch.tensor(math.nan)
    return compare_exact(torch.where(got.isnan(), nan, got), torch.where(want.isnan(), nan, want))


def check_update(case: Case) -> Comparison:
    """The update from a gradient, or from what makes it: every byte of what it changes after one step."""
    chance = generator(case)
    rows, columns = case.shape["rows"], case.shape["columns"]
    state, scale, v = layer_tensors(case, chance)
    s_base = scale * (0.5 + torch.rand(rows, 1, generator=chance))
    # What no weight is shows that nothing but what changed is written.
    cache = torch.full((rows, columns), 5, dtype=getattr(torch, case.options.get("cache", "int8")))
    start = (state, scale, v, torch.tensor([3, 5, 7]), s_base, cache)
    grad = gradient(rows, columns, chance)
    seed = int(torch.randint(0, 1 << 32, (), generator=chance))
    rule = make_rule(case.options)
    source: tuple[torch.Tensor, ...] = (grad,)
    if case.op == "counter_update_from_io_":
        tokens = case.shape["tokens"]
        # Rows of the magnitudes that gradients have, of no numbers, zeros and subnormals too.
        grad_out = torch.randn(tokens, rows, generator=chance) * gradient(rows, 1, chance)[:, 0].abs().clamp_max(1e3)
        source = (torch.randn(tokens, columns, generator=chance), grad_out)
    estimate = grad.square().mean(dim=1, keepdim=True) * (0.5 + torch.rand(rows, 1, generator=chance))
    more: dict[str, Any] = {
        "g_sq": estimate if rule.rms_mode == "proxy" else None,
        "clock": torch.tensor([4, 0, 1, 2]) if case.options.get("clock") else None,
    }
    if "index_base" in case.options:
        more["index_base"] = case.options["index_base"]
    ends = []
    for room in (ops, reference):
        state, scale, v, totals, s_base, cache = (tensor.clone() for tensor in start)
        own = {"s_base": s_base, "cache": cache if "cache" in case.options else None}
        getattr(room, case.op)(state, scale, v, *source, totals, rule, seed=seed, **own, **more)
        codes = reference.unpack_codes(state, columns) if case.options["packed"] else state
        ends.append((codes, scale, v, totals, s_base, cache))
    return sum((compare_exact(got, want) for got, want in zip(*ends, strict=True)), Comparison())


def check_clock(case: Case) -> Comparison:
    """advance_clock_ and observe_clock_: the clock's four numbers."""
    ends = []
    for room in (ops, reference):
        if case.op == "advance_clock_":
            clock, totals = torch.tensor([case.shape["period"], case.shape["since"], 0, 3]), torch.tensor([4, 5, 6])
            room.advance_clock_(clock, totals)
        else:
            clock, totals = torch.tensor([3, 1, case.shape["fire"], 5]), torch.tensor([4, 5 + case.shape["flips"], 6])
            room.observe_clock_(clock, totals, case.shape["weights"])
        ends.append(clock)
    return compare_exact(*ends)


def check_backward(case: Case) -> Comparison:
    """counter_backward_: every byte of what a step changes, of inputs so small and whole that products are exact."""
    chance = generator(case)
    tokens, rows, columns = (case.shape[name] for name in ("tokens", "rows", "columns"))
    state, scale, v = layer_tensors(case, chance)
    x, grad_out = (torch.randint(-3, 4, (tokens, size), generator=chance).float() for size in (columns, rows))
    cache = torch.empty((rows, columns), dtype=getattr(torch, case.options["cache"]))
    rule = make_rule(case.options)
    reference.refresh_cache_(cache, state, C=rule.C, packed=rule.packed)
    s_base = scale * (0.5 + torch.rand(rows, 1, generator=chance))
    # One of four steps, the last one or another.
    clock = torch.tensor([4, 3 if case.options["fires"] else 1, 1, 2])
    start = (state, scale, v, torch.tensor([3, 5, 7]), s_base, clock, cache)
    ends, made = [], []
    for room in (ops, reference):
        state, scale, v, totals, s_base, clock, cache = end = tuple(tensor.clone() for tensor in start)
        more = {"s_base": s_base, "clock": clock, "cache": cache, "tile_rows": case.options["tile_rows"]}
        made.append(room.counter_backward_(x, grad_out, state, scale, v, totals, rule, seed=9, **more))
        ends.append(end)
    dense = start[1] * start[6].float()
    result = compare_product(made[0], grad_out, dense, PRODUCT_TOLERANCE)
    return sum((compare_exact(got, want) for got, want in zip(*ends, strict=True)), Comparison(0.0, result.mismatches))


def check_moments(case: Case) -> Comparison:
    """proxy_moments: bytes."""
    chance = generator(case)
    tokens, rows, columns = (case.shape[name] for name in ("tokens", "rows", "columns"))
    x, grad_out = (torch.randn(tokens, size, generator=chance) for size in (columns, rows))
    return compare_exact(ops.proxy_moments(grad_out, x), reference.proxy_moments(grad_out, x))


def check_refresh(case: Case) -> Comparison:
    """refresh_cache_: bytes."""
    state, _, _ = layer_tensors(case, generator(case))
    kind, C, packed = getattr(torch, case.options["cache"]), case.options["C"], case.options["packed"]
    got, want = (torch.full((case.shape["rows"], case.shape["columns"]), 5, dtype=kind) for _ in range(2))
    ops.refresh_cache_(got, state, C=C, packed=packed)
    reference.refresh_cache_(want, state, C=C, packed=packed)
    return compare_exact(got, want)


def check_product(case: Case) -> Comparison:
    """The three products of a layer, within the case's tolerance of float64."""
    chance = generator(case)
    tokens, rows, columns = (case.shape[name] for name in ("tokens", "rows", "columns"))
    state, scale, _ = layer_tensors(case, chance)
    x = torch.randn(tokens, columns, generator=chance)
    grad_out = torch.randn(tokens, rows, generator=chance)
    if case.op == "grad_weight":
        return compare_product(ops.grad_weight(grad_out, x), grad_out.t(), x, case.tolerance)
    C, packed = case.options["C"], case.options["packed"]
    dense = reference.decode_dense(state, scale, columns, C=C, packed=packed)
    cache = None
    if "cache" in case.options:
        cache = torch.empty((rows, columns), dtype=getattr(torch, case.options["cache"]))
        reference.refresh_cache_(cache, state, C=C, packed=packed)
    if case.op == "counter_forward":
        y = ops.counter_forward(x, state, scale, C=C, packed=packed, cache=cache)
        return compare_product(y, x, dense.t(), case.tolerance)
    grad_x = ops.counter_grad_input(grad_out, state, scale, columns, C=C, packed=packed, cache=cache)
    return compare_product(grad_x, grad_out, dense, case.tolerance)


def check_probe(case: Case) -> Comparison:
    """The device's arithmetic: each kind of fault counts as one mismatch."""
    found = faults(get_device())
    return Comparison(math.inf if found else 0.0, len(found))


CHECKS: dict[str, Callable[[Case], Comparison]] = {
    "pack_codes": check_codec,
    "unpack_codes": check_codec,
    "decode_dense": check_decode,
    "row_statistics": check_statistics,
    "counter_update_": check_update,
    "counter_update_from_io_": check_update,
    "advance_clock_": check_clock,
    "observe_clock_": check_clock,
    "counter_backward_": check_backward,
    "proxy_moments": check_moments,
    "refresh_cache_": check_refresh,
    "counter_forward": check_product,
    "counter_grad_input": check_product,
    "grad_weight": check_product,
    "faults": check_probe,
    **OF_CODES,
    **OF_ROWS,
    **OF_PROFILES,
    **OF_BLOCKS,
    **OF_ADAM,
    **OF_FP8,
    **OF_ROTATIONS,
    **OF_AUTOMAGIC,
    **OF_ENGINE,
}


def check(case: Case) -> Comparison:
    """The check of a case's operation."""
    own = CHECKS.get(case.op)
    if own is not None:
        return own(case)
    from memtrain_cl.verify_aten import CHECKS as OF_TORCH

    return OF_TORCH[case.op](case)


# ---- one kernel, one device ----


def shapes_of(device: Device) -> dict[str, Device]:
    """The device as it is, and as kinds for which kernels take their other shapes, by what sets them apart."""
    # Few compute units, because products take their large tiles only where there are more tiles than units.
    twins = {"native": device, "as a GPU": device.with_capabilities(type="gpu", compute_units=2)}
    if groups_share_rows(device.info):
        twins["as a CPU"] = device.with_capabilities(type="cpu", short_loops=False)
    return twins


def verify_kernel(device: Device, file: str, kernel: str, *, small: bool = False) -> Row:
    """All cases of one kernel in all shapes; a check that raises makes the kernel's row, not the end."""
    total, failed, detail = Comparison(), 0, ""
    count = len(cases_of(file, kernel, small=small))
    # Some kernels begin at sizes that are too much for a simulator.
    complete = count > 0
    for shape, twin in shapes_of(device).items():
        with use_device(twin):
            for case in cases_of(file, kernel, native=twin is device, small=small):
                try:
                    result = check(case)
                except Exception as error:  # noqa: BLE001 (whatever a broken kernel brings about belongs in its row)
                    complete, failed = False, failed + 1
                    detail = detail or f"{case.name}, {shape}: {error}"
                    continue
                total += result
                if result.mismatches:
                    failed += 1
                    detail = detail or f"{case.name}, {shape}: {result.mismatches} elements differ"
    if not cases_of(file, kernel):
        detail = "no case in memtrain_cl/cases.py"
    if failed > 1:
        detail = f"{failed} checks failed; the first: {detail}"
    return _row(device.info, file, kernel, total if complete else None, count, detail)


def _row(info: DeviceInfo, file: str, kernel: str, total: Comparison | None, cases: int, detail: str) -> Row:
    # JSON has no infinity.
    error = total.max_error if total is not None and math.isfinite(total.max_error) else None
    return Row(
        kernel=kernel,
        file=file,
        platform=info.platform,
        platform_version=info.platform_version,
        device=info.name,
        ok=not detail,
        max_error=error,
        mismatches=None if total is None else total.mismatches,
        cases=cases,
        detail=detail,
    )


def _child(results: Connection, label: str, ordinal: int, kernels: Sequence[tuple[str, str]], small: bool) -> None:
    """The child's whole work: for each kernel its name, which the parent needs when the child dies, then its row."""
    warnings.filterwarnings("ignore", message="Non-empty compiler output encountered")
    # By label, since a driver's folder may list in another order here.
    info = [info for info in devices() if info.label == label][ordinal]
    device = get_device(info.index)
    if small:
        # Oclgrind 21.10 keeps the size of a freed buffer in its books for the one that comes after it, and reports what
        # lies beyond as uninitialised: so none is freed, nor taken again by another tensor.
        device.kept["alive"] = []
    for file, kernel in kernels:
        results.send((file, kernel))
        results.send(verify_kernel(device, file, kernel, small=small))
    results.close()


def _cause_of_death(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}"


def named_kernels(names: Sequence[str]) -> list[tuple[str, str]]:
    """The (file, kernel) pairs that carry one of these names, of a kernel or of a file; all of them for no name.

    ValueError for a name that none carries.
    """
    declared = declared_kernels()
    unknown = sorted(set(names) - {name for pair in declared for name in pair})
    if unknown:
        raise ValueError(f"expected names of kernels or of their files, got {', '.join(unknown)}")
    return [pair for pair in declared if not names or not set(names).isdisjoint(pair)]


def verify_device(
    info: DeviceInfo, kernels: Sequence[tuple[str, str]] | None = None, *, small: bool = False
) -> Iterator[Row]:
    """One row a kernel (None: of all that there are), each as soon as it is known; child processes do the work."""
    spawn = multiprocessing.get_context("spawn")
    ordinal = [other.index for other in devices() if other.label == info.label].index(info.index)
    left = list(declared_kernels() if kernels is None else kernels)
    while left:
        receiver, sender = spawn.Pipe(duplex=False)
        child = spawn.Process(target=_child, args=(sender, info.label, ordinal, left, small), daemon=True)
        child.start()
        sender.close()
        running: tuple[str, str] | None = None
        try:
            while True:
                message = receiver.recv()
                if isinstance(message, Row):
                    running = None
                    yield message
                else:
                    running = message
                    left = left[left.index(running) + 1 :]
        except EOFError:
            child.join()
        finally:
            receiver.close()
            child.kill()  # where the caller stopped listening
        # A child that dies before its first kernel would do so again: then no kernel can be checked.
        lost = [running] if running else left
        left = left if running else []
        for file, kernel in lost:
            cases = len(cases_of(file, kernel, small=small))
            yield _row(info, file, kernel, None, cases, _cause_of_death(child.exitcode))
