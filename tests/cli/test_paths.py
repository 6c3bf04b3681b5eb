"""Relative paths of data refer to the directory in which a run was started."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import TEXT, jaxgpt, lm_of, small_run

from jaxgpt.checkpoint.index import checkpoints
from jaxgpt.checkpoint.info import read_info, seal
from jaxgpt.checkpoint.run import Run
from jaxgpt.cli.settings import with_settings
from jaxgpt.config import Config, DataConfig
from jaxgpt.data.run_tokenizer import run_tokenizer
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.data_files import has_documents, located
from jaxgpt.errors import UserError
from jaxgpt.lm.model import save
from jaxgpt.trainer.loop import train
from jaxgpt.trainer.start import Start

STEPS = ["--train.sample-tokens", "0", "--train.steps"]


class Quiet:
    def __getattr__(self, name: str) -> object:
        return lambda *args: None


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A run of four steps at project/run on the text project/text.txt; the current directory is a different one."""
    (tmp_path / "project").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    Path("text.txt").write_text(TEXT)
    config = small_run(steps=4, sample_tokens=0)
    train(Start(replace(config, data=DataConfig(path="text.txt", tokenizer="byte")), "run"), Quiet())  # type: ignore[arg-type]
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "project"


def old(run: Path) -> None:
    """Make a run as version 0.1.0 wrote it: the directory is recorded in metrics.jsonl only."""
    for path in [run / "config.json", *run.glob("checkpoints/*")]:
        if path.is_dir():
            info = read_info(path)
            config = {
                name: value for name, value in info.about["config"].items() if name not in ("directory", "state_from")
            }
            about = {name: value for name, value in info.about.items() if name != "sources"}
            seal(path, replace(info, about=about | {"config": config}))
            continue
        config = json.loads(path.read_text())
        del config["directory"], config["state_from"]
        path.write_text(json.dumps(config))


@pytest.mark.parametrize("version", ["0.1.0", pytest.param("now", marks=pytest.mark.ci)])
def test_a_run_is_used_from_another_directory(project: Path, version: str) -> None:
    if version == "0.1.0":
        old(project / "run")
    for command in (
        ["eval", "../project/run"],
        ["sample", "../project/run", "--check-memorized", "--max-new-tokens", "4"],
        ["data", "report", "../project/run"],
        ["train", "--resume", "--out", "../project/run", *STEPS, "6"],
        ["train", "../project/run", "--out", "again", *STEPS, "1"],
        ["train", "--resume", "--out", "again", *STEPS, "2"],
    ):
        result = jaxgpt(*command)
        assert result.code == 0, result.err
    assert Run(project / "run").config().directory == str(project)


