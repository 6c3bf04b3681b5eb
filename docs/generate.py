"""Generate docs/reference.md, which lists every command, setting and preset: `python docs/generate.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxgpt.cli import COMMANDS, module_of
from jaxgpt.cli.help import COMMON, Group, groups
from jaxgpt.cli.parse import SECTIONS, Settings
from jaxgpt.cli.presets import BASE, size
from jaxgpt.config import Config, flat
from jaxgpt.presets import PRESETS, command, preset

PAGE = Path(__file__).with_name("reference.md")
COLUMNS = ("option", "value", "default", "meaning")
ENVIRONMENT = """\
The exit code is 0 for success, 1 for a failure, 2 for invalid arguments or input, and 75 for a training run \
that was stopped before its last step. `jaxgpt --version` prints the version.

| environment variable | meaning |
|---|---|
| `JAXGPT_CACHE` | folder of caches (compiled programs, token ids, downloads); default: `~/.cache/jaxgpt` |
| `JAX_PLATFORMS=cpu` | use the CPU, although there is an accelerator |
| `JAX_NUM_CPU_DEVICES=8` | simulate 8 devices on the CPU |"""


def reference() -> str:
    """Return the text of the page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Reference"
    yield ""
    yield "Generated from the code by `python docs/generate.py`."
    yield ""
    yield "[Commands](#commands), [settings](#settings), [presets](#presets)"
    yield ""
    yield "## Commands"
    yield ""
    yield "Every command accepts the options in the first table. Options without a value in the second column are switches."
    yield ""
    yield from _table(Group("", "", COMMON))
    yield ENVIRONMENT
    yield ""
    for name in COMMANDS:
        described, cls = module_of(name).COMMAND, module_of(name).Args
        takes_settings = issubclass(cls, Settings)
        default = cls(**{section: getattr(Config(), section) for section in SECTIONS}) if takes_settings else None
        yield f"### jaxgpt {name}"
        yield ""
        yield f"`{described.usage}`"
        yield ""
        yield described.about
        yield ""
        yield "```sh"
        yield from described.examples
        yield "```"
        yield ""
        for group in groups(cls, default):
            rows = [row for row in group.rows if row not in COMMON]
            if rows and not (takes_settings and group.title.removesuffix(" options") in SECTIONS):
                yield f"{group.title.capitalize()}:"
                yield ""
                yield from _table(group._replace(rows=rows))
        if takes_settings:
            yield "Also accepts all [settings](#settings)."
            yield ""
    yield "## Settings"
    yield ""
    yield "`--train.batch-size` is `batch_size` in the section `train` of `config.json`. Presets change the defaults."
    yield ""
    for group in groups(Config):
        if group.title.removesuffix(" options") in SECTIONS:
            yield f"### {group.title.removesuffix(' options')}"
            yield ""
            yield group.about
            yield ""
            yield from _table(group)
    yield "## Presets"
    yield ""
    yield "Train a preset with `jaxgpt train PRESET`. The listed settings differ from the defaults above."
    yield ""
    for name, each in PRESETS.items():
        yield f"### `{name}`"
        yield ""
        yield each.about
        yield ""
        yield f"- parameters: {parameters:,}" if (parameters := size(name)) else f"- {BASE}"
        yield f"- command: `{command(name)}`"
        if each.expect:
            yield f"- result: {each.expect}"
        yield f"- settings: {', '.join(_changes(name))}"
        yield ""


def _changes(name: str) -> list[str]:
    default = flat(Config())
    of_base = ("model.", "data.tokenizer") if size(name) is None else ()
    return [
        f"`{key} = {value!r}`"
        for key, value in flat(preset(name)).items()
        if value != default[key] and key != "preset" and not key.startswith(of_base)
    ]


def _table(group: Group) -> Iterator[str]:
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for row in group.rows:
        flags = ", ".join(f"`{flag}`" for flag in row.flags.split(", "))
        cells = (flags, row.kind and f"`{row.kind}`", row.default and f"`{row.default}`", row.meaning)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(reference(), "utf-8")
