"""Arguments and options: all spellings are equivalent, and errors are one clear line."""

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
from cyclopts.argument import Argument
from folders import SMALL, run_folder
from helpers import jaxgpt, parsed
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.cli.absent import ABSENT, OTHER_NAMES, other_program
from jaxgpt.cli.option_help import full_names
from jaxgpt.cli.options import EVERY
from jaxgpt.cli.parse import COMMANDS, make_app
from jaxgpt.config import Config, TextParams, flat
from jaxgpt.errors import UserError
from jaxgpt.presets import preset

SETTINGS = [name for name in flat(Config()) if "." in name]


def options(name: str, *words: str) -> list[Argument]:
    app = make_app([*name.split(), *words]).parse_commands(name.split())[1][-1]
    return [
        each
        for each in app.assemble_argument_collection(default_parameter=EVERY, parse_docstring=True)
        if each.show and not each.children
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train --init-from=x", {"init_from": "x"}),
        ("train --init-from x --init-from=y", {"init_from": "y"}),
        ("train --init-from=--resume", {"init_from": "--resume"}),
        ("train --init_from=a=b", {"init_from": "a=b"}),
        ("train --resume=false", {"resume": False}),
        ("train --resume x", {"resume": True, "target": "x"}),
        ("train --resume=True", {"resume": True}),
        ("train -- --resume", {"target": "--resume"}),
        ("train --train.no-scan-layers --train.steps=3", {"settings": {"train.scan_layers": False, "train.steps": 3}}),
        ("train --no_scan_layers --bias=true", {"settings": {"train.scan_layers": False, "model.bias": True}}),
        ("train --steps 3 --n_layer=2", {"settings": {"train.steps": 3, "model.n_layer": 2}}),
        ("train --data.mix web=0.7 code=0.3", {"settings": {"data.mix": ("web=0.7", "code=0.3")}}),
        ("train --train.prompt ''", {"settings": {"train.prompt": ""}}),
        ("train --optim.min-lr -1e-3", {"settings": {"optim.min_lr": -1e-3}}),
        ("sample x --stop-ids 1 -2", {"text": TextParams(stop_ids=(1, -2))}),
        ("explain x --prompt='- item'", {"prompt": "- item"}),
        ("explain x --top-k 3", {"sampling": {"top_k": 3}}),
        ("launch --processes=3 train gpt2 --train.steps 2", {"command": ("train", "gpt2", "--train.steps", "2")}),
    ],
)
def test_spellings(words: str, expected: dict[str, Any]) -> None:
    name, *rest = shlex.split(words)
    found = parsed(name, *rest)
    assert {key: found[key] for key in expected} == expected
    assert found.get("settings", {}) == expected.get("settings", {})


def word_of(kind: Any) -> tuple[str, object]:
    """Return a value in its command-line form, and parsed."""
    if get_origin(kind) is Literal:
        return str(get_args(kind)[-1]), get_args(kind)[-1]
    if get_args(kind):
        return word_of(get_args(kind)[0])
    return {int: ("3", 3), float: ("0.5", 0.5), str: ("x y", "x y"), bool: ("true", True)}[kind]


def test_every_setting_is_read_by_its_full_name_and_by_an_unambiguous_last_part() -> None:
    declared = {each.names[0]: each for each in options("train")}
    full = list[str]()
    short = list[str]()
    values = dict[str, Any]()
    for name in SETTINGS:
        argument = declared[f"--{name.replace('_', '-')}"]
        word, value = word_of(argument.hint)
        values[name] = (value,) if get_origin(argument.hint) is tuple else value
        full.append(f"{argument.names[0]}={word}")
        last = name.partition(".")[2]
        is_unique = [each.partition(".")[2] for each in SETTINGS].count(last) == 1 and last != "data"
        short.append(f"--{last}={word}" if is_unique else full[-1])
    assert parsed("train", *full)["settings"] == parsed("train", *short)["settings"] == values
    assert sum(word in full for word in short) == 3  # vocab_size of two sections, and mesh.data


@pytest.mark.parametrize("name", ["train", "plan --topology v5e:1", "bench", "data report"])
def test_no_two_options_of_a_command_have_the_same_name(name: str) -> None:
    names = [option for each in options(name.partition(" --")[0]) for option in each.names]
    assert len(names) == len(set(names))


