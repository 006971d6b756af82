"""Activations saved for backward in few bits, in any torch model: `saved_activations`.

The gradient of a product by one factor needs the other factor only on average: any Q(x) whose mean is x leaves the mean
of grad_out^T Q(x) where it was. So much of what torch saves for backward can be rounded stochastically to a few bits a
number, one scale a row (`memtrain_cl.ops.save_rows`). What may be is the matter of activation_rules.py. Rounded to the
nearest 8-bit floating number instead (`memtrain_cl.fp8_cast_with_guard`), it costs no scale, and is biased.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from memtrain_cl.activation_rules import FunctionWatch, Keep, require_outside_checkpoint
from memtrain_cl.activation_store import (
    FP8,
    Fp8Stored,
    Kept,
    NarrowStored,
    OperandStored,
    RowsStored,
    Stored,
    Use,
    is_parameter,
    order_of,
    root_of,
    unpack,
)
from memtrain_cl.bridge import is_known
from memtrain_cl.errors import NotFinite
from memtrain_cl.formats import check_bits, stream_seed
from memtrain_cl.fp8 import fp8_cast_with_guard
from memtrain_cl.homes import operand_of
from memtrain_cl.operand import Operand
from memtrain_cl.ops.launch import require_seed

#: Tensors of fewer elements are left as they are, and those with rows of fewer, whose scales would cost too much.
MIN_NUMEL = 4096
MIN_ROW = 4
#: Formats that activations can be saved in.
FORMATS = ("int", "fp8")

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class SavedReport:
    """What one entry of `saved_activations` did; it grows while the forward runs.

    bytes_before, bytes_after: of the activations that were saved in few bits, or could have been, each once.
    elements: of those. packed: how many were. shared: saves of one that was there already. not_finite: those kept in
    full because a number was not finite. fallbacks: those that 8-bit numbers would not have held, kept in wider ones.
    left: tensors left as they are (parameters, integers, small ones ...).
    """

    bytes_before: int = 0
    bytes_after: int = 0
    elements: int = 0
    packed: int = 0
    shared: int = 0
    not_finite: int = 0
    fallbacks: int = 0
    left: int = 0

    @property
    def bits_per_element(self) -> float:
        """Bits that an element of the activations costs now."""
        return 8 * self.bytes_after / self.elements if self.elements else 0.0

    def __str__(self) -> str:
        return (
            f"{self.packed} activations saved in {self.bytes_after} bytes instead of {self.bytes_before} "
            f"({self.bits_per_element:.2f} bits an element); {self.shared} saved again, {self.not_finite} not finite, "
            f"{self.fallbacks} beyond 8-bit numbers, {self.left} tensors left as they are"
        )


class Session:
    """One entry of the context: its report, and what was packed in it and still waits for its backward.

    restore: what gives a saved tensor back, `unpack` or around it.   watch: to be entered, too, where `pack` is asked
    without `open`.
    """

    def __init__(self, owner: saved_activations, restore: Callable[[Kept | Use], torch.Tensor] = unpack) -> None:
        self._owner = owner
        self.report = SavedReport()
        self._stored: weakref.WeakValueDictionary[Any, Stored] = weakref.WeakValueDictionary()
        self.watch = FunctionWatch()
        self._hooks = saved_tensors_hooks(self.pack, restore)

    def open(self) -> None:
        """From here on what is saved comes here."""
        self._hooks.__enter__()
        self.watch.__enter__()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Up to here."""
        self.watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._hooks.__exit__(None, None, None)

    def _takes(self, tensor: torch.Tensor, root: torch.Tensor) -> bool:
        return (
            tensor.dtype in _DTYPES
            and tensor.numel() >= max(self._owner.min_numel, 1)
            and tensor.ndim > 0
            and tensor.shape[-1] >= MIN_ROW
            and tensor.layout is torch.strided
            and self._is_plain(tensor)
            and not any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            and not is_parameter(tensor, root)
        )

    @staticmethod
    def _is_plain(tensor: torch.Tensor) -> bool:
        """Whether kernels can read it: no subclass of others, on a device that they know."""
        return is_known(tensor) and (type(tensor) is torch.Tensor or operand_of(tensor) is not None)

    def pack(self, tensor: torch.Tensor) -> Kept | Use:
        """What is kept of a tensor until `unpack` is asked for it."""
        root = root_of(tensor)
        keep = self.watch.rule_for(tensor)
        if keep is Keep.FULL or not self._takes(tensor, root):
            self.report.left += 1
            return Kept(tensor)
        order = order_of(tensor)
        length = tensor.shape[-1 if order is None else order[-1]]
        rows = tensor.numel() // length
        # Views with the same rows of one memory are one, whatever their shapes.
        whole = order is not None or tensor.is_contiguous()
        place = (rows, length) if whole else (*tensor.shape, *tensor.stride())
        key = (id(root), root._version, tensor.storage_offset(), tensor.dtype, keep, place)
        stored = self._stored.get(key)
        if stored is not None and stored.is_of(root):
            self.report.shared += 1
        else:
            self.report.bytes_before += tensor.nbytes
            self.report.elements += tensor.numel()
            operand = operand_of(tensor) if whole else None
            if operand is not None and keep is Keep.ROUNDED and self._owner.format == "int":
                stored = self._of_operand(operand.viewed((rows, length)), tensor.dtype, root)
            else:
                dense = tensor.detach() if order is None else tensor.detach().permute(order)
                stored = self._fresh(dense.reshape(rows, length), root, keep)
            self.report.bytes_after += tensor.nbytes if stored is None else stored.nbytes
            if stored is None:
                return Kept(tensor)
            self._stored[key] = stored
        return Use(stored, tuple(tensor.shape), order)

    def _of_operand(self, matrix: Operand, dtype: torch.dtype, root: torch.Tensor) -> Stored:
        """What is stored of a matrix on "opencl", where nobody waits to see whether it is finite."""
        stored = OperandStored(matrix, dtype, self._owner.bits, self._owner.next_seed(), root)
        self.report.packed += 1
        return stored

    def _fresh(self, matrix: torch.Tensor, root: torch.Tensor, keep: Keep) -> Stored | None:
        """What is stored of a matrix; None where it is to be kept as it is."""
        if keep is Keep.SIGNS:
            # They are exact in two bits.
            return self._in_few_bits(matrix.sign(), 2, root)
        if self._owner.format == "fp8":
            return self._in_fp8(matrix, root)
        return self._in_few_bits(matrix, self._owner.bits, root)

    def _in_few_bits(self, matrix: torch.Tensor, bits: int, root: torch.Tensor) -> Stored | None:
        """None where a row is not finite."""
        try:
            stored = RowsStored(matrix, bits, self._owner.next_seed(), root)
        except NotFinite:
            self.report.not_finite += 1
            return None
        self.report.packed += 1
        return stored

    def _in_fp8(self, matrix: torch.Tensor, root: torch.Tensor) -> Stored | None:
        """As the receipt says; None where a number is not finite, or 16 bits would be no fewer or hold too little."""
        wider = torch.bfloat16 if matrix.element_size() > 2 else matrix.dtype
        result = fp8_cast_with_guard(matrix, FP8, wider)
        if result.used_fp8:
            self.report.packed += 1
            return Fp8Stored(matrix.dtype, result.tensor.view(torch.uint8), root)
        if result.reason == "non-finite":
            self.report.not_finite += 1
            return None
        self.report.fallbacks += 1
        kept = wider is matrix.dtype or result.max_abs > torch.finfo(wider).max
        return None if kept else NarrowStored(matrix.dtype, result.tensor, root)


