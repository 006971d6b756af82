"""``torch.opencl``: what torch and its users ask of a device's module, as of torch.cuda."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

#: torch.utils.checkpoint keeps the random state of a device whose module says this.
_initialized = True


def _index(device: Any = None) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    named = torch.device(device)
    if named.type != "opencl":
        raise ValueError(f"expected a device of type 'opencl', got {named}")
    return current_device() if named.index is None else named.index


def _open(device: Any = None) -> Any:
    from memtrain_cl.torch_device.tensor import opened

    return opened(torch.device("opencl", _index(device)))


def is_available() -> bool:
    """Whether any OpenCL device is there."""
    return device_count() > 0


def device_count() -> int:
    """Number of OpenCL devices."""
    from memtrain_cl.device import devices

    return len(devices())


def is_initialized() -> bool:
    """Always: a device opens with its first tensor."""
    return True


def init() -> None:
    """Nothing to do: a device opens with its first tensor."""


def _is_in_bad_fork() -> bool:
    return False


def current_device() -> int:
    """The index that "opencl" means here."""
    from memtrain_cl.device import current_index

    return current_index()


@contextlib.contextmanager
def device(index: Any) -> Iterator[None]:
    """Within the block "opencl" means this device."""
    from memtrain_cl.device import use_device

    if index is None:
        yield
        return
    with use_device(_open(index)):
        yield


def get_device_name(device: Any = None) -> str:
    """The device's own name."""
    return str(get_device_properties(device).name)


def get_device_properties(device: Any = None) -> Any:
    """The device's DeviceInfo."""
    from memtrain_cl.device import devices

    return devices()[_index(device)]


def synchronize(device: Any = None) -> None:
    """Wait until the device's kernels have ended; raises what they found amiss, such as an index out of range."""
    from memtrain_cl.faults import raise_pending

    home = _open(device)
    home.synchronize()
    raise_pending(home)


class _NoTypes(list[torch.dtype]):
    """What torch.autocast looks a type up in when it is to be enabled; checkpoints ask for it disabled, which works."""

    def __contains__(self, dtype: object) -> bool:
        raise RuntimeError(
            "autocast is not offered on the device 'opencl'; give the model's tensors the type that you want"
        )


def get_amp_supported_dtype() -> list[torch.dtype]:
    """None, and a RuntimeError for whoever enables autocast."""
    return _NoTypes()


def _pool(device: Any) -> Any:
    from memtrain_cl.memory import pool_of

    return pool_of(_open(device))


def memory_allocated(device: Any = None) -> int:
    """Bytes in living tensors."""
    return int(_pool(device).statistics().allocated)


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes in living tensors since the last reset_peak_memory_stats."""
    return int(_pool(device).statistics().peak_allocated)


def memory_reserved(device: Any = None) -> int:
    """Bytes taken from the driver: living tensors, and what is kept for the next ones."""
    return int(_pool(device).statistics().reserved)


def max_memory_reserved(device: Any = None) -> int:
    """The most bytes taken from the driver since the last reset_peak_memory_stats."""
    return int(_pool(device).statistics().peak_reserved)


def reset_peak_memory_stats(device: Any = None) -> None:
    """Let the peaks begin at what is held now."""
    _pool(device).reset_peak()


def empty_cache() -> None:
    """Give back to the drivers what is kept for the next tensors, on every device opened so far."""
    from memtrain_cl.device import opened_devices

    for home in opened_devices():
        if "memory" in home.kept:
            home.kept["memory"].release()


def set_memory_limit(limit: int, device: Any = None) -> None:
    """Allow tensors and cache `limit` bytes in all; torch.OutOfMemoryError beyond."""
    _pool(device).set_limit(limit)


def memory_stats(device: Any = None) -> dict[str, int]:
    """The allocator's numbers by name."""
    return dict(vars(_pool(device).statistics()))


def memory_summary(device: Any = None) -> str:
    """The allocator's numbers as text."""
    numbers = memory_stats(device)
    lines = [f"{name:>15}: {value:>16,d}" for name, value in numbers.items()]
    return "\n".join([f"memory of opencl:{_index(device)} ({get_device_name(device)}), in bytes", *lines])


def manual_seed(seed: int) -> None:
    """Seed the current device's random numbers."""
    from memtrain_cl.torch_device import random

    random.manual_seed(int(seed), current_device())


def manual_seed_all(seed: int) -> None:
    """Seed every device's random numbers; torch.manual_seed calls it."""
    from memtrain_cl.torch_device import random

    random.manual_seed_all(int(seed))


def initial_seed(device: Any = None) -> int:
    """The seed that the device's random numbers began with."""
    from memtrain_cl.torch_device import random

    return random.initial_seed(_index(device))


def get_rng_state(device: Any = None) -> torch.Tensor:
    """The random state as a CPU uint8 tensor."""
    from memtrain_cl.torch_device import random

    return random.get_rng_state(_index(device))


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    """Continue from a state that get_rng_state gave."""
    from memtrain_cl.torch_device import random

    random.set_rng_state(state, _index(device))


def get_rng_state_all() -> list[torch.Tensor]:
    """The random states of all devices."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    """Continue from what get_rng_state_all gave."""
    for index, state in enumerate(states):
        set_rng_state(state, index)