@settings(max_examples=40)
@given(
    st.lists(
        st.sampled_from(["--init-from", "--train.steps", "--", "=", "x", "1", "-1", "", "true", "--x", "--no-bias"])
    )
)
def test_any_words_parse_or_raise_one_line(words: list[str]) -> None:
    with contextlib.suppress(UserError):
        parsed("train", *words)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_every_option_and_examples_that_parse(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    helps = [jaxgpt(*words).out for words in ([*name.split(), "--help"], [*name.split(), "-h"])]
    assert helps[0] == helps[1]
    for each in options(name, "--help"):
        assert each.parameter.help, each.names
        assert all(option in helps[0] for option in full_names(each.names))
    examples = [line.strip() for line in helps[0].splitlines() if line.startswith("jaxgpt ")]
    assert len(examples) >= 2
    for line in examples:
        parsed(name, *shlex.split(line, comments=True)[1 + len(name.split()) :])


def test_help_comes_before_errors_and_shows_the_defaults_of_the_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for words in (["sample", "-h"], ["train", "--resume", "--nonsense", "--help"]):
        assert "Usage: jaxgpt " in jaxgpt(*words).out
    for name in ("gpt2", "python-char"):
        assert re.search(
            rf"--train.steps INT .*\[default: {preset(name).train.steps}\]", jaxgpt("train", name, "-h").out
        )


def test_main_help() -> None:
    text = jaxgpt("--help").out
    assert all(f" {name} " in text for name in COMMANDS if " " not in name)
    assert jaxgpt("-h").out == jaxgpt().out == text
    assert all(name in jaxgpt("data", "--help").out for name in ("prepare", "report"))
    assert jaxgpt("--version").out.startswith("0.")


def test_help_starts_quickly() -> None:
    """Help imports neither JAX nor NumPy nor the modules of other commands."""
    began = time.process_time()
    jaxgpt("train", "--help")
    assert time.process_time() - began < 1
    loaded = "import sys, jaxgpt.cli as c; c.main(['train', '--help']); print({'jax', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True).stdout.endswith("set()\n")


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
    assert "did you mean" not in jaxgpt("eval", "runs/nope").err


def test_the_name_of_a_preset_means_the_preset() -> None:
    """A preset's name means the preset even if a directory has this name; with ./ the name is a path."""
    alone = jaxgpt("info", "statquest", "--json").json
    run_folder(Path("statquest"), SMALL)
    assert jaxgpt("info", "statquest", "--json").json == alone
    assert jaxgpt("info", "./statquest", "--json").json["parameters"] != alone["parameters"]


def test_hints_for_options_of_other_programs_name_options_that_exist() -> None:
    known = {name for command in ("train", "sample") for option in options(command) for name in option.names}
    named = re.findall(r"--[\w.-]+", " ".join(hint for _, hint in (*OTHER_NAMES, *ABSENT)))
    assert len(named) > 10
    assert set(named) <= known


def test_no_option_is_taken_for_one_of_another_program() -> None:
    """Otherwise a typo of an option would be explained as a missing feature."""
    known = {name for command in COMMANDS for option in options(command) for name in option.names}
    assert [name for name in known if other_program(name)] == []


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        (["--sequence-length", "--max-sequence-length", "--max-seq-len", "--context-length"], "--model.block-size"),
        (["--mesh.sequence", "--sequence-parallel", "--sequence-parallel-size"], "--mesh.context"),
        (["--zero", "--zero-stage", "--zero3", "--deepspeed-config"], "--mesh.fsdp"),
        (["--precompute-ref-log-probs", "--post.precompute-ref-log-prob"], "--post.reference-log-p once"),
        (["--ref-model", "--reference-model", "--post.ref-model"], "--post.reference"),
        (["--stage", "--loss-type"], "--post.objective"),
    ],
)
def test_options_of_other_programs_hint_at_the_setting(options: list[str], setting: str) -> None:
    assert {other_program(option) for option in options} == {f" (here: {setting})"}


@pytest.mark.parametrize("option", ["--post.temperature", "--train.temperature", "--post.top-p", "--post.min-p"])
def test_rollouts_have_no_temperature(option: str) -> None:
    """Other commands have these options."""
    assert "training draws answers at temperature 1" in other_program(option)
    name = option.rpartition(".")[2]
    assert other_program(f"--{name}") == ""


@pytest.mark.parametrize("option", ["--pipeline-parallel", "--pipeline-stages", "--num-stages", "--mesh.pp"])
def test_there_is_no_pipeline_parallelism(option: str) -> None:
    assert "no pipeline parallelism" in other_program(option)


@pytest.mark.parametrize("option", ["--zero-init", "--optim.zero-nans", "--data.sequence-count"])
def test_words_in_common_with_another_program_are_no_hint(option: str) -> None:
    assert other_program(option) == ""
