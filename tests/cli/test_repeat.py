"""Runs can be repeated from their settings, and the commands that `train` prints work."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from folders import SMALL, TEXT, run_folder
from helpers import jaxgpt, parsed

from jaxgpt.checkpoint.run import Run, write_settings
from jaxgpt.cli.report import TrainReport, first_prompt, sample_command
from jaxgpt.config import Config, DataConfig, ModelConfig, TrainConfig, from_json, to_json
from jaxgpt.data.tokenizer_files import make_tokenizer
from jaxgpt.data.tokens import Tokens
from jaxgpt.errors import UserError
from jaxgpt.trainer import train as train_module
from jaxgpt.trainer.train import Outcome


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Collect configs instead of training."""
    configs: list[Config] = []
    monkeypatch.setattr(
        train_module, "train", lambda start, report: configs.append(start.config) or Outcome(*[None] * 4)
    )
    monkeypatch.setattr(TrainReport, "finished", lambda report, outcome: None)
    return configs


def test_a_run_is_repeated(trained: list[Config]) -> None:
    run = Run(run_folder(Path("a run"), SMALL))
    settings = Config(preset="gpt2-style", train=TrainConfig(steps=7, prompt="once"), data=DataConfig(path="text.txt"))
    old = replace(settings, model=run.config().model)
    write_settings(run, old, run.tokenizer())
    for args in (["a run"], ["a run/config.json"]):
        assert jaxgpt("train", *args, "--out", "new").code == 0
        assert jaxgpt("train", *args, "--out", "new", "--train.steps", "9", "--model.no-bias").code == 0
        same, changed = trained[-2:]
        assert same.with_model(vocab_size=old.model.vocab_size) == old
        assert changed == replace(same, train=TrainConfig(steps=9, prompt="once")).with_model(bias=False)
    assert trained[0].model.vocab_size == 0, "other data may have another vocabulary"
    assert "using the settings of a run, starting from random weights" in jaxgpt("train", "a run", "--out", "new").err
    assert jaxgpt("train", "a run", "--out", "new", "--data.path", "other.txt").code == 0
    assert trained[-1].train.prompt == "once", "only the prompt of a preset belongs to its text"
    shutil.rmtree("a run/checkpoints/0")
    assert jaxgpt("train", "a run", "--resume", "--train.steps", "9").code == 0
    assert trained[-1] == replace(old, train=TrainConfig(steps=9, prompt="once"))


def test_a_file_of_settings_starts_a_run_and_resumes_it(trained: list[Config]) -> None:
    run = run_folder(Path("a run"), SMALL)
    shutil.copy(run / "config.json", "my.json")
    run_config = Run(run).config()
    args = ["train", "my.json", "--out", "new", "--resume", "--train.steps", "9"]
    assert "no run at new yet" in jaxgpt(*args).err
    started = Run(run_folder(Path("new"), SMALL))
    write_settings(started, trained[-1].with_model(vocab_size=Run(run).config().model.vocab_size), started.tokenizer())
    shutil.rmtree("new/checkpoints/0")
    done = jaxgpt(*args)
    assert (done.code, "differs" in done.err) == (0, False)
    assert trained[-1].train.steps == 9
    changed = replace(run_config, optim=replace(run_config.optim, learning_rate=0.5))
    Path("my.json").write_text(to_json(changed))
    assert "new keeps its settings, and ignores these settings of my.json: optim.learning_rate" in jaxgpt(*args).err
    Path("my.json").write_text('{"lora": {"rank": 2}}')
    done = jaxgpt("train", "my.json", "--out", "other")
    assert (done.code, len(trained)) == (2, 3)
    assert "--lora.rank needs the weights of a run: add --init-from RUN" in done.err


def test_a_run_that_started_from_another_is_repeated_from_it(trained: list[Config]) -> None:
    run_folder(Path("base"), SMALL)
    Path("text.txt").write_text(TEXT)
    args = ["finetune", "--init-from", "base", "--data.path", "text.txt", "--data.window", "8"]
    assert jaxgpt("train", *args).code == 0
    run = Run(run_folder(Path("tuned"), SMALL))
    write_settings(run, trained[-1], run.tokenizer())
    result = jaxgpt("train", "tuned", "--out", "again")
    assert f"from the weights of {Path.cwd()}/base/checkpoints/0" in result.err
    assert trained[-1] == trained[0]
    assert trained[-1].init_from == f"{Path.cwd()}/base/checkpoints/0"
    result = jaxgpt("train", "tuned", "--out", "again", "--model.n-layer", "3")
    assert (result.code, len(trained)) == (2, 2)


def test_the_preset_name_in_a_file_is_not_a_path() -> None:
    from jaxgpt.cli.settings import named_config

    Path("config.json").write_text('{"preset": "../../outside"}')
    assert named_config("config.json") == replace(from_json("{}"), preset="custom")


@pytest.mark.parametrize("kind", ["char", "word", "byte", "ids"])
@pytest.mark.parametrize("prompt", ["\n", "", "to be", "ZZZ", "-x", "--out", "a\nb 'c' \"d\" $e `f` \\g", "be " * 30])
def test_the_printed_prompt_is_quoted_for_the_shell(kind: str, prompt: str) -> None:
    text = "12 7 7 12\n3 12\n" if kind == "ids" else "to be or not to be\nthat is the question -\n"
    tokenizer = make_tokenizer(kind, text, 0, 20)
    tokens = Tokens([np.asarray(tokenizer.encode(text))])
    model = ModelConfig(vocab_size=tokenizer.vocab_size, block_size=16)
    try:
        ids = first_prompt(Config(model=model, train=TrainConfig(prompt=prompt)), tokenizer, tokens)
    except UserError:
        assert not set(prompt.split()) <= set(text.split())  # words outside the vocabulary
        return
    assert len(ids) <= 16
    chosen = tokenizer.decode(ids)
    assert tokenizer.encode(chosen).tolist() == ids
    words = shlex.split(sample_command(Path("my run"), chosen))
    read = parsed("sample", *words[2:])
    assert (read["run"], read.get("prompt", ("",))) == ("my run", (chosen,))
    expected = {"to be": "to be", "\n": "that is " if kind in ("char", "byte") else "to be or not"}
    if prompt in expected and kind != "ids":
        assert chosen == expected[prompt]
