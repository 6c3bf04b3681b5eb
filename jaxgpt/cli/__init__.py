"""The command line: one module and function per command.

`parse` derives the options and the help of a command from its function.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from jaxgpt.cli.output import note
from jaxgpt.errors import FULL, TrainingFailed, UserError, full_disk_fix, one_line
from jaxgpt.runtime import debugs_nans, keep_compiled, set_quick_flag, skip_missing_tpus, tune_memory
from jaxgpt.signals import INTERRUPTED, advice, exit_on_second_signal

# Exit codes. jaxgpt/signals.py defines two more, UNFINISHED and INTERRUPTED.
FAILED = 1  # failed command
BAD_INPUT = 2  # bad usage or input


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, `FAILED`, `BAD_INPUT`, `UNFINISHED` or `INTERRUPTED`."""
    # Imported here, because a program may have added names of functions (docs/own/activation.md) since its first import.
    from jaxgpt.cli.parse import parse

    try:
        command, arguments = parse(sys.argv[1:] if argv is None else argv)
        if "run" in arguments.arguments:  # report a wrong path before the command imports JAX
            from jaxgpt.checkpoint.run import open_run

            open_run(Path(arguments.arguments["run"]))
        code = command(*arguments.args, **arguments.kwargs) or 0
        if sys.stdout is not None:
            sys.stdout.flush()  # report a failed write here rather than when Python exits
        return code
    except (UserError, TrainingFailed) as e:
        return _fail(str(e), FAILED if isinstance(e, TrainingFailed) else BAD_INPUT)
    except KeyboardInterrupt:
        return _fail(_with_advice("interrupted"), INTERRUPTED)
    except BrokenPipeError:  # pipe closed by its reader, as in `jaxgpt sample ... | head`
        sys.stdout = None  # keep Python from flushing the closed pipe at exit
        return 0
    except OSError as e:
        if e.errno in FULL:
            file = f" {e.filename}" if e.filename else ""
            return _fail(f"cannot write{file}: {e.strerror}; {full_disk_fix(e)}", FAILED)
        if e.filename is None:
            raise
        return _fail(f"cannot access {e.filename}: {e.strerror}", BAD_INPUT)
    except MemoryError as e:
        details = f" ({one_line(e, 100)})" if str(e) else ""
        reason = _with_advice(f"out of memory on the host{details}")
        return _fail(f"{reason}; use a smaller model or batch, or a machine with more memory", FAILED)
    except FloatingPointError as e:
        if not debugs_nans():
            raise
        reason = f"JAX_DEBUG_NANS or JAX_DEBUG_INFS found a non-finite value: {one_line(e, 200)}"
        return _fail(_with_advice(reason), FAILED)
    except (RuntimeError, AssertionError) as e:  # missing accelerator, or failure of XLA
        import jax

        from jaxgpt.parallel.host import missing_platform

        missing = missing_platform()
        if missing:
            return _fail(missing, BAD_INPUT)
        if not isinstance(e, jax.errors.JaxRuntimeError):
            raise
        reason = f"XLA failed: {one_line(e, 300)}"
        if "RESOURCE_EXHAUSTED" in str(e):
            reason += "; the device is out of memory: use a smaller model or batch, or the CPU (JAX_PLATFORMS=cpu)"
        return _fail(reason, FAILED)


def _with_advice(reason: str) -> str:
    """Append the advice for an early end: what is kept, and how to continue."""
    text = advice()
    return f"{reason}: {text}" if text else reason


def _fail(reason: str, code: int) -> int:
    note(str(UserError(reason)))  # `UserError` keeps the message on one line
    return code


def entry(*before: str) -> None:
    """Run the console script; `before` precedes the command-line arguments.

    Compiled programs are cached.
    """
    tune_memory()
    set_quick_flag()
    skip_missing_tpus()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # hide XLA's logs, such as warnings about slow compilation
    exit_on_second_signal()
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
