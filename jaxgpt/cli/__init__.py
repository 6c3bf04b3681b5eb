"""The command line: one module per command, which parses the options, calls the library and prints."""

from __future__ import annotations

import codecs
import errno
import importlib
import io
import sys
from collections.abc import Sequence
from types import ModuleType

from jaxgpt.config import UserError
from jaxgpt.errors import TrainingFailed, short_repr
from jaxgpt.runtime import keep_compiled, tune_memory
from jaxgpt.signals import INTERRUPTED, exit_on_second_signal

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk or quota full: neither bad input nor a bug
NO_CACHE = {"--no-cache", "--no_cache"}

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
    "presets": "list the presets and the results to expect",
    "import": "convert a transformers or nanoGPT model to a run",
    "export": "convert a run to a transformers model",
    "verify": "check the numerical consistency of jaxgpt on this machine",
    "plan": "plan a run on hardware you do not have: memory, traffic, speed",
    "bench": "measure training and generation speed on this machine",
}
FILES = {  # commands whose names are not module names
    "import": "import_",
    "data prepare": "data_prepare",
    "data report": "data_report",
}
USAGE = "usage: jaxgpt COMMAND [ARGUMENTS] [OPTIONS]\n\ncommands:\n"
USAGE += "\n".join(f"  {name:12}  {about}" for name, about in COMMANDS.items())
USAGE += """

See jaxgpt COMMAND --help for the arguments and options of a command. Every
command accepts --no-cache, which disables the cache of compiled programs.
jaxgpt --version prints the version.
"""


def module_of(command: str) -> ModuleType:
    """Import the module of a command, which defines `run` and `Args`, the dataclass of its options."""
    return importlib.import_module(f"jaxgpt.cli.{FILES.get(command, command)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        Exit code: 0 success, 1 failure, 2 invalid usage or input.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] and args[0] in ("-h", "--help", "help"):
        args = [*args[1:], "--help"] if args[1:2] and args[1] not in ("-h", "--help", "help") else []
    try:
        if not args:
            print(USAGE, end="", flush=True)
            return 0
        if args[0] == "--version":
            import jaxgpt

            print(f"jaxgpt {jaxgpt.__version__}", flush=True)
            return 0
        words = 2 if " ".join(args[:2]) in COMMANDS else 1
        name, rest = " ".join(args[:words]), args[words:]
        if group := [command for command in COMMANDS if command.startswith(f"{name} ")]:
            if rest[:1] in (["-h"], ["--help"]):
                print("\n".join(f"{command:12}  {COMMANDS[command]}" for command in group), flush=True)
                return 0
            unknown = (
                f"no command {short_repr(' '.join([name, rest[0]]))}" if rest else f"jaxgpt {name} is not complete"
            )
            raise UserError(f"{unknown}: use {' or '.join(group)}")
        if name not in COMMANDS:
            from jaxgpt.cli.suggest import unknown_command
            from jaxgpt.presets import PRESETS

            raise UserError(unknown_command(name, COMMANDS, PRESETS))
        code: int = module_of(name).run(rest)
        if sys.stdout is not None:
            sys.stdout.flush()  # report a failed write here rather than when Python exits
        return code
    except UserError as e:
        print(f"jaxgpt: {e}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader closed the pipe (`jaxgpt sample ... | head`). That is no error, but nothing more can be printed.
        sys.stdout = None  # type: ignore[assignment]
        return 0
    except KeyboardInterrupt:
        print("jaxgpt: interrupted", file=sys.stderr)
        return INTERRUPTED
    except TrainingFailed as e:
        print(f"jaxgpt: {e}", file=sys.stderr)
        return 1
    except (RuntimeError, AssertionError) as e:
        if "jax" not in sys.modules:
            raise
        from jaxgpt.parallel.host import missing_platform

        if missing := missing_platform():
            print(f"jaxgpt: {missing}", file=sys.stderr)
            return 2
        if type(e).__name__ != "JaxRuntimeError":  # raised by XLA's compiler or a device
            raise
        fix = "; the device is out of memory: lower train.microbatch, or use a smaller model" * (
            "RESOURCE_EXHAUSTED" in str(e)
        )
        print(f"jaxgpt: XLA failed: {' '.join(str(e).split())[:300]}{fix}", file=sys.stderr)
        return 1
    except OSError as e:
        if e.errno not in FULL:
            raise
        print(f"jaxgpt: cannot write{f' {e.filename}' if e.filename else ''}: {e.strerror}", file=sys.stderr)
        return 1


def entry(*before: str) -> None:
    """Run the console script, with the compilation cache enabled unless `--no-cache` is given.

    Args:
        before: arguments to insert before those of the command line.
    """
    tune_memory()
    exit_on_second_signal()
    if isinstance(sys.stdout, io.TextIOWrapper) and codecs.lookup(sys.stdout.encoding).name != "utf-8":
        sys.stdout.reconfigure(errors="backslashreplace")  # a sample may have characters that the terminal has not
    words = [*before, *sys.argv[1:]]
    if NO_CACHE & set(words):
        words = [word for word in words if word not in NO_CACHE]
    else:
        keep_compiled()
    code = main(words)
    # Only commands that run in several processes import this. A process that failed does not wait for the others.
    if code and (join := sys.modules.get("jaxgpt.parallel.join")) and join.count() > 1:
        join.leave(code)
    sys.exit(code)
