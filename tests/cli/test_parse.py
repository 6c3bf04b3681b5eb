"""Arguments and options: every spelling means the same, and errors are one clear line."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from folders import SMALL, run_folder
from helpers import jaxgpt, parsed
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.cli import COMMANDS, command
from jaxgpt.cli.parse import PEERS, Settings, parser, run
from jaxgpt.config import Config, SamplingParams, flat
from jaxgpt.errors import UserError
from jaxgpt.presets import preset

SETTINGS = [name for name in flat(Config()) if "." in name]


def example(
    target: str = "",
    /,
    *,
    init_from: str = "",
    top: float | None = None,
    stop_ids: tuple[int, ...] = (),
    dry_run: bool = False,
    kind: Literal["a", "b"] = "a",
    sampling: SamplingParams,
    settings: Settings,
) -> int:
    """Do something.

    jaxgpt example x
    """
    found.update({k: v for k, v in locals().items() if v not in ("", None, (), False, "a", {}, SamplingParams())})
    return 3


found: dict[str, Any] = {}


def values(words: list[str]) -> dict[str, Any]:
    found.clear()
    assert run("example", example, words) == 3
    return dict(found)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--init_from=x"], {"init_from": "x"}),
        (["--init-from", "x"], {"init_from": "x"}),
        (["--init-from", "x", "--init_from=y"], {"init_from": "y"}),
        (["--init-from=--dry-run"], {"init_from": "--dry-run"}),
        (["--init-from", "-x"], {"init_from": "-x"}),
        (["--init-from", "- item\n--dry-run"], {"init_from": "- item\n--dry-run"}),
        (["--init-from", "-- a remark"], {"init_from": "-- a remark"}),
        (["--init-from=a=b\nc"], {"init_from": "a=b\nc"}),
        (["--top", "-1e-3"], {"top": -1e-3}),
        (["--stop_ids", "1", "-2"], {"stop_ids": (1, -2)}),
        (["--dry_run"], {"dry_run": True}),
        (["--dry-run", "True", "x"], {"dry_run": True, "target": "x"}),
        (["--dry-run=false", "--kind", "b"], {"kind": "b"}),
        (["--top-k", "3"], {"sampling": SamplingParams(top_k=3)}),
        (["--train.no-scan-layers", "--train.steps=3"], {"settings": {"train.scan_layers": False, "train.steps": 3}}),
        (["--no_scan_layers"], {"settings": {"train.scan_layers": False}}),
        (["--scan-layers", "false", "--bias", "true"], {"settings": {"train.scan_layers": False, "model.bias": True}}),
        (["--steps", "3", "--n_layer=2"], {"settings": {"train.steps": 3, "model.n_layer": 2}}),
        (["--data.mix", "web=0.7", "code=0.3"], {"settings": {"data.mix": ("web=0.7", "code=0.3")}}),
        (["--dry-run", "t", "--train.prompt", ""], {"dry_run": True, "target": "t", "settings": {"train.prompt": ""}}),
        (["--", "--dry-run"], {"target": "--dry-run"}),
    ],
)
def test_spellings(words: list[str], expected: dict[str, Any]) -> None:
    assert values(words) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ini"], "--ini"),
        (["--Init-From", "x"], "--Init-From"),
        (["--init-from"], "--init-from requires an argument"),
        (["--init-from", "--dry-run"], "--init-from requires an argument"),
        (["--init-from", "--"], "--init-from requires an argument"),
        (["--top", "much"], "--top.*much"),
        (["--stop-ids", "1", "x"], "'x' is not an integer"),
        (["--n-layer", "1.5"], "--model.n-layer.*'1.5' is not an integer"),
        (["--kind", "c"], '"c" for --kind. Choose from: "a", "b"'),
        (["--dry-run=maybe"], "--dry-run.*maybe"),
        (["--train", "3"], "--train is a section of settings: add the name of one, such as --train.steps"),
        (["--data", "x"], "did you mean --data.path"),
        (["--vocab-size", "3"], "--vocab-size is ambiguous: use --model.vocab-size or --data.vocab-size"),
        (["-x"], "-x"),
        (["a", "b"], "'b'"),
        (["--lr", "1"], "did you mean --optim.learning-rate"),
        (["--train.stepz", "1"], "Did you mean --train.steps"),
    ],
)
def test_bad_options(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        values(words)


def word_of(kind: Any) -> tuple[str, object]:
    """Return a value in its command-line form, and parsed."""
    if get_origin(kind) is Literal:
        return str(get_args(kind)[-1]), get_args(kind)[-1]
    if get_args(kind):
        return word_of(get_args(kind)[0])
    return {int: ("3", 3), float: ("0.5", 0.5), str: ("x y", "x y"), bool: ("true", True)}[kind]


ARGUMENTS = {each.names[0]: each for each in parser("example", example).assemble_argument_collection()}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_read_by_its_full_name_and_by_an_unambiguous_last_part(name: str) -> None:
    argument = ARGUMENTS[f"--{name.replace('_', '-')}"]
    word, value = word_of(argument.hint)
    last = name.partition(".")[2].replace("_", "-")
    assert values([argument.names[0], word])["settings"][name] in (value, (value,))
    if last != "data" and [each.partition(".")[2] for each in SETTINGS].count(name.partition(".")[2]) == 1:
        assert values([f"--{last}={word}"])["settings"][name] in (value, (value,))


@settings(max_examples=40)
@given(
    st.lists(
        st.sampled_from(["--init-from", "--train.steps", "--", "=", "x", "1", "-1", "", "true", "--x", "--no-bias"])
    )
)
def test_any_words_parse_or_raise_one_line(words: list[str]) -> None:
    with contextlib.suppress(UserError):
        values(words)


def test_arguments_after_the_command_of_launch_belong_to_it() -> None:
    given = parsed("launch", "--processes=3", "train", "gpt2", "--train.steps", "2", "-h")
    assert given["options"].processes == 3
    assert given["command"] == ("train", "gpt2", "--train.steps", "2", "-h")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_every_option_and_examples_that_parse(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    helps = [jaxgpt(*words).out for words in ([*name.split(), "--help"], [*name.split(), "-h"])]
    assert helps[0] == helps[1]
    arguments = parser(name, command(name)).assemble_argument_collection(parse_docstring=True)
    for each in arguments:
        if each.show:
            assert each.parameter.help, each.names
            assert all(option in helps[0] for option in each.names)
    examples = [line.strip() for line in helps[0].splitlines() if line.startswith("jaxgpt ")]
    assert len(examples) >= 3
    for line in examples:
        words = shlex.split(line, comments=True)
        if "--help" not in words:
            parsed(name, *words[1 + len(name.split()) :])


def test_help_comes_before_errors_and_shows_the_defaults_of_the_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for words in (["sample", "-h"], ["help", "export"], ["train", "--resume", "--nonsense", "--help"]):
        assert jaxgpt(*words).out.startswith("Usage: jaxgpt ")
    for name in ("gpt2", "python-char"):
        assert re.search(
            rf"--train.steps INT .*\[default: {preset(name).train.steps}\]", jaxgpt("train", name, "-h").out
        )


def test_main_help() -> None:
    text = jaxgpt("--help").out
    assert max(map(len, text.splitlines())) <= 80
    assert all(f"\n  {name} " in text for name in COMMANDS)
    assert jaxgpt("help").out == jaxgpt("-h").out == jaxgpt().out == text
    assert all(name in jaxgpt("data", "--help").out for name in ("data prepare", "data report"))


def test_help_starts_quickly() -> None:
    """Help imports neither JAX nor NumPy nor the modules of other commands."""
    began = time.process_time()
    jaxgpt("train", "--help")
    assert time.process_time() - began < 1
    loaded = "import sys, jaxgpt.cli as c; c.main(['train', '--help']); print({'jax', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True).stdout.endswith("set()\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "runs/x"], "DIRECTORY requires an argument"),
        (["bench", "runs/nosuch"], "no preset or run 'runs/nosuch'; jaxgpt presets lists the presets"),
        (["eval", "caf\udcff"], "unpaired surrogate"),
        (["train", "--data.path", ""], "--data.path is empty"),
        (["train", "finetune", "--init-from=nowhere", "--data.path", "x"], "nowhere"),
        (["train", "--model.n-head", "3"], "model.n_head 3 does not divide model.n_embd 128"),
        (["sample", "x", "--weights", "int4"], 'Did you mean "int8"?'),
        (["sample", "x", "--max_tokens", "5"], "did you mean --max-new-tokens"),
        (["shakespeare"], "(did you mean jaxgpt train shakespeare?)"),
        (["smaple"], "(did you mean sample?)"),
        (["data"], "(did you mean jaxgpt data prepare or jaxgpt data report?)"),
        (["qwertyuiop"], "unknown command 'qwertyuiop'; see jaxgpt --help"),
    ],
)
def test_errors_name_the_fix(words: list[str], message: str) -> None:
    result = jaxgpt(*words)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert message in result.err


def test_a_missing_run_names_those_that_exist() -> None:
    Path("runs").mkdir()
    run_folder(Path("runs/first"), SMALL)
    run_folder(Path("runs/second"), SMALL)
    for words in (["eval", "nope"], ["sample", "runs/nope"], ["info", "nope"], ["train", "nope", "--out", "x"]):
        said = jaxgpt(*words).err
        assert "nope" in said
        assert "runs/first" in said
        assert "runs/second" in said
    assert "(did you mean runs/second?)" in jaxgpt("eval", "runs/secnd").err


def test_suggested_options_exist() -> None:
    names = {
        option
        for name in ("train", "sample")
        for each in parser(name, command(name)).assemble_argument_collection()
        for option in each.names
    }
    assert set(PEERS.values()) <= names
    assert not {f"--{peer}" for peer in PEERS} & names


def test_the_name_of_a_preset_means_the_preset() -> None:
    """The name means the preset regardless of the directory's content, with a note. With ./ the name is a path."""
    alone = jaxgpt("info", "statquest", "--json")
    assert alone.err == ""
    run_folder(Path("statquest"), SMALL)
    beside = jaxgpt("info", "statquest", "--json")
    assert beside.json == alone.json
    assert "statquest is the preset" in beside.err
    there = jaxgpt("info", "./statquest", "--json")
    assert there.err == ""
    assert there.json["parameters"] != alone.json["parameters"]
