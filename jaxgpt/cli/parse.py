"""Commands are functions, parsed by cyclopts: the signature declares arguments and options, the docstring is the help.

Parameters before `/` are arguments, the others options. A `Section` declares one option per field, and `Settings` one per
setting of a run: `--train.steps`, or `--steps` if the last part is unambiguous.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from cyclopts import App, CycloptsError, Group, Parameter, Token, convert
from cyclopts.validators import Number

from jaxgpt.config import Config
from jaxgpt.errors import UserError
from jaxgpt.presets import DEFAULT, PRESETS, preset
from jaxgpt.settings import Section

Json = Annotated[bool, Parameter(help="print one JSON object instead of text", negative=())]
Checkpoint = Annotated[str, Parameter(help="checkpoint to load: best (lowest validation loss), last, or a step")]
Weights = Annotated[Literal["float32", "bfloat16", "int8"], Parameter(help="precision of the weights in memory")]
Seed = Annotated[int, Parameter(help="random seed", validator=Number(gte=0, lt=2**32))]
Special = Annotated[bool, Parameter(help="encode special tokens in the prompt, such as <|im_end|>, as their ids")]

SWITCH = ("true", "false")
PEERS = {  # options of other programs
    "lr": "--optim.learning-rate",
    "optimizer": "--optim.name",
    "max-iters": "--train.steps",
    "max-steps": "--train.steps",
    "eval-interval": "--train.eval-every",
    "dtype": "--train.compute-dtype",
    "context-length": "--model.block-size",
    "out-dir": "--out",
    "output-dir": "--out",
    "max-tokens": "--max-new-tokens",
    "data": "--data.path",
    "mesh.context": "--mesh.tensor",
    "mesh.sequence": "--mesh.tensor",
}


class Settings(dict[str, Any]):
    """Settings given on the command line, by dotted name: `{"train.steps": 10}`."""


def run(name: str, command: Callable[..., int | None], words: Sequence[str]) -> int:
    """Call a command with the words of a command line, or print its help.

    Raises:
        UserError: if an option or argument is unknown, missing or invalid.
    """
    app = parser(name, command, next((word for word in words if word in PRESETS), DEFAULT))
    if name == "launch" and "train" in words:  # all that follows belongs to train
        words = [*words[: words.index("train")], "--", *words[words.index("train") :]]
    if {"-h", "--help"} & set(words[: words.index("--")] if "--" in words else words):
        app.help_print([])
        return 0
    return bind(app, words)() or 0


def bind(app: App, words: Sequence[str]) -> Callable[[], int | None]:
    """Return the call of a command with the words of a command line.

    Raises:
        UserError: as `run`.
    """
    arguments = [each for each in app.assemble_argument_collection() if not is_dataclass(each.hint)]
    names = [name for argument in arguments for name in argument.names]
    try:
        command, bound, _ = app.parse_args(spell(words, names), exit_on_error=False, print_error=False)
    except CycloptsError as e:
        raise UserError(f"{' '.join(str(e).split()).rstrip('.')} (see {app.name[0]} --help)") from None
    return lambda: command(*bound.args, **bound.kwargs)


def spell(words: Sequence[str], names: Collection[str]) -> list[str]:
    """Write options in full, and as `--name=value` if the value begins with a hyphen or turns a switch on or off.

    Raises:
        UserError: if a part of a name is ambiguous, or the option is known from a different program.
    """
    left, done = list(words), list[str]()
    while left and left[0] != "--":
        option = re.fullmatch(r"(--[A-Za-z][^\s=]*)(=.*)?", word := left.pop(0), re.DOTALL)
        if option and not option[2] and left and (left[0].lower() in SWITCH or re.match(r"-(?!-\w|-$)", left[0])):
            done.append(f"{_full_name(option[1], names)}={left.pop(0)}")
        else:
            done.append(_full_name(option[1], names) + (option[2] or "") if option else word)
    return done + left


def _full_name(name: str, names: Collection[str]) -> str:
    name = name.replace("_", "-")
    if name in names:
        return name
    if PEERS.get(name[2:]) in names:
        raise UserError(f"unknown option {name} (did you mean {PEERS[name[2:]]}?)")
    if section := [full for full in names if full.startswith(f"{name}.")]:
        raise UserError(f"{name} is a section of settings: add the name of one, such as {section[0]}")
    same = [full for full in names if full.rpartition(".")[2] == name[2:]]
    if len(same) > 1:
        raise UserError(f"{name} is ambiguous: use {' or '.join(same)}")
    return same[0] if same else name


def parser(name: str, command: Callable[..., Any], shown: str = DEFAULT) -> App:
    """Return the cyclopts app of a command.

    Args:
        name: name of the command, such as "data prepare".
        command: function of the command.
        shown: preset that provides the defaults in the help.
    """
    hints, signature = get_type_hints(command, include_extras=True), inspect.signature(command)
    sections: dict[str, Any] = {}
    parameters = []
    for each in signature.parameters.values():
        hint = hints[each.name]
        kind: Any
        kind, *details = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if isinstance(kind, type) and issubclass(kind, (Settings, Section)):
            sections[each.name] = kind
            base: Any = preset(shown) if kind is Settings else kind()
            cls = _optional(base, [detail for detail in details if isinstance(detail, str)])
            prefix = "*" if kind is Settings or not base.prefix else f"--{base.prefix}"
            each = each.replace(annotation=Annotated[cls, Parameter(name=prefix)], default=cls())
        else:
            switch = Parameter(negative=() if each.default is False else None)
            each = each.replace(annotation=Annotated[hint, switch, _details(kind, each.default)])
        parameters.append(each)

    def call(*args: Any, **options: Any) -> Any:
        for parameter, kind in sections.items():
            options[parameter] = kind(**_given(options.get(parameter)))
        return command(*args, **options)

    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    call.__doc__ = command.__doc__
    arguments = [each for each in parameters if each.kind is not each.KEYWORD_ONLY]
    words = [each.name.upper() if each.default is each.empty else f"[{each.name.upper()}]" for each in arguments]
    app = App(
        name=f"jaxgpt {name}",
        usage=" ".join(["Usage: jaxgpt", name, *words, "[OPTIONS]"]),
        help_format="plaintext",
        help_flags=[],
        version_flags=[],
        default_parameter=Parameter(consume_multiple=True, negative_iterable=(), allow_repeating=True),
    )
    app.default(call)
    return app


def _optional(base: Any, sections: Collection[str] = ()) -> type:
    """Return a dataclass with the fields of `base`, all None by default. The help shows the values of `base` as defaults.

    Args:
        base: an instance of a `Section`.
        sections: sections of a config to include; empty: all.
    """
    hints, members = get_type_hints(type(base)), list[Any]()
    about = inspect.cleandoc(base.__doc__ or "").split("\n")[0]
    group = Group.create_ordered((base.prefix or type(base).__name__.removesuffix("Params")).capitalize(), about)
    for each in fields(base):
        value, hint = getattr(base, each.name), hints[each.name]
        if is_dataclass(value):
            inner = _optional(value)
            if not sections or each.name in sections:
                members.append((each.name, inner, field(default_factory=inner)))
        elif not isinstance(base, Config):
            help_ = Parameter(help=each.metadata["help"], group=group)
            members.append((each.name, Annotated[hint | None, help_, _details(hint, value)], None))
    made = make_dataclass(type(base).__name__, members, frozen=True)
    made.__module__ = __name__  # cyclopts does not expand classes of the module `types`
    return made


def _given(twin: Any, prefix: str = "") -> dict[str, Any]:
    """Return the fields that are not None, by dotted name."""
    found: dict[str, Any] = {}
    for each in fields(twin) if twin else ():
        value = getattr(twin, each.name)
        found |= _given(value, f"{each.name}.") if is_dataclass(value) else {prefix + each.name: value}
    return {name: value for name, value in found.items() if value is not None}


def _details(kind: Any, default: Any) -> Parameter:
    """Return how an option is converted, and how its default is shown: as on the command line, unless it is empty or off."""
    shown = default if isinstance(default, str) and default.strip() == default else repr(default)
    hidden = default in ("", (), None, False) or default is inspect.Parameter.empty
    whole = int in (kind, *get_args(kind))
    return Parameter(
        show_default=not hidden and (shown.lower() if default is True else shown), converter=_whole if whole else None
    )


def _whole(kind: Any, tokens: Sequence[Token]) -> Any:
    """Convert integers strictly: cyclopts rounds 1.5."""
    for token in tokens:
        if not re.fullmatch(r"[+-]?\d+", token.value):
            raise ValueError(f"{token.value!r} is not an integer")
    return convert(kind, tokens)
