"""What kernels of the torch device work on: shapes, strides and offsets over bytes of a device."""

from __future__ import annotations

import pytest
import torch

from memtrain_cl.device import Device
from memtrain_cl.elements import ELEMENTS
from memtrain_cl.operand import Operand, contiguous_strides, empty_operand


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 4), (2, 0, 5), (4, 1, 3), (1, 1), (2, 3, 4, 5)], ids=str)
def test_geometry_is_torch_s(device: Device, shape: tuple[int, ...]) -> None:
    host = torch.empty(shape)
    operand = empty_operand(device, shape, "float32")
    assert contiguous_strides(shape) == host.stride() == operand.strides
    assert operand.size == host.numel()
    assert operand.contiguous
    assert operand.offset == 0
    assert operand.array.nbytes == 4 * host.numel()
    assert (operand.buffer is None) == (host.numel() == 0)
    assert operand.device is device
    assert str(shape) in repr(operand)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((3, 4), (4, 1)),
        ((3, 4), (1, 3)),
        ((3, 4), (5, 1)),
        ((3, 1), (1, 7)),
        ((1, 4), (9, 1)),
        ((0, 4), (9, 3)),
        ((3, 4), (0, 1)),
        ((2, 3, 4), (12, 4, 1)),
        ((2, 3, 4), (12, 1, 3)),
        ((1,), (5,)),
        ((), ()),
    ],
    ids=str,
)
def test_contiguity_is_torch_s(device: Device, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    whole = empty_operand(device, (64,), "float32")
    seen = Operand(whole.array, shape, strides, 0, "float32")
    assert seen.contiguous == torch.empty_strided(shape, strides).is_contiguous()


def test_views_share_the_bytes(device: Device) -> None:
    whole = empty_operand(device, (6, 4), "int16")
    row = whole.viewed((4,), offset=8)
    assert (row.offset, row.strides, row.element) == (8, (1,), "int16")
    assert row.array is whole.array
    column = row.viewed([6], [4], 1)
    assert (column.shape, column.strides, column.offset, column.contiguous) == ((6,), (4,), 1, False)
    assert column.viewed((2, 3)).offset == 1


def test_elements_have_the_sizes_of_torch() -> None:
    for name, element in ELEMENTS.items():
        dtype = getattr(torch, name)
        assert element.itemsize == dtype.itemsize == element.bits.itemsize
        assert element.floating == dtype.is_floating_point
        assert element.signed == dtype.is_signed
