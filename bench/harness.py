"""How a time is taken, and what stands beside it.

A result is checked before it is timed. Times are medians after a warm-up: by the device's own events on GPUs, by the
host's clock around a finish elsewhere (CPU runtimes fill their events with nonsense now and then). Buffers rotate, so
that caches do not flatter. Memory-bound kernels are judged by the bytes that must move over the time, as a share of a
copy measured in the same run.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import memtrain_cl
from memtrain_cl.array import DeviceArray, empty
from memtrain_cl.device import Device
from memtrain_cl.export.atomic import atomic_path
from memtrain_cl.program import build_options
from memtrain_cl.runtimes import import_pyopencl

RESULTS = Path(__file__).resolve().parent / "results"

_COPY = """
__kernel void copy_words(const __global float4 *a, __global float4 *b, const ulong per, const ulong total) {
    const ulong first = get_global_id(0) * per;
    const ulong last = min(first + per, total);
    for (ulong i = first; i < last; i++) b[i] = a[i];
}
"""


@dataclass
class Row:
    """One line of results.

    us: median microseconds.   peers: the same work by others, in microseconds.   error: what the check found.
    """

    family: str
    name: str
    us: float
    bytes_moved: int = 0
    flops: int = 0
    gbps: float = 0.0
    share_of_copy: float = 0.0
    gflops: float = 0.0
    error: str = ""
    peers: dict[str, float] = field(default_factory=dict)


class Bench:
    """A device, its copy bandwidth, and the rows measured on it."""

    def __init__(self, device: Device, *, repeats: int = 0) -> None:
        cl = import_pyopencl()
        self.events = device.info.type == "gpu"
        # A twin with a queue of its own kind; everything else is shared with the device that was asked for.
        self.device = device.with_capabilities()
        if self.events:
            self.device.queue = cl.CommandQueue(device.context, properties=cl.command_queue_properties.PROFILING_ENABLE)
        self.repeats = repeats or (40 if self.events else 15)
        self.rows: list[Row] = []
        self.copy_bytes = (1 << 29) if self.events else (1 << 27)
        self.copy_gbps = self._copy()

    def _copy(self) -> float:
        cl = import_pyopencl()
        words = self.copy_bytes // 2 // 16
        arrays = [empty(self.device, (words * 4,), np.float32) for _ in range(2)]
        for array in arrays:
            cl.enqueue_fill_buffer(self.device.queue, array.buffer, np.float32(1), 0, array.nbytes)
        kernel = cl.Kernel(cl.Program(self.device.context, _COPY).build(), "copy_words")
        per = 1 if self.events else -(-words // (self.device.info.compute_units * 8))
        size = (-(-words // per),)

        def launch(turn: int) -> Any:
            source, target = arrays[turn % 2], arrays[(turn + 1) % 2]
            args = (source.buffer, target.buffer, np.uint64(per), np.uint64(words))
            return kernel(self.device.queue, size, None, *args)

        return self.copy_bytes / self.time(launch) / 1e3

    def time(self, launch: Callable[[int], Any]) -> float:
        """Median microseconds of `launch(turn)`, which enqueues one kernel and returns its event."""
        for turn in range(3):
            launch(turn)
        self.device.queue.finish()
        if self.events:
            events = [launch(turn) for turn in range(self.repeats)]
            self.device.queue.finish()
            return float(statistics.median((event.profile.end - event.profile.start) / 1e3 for event in events))

        def finished(turn: int) -> None:
            launch(turn)
            self.device.queue.finish()

        return host_time(finished, self.repeats)

    def time_several(self, launch: Callable[[], Any]) -> float:
        """Median microseconds of work that is several kernels: of runs of ten on GPUs, of single ones on CPUs."""
        count = 10 if self.events else 1

        def run(_turn: int) -> None:
            for _ in range(count):
                launch()
            self.device.queue.finish()

        run(0)
        return host_time(run, 5 if self.events else self.repeats) / count

    def add(self, row: Row) -> None:
        """Fill in what follows from the time, keep the row and print it."""
        row.gbps = row.bytes_moved / row.us / 1e3
        row.share_of_copy = row.gbps / self.copy_gbps
        row.gflops = row.flops / row.us / 1e3
        self.rows.append(row)
        beside = "".join(f"  {name} {us:.1f} us (x{us / row.us:.1f})" for name, us in row.peers.items())
        print(
            f"{row.family}/{row.name}: {row.us:.1f} us  {row.gbps:.0f} GB/s  {row.share_of_copy:.2f} of copy"
            f"  {row.gflops:.0f} GFLOP/s  error: {row.error}{beside}",
            flush=True,
        )

    def write(self, path: Path | None) -> Path:
        """File the rows under results/<version>/<device>.json, or at `path`; families not measured anew stay there."""
        info = self.device.info
        target = path or RESULTS / memtrain_cl.__version__ / f"{slug(f'{info.platform} {info.name}')}.json"
        rows = [asdict(row) for row in self.rows]
        if target.exists():
            fresh = {row["family"] for row in rows}
            rows = [row for row in json.loads(target.read_text())["rows"] if row["family"] not in fresh] + rows
        target.parent.mkdir(parents=True, exist_ok=True)
        body = {
            "version": memtrain_cl.__version__,
            "date": time.strftime("%Y-%m-%d"),
            "device": info.name,
            "platform": f"{info.platform} {info.platform_version}",
            "driver": info.driver_version,
            "options": build_options(self.device),
            "clock": "device events" if self.events else "host clock around a finish",
            "host": {"machine": platform.machine(), "python": platform.python_version()},
            "copy_gbps": self.copy_gbps,
            "rows": rows,
        }
        with atomic_path(target) as temporary:
            temporary.write_text(json.dumps(body, indent=1) + "\n")
        return target


def host_time(work: Callable[[int], Any], repeats: int) -> float:
    """Median microseconds of `work(turn)` by the host's clock."""
    times = []
    for turn in range(repeats):
        start = time.perf_counter()
        work(turn)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def slug(text: str) -> str:
    """A file name: lower case, runs of anything but letters and digits become one hyphen."""
    return "-".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


def mismatches(found: Mapping[str, DeviceArray], expected: Mapping[str, np.ndarray]) -> str:
    """How many bytes differ, by name; "0 bytes differ" is the only good answer for bit-exact kernels."""
    wrong = {
        name: int(np.count_nonzero(array.numpy().view(np.uint8) != expected[name].view(np.uint8)))
        for name, array in found.items()
    }
    return "0 bytes differ" if not any(wrong.values()) else f"bytes differ: {wrong}"
