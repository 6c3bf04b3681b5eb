"""Run directories: created atomically, and replaced without a moment in which weights can be lost."""

from __future__ import annotations

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import small_run

from jaxgpt.checkpoint.run import REPLACED, Run, check_free, complete_run, new_run, open_run
from jaxgpt.data.tokenizer_files import make_tokenizer
from jaxgpt.errors import UserError
from jaxgpt.files import LOCK

CONFIG, TOKENIZER = small_run(), make_tokenizer("byte", "", 0, 0)
RUN = {"config.json", "tokenizer.json", "checkpoints"}


def names(path: Path) -> set[str]:
    return {p.name for p in path.iterdir()} - {REPLACED}


def test_concurrent_starts_get_separate_folders() -> None:
    """Each folder appears locked and with its settings, and no temporary files remain."""
    barrier = threading.Barrier(8, timeout=60)  # a start that fails must not leave the others waiting

    def start(_: int) -> tuple[Path, set[str]]:
        barrier.wait()
        with new_run("", CONFIG, TOKENIZER) as run:
            barrier.wait()
            return run.path, names(run.path)

    with ThreadPoolExecutor(8) as pool:
        started = list(pool.map(start, range(8)))
    expected = {"python-char", *(f"python-char-{n}" for n in range(2, 9))}
    assert {path.name for path, _ in started} == names(Path("runs")) == expected
    assert all(files == RUN | {LOCK} for _, files in started)
    with pytest.raises(UserError, match="already holds a run"), new_run("runs/python-char", CONFIG, TOKENIZER):
        pass


def test_a_run_may_start_among_other_files() -> None:
    Path("run").mkdir()
    Path("run/slurm.log").touch()
    with new_run("run", CONFIG, TOKENIZER):
        assert names(Path("run")) == RUN | {LOCK, "slurm.log"}
    Path("old/checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match=r"old holds checkpoints but no config\.json"):
        check_free(Path("old"), overwrite=True)


class Killed(BaseException):
    """A kill: nothing but the draft is cleaned up after it."""


def replaced(moves: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Replace a run by another one in a process that is killed after a number of renames; return whether it was."""
    old = small_run(steps=1)
    with complete_run(Path("run"), old, TOKENIZER) as run:
        (run.checkpoints / "weights").write_text("old")
    Path("run/notes.txt").touch()
    rename, left = os.rename, iter(range(moves))

    def rename_or_die(source: str, target: str) -> None:
        if next(left, None) is None:
            raise Killed
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename_or_die)
        try:
            with complete_run(Path("run"), CONFIG, TOKENIZER, overwrite=True) as run:
                (run.checkpoints / "weights").write_text("new")
        except Killed:
            return True
    return False


@pytest.mark.parametrize("moves", range(7))
def test_a_kill_while_a_run_is_replaced_loses_no_weights(moves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three files are moved out and three are moved in. In between, a message names the old ones."""
    assert replaced(moves, monkeypatch) is (moves < 6)
    run = Run(Path("run"))
    if moves in (0, 6):
        assert open_run(run.path).config().train.steps == (CONFIG.train.steps if moves else 1)
        assert (run.checkpoints / "weights").read_text() == ("new" if moves else "old")
        assert names(run.path) - {LOCK} == RUN | {"notes.txt"}
        with complete_run(run.path, CONFIG, TOKENIZER, overwrite=True):
            pass
        assert names(run.path) - {LOCK} == RUN | {"notes.txt"}
        return
    for command in (lambda: open_run(run.path), lambda: check_free(run.path, True)):
        with pytest.raises(
            UserError, match=r"replacing run was interrupted: move the files of run/\.replaced back over"
        ):
            command()
    for file in (run.path / REPLACED).iterdir():  # what the message says
        shutil.rmtree(run.path / file.name, ignore_errors=True)
        os.replace(file, run.path / file.name)
    assert open_run(run.path).config().train.steps == 1
    assert (run.checkpoints / "weights").read_text() == "old"
