"""Commands are functions, parsed by cyclopts: the signature declares arguments and options, the docstring is the help.

Parameters before `/` are arguments, the others options. A `Section` declares one option per field, and `Settings` one per
setting of a run: `--train.steps`, or `--steps` if the last part is unambiguous.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from cyclopts import App, CycloptsError, Group, Parameter, Token, convert
from cyclopts.validators import Number

from jaxgpt.errors import UserError, one_line
from jaxgpt.presets import DEFAULT, PRESETS, preset
from jaxgpt.settings import Section, check_text

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
    for word in words:
        check_text("argument", word)
    app = parser(name, command, next((word for word in words if word in PRESETS), DEFAULT))
    if name == "launch" and "train" in words:  # all that follows belongs to train
        words = [*words[: words.index("train")], "--", *words[words.index("train") :]]
    if {"-h", "--help"} & set(words[: words.index("--")] if "--" in words else words):
        app.help_print([])
        return 0
    options = [option for argument in app.assemble_argument_collection() for option in argument.names]
    try:
        call, bound, _ = app.parse_args(spell(words, options), exit_on_error=False, print_error=False)
    except CycloptsError as e:
        raise UserError(f"{one_line(e).rstrip('.')} (see jaxgpt {name} --help)") from None
    if "" in bound.args:
        raise UserError(
            f"an argument is empty, as of an unset variable; omit it, or write ./ (see jaxgpt {name} --help)"
        )
    return call(*bound.args, **bound.kwargs) or 0


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
    parameters, kinds = list[inspect.Parameter](), dict[str, Any]()
    keys: dict[str, tuple[str, str]] = {}  # option of a section -> parameter of the command, and the key in it
    for each in signature.parameters.values():
        hint = hints[each.name]
        kind, *details = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if not (isinstance(kind, type) and issubclass(kind, (Settings, Section))):
            switch = Parameter(negative=() if each.default is False else None)
            parameters.append(each.replace(annotation=Annotated[hint, switch, _details(kind, each.default)]))
            continue
        kinds[each.name] = kind
        sections = [kind()] if issubclass(kind, Section) else _sections(shown, details)
        for key, option in (pair for section in sections for pair in _options(section)):
            parameters.append(option)
            keys[option.name] = each.name, key if kind is Settings else key.rpartition(".")[2]

    def call(*args: Any, **options: Any) -> Any:
        given: dict[str, dict[str, Any]] = {owner: {} for owner in kinds}
        for option in keys.keys() & options.keys():
            owner, key = keys[option]
            given[owner][key] = options.pop(option)
        return command(*args, **options, **{owner: kind(**given[owner]) for owner, kind in kinds.items()})

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


def _sections(name: str, wanted: Collection[Any]) -> list[Section]:
    """Return the sections of a preset: all, or those named in `wanted`."""
    sections = [value for value in vars(preset(name)).values() if isinstance(value, Section)]
    return [each for each in sections if each.prefix in wanted] or sections


def _options(section: Section) -> Iterator[tuple[str, inspect.Parameter]]:
    """Yield the dotted name and the option of each setting of a section; the help shows its values as defaults."""
    hints = get_type_hints(type(section))
    title = (section.prefix or type(section).__name__.removesuffix("Params")).capitalize()
    group = Group.create_ordered(title, inspect.cleandoc(section.__doc__ or "").split("\n")[0])
    for field in fields(section):
        key = f"{section.prefix}.{field.name}".lstrip(".")
        about = Parameter(name=f"--{key.replace('_', '-')}", help=field.metadata["help"], group=group)
        kind: Any = hints[field.name]
        hint = Annotated[kind, about, _details(kind, getattr(section, field.name))]
        yield (
            key,
            inspect.Parameter(key.replace(".", "__"), inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint),
        )


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
