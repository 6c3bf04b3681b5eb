"""Commands that open the data of a run, after the data have changed; and runs inside the directory of their text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import flags, jaxgpt

from jaxgpt.checkpoint.info import read_info, seal

TINY = flags(
    model__n_layer=1,
    model__n_head=1,
    model__n_embd=8,
    model__block_size=8,
    data__tokenizer="byte",
    train__steps=1,
    train__batch_size=2,
    train__eval_windows=1,
    train__sample_tokens=0,
    mesh__data=1,
)
TEXT = "".join(f"{n} times {n} is {n * n}.\n" for n in range(60))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run inside the directory of its text, which the data path `.` names; the directory has moved since."""
    place = tmp_path_factory.mktemp("trained") / "place"
    place.mkdir()
    (place / "a.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        result = jaxgpt("train", "python-char", *TINY, "--data.path", ".", "--out", "runs/x")
    assert result.code == 0, result.err
    return place.rename(place.with_name("moved"))


@pytest.fixture
def place(trained: Path) -> None:
    """Copy the run and its text into the current directory."""
    shutil.copytree(trained, ".", dirs_exist_ok=True)


COMMANDS = {
    "eval": ("eval", "runs/x"),
    "sample": ("sample", "runs/x", "--check-memorized", "--max-new-tokens", "2"),
    "report": ("data", "report", "runs/x"),
    "resume": ("train", "--resume", "--out", "runs/x", "--train.steps", "2"),
}


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", COMMANDS)
def test_changed_data_is_no_data_of_the_run(name: str) -> None:
    shorter = TEXT[: len(TEXT) * 6 // 10] + "\n"
    Path("a.txt").write_text(shorter)
    result = jaxgpt(*COMMANDS[name])
    assert "the data of runs/x has changed since step 1: 1 text file in .; skipped 1 run" in result.err
    assert f"({len(TEXT):,} tokens then, {len(shorter):,} now)" in result.err
    if name == "report":
        assert (result.code, "this report and its baselines describe the new data" in result.err) == (0, True)
        return
    assert (result.code, result.out) == (2, "")
    assert "restore it" in result.err


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_run_inside_the_directory_of_its_text_reads_the_same_text(name: str) -> None:
    result = jaxgpt(*COMMANDS[name])
    assert result.code == 0, result.err
    assert "has changed" not in result.err
    if name in ("eval", "report"):
        assert "1 text file in .; skipped 1 run" in result.out


@pytest.mark.usefixtures("place")
def test_a_changed_text_can_be_evaluated_as_a_different_text() -> None:
    Path("a.txt").write_text(TEXT[:100])
    result = jaxgpt("eval", "runs/x", "--data.path", "a.txt")
    assert result.code == 0, result.err
    assert "a.txt (all)" in result.out


@pytest.mark.usefixtures("place")
def test_a_report_with_other_data_settings_is_not_compared() -> None:
    Path("b.txt").write_text(TEXT + TEXT)
    result = jaxgpt("data", "report", "runs/x", "--data.path", "b.txt")
    assert (result.code, result.err) == (0, "")


@pytest.mark.usefixtures("place")
def test_a_checkpoint_without_recorded_sizes_is_compared() -> None:
    """Checkpoints of version 0.1.0 record only the fingerprint."""
    path = Path("runs/x/checkpoints/1")
    info = read_info(path)
    about = {
        name: value
        for name, value in info.about.items()
        if name not in ("data_tokens", "sources", "boundaries", "files")
    }
    seal(path, replace(info, about=about))
    assert jaxgpt("eval", "runs/x").code == 0
    Path("a.txt").write_text(TEXT + "more")
    result = jaxgpt("eval", "runs/x")
    assert result.code == 2
    assert "has changed since step 1: 1 text file in .; skipped 1 run, so a loss" in result.err


@pytest.mark.usefixtures("place")
def test_the_files_that_have_changed_are_named() -> None:
    Path("a.txt").write_text(TEXT.replace("times", "TIMES"))
    Path("b.txt").write_text("new\n")
    Path("c.txt").write_text("new\n")
    result = jaxgpt("eval", "runs/x")
    assert result.code == 2
    assert "; added: b.txt and 1 more; changed: a.txt, so a loss on it" in result.err


@pytest.mark.usefixtures("place")
def test_a_file_that_is_gone_is_named() -> None:
    Path("a.txt").rename("b.txt")
    with Path("b.txt").open("a") as file:
        file.write("more\n")
    result = jaxgpt(*COMMANDS["resume"])
    assert result.code == 2
    assert "; added: b.txt; removed: a.txt" in result.err


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_log_in_the_directory_of_the_text_is_no_change(name: str) -> None:
    Path("train.log").write_text("step 1\n")
    result = jaxgpt(*COMMANDS[name])
    assert result.code == 0, result.err
    assert "has changed" not in result.err


@pytest.mark.parametrize(
    ("suffix", "source"),
    [("jsonl", ["--data.path", "data"]), ("bin", ["--data.path", "data"]), ("bin", ["--data.mix", "data=1"])],
)
def test_changed_files_of_conversations_and_ids_are_named(suffix: str, source: list[str]) -> None:
    Path("data").mkdir()
    token_files() if suffix == "bin" else conversations()
    result = jaxgpt("train", "python-char", *TINY, *source, "--data.train-fraction", "0.5", "--out", "r")
    assert result.code == 0, result.err
    copied = Path(f"data/a_train.{suffix}").read_bytes()
    Path(f"data/c_train.{suffix}").write_bytes(copied)
    result = jaxgpt("eval", "r")
    assert result.code == 2
    assert f"; added: c_train.{suffix}" in result.err


def token_files() -> None:
    for name in ("a_train", "b_train"):
        (np.arange(600) % 250).astype("<u2").tofile(f"data/{name}.bin")


def conversations() -> None:
    for name in ("a_train", "b_train"):
        lines = [json.dumps({"prompt": f"{name[0]}{n}", "completion": f" {n}."}) for n in range(30)]
        Path(f"data/{name}.jsonl").write_text("\n".join(lines))


@pytest.mark.parametrize(("write", "mixed"), [(token_files, False), (token_files, True), (conversations, False)])
def test_a_training_file_renamed_for_validation_is_no_validation_data(write: Callable[[], None], mixed: bool) -> None:
    Path("data").mkdir()
    write()
    path = ["--data.mix", "data=1"] if mixed else ["--data.path", "data"]
    result = jaxgpt("train", "python-char", *TINY, *path, "--out", "run")
    assert result.code == 0, result.err
    assert jaxgpt("eval", "run").code == 0
    [second] = Path("data").glob("b_train*")
    second.rename(str(second).replace("train", "val"))
    for command in (("eval", "run"), ("train", "--resume", "run", "--train.steps", "2")):
        result = jaxgpt(*command)
        assert result.code == 2
        assert "the data of run has changed since step 1" in result.err
        assert "; other files are for validation now" in result.err


def test_a_run_inside_the_directory_of_its_conversations_can_be_resumed() -> None:
    Path("data").mkdir()
    conversations()
    result = jaxgpt("train", "python-char", *TINY, "--data.path", "data", "--out", "data/run")
    assert result.code == 0, result.err
    result = jaxgpt("train", "--resume", "data/run", "--train.steps", "2")
    assert result.code == 0, result.err


def test_a_report_takes_the_path_as_an_option() -> None:
    Path("a.txt").write_text(TEXT)
    Path("b.txt").write_text(TEXT)
    by_option = jaxgpt("data", "report", "--data.path", "a.txt", "--json")
    assert by_option.json == jaxgpt("data", "report", "a.txt", "--json").json
    assert by_option.json["name"] == "a.txt"
    mixed = jaxgpt("data", "report", "--data.mix", "a.txt=1", "b.txt=1", "--json").json
    assert [each["path"] for each in mixed["sources"]] == ["a.txt", "b.txt"]
    result = jaxgpt("data", "report")
    assert result.code == 2
    assert "missing argument: a preset, a run or the path of the data" in result.err


def test_ids_of_int64_are_not_trained_on() -> None:
    np.array([*range(3000)]).tofile("ids.bin")
    ids = flags(data__path="ids.bin", data__tokenizer="ids", model__vocab_size=3000)
    result = jaxgpt("train", "python-char", *TINY, *ids, "--out", "run")
    assert result.code == 2
    assert "ids.bin has no header" in result.err
    assert "looks like ids of int64" in result.err
    assert not Path("run").exists()


def test_literal_separators_of_a_training_text_are_counted() -> None:
    Path("a.txt").write_text(TEXT + "<|endoftext|>\n" * 3)
    found = json.loads(jaxgpt("data", "report", "a.txt", "--json").out)
    command = "jaxgpt data prepare a.txt --separator '<|endoftext|>' --out tokens"
    assert found["source"] == f"a.txt; 3 times <|endoftext|> as ordinary text; to separate documents there: {command}"
