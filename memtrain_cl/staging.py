"""Copies between pageable host memory and a device that does not share it, through pinned buffers and a queue of their
own.

A direction has two pinned buffers, so that the host fills one while the other travels; the copies run on the device's
transfer queue, beside the kernels of the main queue, which waits for them by an event.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from memtrain_cl.device import Device
from memtrain_cl.runtimes import import_pyopencl

#: Bytes of one pinned buffer: long enough to reach the bus's full rate, short enough to overlap.
CHUNK_BYTES = 8 << 20


class _Direction:
    """The two pinned buffers of one direction and the events of the copies that last used them."""

    def __init__(self, device: Device) -> None:
        cl = import_pyopencl()
        self.lock = threading.Lock()
        self.chunk = CHUNK_BYTES
        self.events: list[Any] = [None, None]
        self._buffers = [
            cl.Buffer(device.context, cl.mem_flags.READ_WRITE | cl.mem_flags.ALLOC_HOST_PTR, self.chunk)
            for _ in range(2)
        ]
        flags = cl.map_flags.READ | cl.map_flags.WRITE
        self.memory = [
            cl.enqueue_map_buffer(device.transfer_queue, buffer, flags, 0, (self.chunk,), np.uint8)[0]
            for buffer in self._buffers
        ]

    def free(self, which: int) -> np.ndarray:
        """Pinned memory `which`, once the copy that used it has ended."""
        if self.events[which] is not None:
            self.events[which].wait()
        return self.memory[which]  # type: ignore[no-any-return]


_lock = threading.Lock()


def _direction(device: Device, name: str) -> _Direction:
    with _lock:
        directions: dict[str, _Direction] = device.kept.setdefault("staging", {})
        if name not in directions:
            directions[name] = _Direction(device)
        return directions[name]


def upload(device: Device, values: np.ndarray, buffer: Any, start: int = 0) -> None:
    """Copy contiguous `values` into a device buffer, from its byte `start` on; kernels enqueued afterwards see them.
    Returns once `values` may change.
    """
    cl = import_pyopencl()
    device.check_process()
    source = values.reshape(-1).view(np.uint8)
    up = _direction(device, "up")
    # The buffer may be one that kernels still in the queue read or write.
    before = [cl.enqueue_marker(device.queue)]
    device.queue.flush()
    with up.lock:
        event = None
        for number, offset in enumerate(range(0, source.nbytes, up.chunk)):
            which = number % 2
            pinned = up.free(which)
            size = min(up.chunk, source.nbytes - offset)
            pinned[:size] = source[offset : offset + size]
            event = cl.enqueue_copy(
                device.transfer_queue,
                buffer,
                pinned[:size],
                dst_offset=start + offset,
                is_blocking=False,
                wait_for=before,
            )
            up.events[which] = event
            device.transfer_queue.flush()
        if event is not None:
            cl.enqueue_barrier(device.queue, wait_for=[event])


def download(device: Device, buffer: Any, target: np.ndarray, start: int = 0) -> None:
    """Copy a device buffer, from its byte `start` on, into contiguous `target`, after every kernel enqueued before.
    Returns when it is there.
    """
    cl = import_pyopencl()
    device.check_process()
    destination = target.reshape(-1).view(np.uint8)
    down = _direction(device, "down")
    ready = cl.enqueue_marker(device.queue)
    device.queue.flush()
    with down.lock:
        waiting: list[tuple[int, int, Any, int]] = []

        def drain() -> None:
            offset, size, event, which = waiting.pop(0)
            event.wait()
            destination[offset : offset + size] = down.memory[which][:size]

        for number, offset in enumerate(range(0, destination.nbytes, down.chunk)):
            which = number % 2
            if len(waiting) == 2:
                drain()
            size = min(down.chunk, destination.nbytes - offset)
            event = cl.enqueue_copy(
                device.transfer_queue,
                down.memory[which][:size],
                buffer,
                src_offset=start + offset,
                is_blocking=False,
                wait_for=[ready],
            )
            down.events[which] = event
            device.transfer_queue.flush()
            waiting.append((offset, size, event, which))
        while waiting:
            drain()