class saved_activations:
    """What torch saves for backward while this context is entered is saved in few bits: for any model, on the host,
    on "opencl" and on CUDA.

        saver = saved_activations(bits=4)
        for x, target in data:
            with saver as report:
                loss = loss_of(model(x), target)
            loss.backward()
        print(report)    # a SavedReport: bytes before and after

    Taken are float32, float16 and bfloat16 tensors of at least min_numel elements with rows (along the last dimension)
    of at least 4, from functions of torch's whose gradients bear it: products (linear, matmul, conv, mul ...), whose
    gradients keep their mean, and smooth functions (gelu, softmax, norms, attention ...), whose gradients nearly do.
    They become codes of `bits` (2..15) bits and a bfloat16 scale a row: 4 + 16/row_len bits an element at 4 bits. A
    ReLU keeps the signs of its result in 4 bits. Everything else is left as it is: what other functions save (a
    quotient's divisor, the log-probabilities of a cross entropy; compiled graphs are such, too, and custom functions
    without an attribute `saved_may_be_rounded = True`),
    parameters, their views and casts, leaves that require grad, integers, float64, expanded and small tensors. A tensor
    that is saved twice is stored once, unless it was changed in place between (a write through `.data` is not seen, as
    autograd does not see it). Tensors come back in their dtype and shape.

    Rounding is stochastic. Each stored tensor has a stream of random numbers of its own, from `seed` and a counter that
    goes on from one entry of this object to the next: keep one object for a training, as above. Two objects of one seed
    round alike.

    format "fp8" rounds to the nearest number of float8_e4m3fn instead: 8 bits an element and no scale, whatever `bits`
    says. `fp8_cast_with_guard` decides, a tensor at a time; what it refuses is kept in bfloat16, or as it is where it
    has 16 bits already, and counted in the report's `fallbacks`. These estimates are not unbiased: the error does not
    vanish in the mean of many steps, and magnitudes up to 2^-10 become zero (of at most half of a tensor's numbers,
    beyond which the guard refuses). The signs of a ReLU are kept as above. Each receipt is read on the host, which on
    "opencl" and CUDA waits for it.

    A tensor with inf or nan in it (or numbers that its scale cannot give back) is kept in full; on "opencl", where
    nobody waits for codes with a scale, NotFinite is raised at the next wait instead.

    Entered within itself or other hooks, the innermost counts. Around torch.utils.checkpoint, what the checkpoint keeps
    to begin again stays in full; within a region of it (use_reentrant=False), where nothing would be recomputed any
    more, RuntimeError is raised. ValueError for a format but "int" and "fp8".
    """

    def __init__(
        self,
        bits: int = 4,
        seed: int = 0,
        min_numel: int = MIN_NUMEL,
        format: str = "int",  # noqa: A002
    ) -> None:
        self.bits = check_bits(bits)
        if isinstance(min_numel, bool) or not isinstance(min_numel, int) or min_numel < 0:
            raise ValueError(f"expected min_numel as an integer >= 0, got {min_numel!r}")
        if format not in FORMATS:
            raise ValueError(f"expected format as one of {', '.join(FORMATS)}, got {format!r}")
        self.min_numel = min_numel
        self.format = format
        self.reseed(seed)
        self._entered: list[Session] = []

    def reseed(self, seed: int) -> None:
        """Let the streams begin anew from a seed, as for a run that is resumed at a step."""
        require_seed("a seed", seed)
        self.seed = seed
        self._count = itertools.count(1)

    def next_seed(self) -> int:
        """The seed of the next tensor that is stored."""
        return stream_seed(self.seed, next(self._count))

    def __enter__(self) -> SavedReport:
        require_outside_checkpoint()
        session = Session(self)
        session.open()
        self._entered.append(session)
        return session.report

    def __exit__(self, *error: object) -> None:
        self._entered.pop().close()
