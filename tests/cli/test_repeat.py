"""Runs can be repeated from their settings, and the commands that `train` prints work."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from folders import LLAMA, SMALL, TEXT, run_folder
from helpers import jaxgpt, parsed

from jaxgpt.checkpoint.run import Run, write_settings
from jaxgpt.cli.final_sample import FinalPrompt, final_prompt, sample_command
from jaxgpt.cli.run_printer import RunPrinter
from jaxgpt.config import Config, DataConfig, ModelConfig, TrainConfig
from jaxgpt.config_json import from_json, to_json
from jaxgpt.data.chat.encoding import Conversation
from jaxgpt.data.preferences import Preference, Preferences
from jaxgpt.data.tokenizers.base import CharTokenizer, Tokenizer
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.data.tokens import Tokens
from jaxgpt.errors import UserError
from jaxgpt.trainer import loop
from jaxgpt.trainer.events import Listener
from jaxgpt.trainer.loop import Outcome
from jaxgpt.trainer.start import Start

LINES = "to be or not to be\nthat is the question -\n"
NUMBERS = "12 7 7 12\n3 12\n"
CONTEXT = 16


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Collect configs instead of training."""
    configs: list[Config] = []

    def collect(start: Start, listener: Listener) -> Outcome:
        configs.append(start.config)
        return Outcome(state=None, step=0, evaluation=None, stopped=False)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "train", collect)
    monkeypatch.setattr(RunPrinter, "finished", lambda printer, outcome: None)
    return configs


@pytest.fixture
def recorded() -> Config:
    """Write the run "a run", and return its settings."""
    run = Run(run_folder(Path("a run"), SMALL))
    settings = Config(
        preset="gpt2-style",
        model=run.config().model,
        data=DataConfig(path="text.txt"),
        train=TrainConfig(steps=7, prompt="once"),
    )
    write_settings(run, settings, run.tokenizer())
    return settings


def with_vocab_size_of(config: Config, other: Config) -> Config:
    return config.with_model(vocab_size=other.model.vocab_size)


@pytest.mark.parametrize("target", ["a run", "a run/config.json"])
def test_a_run_is_repeated(trained: list[Config], recorded: Config, target: str) -> None:
    result = jaxgpt("train", target, "--out", "new")
    assert result.code == 0, result.err
    [config] = trained
    assert with_vocab_size_of(config, recorded) == recorded


@pytest.mark.parametrize("target", ["a run", "a run/config.json"])
def test_a_run_is_repeated_with_changes(trained: list[Config], recorded: Config, target: str) -> None:
    result = jaxgpt("train", target, "--out", "new", "--train.steps", "9", "--model.no-bias")
    assert result.code == 0, result.err
    [config] = trained
    expected = replace(recorded, train=TrainConfig(steps=9, prompt="once")).with_model(bias=False)
    assert with_vocab_size_of(config, recorded) == expected


def test_a_repeated_run_begins_with_random_weights_and_a_new_vocabulary(
    trained: list[Config], recorded: Config
) -> None:
    result = jaxgpt("train", "a run", "--out", "new")
    assert "using the settings of a run, starting from random weights" in result.err
    assert trained[0].model.vocab_size == 0, "other data may have another vocabulary"


def test_a_repeated_run_on_other_data_keeps_its_prompt(trained: list[Config], recorded: Config) -> None:
    result = jaxgpt("train", "a run", "--out", "new", "--data.path", "other.txt")
    assert result.code == 0, result.err
    assert trained[0].train.prompt == "once", "only the prompt of a preset belongs to its text"


def test_a_run_without_a_checkpoint_is_resumed(trained: list[Config], recorded: Config) -> None:
    shutil.rmtree("a run/checkpoints/0")
    result = jaxgpt("train", "a run", "--resume", "--train.steps", "9")
    assert result.code == 0, result.err
    assert trained == [replace(recorded, train=TrainConfig(steps=9, prompt="once"))]


def test_a_resume_may_repeat_the_path_of_the_tokenizer(trained: list[Config], recorded: Config) -> None:
    """The run has its own copy of the tokenizer, so a restart script may run in a directory without the file."""
    shutil.rmtree("a run/checkpoints/0")
    data = replace(recorded.data, tokenizer="own.json")
    settings = replace(recorded, data=data, directory=str(Path("start").absolute()))
    write_settings(Run("a run"), settings, Run("a run").tokenizer())
    result = jaxgpt("train", "a run", "--resume", "--data.tokenizer", "own.json")
    assert result.code == 0, result.err
    assert trained == [settings]


RESUME_FROM_FILE = ["train", "my.json", "--out", "new", "--resume", "--train.steps", "9"]


