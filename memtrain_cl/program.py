"""Render, build, cache and launch kernels: ``get_kernel(device, "counter", "counter_update", C=11, ...)``.

A kernel file is a Mako template in kernels/. ``#include "_name.cl"`` lines are expanded into one string before
rendering, so that pyopencl's binary cache, which keys on the source text, sees everything. A file whose name begins
with "_" is include-only.

Programs are shared by a process; `pyopencl.Kernel` objects hold arguments and are therefore kept one a thread.
"""

from __future__ import annotations

import functools
import os
import re
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mako import exceptions as mako_exceptions
from mako.template import Template

from memtrain_cl._resources import kernels_dir
from memtrain_cl.array import DeviceArray
from memtrain_cl.device import Device
from memtrain_cl.errors import BuildError, MemtrainError
from memtrain_cl.operand import Operand
from memtrain_cl.runtimes import import_pyopencl

_INCLUDE = re.compile(r'^#include\s+"(_\w+\.cl)"\s*$', re.MULTILINE)
_HOLDERS = (DeviceArray, Operand)
_RELAXED = (
    "-cl-fast-relaxed-math",
    "-cl-finite-math-only",
    "-cl-unsafe-math-optimizations",
    "-cl-no-signed-zeros",
    "-cl-mad-enable",
    "-cl-denorms-are-zero",
    "-cl-single-precision-constant",
)


def expand_includes(path: Path) -> str:
    """The file's text with each ``#include "_x.cl"`` replaced by that file, every file at most once."""
    seen: set[Path] = set()

    def expand(file: Path) -> str:
        if file in seen:
            return ""
        seen.add(file)
        if not file.is_file():
            raise BuildError(f"kernel file {file.name} is missing from {file.parent}")
        return _INCLUDE.sub(lambda match: expand(path.parent / match.group(1)), file.read_text())

    return expand(path)


@functools.lru_cache(maxsize=256)
def _template(source: str) -> Template:
    # Reading a template takes Mako longer than rendering it, and a file is rendered once a set of constants.
    return Template(source, strict_undefined=True)


def render(file: str, params: Mapping[str, Any]) -> str:
    """OpenCL C of kernels/<file>.cl for these template constants; BuildError names what is undefined."""
    source = expand_includes(kernels_dir() / f"{file}.cl")
    try:
        return str(_template(source).render(**params))
    except Exception as error:
        raise BuildError(
            f"kernel file {file}.cl did not render with {dict(params)}: {error}\n"
            f"{mako_exceptions.text_error_template().render()}"
        ) from error


def relaxed_options() -> list[str]:
    """Those of PYOPENCL_BUILD_OPTIONS that relax arithmetic."""
    return [option for option in os.environ.get("PYOPENCL_BUILD_OPTIONS", "").split() if option in _RELAXED]


def build_options(device: Device) -> list[str]:
    """Options for this device. BuildError where PYOPENCL_BUILD_OPTIONS asks for relaxed arithmetic."""
    refused = relaxed_options()
    if refused:
        raise BuildError(
            f"PYOPENCL_BUILD_OPTIONS holds {' '.join(refused)}, which breaks guards and reproducible results; "
            "unset it to use memtrain_cl"
        )
    return ["-cl-fp32-correctly-rounded-divide-sqrt"] if device.info.correctly_rounded_divide else []


class Kernel:
    """One entry point of a built program. Calling it enqueues a launch on the device's queue and returns at once."""

    def __init__(self, device: Device, program: Any, file: str, name: str, params: Mapping[str, Any]) -> None:
        cl = import_pyopencl()
        self.device = device
        self.label = f"{file}.{name}({', '.join(f'{key}={value}' for key, value in sorted(params.items()))})"
        self._program = program
        self._name = name
        self._of_thread = threading.local()
        self._queue = device.queue
        self._enqueue = cl.enqueue_nd_range_kernel
        self._error = cl.Error
        self._handle()

    def _handle(self) -> Any:
        cl = import_pyopencl()
        try:
            handle = self._of_thread.handle = cl.Kernel(self._program, self._name)
        except cl.Error as error:
            raise BuildError(f"the program of {self.label} has no such kernel: {error}") from error
        self._of_thread.set_args = None
        return handle

    def _typed(self, handle: Any, args: Sequence[Any]) -> Any:
        # Told the types once, pyopencl sets all arguments in one compiled call, in a fifth of the time.
        handle.set_scalar_arg_dtypes([arg.dtype if isinstance(arg, np.generic) else None for arg in args])
        self._of_thread.set_args = handle.set_args
        return handle.set_args

    def __call__(self, global_size: Sequence[int], local_size: Sequence[int] | None, *args: Any) -> Any:
        """Launch with DeviceArrays, Operands and NumPy scalars as arguments; the launch's event."""
        return self.enqueue(
            tuple(global_size),
            None if local_size is None else tuple(local_size),
            [arg.buffer if isinstance(arg, _HOLDERS) else arg for arg in args],
        )

    def enqueue(self, global_size: tuple[int, ...], local_size: tuple[int, ...] | None, args: Sequence[Any]) -> Any:
        """The call with buffers in place of what holds them: the short way for launches that cost little themselves."""
        self.device.check_process()
        own = self._of_thread
        try:
            handle = own.handle
        except AttributeError:  # this thread's first launch
            handle = self._handle()
        try:
            (own.set_args or self._typed(handle, args))(*args)
            return self._enqueue(self._queue, handle, global_size, local_size)
        except self._error as error:
            raise MemtrainError(
                f"kernel {self.label} did not launch on {self.device.info.name} with global size {global_size}, "
                f"local size {local_size}: {error}"
            ) from error


