"""Generate docs/reference.md: every command, setting and preset. Usage: `python docs/tools/generate.py`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from cyclopts.argument import Argument

from jaxgpt.cli.option_help import full_names
from jaxgpt.cli.options import EVERY
from jaxgpt.cli.parse import COMMANDS, make_app
from jaxgpt.cli.presets import BASE, size
from jaxgpt.config import Config, flat
from jaxgpt.presets import PRESETS, preset
from jaxgpt.presets import command as train_command
from jaxgpt.settings import Section

PAGE = Path(__file__).parents[1] / "reference.md"
COLUMNS = ("option", "value", "default", "meaning")
KINDS = {int: "INT", float: "FLOAT", str: "STR"}
SECTIONS = tuple(f"--{field.name}." for field in fields(Config) if isinstance(getattr(Config(), field.name), Section))
ENVIRONMENT = """\
`-h` or `--help` prints the help of a command, and `jaxgpt --version` prints the version.

The exit code is 0 for success, 1 for a failure, 2 for invalid usage or input, 75 for a run that was stopped before its
last step, and 130 after Ctrl-C (in `train`, after a second Ctrl-C).

| environment variable | meaning |
|---|---|
| `JAXGPT_CACHE` | directory of caches (compiled programs, downloads); default: `~/.cache/jaxgpt` |
| `JAX_ENABLE_COMPILATION_CACHE=false` | do not use the cache of compiled programs |
| `JAX_PLATFORMS=cpu` | use the CPU even if there is an accelerator |
| `JAX_NUM_CPU_DEVICES=8` | simulate 8 devices on the CPU |"""


def reference() -> str:
    """Return the Markdown text of docs/reference.md."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Reference\n\nGenerated from the code by `python docs/tools/generate.py`.\n"
    yield "[Commands](#commands), [settings](#settings), [presets](#presets)\n"
    yield "## Commands\n"
    yield "Options without a value in the second column are switches. The last part of a name is enough if it is unambiguous:"
    yield "`--steps` means `--train.steps`.\n"
    yield f"{ENVIRONMENT}\n"
    for name in COMMANDS:
        words = name.split()
        app = make_app([*words, "--help"]).parse_commands(words)[1][-1]
        arguments = [
            each
            for each in app.assemble_argument_collection(default_parameter=EVERY, parse_docstring=True)
            if each.show and not each.children
        ]
        about, _, examples = (
            inspect.cleandoc(app.default_command.__doc__).partition("\n\nArgs:")[0].partition("\n\njaxgpt ")
        )
        yield f"### jaxgpt {name}\n"
        yield f"{about}\n"
        yield f"```sh\njaxgpt {examples}\n```\n"
        takes_settings = any(each.names[0].startswith("--train.") for each in arguments)
        yield from _table(each for each in arguments if not (takes_settings and each.names[0].startswith(SECTIONS)))
        if takes_settings:
            yield "Also accepts all [settings](#settings).\n"
    yield "## Settings\n"
    yield "`--train.batch-size` is `batch_size` in the section `train` of `config.json`. Presets change the defaults.\n"
    for section in SECTIONS:
        yield f"### {section.strip('-.')}\n"
        default = getattr(Config(), section.strip("-."))
        yield f"{inspect.cleandoc(default.__doc__ or '').splitlines()[0]}\n"
        yield from _table_of_settings(section, default)
    yield "## Presets\n"
    yield "Train a preset with `jaxgpt train PRESET`. The listed settings differ from the defaults above.\n"
    for name, each in PRESETS.items():
        yield f"### `{name}`\n"
        yield f"{each.about}\n"
        yield f"- parameters: {parameters:,}" if (parameters := size(name)) else f"- parameters: {BASE}"
        yield f"- command: `{train_command(name)}`"
        if each.expect:
            yield f"- result: {each.expect}"
        yield f"- settings: {', '.join(_changes(name))}\n"


def _changes(name: str) -> list[str]:
    default = flat(Config())
    of_base = ("model.", "data.tokenizer") if size(name) is None else ()
    return [
        f"`{key} = {value!r}`"
        for key, value in flat(preset(name)).items()
        if value != default[key] and key != "preset" and not key.startswith(of_base)
    ]


def _table(arguments: Iterable[Argument]) -> Iterator[str]:
    rows = [
        (
            each.names,
            _kind(each.hint),
            _default(each),
            " ".join((each.parameter.help or "").split()),
        )
        for each in arguments
    ]
    if rows:
        yield from _rows(rows)


def _default(argument: Argument) -> str:
    shown = argument.show_default
    return str((shown(argument.field_info.default) if callable(shown) else shown) or "")


def _table_of_settings(section: str, default: Any) -> Iterator[str]:
    app = make_app(["train", "--help"])["train"]
    of_section = [
        each
        for each in app.assemble_argument_collection(default_parameter=EVERY, parse_docstring=True)
        if each.names[0].startswith(section)
    ]
    values = [getattr(default, field.name) for field in fields(default)]
    shown = [
        "" if value in ("", ()) else f"{value:g}" if isinstance(value, float) else _word(value) for value in values
    ]
    yield from _rows(
        (full_names(each.names), _kind(each.hint), value, each.parameter.help)
        for each, value in zip(of_section, shown, strict=True)
    )


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) and value.strip() == value else repr(value)


def _kind(hint: Any) -> str:
    """Return the text in the value column for a type hint; "": the option is a switch."""
    if get_origin(hint) is Literal:
        return f"{{{','.join(get_args(hint))}}}"
    kinds = [KINDS.get(hint, "")] if not get_args(hint) else [_kind(each) for each in get_args(hint)]
    kind = next(filter(None, kinds), "")
    return f"{kind} ..." if get_origin(hint) is tuple else kind


def _rows(rows: Iterable[tuple[Iterable[str], str, str, str | None]]) -> Iterator[str]:
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for names, kind, default, meaning in rows:
        cells = (
            ", ".join(f"`{name}`" for name in names),
            kind and f"`{kind}`",
            default and f"`{default}`",
            meaning or "",
        )
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(reference(), "utf-8")
