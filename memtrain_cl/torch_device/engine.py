"""Python errors on their way out of a backward.

torch's engine guards the device's stream while it runs a node. An error of a hook or of an operation unwinds that guard
with the error still set in the interpreter, and a device of Python's making is asked for its type by a call of Python,
which ends the process or loses the error (torch 2.10 to 2.13). So that call takes the error away, the engine then finds
none (SystemError), and where the backward was started the error takes its place again. (A signal whose handler raises
at the very entry of that call still ends the process: torch does not expect it.)
"""

from __future__ import annotations

import _thread
import ctypes
import sys
import threading
from typing import Any

import torch

#: A function of C that does nothing. ctypes looks for an error after a call, and so raises one that was set before it.
_raise_what_is_set = ctypes.PYFUNCTYPE(ctypes.c_int)(("Py_IsInitialized", ctypes.pythonapi))
_TYPE = torch._C._autograd.DeviceType.PrivateUse1
#: The name of a thread's `_Backwards` among the objects that torch hands on to the threads of its engine.
_NAME = "memtrain_cl_backwards"


class _Errors:
    """Of one backward: those that unwound it, and what collections found meanwhile, as Python would tell it."""

    def __init__(self) -> None:
        self.unwound: list[BaseException] = []
        self.collected: list[Any] = []

    def take(self) -> BaseException | None:
        """The first of those that unwound it, else of those collected."""
        if self.unwound:
            return self.unwound.pop(0)
        return self.collected.pop(0).exc_value if self.collected else None


class _Backwards:
    """Of a thread, and of the engine's threads that work for it: what its backwards keep, the innermost last."""

    def __init__(self) -> None:
        self.running: list[_Errors] = []


def _of_thread() -> _Backwards | None:
    """That of this thread, or of the one that waits for this thread of the engine; None before its first backward."""
    found: _Backwards | None = None
    if torch._C._is_key_in_tls(_NAME):
        found = torch._C._get_obj_in_tls(_NAME)
    return found


def _errors() -> _Errors | None:
    """Those of the backward that runs in this thread."""
    own = _of_thread()
    return own.running[-1] if own is not None and own.running else None


def _entered() -> _Backwards:
    own = _of_thread()
    if own is None:
        own = _Backwards()
        # torch 2.11 takes over a reference that it was not given, 2.13 one of its own: one a thread stays then.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(own))
        torch._C._stash_obj_in_tls(_NAME, own)
    return own


class Guard(torch._C._acc.DeviceGuard):
    """What torch asks for the device's type, also while an error unwinds."""

    def type_(self) -> Any:
        """The type; an error that is set is kept for `Engine`."""
        try:
            _raise_what_is_set()
        except BaseException as error:  # noqa: BLE001 (raised again by Engine)
            _keep(error)
        return _TYPE


def _keep(error: BaseException) -> None:
    errors = _errors()
    if errors is not None:
        errors.unwound.append(error)
    elif isinstance(error, KeyboardInterrupt):
        # A signal that came while nothing unwound.
        _thread.interrupt_main()
    else:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), ctypes.py_object(type(error)))


#: In which words a garbage collection gives an error away.
_COLLECTING = ("garbage collection", "tp_clear")


class _Listener:
    """Before Python's hook for errors that nobody can be given: a collection, too, finds the error that unwinds."""

    def __init__(self, told: Any) -> None:
        self.told = told

    def __call__(self, found: Any) -> None:
        errors, where = _errors(), found.err_msg or ""
        if errors is not None and found.exc_value is not None and any(place in where for place in _COLLECTING):
            errors.collected.append(found)
        else:
            self.told(found)


def _listen() -> None:
    if not isinstance(sys.unraisablehook, _Listener):
        sys.unraisablehook = _Listener(sys.unraisablehook)


def _hand_on(errors: _Errors, own: _Backwards) -> None:
    """What a backward kept that has ended well belongs to another that works for the same thread, or is a signal's."""
    hook = sys.unraisablehook
    tell = hook.told if isinstance(hook, _Listener) else hook
    for found in errors.collected:
        tell(found)
    if own.running:
        own.running[-1].unwound.extend(errors.unwound)
    elif errors.unwound:
        raise errors.unwound.pop(0)


class Engine:
    """torch's engine, whose errors are those that were kept."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's."""
        _listen()
        own, errors = _entered(), _Errors()
        own.running.append(errors)
        try:
            result = self._engine.run_backward(*args, **kwargs)
        except SystemError as error:
            # Two threads that work for one backward may both be in backwards within it: any of them may have kept it.
            for one in (errors, *reversed(own.running)):
                found = one.take()
                if found is not None:
                    break
            if found is None:
                raise
            try:
                raise found from error
            finally:
                # It holds the frames that it passed, and these the graph: nothing here may hold it.
                del found
        finally:
            own.running.remove(errors)
        _hand_on(errors, own)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def install() -> None:
    """Put `Engine` before torch's."""
    variable: Any = torch.autograd.Variable
    if not isinstance(variable._execution_engine, Engine):
        variable._execution_engine = Engine(variable._execution_engine)
