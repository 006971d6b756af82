"""Products of whole numbers against the torch reference, byte for byte and by each way that a device has to form sums.

The cases are `memtrain_cl.cases_int8`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from memtrain_cl import ops, reference
from memtrain_cl.case import Case
from memtrain_cl.comparison import Comparison, compare_exact, generator
from memtrain_cl.device import TENSOR_CORES, Device, get_device, use_device
from memtrain_cl.formats import code_count
from memtrain_cl.inline_assembly import note_inline_assembly
from memtrain_cl.tuning import groups_share_rows

#: A device that forms its sums the portable way.
PORTABLE: dict[str, Any] = {"integer_dot": False, "inline_vnni": False, "tensor_cores": ""}


def kinds_of(device: Device) -> list[Device]:
    """The device as it is, and as those that form their sums in other ways which it has too, the portable one last."""
    note_inline_assembly(device)
    info = device.info
    kinds = [device]
    if groups_share_rows(info) and info.tensor_cores:
        # Few compute units, because only results of more blocks than that have large blocks.
        ways = TENSOR_CORES[: TENSOR_CORES.index(info.tensor_cores) + 1]
        kinds += [device.with_capabilities(tensor_cores=cores, compute_units=1) for cores in reversed(ways)]
    if info.integer_dot or info.tensor_cores if groups_share_rows(info) else info.inline_vnni:
        kinds.append(device.with_capabilities(**PORTABLE))
    return kinds


def _compare(run: Callable[[Any], torch.Tensor]) -> Comparison:
    """run(ops) by every kind against run(reference). The bits of a NaN differ between processors."""
    want = run(reference)
    total = Comparison()
    for kind in kinds_of(get_device()):
        with use_device(kind):
            got = run(ops)
        if want.is_floating_point():
            nan = torch.tensor(math.nan)
            got, want = (torch.where(t.isnan(), nan, t) for t in (got, want))
        total += compare_exact(got, want)
    return total


def _codes(shape: tuple[int, int], chance: torch.Generator) -> torch.Tensor:
    return torch.randint(-127, 128, shape, generator=chance, dtype=torch.int8)


def check_product(case: Case) -> Comparison:
    """int8_product: every sum."""
    chance = generator(case)
    M, N, K = (case.shape[name] for name in ("M", "N", "K"))
    a, b = _codes((M, K), chance), _codes((N, K), chance)
    if case.options.get("extreme"):
        a.fill_(127)
        b.fill_(-127)
    return _compare(lambda room: room.int8_product(a, b))


def check_layer(case: Case) -> Comparison:
    """A layer's product by codes: every byte. One token and one column are not finite where there are many."""
    chance = generator(case)
    tokens, rows, columns = (case.shape[name] for name in ("tokens", "rows", "columns"))
    C, packed = case.options["C"], case.options["packed"]
    codes = torch.randint(0, code_count(C), (rows, columns), generator=chance, dtype=torch.uint8)
    state = reference.pack_codes(codes) if packed else codes
    scale = 0.02 * 50.0 ** torch.rand(rows, 1, generator=chance)
    x, grad_out = (torch.randn(tokens, size, generator=chance) for size in (columns, rows))
    if tokens >= 8:
        x[3, columns // 2] = math.nan
        grad_out[5, rows - 1] = math.inf
        grad_out[6] = 0.0
    seed = int(torch.randint(0, 1 << 32, (), generator=chance))
    layer = {"C": C, "packed": packed}
    if case.op == "counter_forward_int8":
        return _compare(lambda room: room.counter_forward_int8(x, state, scale, **layer))
    if case.op == "counter_grad_input_int8":
        return _compare(lambda room: room.counter_grad_input_int8(grad_out, state, scale, columns, **layer, seed=seed))
    chunk = {"chunk": case.options["chunk"]} if "chunk" in case.options else {}
    first = rows // 3
    return _compare(
        lambda room: room.grad_weight_int8(grad_out, x, first, seed_grad=seed, seed_input=seed ^ 1, **chunk)
    )


def check_ternary(case: Case) -> Comparison:
    """decode_ternary: bytes."""
    rows, columns = case.shape["rows"], case.shape["columns"]
    options = {name: case.options[name] for name in ("C", "packed", "transposed")}
    codes = torch.randint(0, code_count(options["C"]), (rows, columns), generator=generator(case), dtype=torch.uint8)
    state = reference.pack_codes(codes) if options["packed"] else codes
    got, want = (room.decode_ternary(state, columns, **options) for room in (ops, reference))
    return compare_exact(got, want)


CHECKS: dict[str, Callable[[Case], Comparison]] = {
    "int8_product": check_product,
    "counter_forward_int8": check_layer,
    "counter_grad_input_int8": check_layer,
    "grad_weight_int8": check_layer,
    "decode_ternary": check_ternary,
}
