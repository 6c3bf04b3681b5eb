"""Hostile words in every argument and option of every command: exit code 2 with one line, and no traceback."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from folders import SMALL, run_folder
from helpers import jaxgpt

from jaxgpt.cli.parse import COMMANDS, make_app

WORDS = ("\udcff", "a\0b", "", "x" * 100_000, "a\nb", "-1", "--", str(10**30), "nan", "/", "%s{}[*]\u2028")
# Arguments besides the hostile word. No file or preset has these names, so no command starts its work.
GIVEN = {"import": ["./nowhere", "out"], "export": ["nowhere", "out"], "presets": [], "plot": ["nowhere"]}
GIVEN |= {
    "launch": ["nowhere"],
    "follow": ["nowhere", "--to", "tensorboard"],
    "compare": ["nowhere", "nowhere"],
    "plan": ["nowhere", "--topology", "h100:8"],
}


def options(name: str) -> list[str]:
    """Return the options of a command that take a value; settings of a run only for `train`."""
    command = make_app(name.split()).parse_commands(name.split())[1][-1]
    arguments = command.assemble_argument_collection()
    names = [each.names[0] for each in arguments if each.hint is not bool and not each.children]
    return [each for each in names if each.startswith("--") and (name == "train" or "." not in each)]


def check(*args: str) -> None:
    result = jaxgpt(*args)
    assert (result.code, result.out) == (2, ""), args
    assert re.fullmatch(r"jaxgpt: .{,1100}\n", result.err), (args, result.err)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("presets", "verify")])
def test_a_hostile_argument(name: str) -> None:
    for word in WORDS:
        if (name, word) not in (("train", "--"), ("data report", "/")):  # no argument; reads the whole disk
            check(*name.split(), word, *GIVEN.get(name, [])[1:])


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["20 options", "all"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_hostile_option(name: str, every: bool) -> None:
    for number, option in enumerate(options(name)[: None if every else 20]):
        for word in WORDS if every else [WORDS[number % len(WORDS)]]:
            check(*name.split(), *GIVEN.get(name, ["nowhere"]), option, word)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["sample", "chat", "explain", "inspect", "eval", "export", "plot", "info"])
def test_hostile_options_on_a_run(name: str) -> None:
    """Words that are valid text succeed; the others give one line."""
    run = str(run_folder(Path("run"), SMALL))
    for option in options(name):
        for word in WORDS:
            result = jaxgpt(name, run, *GIVEN.get(name, [])[1:], option, word)
            assert result.code in (0, 2), (option, word)
            assert all(line.startswith("jaxgpt: ") for line in result.err.split("\n")[:-1]), (option, word, result.err)
