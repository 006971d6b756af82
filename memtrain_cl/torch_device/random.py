"""Random state of the device "opencl": a seed and a count of the operations drawn from it, one pair a device.

Every random operation takes the next count and hashes it with the seed to a stream (kernels/_rng.cl hashes stream and
element), so equal seeds give equal numbers on every OpenCL device, whatever the shape of its kernels. The state is two
numbers: torch.utils.checkpoint and fork_rng save and restore it without waiting for anything.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass

import torch

from memtrain_cl.device import Device

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
#: So that the seed 0 does not hash to 0.
_START = 0x9E3779B9
#: Little-endian seed and offset.
_STATE = struct.Struct("<QQ")


def hash_u32(x: int) -> int:
    """The mixer of kernels/_rng.cl on a Python int of 32 bits."""
    x ^= x >> 16
    x = x * 0x7FEB352D & _MASK32
    x ^= x >> 15
    x = x * 0x846CA68B & _MASK32
    return x ^ x >> 16


@dataclass
class _Generator:
    """seed: 64 bits. offset: streams taken so far. root: the hash of the seed."""

    seed: int
    offset: int = 0
    root: int = 0

    def __post_init__(self) -> None:
        self.root = hash_u32(self.seed >> 32 ^ hash_u32((self.seed & _MASK32) + _START & _MASK32))


_lock = threading.Lock()
_generators: dict[int, _Generator] = {}
#: The seed of devices that have not been seeded by themselves; None: torch's own.
_common: int | None = None


def _generator(index: int) -> _Generator:
    found = _generators.get(index)
    if found is None:
        seed = torch.initial_seed() if _common is None else _common
        found = _generators.setdefault(index, _Generator(seed & _MASK64))
    return found


def next_seed(device: Device) -> int:
    """A fresh stream (32 bits) for one random operation on the device."""
    generator = _generator(device.info.index)
    with _lock:
        offset = generator.offset
        generator.offset = offset + 1 & _MASK64
    # The lower half comes last: 2^32 operations in a row get streams that all differ.
    return hash_u32(offset & _MASK32 ^ hash_u32(offset >> 32 ^ generator.root))


def _checked(seed: int) -> int:
    if not -(1 << 63) <= seed <= _MASK64:
        raise RuntimeError(f"Overflow when unpacking long: expected a seed of 64 bits, got {seed}")
    return seed & _MASK64


def manual_seed(seed: int, index: int) -> None:
    """Seed device `index`: any 64 bits, signed or not; RuntimeError for more."""
    _generators[index] = _Generator(_checked(seed))


def manual_seed_all(seed: int) -> None:
    """Seed every device, also those that open later."""
    global _common
    _common = _checked(seed)
    _generators.clear()


def initial_seed(index: int) -> int:
    """The seed in use on device `index`."""
    return _generator(index).seed


def get_rng_state(index: int) -> torch.Tensor:
    """CPU uint8 [16]: seed and offset of device `index`, little-endian."""
    generator = _generator(index)
    return torch.frombuffer(bytearray(_STATE.pack(generator.seed, generator.offset)), dtype=torch.uint8)


def set_rng_state(state: torch.Tensor, index: int) -> None:
    """Continue device `index` from what `get_rng_state` gave; TypeError or RuntimeError for anything else."""
    if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8:
        raise TypeError(
            f"expected the random state as a torch uint8 tensor, got {getattr(state, 'dtype', type(state))}"
        )
    if state.shape != (_STATE.size,):
        raise RuntimeError(f"expected a random state of shape [{_STATE.size}], got {list(state.shape)}")
    seed, offset = _STATE.unpack(bytes(state.cpu().tolist()))
    _generators[index] = _Generator(seed, offset)


def stream_of(device: Device, generator: torch.Generator | None) -> int:
    """The stream of an operation: the device's next, or one drawn from the CPU generator that was given.

    RuntimeError for a generator of another device: torch makes none for "opencl".
    """
    if generator is None:
        return next_seed(device)
    if generator.device.type != "cpu":
        raise RuntimeError(f"expected a CPU generator or none on the device 'opencl', got one of {generator.device}")
    return int(torch.randint(1 << 32, (), dtype=torch.int64, generator=generator))
