"""Parse commands with cyclopts: a signature declares options, a docstring is the help."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from inspect import BoundArguments
from typing import Any, get_args

from cyclopts import App, CycloptsError, MissingArgumentError, UnknownOptionError, UnusedCliTokensError
from cyclopts.argument import ArgumentCollection

import jaxgpt
from jaxgpt.cli.absent import other_program
from jaxgpt.cli.option_help import PresetHelp
from jaxgpt.cli.options import EVERY
from jaxgpt.errors import UserError, one_line, short_repr
from jaxgpt.presets import DEFAULT, PRESETS, preset
from jaxgpt.settings import check_text
from jaxgpt.suggestions import similar_setting

# The function of each command; cyclopts imports only the module of the command in use.
COMMANDS = {
    "train": "jaxgpt.cli.train:train",
    "launch": "jaxgpt.cli.launch:launch",
    "sample": "jaxgpt.cli.sample:sample",
    "chat": "jaxgpt.cli.chat:chat",
    "explain": "jaxgpt.cli.explain:explain",
    "inspect": "jaxgpt.cli.inspect:inspect",
    "eval": "jaxgpt.cli.eval:eval",
    "plot": "jaxgpt.cli.plot:plot",
    "compare": "jaxgpt.cli.compare:compare",
    "follow": "jaxgpt.cli.follow:follow",
    "info": "jaxgpt.cli.info:info",
    "presets": "jaxgpt.cli.presets:presets",
    "import": "jaxgpt.cli.import_:import_",
    "export": "jaxgpt.cli.export:export",
    "verify": "jaxgpt.cli.verify:verify",
    "plan": "jaxgpt.cli.plan:plan",
    "bench": "jaxgpt.cli.bench:bench",
    "data prepare": "jaxgpt.cli.data_prepare:data_prepare",
    "data report": "jaxgpt.cli.data_report:data_report",
}

# Options of other programs that select devices.
DEVICE_OPTIONS = ("--platform", "--device", "--devices", "--accelerator", "--gpu", "--gpus", "--cpu", "--tpu")
DEVICE_HINT = "JAX chooses the devices: set the environment variable JAX_PLATFORMS to cpu, cuda or tpu"


def parse(words: Sequence[str]) -> tuple[Callable[..., Any], BoundArguments]:
    """Parse words into the function of a command, or the help printer, and its arguments.

    Raises:
        UserError: if a command, option or argument is unknown, missing or invalid.
    """
    app = make_app(words)
    try:
        command, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    except CycloptsError as e:
        name = " ".join(["jaxgpt", *(e.command_chain or ())])
        e.command_chain = ()  # otherwise the text of the error begins with the command
        raise UserError(f"{_reason(e)} See {name} --help.") from None
    return command, bound


def parse_options(function: Callable[..., Any], words: Sequence[str]) -> dict[str, Any]:
    """Parse words into the given arguments of a function that is not a command, such as the options in an option's value.

    Raises:
        UserError: if an option is unknown or invalid.
    """
    app = App(default_parameter=EVERY, config=_check_words, help_flags=(), version_flags=())
    app.default(function)
    try:
        _, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    except CycloptsError as e:
        raise UserError(_reason(e)) from None
    return dict(bound.arguments)


def _reason(error: CycloptsError) -> str:
    """Return what is wrong with the words of a command line, in one line."""
    if isinstance(error, UnknownOptionError):
        return _unknown_option(error)
    if isinstance(error, UnusedCliTokensError):
        words = ", ".join(map(short_repr, error.unused_tokens or ()))
        return f"Unexpected argument: {words}; an option takes one value, in quotes if it contains spaces."
    if isinstance(error, MissingArgumentError) and error.argument and not error.argument.name.startswith("-"):
        return f"Missing argument: {error.argument.name}."
    return one_line(error)


def _unknown_option(error: UnknownOptionError) -> str:
    """Return the message for an unknown option, with a hint.

    The hints of cyclopts are not used: they compare complete names, so --train.dtype would suggest --train.steps.
    """
    word = error.token.keyword or error.token.value
    option = word.partition("=")[0].replace("_", "-")
    if option in DEVICE_OPTIONS:
        return f"Unknown option: {option} ({DEVICE_HINT})."
    known = [name for argument in error.argument_collection for name in argument.names]
    hint = other_program(option, known) or similar_setting(option, known)
    return f"Unknown option: {option}{hint}."


def make_app(words: Sequence[str]) -> App:
    """Build the parser; its help shows the values of the preset in `words`, or of the default preset."""
    base = next((word for word in words if word in PRESETS), DEFAULT)
    app = App(
        name="jaxgpt",
        help="Train, sample and study decoder-only transformers.",
        version=jaxgpt.__version__,
        help_format="plaintext",
        help_formatter=PresetHelp(preset(base)),
        default_parameter=EVERY,
        config=_check_words,
    )
    app.command(App(name="data", help="Prepare and describe training data."))
    given = [word for word in words if not word.startswith("-")]
    for name, function in COMMANDS.items():
        *group, last = name.split()
        parent = app["data"] if group else app
        usage = f"Usage: jaxgpt {name} [ARGUMENTS] [OPTIONS]"
        parent.command(function, name=last, usage=usage)

        # A list of commands shows the first line of each docstring, so the list needs all functions.
        is_listed = given in ([], group)
        if is_listed:
            _ = parent[last]  # the look-up imports the function
    return app


def _check_words(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Check words before cyclopts converts them: cyclopts would round 1.5 to an integer."""
    for argument in arguments:
        name = argument.name
        types = (argument.hint, *get_args(argument.hint))
        for token in argument.tokens:
            word = token.value
            check_text(name, word)
            if int in types and not re.fullmatch(r"[+-]?\d+", word):
                raise UserError(f"{name} must be an integer, not {word!r}")
            may_be_empty = name.endswith("prompt")
            if str in types and not word and not may_be_empty:
                raise UserError(f"{name} is empty (an unset variable?): set it, or omit it")