@pytest.fixture
def file_of_settings() -> Config:
    """Write my.json with the settings of a run, and return the config of the run."""
    run = run_folder(Path("a run"), SMALL)
    shutil.copy(run / "config.json", "my.json")
    return Run(run).config()


def start_from_file(trained: list[Config], settings: Config) -> None:
    """Start the run "new" from my.json, and write its directory without a checkpoint, as right after the start."""
    result = jaxgpt(*RESUME_FROM_FILE)
    assert "no run at new yet" in result.err
    new = Run(run_folder(Path("new"), SMALL))
    write_settings(new, with_vocab_size_of(trained[-1], settings), new.tokenizer())
    shutil.rmtree("new/checkpoints/0")


def test_a_file_of_settings_starts_a_run_and_resumes_it(trained: list[Config], file_of_settings: Config) -> None:
    start_from_file(trained, file_of_settings)
    result = jaxgpt(*RESUME_FROM_FILE)
    assert result.code == 0, result.err
    assert "differs" not in result.err
    assert trained[-1].train.steps == 9


def test_a_resumed_run_ignores_changes_of_the_file(trained: list[Config], file_of_settings: Config) -> None:
    start_from_file(trained, file_of_settings)
    optim = replace(file_of_settings.optim, learning_rate=0.5)
    Path("my.json").write_text(to_json(replace(file_of_settings, optim=optim)))
    result = jaxgpt(*RESUME_FROM_FILE)
    assert "new keeps its settings, and ignores these settings of my.json: optim.learning_rate" in result.err


def test_adapters_in_a_file_of_settings_need_weights(trained: list[Config]) -> None:
    Path("my.json").write_text('{"lora": {"rank": 2}}')
    result = jaxgpt("train", "my.json", "--out", "other")
    assert result.code == 2
    assert "--lora.rank needs the weights of a run: add --init-from RUN" in result.err
    assert not trained


def test_a_run_that_started_from_another_is_repeated_from_it(trained: list[Config]) -> None:
    run_folder(Path("base"), SMALL)
    Path("text.txt").write_text(TEXT)
    first = jaxgpt("train", "finetune", "--init-from", "base", "--data.path", "text.txt", "--data.window", "8")
    assert first.code == 0, first.err
    tuned = Run(run_folder(Path("tuned"), SMALL))
    write_settings(tuned, trained[0], tuned.tokenizer())

    again = jaxgpt("train", "tuned", "--out", "again")
    checkpoint = f"{Path.cwd()}/base/checkpoints/0"
    assert f"from the weights of {checkpoint}" in again.err
    assert trained[1] == trained[0]
    assert trained[1].init_from == checkpoint

    other_shape = jaxgpt("train", "tuned", "--out", "again", "--model.n-layer", "3")
    assert other_shape.code == 2
    assert len(trained) == 2


YARN = "--model.block-size 32 --model.rope-scaling yarn --model.rope-factor 2 --model.rope-original-context 16".split()
ROTARY = replace(LLAMA, vocab_size=CharTokenizer(TEXT).vocab_size)
LONGER = replace(ROTARY, block_size=32, rope_scaling="yarn", rope_factor=2.0, rope_original_context=16)


@pytest.fixture
def longer(trained: list[Config]) -> Config:
    """A run "tuned" with a longer context than the run "base" of its initial weights."""
    run_folder(Path("base"), LLAMA)
    Path("text.txt").write_text(TEXT)
    result = jaxgpt("train", "finetune", "--init-from", "base", "--data.path", "text.txt", *YARN)
    assert result.code == 0, result.err
    tuned = Run(run_folder(Path("tuned"), LLAMA))
    write_settings(tuned, trained[0], tuned.tokenizer())
    return trained.pop()


def test_a_run_may_change_the_positions_of_its_initial_weights(longer: Config) -> None:
    assert longer.model == LONGER


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["tuned"], LONGER),
        (["tuned/config.json"], LONGER),
        (["tuned", "--model.rope-factor", "4"], replace(LONGER, rope_factor=4.0)),
        (["tuned", "--init-from", "base"], replace(ROTARY, block_size=32)),
        (["finetune", "--init-from", "tuned", "--data.path", "text.txt"], LONGER),
        (["weights.json"], replace(ROTARY, block_size=ModelConfig.block_size)),
    ],
)
def test_positions_belong_to_the_weights_unless_given(
    command: list[str], expected: ModelConfig, longer: Config, trained: list[Config]
) -> None:
    """A file without settings of positions does not change the positions of the weights, nor does a run of other weights."""
    file = {"init_from": longer.init_from, "data": {"path": "text.txt"}}
    Path("weights.json").write_text(json.dumps(file))
    result = jaxgpt("train", *command, "--out", "again")
    assert result.code == 0, result.err
    assert [config.model for config in trained] == [expected]


