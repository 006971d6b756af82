"""Cases of kernels/adam.cl: a step of Adam on compressed moments (see `memtrain_cl.cases`). Imports no torch.

Each set of template constants is a program to build, so that sizes vary more than options.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memtrain_cl.case import Case
from memtrain_cl.elements import ELEMENTS

#: Bytes of a moment's element, and of what it keeps for a block.
_MOMENT_BYTES = {"dense": (4, 0), "linear": (1, 4), "dynamic": (1, 4), "profile": (1, 8)}


def adam_case(
    n: int,
    block_size: int = 2048,
    code: str = "linear",
    *,
    tensors: int = 1,
    param: str = "float32",
    grad: str = "float32",
    small: bool = False,
    **options: Any,
) -> Case:
    """adam_step_ of tensors of n, n-7, n-14 ... elements, one at least.

    options: wrong (a gradient that is not finite in the first tensor, in one block of it), and those of `AdamStep`.
    """
    elements = sum(max(1, n - 7 * place) for place in range(tensors))
    each, block = _MOMENT_BYTES[code]
    weights = 2 * ELEMENTS[param].itemsize + ELEMENTS[grad].itemsize
    chosen: dict[str, Any] = {"code": code}
    chosen |= {name: kind for name, kind in (("param", param), ("grad", grad)) if kind != "float32"}
    chosen |= {"tensors": tensors} if tensors > 1 else {}
    looks_first = options.get("skip", "tensor") == "tensor" or code == "dense"
    return Case(
        "adam",
        "adam_step",
        "adam_step_",
        {"n": n, "block_size": block_size},
        chosen | options,
        bytes_moved=elements * (weights + 4 * each) + 4 * block * -(-elements // block_size),
        flops=(19 if code == "dense" else 26) * elements,
        small=small,
        also=(("adam", "adam_scan"),) if looks_first else (),
    )


def adam_cases() -> Iterator[Case]:
    """All of them."""
    for code in ("linear", "profile"):
        yield adam_case(29, 12, code, wrong=True, small=True)
    for code in ("dense", "linear", "dynamic"):
        yield adam_case(40, 8, code, param="bfloat16", tensors=3, skip="block", wrong=True, small=True)
    yield adam_case(40, 8, "profile", param="bfloat16", tensors=3, skip="block", wrong=True)
    # Blocks of GPUs end at 32, 128, 256, 512, 1024, 2048 and 4096 elements, those that a CPU's item keeps at 2048.
    sizes = ((1, 1), (7, 3), (1030, 37), (4096, 256), (4100, 512), (6145, 2048), (9004, 4096), (9001, 4097))
    yield from (adam_case(*size, decoupled=True, weight_decay=0.1) for size in sizes)
    yield from (adam_case(*size, skip="block", wrong=True) for size in (sizes[2], (3077, 1024), sizes[5], sizes[7]))
    yield from (adam_case(*size, "dynamic") for size in (sizes[2], sizes[5]))
    yield from (adam_case(*size, "profile") for size in ((1, 1), (1030, 37), (4099, 256)))
    yield from (adam_case(n, 2048, "dense", weight_decay=0.1, maximize=True) for n in (1, 2049, 8192))
    # More than one launch's tensors, of which some fill several blocks.
    yield adam_case(150, 64, tensors=27, wrong=True)
    for code in ("linear", "dynamic"):
        yield adam_case(5000, 256, code, stochastic_moments=True, weight_decay=0.1, maximize=True)
    yield adam_case(3001, 128, param="float16", grad="float16", stochastic_moments=True)
    yield adam_case(3001, 128, "dense", param="float16", grad="float32")
    yield adam_case(3001, 128, param="bfloat16", grad="bfloat16", skip="block", wrong=True)
