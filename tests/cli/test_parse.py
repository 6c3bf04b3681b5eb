"""Arguments and options: every spelling means the same, and errors are one clear line."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from folders import SMALL, run_folder
from helpers import jaxgpt
from hypothesis import given
from hypothesis import strategies as st

from jaxgpt.cli import COMMANDS, main, module_of
from jaxgpt.cli.help import help_text
from jaxgpt.cli.options import Option, build, options, read
from jaxgpt.cli.parse import with_settings
from jaxgpt.cli.suggest import COMMANDS as OTHER_COMMANDS
from jaxgpt.cli.suggest import PEERS
from jaxgpt.config import UserError
from jaxgpt.presets import preset

EVERY_OPTION = [(name, option) for name in COMMANDS for option in options(module_of(name).Args)]


@dataclass(frozen=True)
class Inner:
    """Inside."""

    n_layer: int = 1  # number of layers
    bias: bool = True  # whether there is one
    # a comment above
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Outer:
    init_from: str = ""  # a path
    top_p: float | None = None  # a number
    stop_ids: tuple[int, ...] = ()  # some numbers
    dry_run: bool = False  # a flag
    inner: Inner = field(default_factory=Inner)


def values(args: list[str]) -> dict[str, object]:
    return read(Outer, args, lambda flag: f"unknown option {flag}")[1]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--init_from=x"], {"init_from": "x"}),
        (["--init-from", "x"], {"init_from": "x"}),
        (["--init_from", "x", "--init-from=y"], {"init_from": "y"}),
        (["--init-from=--dry-run"], {"init_from": "--dry-run"}),
        (["--init-from", "- item\n--dry-run"], {"init_from": "- item\n--dry-run"}),
        (["--init-from", "-- a remark"], {"init_from": "-- a remark"}),
        (["--init-from="], {"init_from": ""}),
        (["--init-from=a=b\nc"], {"init_from": "a=b\nc"}),
        (["--top-p", "-1e-3"], {"top_p": -1e-3}),
        (["--stop_ids", "1", "-2"], {"stop_ids": (1, -2)}),
        (["--stop_ids", "1", "--stop-ids=3"], {"stop_ids": (3,)}),
        (["--dry_run"], {"dry_run": True}),
        (["--dry-run", "--no-dry-run"], {"dry_run": False}),
        (["--dry-run=False"], {"dry_run": False}),
        (["--dry-run", "False"], {"dry_run": False}),
        (["--no-dry-run", "false", "--inner.bias", "true"], {"dry_run": True, "inner.bias": True}),
        (["--inner.bias=false"], {"inner.bias": False}),
        (["--inner.no_bias"], {"inner.bias": False}),
        (["--inner.n_layer=3", "--inner.kind", "b"], {"inner.n_layer": 3, "inner.kind": "b"}),
    ],
)
def test_spellings(args: list[str], expected: dict[str, object]) -> None:
    assert values(args) == expected


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--init"], "unknown option --init"),
        (["--Init-From", "x"], "unknown option --Init-From"),
        (["--init-from"], "--init-from needs a value"),
        (["--init-from", "--dry-run"], "needs a value .*--init-from=VALUE"),
        (["--init-from", "--"], "--init-from needs a value"),
        (["--top-p", "much"], "--top-p must be a number, not 'much'"),
        (["--stop-ids", "1", "x"], "--stop-ids must be an integer, not '1 x'"),
        (["--inner.n-layer", "1.5"], "--inner.n-layer must be an integer, not '1.5'"),
        (["--inner.kind", "c"], "--inner.kind must be one of a, b, not 'c'"),
        (["--dry-run=maybe"], "--dry-run takes true, false or no value, not 'maybe'"),
        (["-x"], "unknown option -x"),
    ],
)
def test_bad_options(args: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        values(args)


def test_positional_arguments_may_be_anywhere() -> None:
    arguments, given = read(Outer, ["a", "--dry-run", "b", "--init-from", "c", "d", "--", "--dry-run", "-x"], str)
    assert arguments == ["a", "b", "d", "--dry-run", "-x"]
    assert given == {"dry_run": True, "init_from": "c"}


def test_arguments_after_the_command_of_launch_belong_to_it() -> None:
    command = module_of("launch")
    arguments, given = command.COMMAND.read(
        command.Args, ["--processes=3", "train", "gpt2", "--train.steps", "2", "-h"]
    )
    assert (arguments, given) == (["train", "gpt2", "--train.steps", "2", "-h"], {"processes": 3})


def test_build_changes_only_given_options() -> None:
    default = Outer(init_from="x", inner=Inner(n_layer=7, bias=False))
    assert build(Outer, {}, default) == default
    assert build(Outer, {"inner.kind": "b"}, default) == Outer(
        init_from="x", inner=Inner(n_layer=7, bias=False, kind="b")
    )


def sample_value(option: Option) -> tuple[str, object]:
    """Return a value as written on the command line, and as parsed."""
    if get_origin(option.kind) is Literal:
        word = get_args(option.kind)[-1]
        return str(word), word
    return {int: ("3", 3), float: ("0.5", 0.5), str: ("x y", "x y")}[option.kind]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_every_command_is_read_in_every_spelling(command: str) -> None:
    """Each spelling, with all options at once."""
    cls = module_of(command).Args
    known = options(cls)
    values = {option.name: sample_value(option) for option in known if option.kind is not bool}
    for underscores, equals in itertools.product((False, True), repeat=2):
        words: list[str] = []
        for option in known:
            for flag in option.flags:
                spelled = flag.replace("-", "_").replace("__", "--", 1) if underscores else flag
                if option.kind is bool:
                    words += [f"{spelled}=true"] if equals else [spelled, *["true"] * underscores]
                else:
                    words += [f"{spelled}={values[option.name][0]}"] if equals else [spelled, values[option.name][0]]
        arguments, given = read(cls, words, str)
        assert arguments == []
        assert set(given) == {option.name for option in known}
        for option in known:
            if option.kind is bool:
                assert given[option.name] is False, option  # the negative flag comes last
            else:
                value = given[option.name]
                assert value in (values[option.name][1], (values[option.name][1],)), option


@given(
    st.lists(st.sampled_from([o.flag for o in options(Outer)] + ["--", "-h", "=", "x", "1", "-1", "", "true", "--x"]))
)
def test_any_words_parse_or_raise_one_line(words: list[str]) -> None:
    with contextlib.suppress(UserError):
        build(Outer, read(Outer, words, lambda flag: f"unknown option {flag}")[1])


@pytest.mark.parametrize("spelling", ["--init-from={}", "--init_from={}", "--init-from {}", "--init_from {}"])
def test_init_from_is_honored_in_every_spelling(spelling: str) -> None:
    args = ["train", "finetune", *spelling.format("nowhere").split(), "--data.path", "x"]
    result = jaxgpt(*args)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "nowhere" in result.err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    helps = [jaxgpt(*args).out for args in ([command, "--help"], [command, "-h"], ["help", command], ["-h", command])]
    assert len(set(helps)) == 1
    [text] = set(helps)
    assert text.count("usage:") == 1
    assert text.startswith(f"usage: {module_of(command).COMMAND.usage}\n")
    examples = text.split("examples:\n")[1].split("\n\n")[0].splitlines()
    assert len(examples) >= 3
    assert [line for line in text.splitlines() if len(line) > 80 and line not in examples] == []
    shown = set(re.findall(r"^  (--[\w.-]+)", text, re.MULTILINE)) - {"--no-cache"}
    known = options(module_of(command).Args)
    assert {option.flag for option in known} <= shown <= {flag for option in known for flag in option.flags}


def test_help_shows_kinds_choices_and_each_default_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert (
        f"\n{help_text(Outer, Outer(init_from='a b '))}\n"
        == """