def test_adapters_and_learned_positions_keep_the_positions_of_their_base(longer: Config) -> None:
    adapters = jaxgpt("train", "tuned", "--init-from", "base", "--out", "again", "--lora.rank", "2", *YARN)
    assert adapters.code == 2
    assert "model.rope_factor must be 1.0 with lora.rank, as in the base of the adapters: omit it" in adapters.err
    run_folder(Path("learned"), SMALL)
    learned = jaxgpt(
        "train", "finetune", "--init-from", "learned", "--data.path", "text.txt", "--model.rope-factor", "2"
    )
    assert learned.code == 2
    assert "model.rope_factor must be 1.0, as in the run of --init-from, not 2.0: omit it" in learned.err


def test_the_preset_name_in_a_file_is_not_a_path() -> None:
    from jaxgpt.cli.settings import named_config

    Path("config.json").write_text('{"preset": "../../outside"}')
    assert named_config("config.json") == replace(from_json("{}"), preset="custom")


def prompt_of(kind: str, prompt: str) -> tuple[Tokenizer, FinalPrompt]:
    """Return a tokenizer, and the prompt that a run with it and with `train.prompt` samples from."""
    text = NUMBERS if kind == "ids" else LINES
    tokenizer = make_tokenizer(kind, text, 0, 20)
    validation = Tokens([np.asarray(tokenizer.encode(text))])
    model = ModelConfig(vocab_size=tokenizer.vocab_size, block_size=CONTEXT)
    config = Config(model=model, train=TrainConfig(prompt=prompt))
    return tokenizer, final_prompt(config, tokenizer, validation)


# The default prompt is "\n": the first words of a line of the validation data.
@pytest.mark.parametrize(
    ("kind", "prompt", "expected"),
    [
        ("char", "\n", "that is "),
        ("byte", "\n", "that is "),
        ("word", "\n", "to be or not"),
        ("ids", "\n", "12 7 7 12"),
        *[(kind, "", "") for kind in ("char", "byte", "word", "ids")],
        *[(kind, "to be", "to be") for kind in ("char", "byte", "word")],
        *[(kind, "--out", "--out") for kind in ("char", "byte")],
        ("byte", "ZZZ", "ZZZ"),
        ("byte", "-x", "-x"),
        # A prompt that exceeds the context is truncated to half its length.
        ("char", "be " * 30, "be be be"),
        ("byte", "be " * 30, "be be be"),
        ("word", "be " * 30, " ".join(["be"] * 8)),
        ("byte", "a\nb 'c' \"d\" $e `f` \\g", "a\nb 'c' "),
    ],
)
def test_the_printed_prompt_is_quoted_for_the_shell(kind: str, prompt: str, expected: str) -> None:
    tokenizer, (ids, chosen, answer) = prompt_of(kind, prompt)
    assert len(ids) <= CONTEXT
    assert chosen == tokenizer.decode(ids) == expected
    assert tokenizer.encode(chosen).tolist() == ids
    assert answer == ""

    _, _, *words = shlex.split(sample_command(Path("my run"), chosen))
    arguments = parsed("sample", *words)
    assert arguments["run"] == "my run"
    assert arguments.get("prompt", ("",)) == (chosen,)


@pytest.mark.parametrize(
    ("kind", "prompt"),
    [
        *[(kind, prompt) for kind in ("char", "word", "ids") for prompt in ("ZZZ", "-x", "a 'c'")],
        *[(kind, "--out") for kind in ("word", "ids")],
        *[("ids", prompt) for prompt in ("to be", "be " * 30)],
    ],
)
def test_a_prompt_outside_the_vocabulary_raises(kind: str, prompt: str) -> None:
    with pytest.raises(UserError, match="is not"):
        prompt_of(kind, prompt)


def test_the_data_continue_only_the_prompt_of_their_first_record() -> None:
    """A record with an empty prompt, and no beginning-of-text token, begins with its answer: the sample needs other words."""
    tokenizer = make_tokenizer("byte", LINES, 0, 20)
    config = Config(model=ModelConfig(vocab_size=tokenizer.vocab_size, block_size=CONTEXT), train=TrainConfig())
    ids = np.asarray(tokenizer.encode("Hi! bye"))
    is_answer = np.arange(len(ids)) >= 4
    prompts = []
    for is_target in (is_answer, np.ones(len(ids), bool)):
        split = Preferences([Preference(Conversation(ids, is_target), Conversation(ids, is_target))])
        prompts.append(final_prompt(config, tokenizer, split))
    assert [(prompt.text, prompt.answer) for prompt in prompts] == [("Hi! ", "bye"), ("bye", "")]
