"""Create a run in a new directory, or in the place of an old run; the new run is locked."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxgpt.atomic import check_renames
from jaxgpt.checkpoint.new_path import check_free
from jaxgpt.checkpoint.paths import check_link
from jaxgpt.checkpoint.replacement import finish_or_undo, interrupted, replaced_run, restore_replaced, swap_in
from jaxgpt.checkpoint.run import Run, write_settings
from jaxgpt.config import Config
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.directories import CHECKPOINTS, NEW, REPLACED
from jaxgpt.errors import TrainingFailed, UserError, WriteFailed, full_disk_fix, reported
from jaxgpt.exception_notes import add_own_note
from jaxgpt.locks import LOCK, sole_writer


class NotReplaced(TrainingFailed):
    """A new run failed before its first step, and the run that it should replace is restored."""


@contextmanager
def new_run(out: str, config: Config, tokenizer: Tokenizer, overwrite: bool = False) -> Iterator[Run]:
    """Create a run in `out`; empty: the first unused name of `runs/PRESET`, `runs/PRESET-2`, ...

    The run is locked in the context. A process killed at any moment leaves no run, the old run, or a new run that can be
    resumed; if the process was moving files, `recover` restores one of them. Raises `UserError` as in `check_free`, or if
    the directory is locked or cannot be written.

    The replaced run is kept in `.replaced` until `delete_replaced`, after the first step of the new run. If an exception
    leaves the context before that, the replaced run is restored.
    """
    path = Path(out) if out else _new_directory(config.preset)
    with _locked(path, overwrite, is_created=not out):
        with _replacing(path):
            draft = _write_draft(path, config, tokenizer)
            swap_in(draft, path, keep=True)
        try:
            yield Run(path)
        except Exception as e:
            if replaced_run(path):
                with reported(f"cannot restore {path / REPLACED}"):
                    restore_replaced(path)
                _raise_restored(e, path)
            raise


@contextmanager
def complete_run(path: Path, config: Config, tokenizer: Tokenizer, overwrite: bool = False) -> Iterator[Run]:
    """Yield a draft of a run, which appears at `path` if the context ends without an error.

    Raises:
        UserError: as for `new_run`.
        TrainingFailed: if the checkpoint in the draft cannot be written.
    """
    with _locked(path, overwrite), _replacing(path):
        draft = _write_draft(path, config, tokenizer)
        try:
            yield Run(draft)
        except WriteFailed as e:
            fix = full_disk_fix(e.cause)
            advice = f"; {fix}" if fix else ""
            raise TrainingFailed(f"cannot write the run to {path}: {e.cause.strerror}{advice}") from None
        swap_in(draft, path)


def _new_directory(preset: str) -> Path:
    number = 1
    while True:
        path = Path("runs", f"{preset}-{number}" if number > 1 else preset)
        with reported("cannot create a run in runs"), suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
        number += 1


@contextmanager
def _locked(path: Path, overwrite: bool, is_created: bool = False) -> Iterator[None]:
    """Create the directory of a run if missing, and lock it; on exit, delete it if it is new and empty.

    `is_created`: the caller has just created the directory.
    """
    check_link(path)
    is_new = is_created or not path.exists()
    if is_new:
        with reported(f"cannot write the run to {path}"):
            path.mkdir(parents=True, exist_ok=True)
    with sole_writer(path):
        try:
            if interrupted(path):
                finish_or_undo(path)  # not `recover`, which would wait for this lock
            check_free(path, overwrite)
            yield
        finally:
            if is_new and [file.name for file in path.iterdir()] == [LOCK]:
                shutil.rmtree(path)


@contextmanager
def _replacing(path: Path) -> Iterator[None]:
    """At the end of the context, delete the draft of a run and, if a move has failed, move the old run back."""
    with reported(f"cannot write the run to {path}"):
        try:
            yield
        finally:
            shutil.rmtree(path / NEW, ignore_errors=True)
            if interrupted(path):
                finish_or_undo(path)


def _write_draft(path: Path, config: Config, tokenizer: Tokenizer) -> Path:
    """Write a draft of a run, with settings and tokenizer, and return its directory.

    A run in `path` that has not taken a step since it replaced an old run is deleted first, and the old run restored.
    """
    draft = path / NEW
    if replaced_run(path):
        restore_replaced(path)
    shutil.rmtree(draft, ignore_errors=True)
    (draft / CHECKPOINTS).mkdir(parents=True)
    check_renames(draft / CHECKPOINTS, path)
    write_settings(Run(draft), config, tokenizer)
    return draft


def _raise_restored(error: Exception, path: Path) -> None:
    """Report that the old run is restored: raise a new `TrainingFailed` or `UserError`; add a note to any other error."""
    restored = f"the old run in {path} is kept"
    if isinstance(error, TrainingFailed):
        raise NotReplaced(f"{error}; {restored}") from None
    if isinstance(error, UserError):
        raise UserError(f"{error}; {restored}") from None
    add_own_note(error, restored)
