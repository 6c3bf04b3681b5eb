"""Commands are functions that cyclopts parses: the signature declares arguments and options, the docstring is the help.

`--train.steps` is the setting `steps` of the section `train`; `--steps` alone is enough, because no other section has it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypedDict, get_args, get_type_hints

from cyclopts import App, CycloptsError, Group, Parameter, UnknownOptionError, UnusedCliTokensError
from cyclopts.argument import ArgumentCollection
from cyclopts.validators import Number

import jaxgpt
from jaxgpt.config import Config
from jaxgpt.errors import UserError, one_line, short_repr
from jaxgpt.presets import DEFAULT, PRESETS, preset
from jaxgpt.settings import Section, check_text

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
HELP = frozenset({"-h", "--help"})


def _shown(value: Any) -> str | None:
    """Format the default of an option; one that is empty or off is not shown."""
    return repr(value).strip("'") if value else None


EVERY = Parameter(  # defaults of all options
    consume_multiple=True, allow_repeating=True, negative_bool=(), negative_iterable=(), show_default=_shown
)
FLAT = Parameter(name="*")  # each field of a dataclass is a top-level option: --top-k
ON = Parameter(negative_bool="no-")  # --no-NAME turns the option off
Json = Annotated[bool, Parameter(help="print one JSON object instead of text")]
Checkpoint = Annotated[str, Parameter(help="checkpoint to load: best (lowest validation loss), last, or a step")]
Weights = Annotated[Literal["float32", "bfloat16", "int8"], Parameter(help="precision of the weights in memory")]
Seed = Annotated[int, Parameter(help="random seed", validator=Number(gte=0, lt=2**32))]
Count = Annotated[int, Parameter(validator=Number(gte=0))]
Special = Annotated[bool, Parameter(help="encode special tokens in the prompt, such as <|im_end|>, as their ids")]

# Settings given on the command line, by dotted name: {"train.steps": 10}.
NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})
if TYPE_CHECKING:
    Settings: TypeAlias = Mapping[str, Any]
    DataSettings: TypeAlias = Mapping[str, Any]
else:
    Settings = FLAT(TypedDict("Settings", {}, total=False))  # `_declare` adds the settings
    DataSettings = FLAT(TypedDict("DataSettings", {}, total=False))

PEERS = {  # options of other programs
    "lr": "--optim.learning-rate",
    "optimizer": "--optim.name",
    "max-iters": "--train.steps",
    "eval-interval": "--train.eval-every",
    "dtype": "--train.compute-dtype",
    "context-length": "--model.block-size",
    "out-dir": "--out",
    "data": "--data.path",
}


def run(words: Sequence[str]) -> int:
    """Run the words of a command line, and return the exit code.

    Raises:
        UserError: if a command, option or argument is unknown, missing or invalid.
    """
    command, args, options = parse(words)
    return command(*args, **options) or 0


def parse(words: Sequence[str]) -> tuple[Callable[..., int | None], tuple[Any, ...], dict[str, Any]]:
    """Return the function of a command, or the help printer, and its arguments."""
    app = make_app(words)
    if not HELP.isdisjoint(words):
        return app.help_print, ([word for word in words[:2] if not word.startswith("-")],), {}
    if words[:1] == ["launch"] and "train" in words:  # all that follows belongs to train
        words = [*words[: words.index("train")], "--", *words[words.index("train") :]]
    try:
        command, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    except CycloptsError as e:
        name, e.command_chain = " ".join(["jaxgpt", *(e.command_chain or ())]), ()
        option = (e.token.keyword or e.token.value) if isinstance(e, UnknownOptionError) else ""
        peer = PEERS.get(option.partition("=")[0].lstrip("-").replace("_", "-"))
        about = f"Unknown option: {option}. Did you mean {peer}?" if peer else one_line(e)
        if isinstance(e, UnusedCliTokensError):
            about = f"Unexpected argument: {' '.join(map(short_repr, e.unused_tokens or ()))}."
        raise UserError(f"{about} See {name} --help.") from None
    return command, bound.args, bound.kwargs


def make_app(words: Sequence[str]) -> App:
    """Return the parser of these words: a command with its options, and the names of the other commands.

    The help shows the defaults of the preset among the words, and full names of settings only.
    """
    _declare(preset(next((word for word in words if word in PRESETS), DEFAULT)), short=HELP.isdisjoint(words))
    app = App(
        name="jaxgpt",
        help="Train, sample and study decoder-only transformers.",
        version=jaxgpt.__version__,
        help_format="plaintext",
        default_parameter=EVERY,
        config=_check,
    )
    app.command(App(name="data", help="prepare and describe training data"))
    for name, about in COMMANDS.items():
        *group, last = path = name.split()
        function = "import_" if name == "import" else name.replace(" ", "_")
        (app["data"] if group else app).command(
            f"jaxgpt.cli.{function}:{function}",
            name=last,
            help=None if list(words[: len(path)]) == path else about,  # its docstring has more
        )
    return app


def _declare(base: Config, short: bool) -> None:
    """Declare one option per setting; the help shows the values of `base` as defaults."""
    sections = {name: section for name, section in vars(base).items() if isinstance(section, Section)}
    count = Counter([*sections, *(field.name for section in sections.values() for field in fields(section))])
    for name, section in sections.items():
        hints, group = get_type_hints(type(section)), Group.create_ordered(name.capitalize())
        for field in fields(section):
            names = [f"{name}.{field.name}"] + [field.name] * (short and count[field.name] == 1)
            about = Parameter(
                name=[f"--{each.replace('_', '-')}" for each in names],
                help=field.metadata["help"],
                group=group,
                show_default=_shown(getattr(section, field.name)) or False,
            )
            for kind in (Settings, DataSettings) if name == "data" else (Settings,):
                kind.__annotations__[names[0]] = Annotated[hints[field.name], about, ON]


def _check(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Check the words of each option, before cyclopts converts them: it would round 1.5 to an integer."""
    for argument in arguments:
        for token in argument.tokens:
            name = token.keyword or argument.name
            check_text(name, token.value)
            if int in (argument.hint, *get_args(argument.hint)) and not re.fullmatch(r"[+-]?\d+", token.value):
                raise UserError(f"{name} must be an integer, not {token.value!r}")
            if not (token.keyword or token.value):
                raise UserError(f"{name} is empty, as of an unset variable: omit it, or write ./")
