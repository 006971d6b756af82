"""Python errors on their way out of a backward.

torch's engine guards the device's stream while it runs a node. An error of a hook or of an operation unwinds that guard
with the error still set in the interpreter, and a device of Python's making is asked for its type by a call of Python,
which ends the process or loses the error (torch 2.10 to 2.13). So that call takes the error away, the engine then finds
none (SystemError), and where the backward was started the error takes its place again.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch

#: A function of C that does nothing. ctypes looks for an error after a call, and so raises one that was set before it.
_raise_what_is_set = ctypes.PYFUNCTYPE(ctypes.c_int)(("Py_IsInitialized", ctypes.pythonapi))
_TYPE = torch._C._autograd.DeviceType.PrivateUse1
_lock = threading.Lock()
_kept: list[BaseException] = []


class Guard(torch._C._acc.DeviceGuard):
    """What torch asks for the device's type, also while an error unwinds."""

    def type_(self) -> Any:
        """The type; an error that is set is kept for `Engine`."""
        try:
            _raise_what_is_set()
        except BaseException as error:  # noqa: BLE001 (raised again by Engine)
            with _lock:
                _kept.append(error)
        return _TYPE


class Engine:
    """torch's engine, whose errors are those that were kept."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's."""
        if torch._C._current_graph_task_id() == -1:
            with _lock:
                _kept.clear()
        try:
            return self._engine.run_backward(*args, **kwargs)
        except SystemError as error:
            with _lock:
                kept, _kept[:] = list(_kept), []
            if kept:
                raise kept[0] from error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def install() -> None:
    """Put `Engine` before torch's."""
    variable: Any = torch.autograd.Variable
    if not isinstance(variable._execution_engine, Engine):
        variable._execution_engine = Engine(variable._execution_engine)
