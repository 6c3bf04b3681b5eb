"""Hostile words in every argument and option of every command: exit code 2 with one line, and no traceback."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers import jaxgpt

from jaxgpt.cli import COMMANDS, command
from jaxgpt.cli.parse import parser

WORDS = ("\udcff", "a\0b", "", "x" * 100_000, "a\nb", "-1", "--", str(10**30), "nan", "/", "%s{}[*]\u2028")
# Arguments that are given to each command besides the hostile word; no file or preset has this name.
NOWHERE = {"import": ["./nowhere", "out"], "export": ["nowhere", "out"], "presets": [], "launch": ["nowhere"]}


def options(name: str) -> Iterator[list[str]]:
    """Yield the options of a command that take a value; the settings of a run only for `train`."""
    for each in parser(name, command(name)).assemble_argument_collection():
        option = each.names[0]
        if option.startswith("--") and each.hint is not bool and (name == "train" or option.count(".") == 0):
            yield [option]


def rejected(*args: str) -> None:
    result = jaxgpt(*args)
    assert (result.code, result.out) == (2, ""), args
    assert result.err.startswith("jaxgpt: "), args
    assert result.err.count("\n") == 1, (args, result.err)
    assert len(result.err) < 1200


@pytest.mark.parametrize("word", WORDS, ids=lambda word: ascii(word[:9]))
def test_a_hostile_argument(word: str) -> None:
    for name in COMMANDS:
        if name not in ("presets", "verify") and not (name == "train" and not word):  # "" is the default preset
            rejected(*name.split(), word, *NOWHERE.get(name, [])[1:])


@pytest.mark.parametrize("name", COMMANDS)
def test_a_hostile_option(name: str) -> None:
    for number, option in enumerate(options(name)):
        rejected(*name.split(), *NOWHERE.get(name, ["nowhere"]), *option, WORDS[number % len(WORDS)])
