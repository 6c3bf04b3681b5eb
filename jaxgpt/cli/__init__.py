"""The command line: one module per command, with a function of its name that `parse` turns into options and help."""

from __future__ import annotations

import codecs
import errno
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from jaxgpt.errors import TrainingFailed, UserError, did_you_mean, one_line
from jaxgpt.runtime import keep_compiled, tune_memory
from jaxgpt.signals import INTERRUPTED, advice, exit_on_second_signal

# Exit codes; signals has UNFINISHED and INTERRUPTED.
FAILED, BAD_INPUT = 1, 2  # the work failed; bad usage or input
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk or quota full: neither bad input nor a bug
NO_CACHE = {"--no-cache", "--no_cache"}
HELP = ("-h", "--help", "help")

COMMANDS = {
    "train": "train a model, or resume a run",
    "launch": "train in several processes on this machine",
    "sample": "generate text from a run",
    "chat": "chat with an instruction-tuned model",
    "explain": "show how the next token is sampled",
    "inspect": "show what a model computes for a text, as tables or a page",
    "eval": "compute the loss of a run on its validation split or a text",
    "data prepare": "tokenize documents to shards of token ids",
    "data report": "describe a dataset, and compute baselines of its loss",
    "plot": "draw the losses of runs in one picture",
    "info": "print parameters, FLOPs and bytes of a run or preset",
    "presets": "list the presets with their expected results",
    "import": "convert a transformers or nanoGPT model to a run",
    "export": "convert a run to a transformers model",
    "verify": "check the numerical consistency of jaxgpt on this machine",
    "plan": "plan a run on hardware you do not have: memory, traffic, speed",
    "bench": "measure training and generation speed on this machine",
}
USAGE = "\n".join(
    [
        "usage: jaxgpt COMMAND [ARGUMENTS] [OPTIONS]\n\ncommands:",
        *(f"  {name:12}  {about}" for name, about in COMMANDS.items()),
        "\njaxgpt COMMAND --help shows the arguments and options of a command.",
        "--no-cache disables the cache of compiled programs, in every command.",
        "jaxgpt --version prints the version.",
    ]
)


def command(name: str) -> Callable[..., int | None]:
    """Import the function of a command: `jaxgpt.cli.data_prepare.data_prepare` of "data prepare"."""
    word = "import_" if name == "import" else name.replace(" ", "_")
    function: Callable[..., int | None] = getattr(importlib.import_module(f"jaxgpt.cli.{word}"), word)
    return function


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, or one of the constants above."""
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        if sys.stdout is not None:
            sys.stdout.flush()  # report a failed write here rather than when Python exits
        return code
    except UserError as e:
        return _fail(str(e), BAD_INPUT)
    except BrokenPipeError:  # the reader has closed the pipe, as in `jaxgpt sample ... | head`
        sys.stdout = None  # type: ignore[assignment]
        return 0
    except KeyboardInterrupt:
        return _fail(f"interrupted{f': {text}' if (text := advice()) else ''}", INTERRUPTED)
    except TrainingFailed as e:
        return _fail(str(e), FAILED)
    except OSError as e:
        if e.errno in FULL:
            return _fail(f"cannot write{f' {e.filename}' if e.filename else ''}: {e.strerror}", FAILED)
        if e.filename is None:
            raise
        return _fail(f"cannot access {e.filename}: {e.strerror}", BAD_INPUT)
    except (RuntimeError, AssertionError) as e:
        if "jax" not in sys.modules:
            raise
        from jaxgpt.parallel.host import missing_platform

        if missing := missing_platform():
            return _fail(missing, BAD_INPUT)
        if type(e).__name__ != "JaxRuntimeError":  # raised by XLA's compiler or a device
            raise
        full = "; the device is out of memory: raise train.accumulation, or use a smaller model"
        reason = one_line(e, 300)
        return _fail(f"XLA failed: {reason}{full if 'RESOURCE_EXHAUSTED' in reason else ''}", FAILED)


def _run(args: list[str]) -> int:
    if args[:1] and args[0] in HELP:
        args = [*args[1:], "--help"] if args[1:2] and args[1] not in HELP else []
    if not args:
        print(USAGE)
        return 0
    if args[0] == "--version":
        import jaxgpt

        print(f"jaxgpt {jaxgpt.__version__}")
        return 0
    name = next((name for name in COMMANDS if args[: len(name.split())] == name.split()), "")
    if name:
        from jaxgpt.cli.parse import run

        return run(name, command(name), args[len(name.split()) :])
    group = [f"jaxgpt {name}" for name in COMMANDS if name.startswith(f"{args[0]} ")]
    if group and set(args) & set(HELP):
        print("\n".join(f"{each}: {COMMANDS[each.removeprefix('jaxgpt ')]}" for each in group))
        return 0
    from jaxgpt.presets import PRESETS

    near = did_you_mean(args[0], COMMANDS)
    if args[0] in PRESETS or group:
        near = f" (did you mean {' or '.join(group or [f'jaxgpt train {args[0]}'])}?)"
    raise UserError(f"unknown command {' '.join(args[: 2 if group else 1])!r}{near}; see jaxgpt --help")


def _fail(reason: str, code: int) -> int:
    print(f"jaxgpt: {UserError(reason)}", file=sys.stderr)  # one line for any names
    return code


def entry(*before: str) -> None:
    """Run the console script, with the compilation cache enabled unless `--no-cache` is given.

    Args:
        before: arguments to insert before those of the command line.
    """
    tune_memory()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA logs a slow compilation as an error; it raises real errors
    exit_on_second_signal()
    if isinstance(sys.stdout, io.TextIOWrapper) and codecs.lookup(sys.stdout.encoding).name != "utf-8":
        # A sample may have characters outside the terminal's encoding.
        sys.stdout.reconfigure(errors="backslashreplace")
    words = [*before, *sys.argv[1:]]
    if not NO_CACHE & set(words):
        # Compile each time if the cache is not writable, or there is no home directory.
        with suppress(OSError, RuntimeError):
            keep_compiled()
    code = main([word for word in words if word not in NO_CACHE])
    # Only commands that run in several processes import this. A process that failed does not wait for the others.
    if code and (join := sys.modules.get("jaxgpt.parallel.join")):
        join.exit_process(code)
    sys.exit(code)
