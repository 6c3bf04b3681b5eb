"""Parse commands with cyclopts: a signature declares options, a docstring is the help.

`--train.steps` is the setting `steps` of the section `train`; `--steps` is equivalent because `steps` is unique.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from inspect import BoundArguments
from typing import Annotated, Any, Literal, TypedDict, get_args, get_type_hints

from cyclopts import (
    App,
    CycloptsError,
    Group,
    MissingArgumentError,
    Parameter,
    UnknownOptionError,
    UnusedCliTokensError,
)
from cyclopts.argument import ArgumentCollection
from cyclopts.validators import Number

import jaxgpt
from jaxgpt.config import SamplingParams
from jaxgpt.errors import UserError, one_line, short_repr
from jaxgpt.presets import DEFAULT, PRESETS, preset
from jaxgpt.settings import Section, check_text, similar_setting

COMMANDS = (
    *"train launch sample chat explain inspect eval plot info presets import export verify plan bench".split(),
    *("data prepare", "data report"),
)

# Options that other programs have for the choice of devices.
DEVICE_OPTIONS = ("--platform", "--device", "--devices", "--accelerator", "--gpu", "--gpus", "--cpu", "--tpu")
DEVICE_HINT = "JAX chooses the devices: set the environment variable JAX_PLATFORMS to cpu, cuda or tpu"


class Settings(TypedDict, total=False):
    """The settings on a command line, keyed by dotted name: {"train.steps": 10}.

    `make_app` declares the keys.
    """


class Sampling(TypedDict, total=False):
    """The fields of `SamplingParams` on a command line; others come from the model, otherwise from `SamplingParams`."""


def shown(default: Any) -> str | None:
    """Format the default of an option; None: do not show it, because it is empty, 0 or False."""
    if not default or default == ("",):
        return None
    return repr(default).strip("'")


EVERY = Parameter(
    consume_multiple=True, allow_repeating=True, negative_bool=(), negative_iterable=(), show_default=shown
)
FLAT = Parameter(name="*")  # fields of a class as top-level options: --top-k
ON = Parameter(negative_bool="no-")  # --no-NAME to turn the option off
GivenSettings = Annotated[Settings, FLAT]
NO_SETTINGS = Settings()
GivenSampling = Annotated[Sampling, FLAT]
NO_SAMPLING = Sampling()
Json = Annotated[bool, Parameter(help="print one JSON object instead of text")]
Checkpoint = Annotated[str, Parameter(help="checkpoint to load: best (lowest validation loss), last, or a step")]
Weights = Annotated[Literal["float32", "bfloat16", "int8"], Parameter(help="precision of the weights in memory")]
Seed = Annotated[int, Parameter(help="random seed", validator=Number(gte=0, lt=2**32))]
Count = Annotated[int, Parameter(validator=Number(gte=0))]
Special = Annotated[bool, Parameter(help="encode special tokens in the prompt, such as <|im_end|>, as their ids")]


for _field in fields(SamplingParams):
    Sampling.__annotations__[_field.name] = Annotated[
        get_type_hints(SamplingParams)[_field.name],
        Parameter(help=_field.metadata["help"], show_default=shown(_field.default) or False),
    ]


def parse(words: Sequence[str]) -> tuple[Callable[..., Any], BoundArguments]:
    """Parse words into the function of a command, or the help printer, and its arguments.

    Raises:
        UserError: if a command, option or argument is unknown, missing or invalid.
    """
    app = make_app(words)
    try:
        return app.parse_args(words, exit_on_error=False, print_error=False)[:2]
    except CycloptsError as e:
        command = " ".join(["jaxgpt", *(e.command_chain or ())])
        e.command_chain = ()  # otherwise its text begins with the command
        raise UserError(f"{_reason(e)} See {command} --help.") from None


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
    """Suggest a setting. cyclopts compares complete names, so it would suggest --train.steps for --train.dtype."""
    word = error.token.keyword or error.token.value
    option = word.partition("=")[0].replace("_", "-")
    if option in DEVICE_OPTIONS:
        return f"Unknown option: {option} ({DEVICE_HINT})."
    known = [name for argument in error.argument_collection for name in argument.names]
    return f"Unknown option: {option}{similar_setting(option, known)}."


def make_app(words: Sequence[str]) -> App:
    """Build the parser; its help shows the defaults of the preset in `words`, and only full setting names."""
    base = next((word for word in words if word in PRESETS), DEFAULT)
    is_help = "-h" in words or "--help" in words
    _declare_settings(base, short=not is_help)

    app = App(
        name="jaxgpt",
        help="Train, sample and study decoder-only transformers.",
        version=jaxgpt.__version__,
        help_format="plaintext",
        default_parameter=EVERY,
        config=_check_words,
    )
    app.command(App(name="data", help="Prepare and describe training data."))
    given = [word for word in words if not word.startswith("-")]
    for name in COMMANDS:
        *group, last = name.split()
        parent = app["data"] if group else app

        # The module and its function have the name of the command; cyclopts imports them only for the command in use.
        function = "import_" if name == "import" else name.replace(" ", "_")
        usage = f"Usage: jaxgpt {name} [ARGUMENTS] [OPTIONS]"
        parent.command(f"jaxgpt.cli.{function}:{function}", name=last, usage=usage)

        # A list of commands shows the first line of each docstring, so it needs all functions.
        is_listed = given in ([], group)
        if is_listed:
            _ = parent[last]  # the look-up imports the function
    return app


def _declare_settings(base: str, short: bool) -> None:
    """Declare an option for each setting; the help shows the values of the preset `base` as defaults."""
    sections = [section for section in vars(preset(base)).values() if isinstance(section, Section)]

    # `--steps` is unique if no other section has this setting, and no section this name.
    count = Counter[str]()
    for section in sections:
        count[section.prefix] += 1
        count.update(field.name for field in fields(section))

    for section in sections:
        types = get_type_hints(type(section))
        group = Group.create_ordered(section.prefix.capitalize())
        for field in fields(section):
            key = f"{section.prefix}.{field.name}"
            names = [key]
            if short and count[field.name] == 1:
                names.append(field.name)
            parameter = Parameter(
                name=[f"--{name.replace('_', '-')}" for name in names],
                help=field.metadata["help"],
                group=group,
                show_default=shown(getattr(section, field.name)) or False,
            )
            # cyclopts reads the options from the annotations of `Settings`.
            Settings.__annotations__[key] = Annotated[types[field.name], parameter, ON]


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
