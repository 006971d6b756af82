"""Errors on their way out of a backward.

torch's engine ends the process when a Python error leaves an operation that it runs for a device of Python's making:
the guard of the device's stream, unwound meanwhile, calls Python with the error still set (torch 2.10 to 2.13). So an
error inside a backward is kept here and the operation returns what torch's conversion refuses, an error of C++; when
that arrives where the backward was started, the first error takes its place.
"""

from __future__ import annotations

import threading
from typing import Any

import torch


class _Refused:
    """What no operation returns."""

    def __repr__(self) -> str:
        return "an error on the device 'opencl'"


_lock = threading.Lock()
_kept: list[Exception] = []


def carry(error: Exception) -> Any:
    """Raise `error`, or, inside a backward, keep it for `Engine` and return what makes torch raise."""
    if torch._C._current_graph_task_id() == -1:
        raise error
    with _lock:
        _kept.append(error)
    return _Refused()


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
        except (RuntimeError, TypeError) as error:  # of an operation, of a hook that gives back what was saved
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