def test_a_project_may_move(project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The run is found in the current directory, and then from anywhere."""
    project.rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    assert jaxgpt("eval", "run").code == 0
    result = jaxgpt("train", "--resume", "--out", "run", *STEPS, "5")
    assert result.code == 0, result.err
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert jaxgpt("train", "--resume", "--out", "../moved/run", *STEPS, "6").code == 0


def test_missing_data_name_both_places_and_the_option(project: Path) -> None:
    (project / "text.txt").rename(project / "renamed.txt")
    for command in (["eval", "../project/run"], ["train", "--resume", "--out", "../project/run", *STEPS, "6"]):
        result = jaxgpt(*command)
        assert (result.code, result.err.count("\n")) == (2, 1)
        assert f"no such file or directory: text.txt, neither in {project}, where the run was started" in result.err
        assert f"nor in {Path.cwd()}: pass the new place with --data.path or --data.mix" in result.err
    result = jaxgpt(
        "train", "--resume", "--out", "../project/run", "--data.path", "../project/renamed.txt", *STEPS, "6"
    )
    assert result.code == 0, result.err
    assert jaxgpt("eval", "../project/run").code == 0


def test_given_paths_refer_to_the_current_directory(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path on the command line does not mean a file of the same name where the run was started."""
    shutil.copy(project / "text.txt", "text.txt")
    (project / "text.txt").write_text("changed " * 400)
    result = jaxgpt("train", "--resume", "--out", "../project/run", "--data.path", "text.txt", *STEPS, "5")
    assert result.code == 0, result.err
    monkeypatch.chdir(project)
    assert jaxgpt("eval", "run").code == 0
    text = jaxgpt("eval", "run", "--data.path", "text.txt", "--json").json["text"]
    assert text.startswith("text.txt"), "--data.path of eval refers to the current directory"


def test_given_paths_are_stored_relative_to_the_start_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    base = replace(Config(), directory=str(tmp_path / "start"))
    data = with_settings(base, {"data.mix": ("start/a=1", "b=2", "@5", "start/../start/c=1")}).data
    assert data.mix == ("a=1", f"{tmp_path}/b=2", "@5", "c=1")
    assert with_settings(base, {"data.path": "start/a"}).data.path == "a"
    assert with_settings(Config(), {"data.path": "start/a"}).data.path == "start/a"


def test_a_tokenizer_is_looked_up_like_the_data(tmp_path: Path) -> None:
    """A repeated run does not use a file of the same name in the current directory."""
    (tmp_path / "start").mkdir()
    (tmp_path / "start/own.json").write_text(make_tokenizer("bpe", TEXT, 280).to_json())
    Path("own.json").write_text(make_tokenizer("bpe", TEXT, 270).to_json())
    recorded = replace(Config(), data=DataConfig(tokenizer="own.json"), directory=str(tmp_path / "start"))
    assert run_tokenizer(recorded).vocab_size == 280

    given = with_settings(recorded, {"data.tokenizer": "own.json"})
    assert run_tokenizer(given).vocab_size == 270, "a path on the command line refers to the current directory"
    for unchanged in ("byte", f"{tmp_path}/start/own.json"):
        assert with_settings(recorded, {"data.tokenizer": unchanged}).data.tokenizer == unchanged


def test_a_saved_model_finds_its_tokenizer_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(lm_of("gpt2"), "saved")
    config = Run("saved").config()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run_tokenizer(config).vocab_size == lm_of("gpt2").tokenizer.vocab_size


def test_a_path_is_looked_up_where_the_run_was_started_first(tmp_path: Path) -> None:
    Path("both").mkdir()
    (tmp_path / "start").mkdir()
    (tmp_path / "start/both").mkdir()
    Path("here").mkdir()
    start = str(tmp_path / "start")
    for path, directory, expected in (
        ("both", start, f"{start}/both"),
        ("here", start, "here"),
        ("both", "", "both"),
        ("both", str(tmp_path), "both"),
        (f"{start}/both", "", f"{start}/both"),
        ("", start, ""),
    ):
        assert located(DataConfig(path=path), directory).path == expected
    with pytest.raises(UserError, match=r"^no such file or directory: none$"):
        located(DataConfig(path="none"), "")


@pytest.mark.ci
def test_a_run_resumed_from_a_damaged_checkpoint_counts_its_epochs(project: Path) -> None:
    """The newest intact checkpoint is at step 4, so training repeats the windows of the later steps."""
    run = project / "run"
    assert jaxgpt("train", "--resume", "--out", str(run), "--train.batch-size", "3", *STEPS, "8").code == 0
    (run / "checkpoints/8/params/_METADATA").write_text("{}")
    result = jaxgpt("train", "--resume", "--out", str(run), "--train.epochs", "0.5", "--train.sample-tokens", "0")
    assert result.code == 0, result.err
    assert "checkpoint 8 is not used" in result.err
    last = max(checkpoints(run / "checkpoints").items())[1]
    windows = last.tokens // 16
    per_epoch = (len(TEXT) * 9 // 10 - 16 - 16) // 16 + 1
    assert 0 <= windows - per_epoch / 2 < 3
    assert windows == 4 * 8 + (last.step - 4) * 3


def test_windows_of_conversations_have_documents_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content of a directory or a JSON file, not its name, determines whether it holds conversations."""
    start = tmp_path / "start"
    (start / "talks").mkdir(parents=True)
    pair = json.dumps({"prompt": "a", "completion": "b"})
    (start / "talks/a.jsonl").write_text(pair + "\n")
    (start / "talks.json").write_text(f"[{pair}]")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for path in ("talks", "talks.json"):
        data = DataConfig(path=path, tokenizer="gpt2")
        assert has_documents(Config(data=data, directory=str(start)))
        assert not has_documents(Config(data=data))
