"""Run directories: created atomically, and replaced without losing weights at any moment."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import small_run

from jaxgpt.checkpoint.new_path import check_free, check_new_run
from jaxgpt.checkpoint.new_run import complete_run, new_run
from jaxgpt.checkpoint.paths import runs_near
from jaxgpt.checkpoint.replacement import recover, replaced_run
from jaxgpt.checkpoint.run import Run
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.directories import NEW, REPLACED
from jaxgpt.errors import UserError
from jaxgpt.locks import LOCK, sole_writer

CONFIG, TOKENIZER = small_run(), make_tokenizer("byte", "", 0, 0)
RUN = {"config.json", "tokenizer.json", "checkpoints"}


def names(path: Path) -> set[str]:
    return {p.name for p in path.iterdir()} - {REPLACED}


def test_concurrent_starts_get_separate_folders() -> None:
    """Each directory appears with its lock and settings, and no temporary files remain."""
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


@pytest.mark.parametrize("out", ["", "runs/other"])
def test_a_start_that_fails_leaves_no_directory(out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run has the name of the preset, not the next number."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("jaxgpt.checkpoint.new_run.write_settings", fail)
    with pytest.raises(UserError, match="No space left on device"), new_run(out, CONFIG, TOKENIZER):
        pass
    assert not any(Path("runs").iterdir())


def test_a_run_may_start_among_other_files() -> None:
    for out in (Path("run"), Path("replaced")):
        out.mkdir()
        (out / "slurm.log").touch()
        (out / "chat_template.jinja").touch()  # it would override the new tokenizer's template
        with new_run(str(out), CONFIG, TOKENIZER, overwrite=out.name == "replaced"):
            assert names(out) == RUN | {LOCK, "slurm.log"}
    Path("old/checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match=r"old holds checkpoints but no config\.json"):
        check_free(Path("old"), overwrite=True)


def test_refused_replacement_keeps_the_draft_of_the_writer() -> None:
    with new_run("out", CONFIG, TOKENIZER):
        pass
    with complete_run(Path("out"), CONFIG, TOKENIZER, overwrite=True) as draft:
        with pytest.raises(UserError, match="is being written by"), new_run("out", CONFIG, TOKENIZER, overwrite=True):
            pass
        assert draft.path.is_dir()
    assert names(Path("out")) == RUN | {LOCK}


@pytest.mark.parametrize("left", [{LOCK}, {LOCK, NEW}, {LOCK, NEW, "tokenizer.json", "checkpoints"}])
def test_what_a_killed_process_left_is_not_a_run(left: set[str]) -> None:
    path = Path("out")
    for name in left:
        (path / name).mkdir(parents=True) if name in (NEW, "checkpoints") else write(path / name)
    check_new_run(path)
    write(path / "mine.txt")
    with pytest.raises(UserError, match="out already exists: choose a different name, or remove it"):
        check_new_run(path)


def test_a_directory_with_files_of_a_run_is_not_new() -> None:
    write(Path("out/tokenizer.json"))
    with pytest.raises(UserError, match="out already exists"):
        check_new_run(Path("out"))


def test_a_living_writer_is_respected() -> None:
    with (
        complete_run(Path("out"), CONFIG, TOKENIZER),
        pytest.raises(UserError, match="out is being written by process"),
    ):
        check_new_run(Path("out"))


def write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gs://bucket/run", "the settings, metrics and lock of a run are ordinary files; mount the bucket"),
        ("a*b", "Orbax reads '\\*' as a pattern"),
        ("a\\b", "reads a backslash as a separator"),
    ],
)
def test_a_path_that_cannot_hold_a_run_is_rejected(path: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_free(Path(path), overwrite=False)


def test_a_directory_whose_name_ends_like_a_bucket_can_hold_a_run() -> None:
    check_free(Path("logs:/a"), overwrite=False)


def test_a_run_that_another_process_completes_before_the_lock_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Path("out")
    changed = replace(CONFIG, preset="new")
    for config in (CONFIG, changed):
        with new_run("out", config, TOKENIZER, overwrite=True):
            pass
    draft = out / NEW / "config.json"
    draft.parent.mkdir()
    (out / "config.json").rename(draft)

    @contextmanager
    def lock_after_another(directory: Path) -> Iterator[None]:
        draft.rename(out / "config.json")
        draft.parent.rmdir()
        with sole_writer(directory):
            yield

    monkeypatch.setattr("jaxgpt.checkpoint.replacement.sole_writer", lock_after_another)
    recover(out)
    assert Run(out).config() == changed
    assert replaced_run(out) is not None


def test_only_a_locked_run_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_wait(seconds: float) -> None:
        pytest.fail("waits for an error that does not pass")

    Path("out", REPLACED).mkdir(parents=True)
    Path("out", REPLACED, "config.json").touch()
    Path("out", LOCK).mkdir()
    monkeypatch.setattr("jaxgpt.checkpoint.replacement.time.sleep", no_wait)
    with pytest.raises(UserError, match="cannot write to out"):
        recover(Path("out"))


def test_runs_near_a_path_are_listed_once() -> None:
    with new_run("runs/first", CONFIG, TOKENIZER):
        pass
    absolute = Path.cwd() / "runs"
    assert runs_near(Path("runs/zzzzz")) == " (existing runs: runs/first)"
    assert runs_near(absolute / "zzzzz") == f" (existing runs: {absolute / 'first'})"


def test_a_run_that_is_replaced_while_runs_are_listed_is_listed_last(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        with new_run(f"runs/{name}", CONFIG, TOKENIZER):
            pass
    is_dir = Path.is_dir

    def replaced(path: Path, **settings: bool) -> bool:
        """The config.json is deleted after it is found."""
        if path == Path("runs/second/checkpoints"):
            (path.parent / "config.json").unlink(missing_ok=True)
        return is_dir(path, **settings)

    monkeypatch.setattr(Path, "is_dir", replaced)
    assert runs_near(Path("runs/zzzzz")) == " (existing runs: runs/first, runs/second)"
