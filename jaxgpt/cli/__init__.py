"""The command line: one file a command; parse, call, print."""

from __future__ import annotations

import errno
import gc
import importlib
import sys
from collections.abc import Sequence

from jaxgpt.cache import keep_compiled
from jaxgpt.config import UserError, did_you_mean
from jaxgpt.train import TrainingFailed

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # nobody's mistake, and no bug
GARBAGE = 50_000  # objects more than before at which Python looks for cycles among them

COMMANDS = {
    "train": "train a preset, or go on with a run",
    "launch": "train in several processes on this machine",
    "sample": "text from a run",
    "explain": "why the next token is what it is",
    "eval": "the loss of a run on its whole validation split, or on another text",
    "info": "parameters, FLOPs and bytes of a run or a preset",
    "presets": "the presets, with what to expect of each",
    "import": "a run from a model of transformers or nanoGPT: a folder, or a name on the hub",
    "export": "a run as a folder that transformers reads",
    "verify": "does every law hold here: a table of equivalences, measured",
    "prove-resume": "whether a run that is cut and resumed is the same, bit for bit",
    "plan": "whether a run fits a machine that one does not have, and how fast it can be",
    "bench": "how fast a run trains and generates here, and where the time goes",
    "replay": "another trainer's recorded run, row by row",
}
FILES = {"import": "import_", "prove-resume": "prove_resume"}  # where a command's name can be no module's
USAGE = "usage: jaxgpt COMMAND ...\n\n" + "\n".join(f"  {name:12} {what}" for name, what in COMMANDS.items())
USAGE += """

jaxgpt COMMAND --help tells more of each. With --no-cache, a command neither keeps nor reuses compiled programs.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code: 0 done, 1 the work failed, 2 bad usage or input."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if args[0] == "--version":
        import jaxgpt

        print(f"jaxgpt {jaxgpt.__version__}")
        return 0
    name, rest = args[0], args[1:]
    try:
        if name not in COMMANDS:
            raise UserError(f"no command {name!r}{did_you_mean(name, COMMANDS)}: one of {', '.join(COMMANDS)}")
        return importlib.import_module(f"jaxgpt.cli.{FILES.get(name, name)}").run(rest)
    except UserError as e:
        print(f"jaxgpt: {e}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader went away (`jaxgpt sample ... | head`): nothing is wrong, and nothing more can be printed.
        sys.stdout = None  # type: ignore[assignment]
        return 0
    except KeyboardInterrupt:
        print("jaxgpt: interrupted", file=sys.stderr)
        return 130
    except TrainingFailed as e:
        print(f"jaxgpt: {e}", file=sys.stderr)
        return 1
    except OSError as e:
        if e.errno not in FULL:
            raise
        print(f"jaxgpt: cannot write{f' {e.filename}' if e.filename else ''}: {e.strerror}", file=sys.stderr)
        return 1


def entry(*before: str) -> None:
    """The console script: a process of its own, which keeps what it compiles unless `--no-cache` stands among its words.

    Args:
        before: words that stand before those of the command line.
    """
    # Imports and traces make millions of objects that stay: looking for garbage among them takes a tenth of their time.
    gc.set_threshold(GARBAGE)
    words = [*before, *sys.argv[1:]]
    if "--no-cache" in words:
        words.remove("--no-cache")
    else:
        keep_compiled()
    code = main(words)
    # Loaded only by what several processes can run. One of them that failed does not wait for the others.
    if code and (join := sys.modules.get("jaxgpt.parallel.join")):
        join.leave(code)
    sys.exit(code)
