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
from typing import Any

from jaxgpt.cli.console import note
from jaxgpt.cli.failure import Failure, known_failure
from jaxgpt.early_end import with_advice
from jaxgpt.errors import INTERRUPTED, UserError
from jaxgpt.heap import tune_memory
from jaxgpt.runtime import keep_compiled, set_quick_flag, skip_missing_tpus
from jaxgpt.signals import exit_on_signals, interrupt_silently


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, `FAILED`, `BAD_INPUT`, `UNFINISHED` or `INTERRUPTED`.

    Args:
        argv: words of the command line; None: the arguments of the process.
    """
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        failure = Failure(with_advice("interrupted"), INTERRUPTED)
    except BrokenPipeError:  # pipe closed by its reader, as in `jaxgpt sample ... | head`
        sys.stdout = None  # keep Python from flushing the closed pipe at exit
        return 0
    except Exception as e:
        known = known_failure(e)
        if known is None:
            raise
        failure = known
    note(str(UserError(failure.reason)))  # `UserError` keeps the message on one line
    return failure.code


def _run(words: Sequence[str]) -> int:
    """Run the command of a command line and return its exit code."""
    # Import late: a program may have added names of functions (docs/own/activation.md) since it imported this module.
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
    interrupt_silently()
    # Only `train` imports `join`. With several processes, a failed process does not wait for the others.
    if code and "jaxgpt.parallel.join" in sys.modules:
        from jaxgpt.parallel.join import exit_process

        exit_process(code)
    sys.exit(code)
