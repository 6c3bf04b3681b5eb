"""Checks of a path before a new run is created there."""

from __future__ import annotations

from pathlib import Path

from jaxgpt.checkpoint.paths import check_link, check_path
from jaxgpt.checkpoint.replacement import recover
from jaxgpt.checkpoint.run import Run
from jaxgpt.directories import CHECKPOINTS, CONFIG, NEW, REPLACED, RUN_FILES
from jaxgpt.errors import UserError
from jaxgpt.locks import LOCK, sole_writer


def check_free(path: Path, overwrite: bool) -> None:
    """Raise `UserError` if a run cannot be created in a directory; unrelated files are allowed."""
    check_path(path)
    check_link(path)
    recover(path)
    if Run(path).exists():
        if not overwrite:
            fix = "replace it with --overwrite (in Python: overwrite=True); jaxgpt import needs a different path"
            raise UserError(f"{path} already holds a run: resume it with --resume, or {fix}")
    elif (path / CHECKPOINTS).exists() and not (path / NEW).exists():  # NEW: left by an interrupted move
        raise UserError(f"{path} holds checkpoints but no config.json: restore it, or choose a different path")


def check_new_run(path: Path) -> None:
    """Raise `UserError` if a path exists, unless it is an empty directory or has only the remains of a killed process.

    Also raises `UserError` if a process is writing a run there.
    """
    if not path.exists():
        return
    remains = {LOCK, NEW, REPLACED}
    if (path / NEW).exists():  # the process was moving files
        remains |= set(RUN_FILES) - {CONFIG}
    if not path.is_dir() or {file.name for file in path.iterdir()} - remains:
        raise UserError(f"{path} already exists: choose a different name, or remove it")
    if (path / LOCK).exists():
        with sole_writer(path):
            pass