options:
  --init-from STR         a path (default: 'a b ')
  --top-p FLOAT           a number
  --stop-ids INT ...      some numbers
  --dry-run               a flag
  -h, --help              show this message and exit
  --no-cache              disable the cache of compiled
                          programs

inner options:
  Inside.
  --inner.n-layer INT     number of layers (default: 1)
  --inner.bias, --inner.no-bias
                          whether there is one
                          (default: true)
  --inner.kind {a,b}      a comment above (default: a)
"""
    )


def test_examples_of_every_command_parse() -> None:
    import shlex

    for name in COMMANDS:
        command = module_of(name).COMMAND
        for example in command.examples:
            words = shlex.split(example, comments=True)
            assert words[0] == "jaxgpt"
            n = 1 + len(name.split()) if example.startswith(f"jaxgpt {name} ") else 2
            module = module_of(" ".join(words[1:n]))
            if "--help" not in words:
                module.COMMAND.read(module.Args, words[n:])


def test_help_comes_before_errors() -> None:
    for args in (["sample", "-h"], ["export", "runs/x", "--json", "--help"], ["train", "--resume", "--help"]):
        assert jaxgpt(*args).out.startswith(f"usage: jaxgpt {args[0]}")
    assert "preset gpt2:" in jaxgpt("train", "gpt2", "--help").out


def test_main_help_and_version() -> None:
    text = jaxgpt("--help").out
    assert max(map(len, text.splitlines())) <= 80
    assert all(f"\n  {name} " in text for name in COMMANDS)
    assert jaxgpt("help").out == jaxgpt("-h").out == jaxgpt().out == text
    began = time.process_time()
    jaxgpt("train", "--help")
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["export", "runs/x"], "missing argument: DIR (usage: jaxgpt export RUN DIR [OPTIONS])"),
        (["export", "--json"], "missing argument: RUN (usage: jaxgpt export RUN DIR [OPTIONS])"),
        (["sample", "--stop", "x", "runs/x"], "missing argument: RUN (put it before --stop, which takes several "),
        (["import", "a", "--accept-option=x", "b"], "RUN (put it before --accept-option, which "),
        (["info", "gpt2", "gpt3"], "unexpected argument 'gpt3' (usage: jaxgpt info RUN|PRESET [OPTIONS])"),
        (["bench", "runs/nosuch"], "no preset or run 'runs/nosuch'; jaxgpt presets lists the presets"),
        (["train", "--lr", "1"], "unknown option --lr (did you mean --optim.learning-rate?); see jaxgpt train --help"),
        (["train", "--learning_rate=1"], "(did you mean --optim.learning-rate?)"),
        (["train", "--optimizer", "sgd"], "(did you mean --optim.name?)"),
        (["train", "--dtype", "bf16"], "(did you mean --train.compute-dtype?)"),
        (["train", "--device", "cuda"], "--device: JAX uses any accelerator it finds"),
        (["train", "--max_iters", "5"], "(did you mean --train.steps?)"),
        (["train", "--max_steps=5"], "(did you mean --train.steps?)"),
        (["train", "--steps", "5"], "(did you mean --train.steps?)"),
        (["train", "--optim.steps", "5"], "(did you mean --train.steps?)"),
        (["train", "--compile"], "--compile: training is always compiled"),
        (["train", "--data", "x"], "(did you mean --data.path or --data.dataset?)"),
        (["train", "--dataset", "x"], "(did you mean --data.path or --data.dataset?)"),
        (["train", "--tensorboard"], "--tensorboard: the run directory has the metrics, metrics.jsonl"),
        (["train", "--wandb_log"], "--wandb-log: the run directory has the metrics, metrics.jsonl"),
        (["train", "--batch_size", "5"], "(did you mean --train.batch-size?)"),
        (["train", "--eval_interval", "5"], "(did you mean --train.eval-every?)"),
        (["train", "--n_layer", "5"], "(did you mean --model.n-layer?)"),
        (["train", "--seed", "5"], "(did you mean --train.seed?)"),
        (["train", "--epochs", "5"], "--epochs: set the length of training with --train.steps"),
        (["train", "--fp16"], "use --train.compute-dtype bfloat16"),
        (["train", "--bf16"], "use --train.compute-dtype bfloat16"),
        (["train", "--output_dir", "x"], "(did you mean --out?)"),
        (["train", "--model", "gpt2"], "--model: the preset or run is the first positional argument"),
        (
            ["train", "--temperature", "1"],
            "--temperature is an option of jaxgpt sample, jaxgpt chat, jaxgpt explain or jaxgpt inspect;",
        ),
        (["train", "--stpes", "1"], "(did you mean --train.steps?)"),
        (["train", "--data.path", ""], "--data.path is empty: name a file or folder, or leave it out"),
        (["train", "--train.stepz", "1"], "(did you mean --train.steps?)"),
        (["train", "--frobnicate"], "unknown option --frobnicate; see jaxgpt train --help"),
        (["train", "-o", "x"], "unknown option -o "),
        (["sample", "x", "--max_tokens", "5"], "(did you mean --max-new-tokens or --max-length?)"),
        (["sample", "x", "--promt", "5"], "(did you mean --prompt?)"),
        (["sample", "x", "--lr", "5"], "--optim.learning-rate is an option of jaxgpt train, "),
        (
            ["sample", "x", "--weights", "int4"],
            "int8, not 'int4' (did you mean int8?)",
        ),
        (["train", "--train.accumulation", "4"], "unknown option --train.accumulation: use --train.microbatch N, "),
        (["graph"], "jaxgpt plot RUN"),
        (["generate"], "(did you mean jaxgpt sample RUN --prompt TEXT?)"),
        (["finetune"], "(did you mean jaxgpt train finetune --init-from RUN"),
        (["talk"], "(did you mean jaxgpt chat RUN"),
        (["resume"], "(did you mean jaxgpt train --resume --out RUN?)"),
        (["shakespeare"], "(did you mean jaxgpt train shakespeare?)"),
        (["smaple"], "(did you mean sample?)"),
        (["qwertyuiop"], "unknown command 'qwertyuiop'; see jaxgpt --help"),
    ],
)
def test_errors_name_the_fix(args: list[str], message: str) -> None:
    result = jaxgpt(*args)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert message in result.err


def test_suggested_options_exist() -> None:
    every = {flag for _, option in EVERY_OPTION for flag in option.flags}
    for peer in PEERS:
        assert set(peer.flags.split()) <= every, peer
        assert set(re.findall(r"--[a-z][a-z.-]+", peer.otherwise)) <= every | {"--processes"}, peer
    names = [name for peer in PEERS for name in peer.names.split()]
    assert len(names) == len(set(names))
    assert not set(COMMANDS) & {name for names in OTHER_COMMANDS for name in names.split()}


def test_errors_of_settings_have_no_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--model.n-head", "3"]) == 2
    err = capsys.readouterr().err
    assert err == ("jaxgpt: model.n_head 3 does not divide model.n_embd 128: choose a divisor, or set model.head_dim\n")


def test_settings_change_the_config() -> None:
    module = module_of("train")
    _, given = module.COMMAND.read(module.Args, ["--model.n_layer=2", "--train.seed", "7", "--out", "x"])
    parsed, config = with_settings(module.Args, given, preset("gpt2"))
    assert (config.model.n_layer, config.train.seed, config.model.n_embd, parsed.out) == (2, 7, 768, "x")


def test_the_name_of_a_preset_means_the_preset() -> None:
    """Whatever the folder holds; a note says so. With ./ the name is a path."""
    alone = jaxgpt("info", "statquest", "--json")
    assert alone.err == ""
    run_folder(Path("statquest"), SMALL)
    beside = jaxgpt("info", "statquest", "--json")
    assert beside.json == alone.json
    assert beside.err == "jaxgpt: statquest is the preset: for the file or folder of this name, write ./statquest\n"
    there = jaxgpt("info", "./statquest", "--json")
    assert there.err == ""
    assert there.json["parameters"] != alone.json["parameters"]