def _for_target(device: Device, program: Any, target: str) -> Any:
    """The program built anew from its PTX, for a target that the compiler of OpenCL does not name.

    Instructions that it alone has stand in the source as comments of inline assembly: ``asm volatile("//@ ...")``.
    """
    cl = import_pyopencl()
    (ptx,) = program.get_info(cl.program_info.BINARIES)
    ptx, found = re.subn(rb"(?m)^\.target \w+", b".target " + target.encode(), ptx.replace(b"//@ ", b""))
    if found != 1:
        raise BuildError(f"expected PTX of one target from the compiler of {device.info.label}, got {found}")
    return cl.Program(device.context, [device.handle], [ptx]).build()


class Launch:
    """A kernel with its sizes and arguments, checked and ready: calling it costs what a launch costs.

    arguments: as for calling the kernel. What they name is kept alive.
    """

    def __init__(
        self, kernel: Kernel, global_size: Sequence[int], local_size: Sequence[int] | None, *arguments: Any
    ) -> None:
        self._enqueue = kernel.enqueue
        self._sizes = tuple(global_size), None if local_size is None else tuple(local_size)
        self._held = arguments
        self._arguments = [value.buffer if isinstance(value, _HOLDERS) else value for value in arguments]

    def __call__(self, *more: Any) -> Any:
        """Enqueue it; more: the arguments that come after those, NumPy scalars. The launch's event."""
        return self._enqueue(*self._sizes, [*self._arguments, *more])


_build_lock = threading.Lock()
_programs: dict[tuple[Any, ...], Any] = {}


def _build(device: Device, file: str, name: str, params: Mapping[str, Any]) -> Any:
    options = build_options(device)
    if "STANDARD" in params:
        options.append(f"-cl-std={params['STANDARD']}")
    source = render(file, params)
    # Equal text gives one program, also where two parameter sets render alike.
    key = (device.handle, device.context, source, tuple(options))
    with _build_lock:
        if key not in _programs:
            cl = import_pyopencl()
            device.check_process()
            try:
                with warnings.catch_warnings():
                    # A compiler that talks about a program that it built.
                    warnings.simplefilter("ignore", cl.CompilerWarning)
                    program = cl.Program(device.context, source).build(options=options)
                    if "PTX_TARGET" in params:
                        program = _for_target(device, program, params["PTX_TARGET"])
                    _programs[key] = program
            except cl.Error as error:
                raise BuildError(
                    f"kernel {name} of {file}.cl did not build on {device.info.label} with {dict(params)}; "
                    f"the compiler said:\n{error}"
                ) from error
        return _programs[key]


@functools.lru_cache(maxsize=4096)
def _cached_kernel(device: Device, file: str, name: str, items: tuple[tuple[str, Any, type], ...]) -> Kernel:
    params = {key: value for key, value, _ in items}
    return Kernel(device, _build(device, file, name, params), file, name, params)


def get_kernel(device: Device, file: str, name: str, **params: Any) -> Kernel:
    """The kernel `name` of kernels/<file>.cl built for `device` with these template constants (hashable values).

    A constant STANDARD names the OpenCL C to build as ("CL3.0"), for kernels that need more than the device's default;
    PTX_TARGET the target of NVIDIA's PTX ("sm_90a"), whose own instructions begin with ``//@`` in inline assembly.
    Raises BuildError with kernel, parameters, device and the compiler's log. Built once a process and constant set.
    """
    # With their types, since 1, 1.0 and True are equal and render differently.
    return _cached_kernel(device, file, name, tuple((key, params[key], type(params[key])) for key in sorted(params)))
