"""`jaxgpt train --overwrite` keeps the old run until the first step of the new run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import pytest
from folders import SMALL, run_folder
from helpers import TEXT, Result, jaxgpt, small_run

from jaxgpt.checkpoint.run import Run
from jaxgpt.config_json import to_json
from jaxgpt.directories import REPLACED
from jaxgpt.errors import UserError
from jaxgpt.trainer.program import Program

OUT = Path("out")
STARTED = ["train", "settings.json", "--out", "out"]


@pytest.fixture(autouse=True)
def old() -> dict[str, bytes]:
    """An old run in `OUT`, and its files."""
    Path("text.txt").write_text(TEXT)
    Path("settings.json").write_text(to_json(small_run(steps=2, eval_every=2)))
    run_folder(OUT, SMALL)
    (OUT / "loss.png").write_bytes(b"plot")
    (OUT / "metrics.jsonl").write_bytes(b'{"step": 0}\n')
    return files(OUT)


def files(directory: Path) -> dict[str, bytes]:
    found = {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}
    found.pop(".lock", None)
    return found


def overwrite() -> Result:
    return jaxgpt(*STARTED, "--overwrite")


def out_of_memory(*_: object) -> Any:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")


def uncompilable(*_: object) -> Any:
    raise UserError("too large for the compiler")


def bug(*_: object) -> Any:
    raise KeyError("mine")


@pytest.mark.parametrize(
    ("function", "fail", "code", "message"),
    [
        (
            "compilation.compile_lowered",
            uncompilable,
            2,
            "jaxgpt: too large for the compiler; the old run in out is kept\n",
        ),
        ("program.Program.step", out_of_memory, 1, "there is no checkpoint yet; the old run in out is kept\n"),
        ("step_batches.StepBatches.put_for_call", bug, 1, "jaxgpt: KeyError: 'mine': the old run in out is kept\n"),
    ],
    ids=["compile", "step", "batches"],
)
def test_a_new_run_that_fails_before_its_first_step_keeps_the_old_run(
    function: str, fail: Any, code: int, message: str, old: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"jaxgpt.trainer.{function}", fail)
    result = overwrite()
    assert result.code == code, result.err
    assert result.err.endswith(message)
    assert result.err.count("\n") == 1
    assert files(OUT) == old


class Killed(BaseException):
    """A process that was killed: no exception handler of jaxgpt runs."""


def killed(*_: object) -> Any:
    raise Killed


@pytest.fixture
def both(old: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """A new run that was killed before its first step, and the old run."""
    with monkeypatch.context() as patch:
        patch.setattr(Program, "step", killed)
        with pytest.raises(Killed):
            overwrite()
    kept = files(OUT / REPLACED)
    assert kept.keys() - old.keys() == {"kept", "moved"}
    assert old.items() <= kept.items()
    assert Run(OUT).config().train.steps == 2


@pytest.mark.usefixtures("both")
def test_the_old_run_of_a_killed_run_is_named_by_a_command_that_reads_the_run() -> None:
    result = jaxgpt("eval", "out")
    assert result.code == 2
    assert result.err.endswith("; the run that out replaces is in out/.replaced until the first step\n")
    assert jaxgpt("info", "out/.replaced").code == 0


@pytest.mark.usefixtures("both")
def test_a_resume_names_the_old_run_and_deletes_it_after_the_first_step() -> None:
    result = jaxgpt("train", "--resume", "--out", "out")
    assert result.code == 0, result.err
    assert "jaxgpt: the run that out replaces is in out/.replaced until the first step\n" in result.err
    assert not (OUT / REPLACED).exists()


@pytest.mark.usefixtures("both")
def test_a_second_new_run_that_fails_restores_the_old_run(
    old: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Program, "step", out_of_memory)
    result = overwrite()
    assert result.code == 1
    first, second = result.err.splitlines()
    assert first == (
        "jaxgpt: the run that out replaces is in out/.replaced until the first step, and is restored before out is replaced "
        "again"
    )
    assert second.endswith("the old run in out is kept")
    assert files(OUT) == old


def test_a_new_run_that_takes_a_step_deletes_the_old_run() -> None:
    result = overwrite()
    assert result.code == 0, result.err
    assert not (OUT / REPLACED).exists()
    assert sorted(path.name for path in (OUT / "checkpoints").iterdir()) == ["2"]
    assert (OUT / "loss.png").read_bytes() != b"plot"


def test_a_saved_step_replaces_the_old_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener fails on the metrics of the first step, before the old run would be deleted."""
    monkeypatch.setattr("jaxgpt.cli.run_printer.RunPrinter.progress", bug)
    result = overwrite()
    assert result.code == 1
    assert "step 1 was saved in out/checkpoints" in result.err
    assert "the old run" not in result.err
    assert not (OUT / REPLACED).exists()
    assert [path.name for path in (OUT / "checkpoints").iterdir()] == ["1"]


def test_an_old_run_that_is_partly_deleted_is_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process was killed while it deleted the old run, after the first step of the new run."""
    shutil.copytree(OUT, OUT / REPLACED)
    (OUT / REPLACED / "config.json").unlink()
    for name in ("moved", "kept"):
        (OUT / REPLACED / name).touch()
    before = files(OUT)
    monkeypatch.setattr(Program, "step", out_of_memory)
    assert overwrite().code == 1
    assert files(OUT) == {name: data for name, data in before.items() if not name.startswith(REPLACED)}
