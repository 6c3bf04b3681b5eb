"""The command line: one module and function per command.

`parse` derives the options and the help of a command from its function.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.cli.output import note
from jaxgpt.errors import BAD_INPUT, FAILED, FULL, TrainingFailed, UserError, full_disk_fix, one_line
from jaxgpt.heap import tune_memory
from jaxgpt.runtime import debugs_nans, keep_compiled, set_quick_flag, skip_missing_tpus
from jaxgpt.signals import INTERRUPTED, exit_on_signals, with_advice


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, `FAILED`, `BAD_INPUT`, `UNFINISHED` or `INTERRUPTED`."""
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        failure = Failure(with_advice("interrupted"), INTERRUPTED)
    except BrokenPipeError:  # pipe closed by its reader, as in `jaxgpt sample ... | head`
        sys.stdout = None  # keep Python from flushing the closed pipe at exit
        return 0
    except Exception as e:
        known = _known_failure(e)
        if known is None:
            raise
        failure = known
    note(str(UserError(failure.reason)))  # `UserError` keeps the message on one line
    return failure.code


def _run(words: Sequence[str]) -> int:
    """Run the command of a command line and return its exit code."""
    # Imported here, because a program may have added names of functions (docs/own/activation.md) since it imported this module.
    from jaxgpt.cli.parse import parse

    command, bound = parse(words)
    _check_run(bound.arguments)
    code = command(*bound.args, **bound.kwargs) or 0
    if sys.stdout is not None:
        sys.stdout.flush()  # report a failed write here rather than when Python exits
    return code


def _check_run(arguments: Mapping[str, Any]) -> None:
    """Check the argument `run`, if any, to report a wrong path before the command imports JAX."""
    if "run" not in arguments:
        return
    from jaxgpt.checkpoint.run import open_run

    open_run(Path(arguments["run"]))


class Failure(NamedTuple):
    """An error with a known cause: the message for the user, and the exit code."""

    reason: str
    code: int


def _known_failure(error: Exception) -> Failure | None:
    """Return the message and the exit code of an error, or None if its cause is unknown."""
    match error:
        case TrainingFailed() | UserError():
            return Failure(str(error), error.exit_code)
        case OSError():
            return _file_failure(error)
        case MemoryError():
            details = f" ({one_line(error, 100)})" if str(error) else ""
            reason = with_advice(f"out of memory on the host{details}")
            return Failure(f"{reason}; use a smaller model or batch, or a machine with more memory", FAILED)
        case FloatingPointError() if debugs_nans():
            reason = f"JAX_DEBUG_NANS or JAX_DEBUG_INFS found a non-finite value: {one_line(error, 200)}"
            return Failure(with_advice(reason), FAILED)
        case RuntimeError() | AssertionError():
            return _device_failure(error)
    return None


def _file_failure(error: OSError) -> Failure | None:
    """Return the failure of a full disk or an inaccessible file."""
    if error.errno in FULL:
        file = f" {error.filename}" if error.filename else ""
        return Failure(f"cannot write{file}: {error.strerror}; {full_disk_fix(error)}", FAILED)
    if error.filename is None:
        return None
    return Failure(f"cannot access {error.filename}: {error.strerror}", BAD_INPUT)


def _device_failure(error: Exception) -> Failure | None:
    """Return the failure of a missing accelerator or of XLA."""
    import jax

    from jaxgpt.parallel.host import missing_platform

    missing = missing_platform()
    if missing:
        return Failure(missing, BAD_INPUT)
    if not isinstance(error, jax.errors.JaxRuntimeError):
        return None
    reason = f"XLA failed: {one_line(error, 300)}"
    if "RESOURCE_EXHAUSTED" in str(error):
        reason += "; the device is out of memory: use a smaller model or batch, or the CPU (JAX_PLATFORMS=cpu)"
    return Failure(reason, FAILED)


def entry(*before: str) -> None:
    """Run the console script, with a cache of compiled programs; `before` precedes the command-line arguments."""
    tune_memory()
    set_quick_flag()
    skip_missing_tpus()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # hide XLA's logs, such as warnings about slow compilation
    exit_on_signals()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # escape characters that the encoding lacks
    with suppress(OSError, RuntimeError):  # without a home directory, compile each time
        keep_compiled()
    code = main([*before, *sys.argv[1:]])
    # Only `train` imports `join`. With several processes, a failed process does not wait for the others.
    if code and "jaxgpt.parallel.join" in sys.modules:
        from jaxgpt.parallel.join import exit_process

        exit_process(code)
    sys.exit(code)
