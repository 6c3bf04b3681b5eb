"""Failures of commands: the one-line message and the exit code of errors with a known cause."""

from __future__ import annotations

from typing import NamedTuple

from jaxgpt.early_end import with_advice
from jaxgpt.errors import BAD_INPUT, FAILED, FULL, TrainingFailed, UserError, full_disk_fix, one_line
from jaxgpt.out_of_memory import MORE_HOST_MEMORY, is_out_of_device_memory, out_of_host_memory
from jaxgpt.runtime import debugs_nans


class Failure(NamedTuple):
    """An error with a known cause: the message for the user, and the exit code."""

    reason: str
    code: int


def known_failure(error: Exception) -> Failure | None:
    """Return the message and the exit code of an error, or None if its cause is unknown."""
    match error:
        case TrainingFailed() | UserError():
            return Failure(str(error), error.exit_code)
        case OSError():
            return _file_failure(error)
        case MemoryError():
            reason = with_advice(out_of_host_memory(error))
            return Failure(f"{reason}; {MORE_HOST_MEMORY}", FAILED)
        case FloatingPointError() if debugs_nans():
            reason = f"JAX_DEBUG_NANS or JAX_DEBUG_INFS found a non-finite value: {one_line(error, 200)}"
            return Failure(with_advice(reason), FAILED)
        case RuntimeError() | AssertionError():  # JAX_PLATFORMS=cuda without the plugin: an AssertionError of JAX
            return _device_failure(error)
    return None


def is_reported(error: Exception) -> bool:
    """Return whether `jaxgpt.cli.main` handles an error without a stack trace."""
    return isinstance(error, BrokenPipeError) or known_failure(error) is not None


def _file_failure(error: OSError) -> Failure | None:
    """Return the failure of a full disk or an inaccessible file; None for other errors without a file name."""
    if error.errno in FULL:
        file = f" {error.filename}" if error.filename else ""
        return Failure(f"cannot write{file}: {error.strerror}; {full_disk_fix(error)}", FAILED)
    if error.filename is None:
        return None
    return Failure(f"cannot access {error.filename}: {error.strerror}", BAD_INPUT)


def _device_failure(error: Exception) -> Failure | None:
    """Return the failure of a missing accelerator or of XLA; None for other errors."""
    import jax

    from jaxgpt.parallel.host import missing_platform

    missing = missing_platform()
    if missing:
        return Failure(missing, BAD_INPUT)
    if not isinstance(error, jax.errors.JaxRuntimeError):
        return None
    reason = f"XLA failed: {one_line(error, 300)}"
    if is_out_of_device_memory(error):
        reason += "; the device is out of memory: use a smaller model or batch, or the CPU (JAX_PLATFORMS=cpu)"
    return Failure(reason, FAILED)
