"""Errors that a user can meet. Each message is one sentence: what was expected, what came, and what mends it."""


class MemtrainError(Exception):
    """Base of every error that memtrain_cl raises on its own account."""


class UnsupportedDevice(MemtrainError, RuntimeError):
    """No OpenCL device answers the request: no driver, no match for a selector, or a device that fails its checks."""


class BuildError(MemtrainError, RuntimeError):
    """An OpenCL program did not build; the message names kernel, parameters and device and holds the compiler's log."""


class CorruptFile(MemtrainError, ValueError):
    """A file that does not hold what its format promises; the message names file, field and value."""


class OutOfMemory(MemtrainError, RuntimeError):
    """A device has no room for a request; the message holds the bytes asked for, held and allowed."""


class NotFinite(MemtrainError, ValueError):
    """Numbers to be saved in few bits are not finite, or beyond what their scale can give back."""
