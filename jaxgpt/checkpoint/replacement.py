"""Replacement of a run by a new run, so that no crash loses weights: a killed process is recovered from its files.

A killed process leaves one of these states. The columns are config.json and .replaced/config.json, the files `moved` and
`kept` in .replaced, and .new/config.json; "-": the file may exist or not.

config  replaced  moved  kept  new   state                                     `recover`
yes     no        -      -     -     a run                                     does nothing
yes     yes       yes    yes   no    a new run without a step, and an old run  does nothing; see `replaced_run`
yes     yes       yes    no    -     a new run, before the old one is deleted  does nothing
no      yes       no     -     -     the old run is moved out, or back         moves the old run back
no      yes       yes    -     yes   the new run is moved in                   moves the rest of the new run in
no      yes       yes    -     no    the new run failed, and is being deleted  deletes it, and moves the old run back
no      no        -      -     -     no run                                    does nothing
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from jaxgpt.directories import CHECKPOINTS, CONFIG, NEW, REPLACED, RUN_FILES
from jaxgpt.errors import reported
from jaxgpt.locks import Locked, sole_writer

REPLACING = 5.0  # maximum seconds to wait for a process that replaces a run
# Files in REPLACED.
MOVED = "moved"  # all files of the old run have been moved there
KEPT = "kept"  # the old run is kept until the new run has taken a step


def swap_in(draft: Path, path: Path, keep: bool = False) -> None:
    """Move a draft to `path`, and any old run to `.replaced`, where `keep` leaves the old run (`replaced_run`)."""
    replaced = path / REPLACED
    delete_replaced(path)
    replaced.mkdir()
    if keep:
        (replaced / KEPT).touch()
    _move(path, replaced, RUN_FILES)
    (replaced / MOVED).touch()
    _move(draft, path, RUN_FILES[::-1])
    if not replaced_run(path):
        delete_replaced(path)


def _move(source: Path, target: Path, names: Sequence[str]) -> None:
    """Move the files of a run that exist in `source`."""
    for name in names:
        if (source / name).exists():
            (source / name).rename(target / name)


def replaced_run(path: Path) -> Path | None:
    """Return the directory of the old run that the run in `path` replaces; None: no old run, or the run has taken a step."""
    replaced = path / REPLACED
    is_kept = all((replaced / name).exists() for name in (CONFIG, MOVED, KEPT))
    is_run = (path / CONFIG).exists()
    return replaced if is_kept and is_run else None


def replaced_note(path: Path) -> str:
    """Return a note with the directory of the old run that a new run in `path` replaces (`replaced_run`), or ""."""
    replaced = replaced_run(path)
    return f"the run that {path} replaces is in {replaced} until the first step" if replaced else ""


def delete_replaced(path: Path) -> None:
    """Delete an old run that a new run has replaced, or the remainder of it; it cannot be restored afterwards."""
    replaced = path / REPLACED
    with suppress(OSError):
        # Delete config.json first, so that a killed process leaves no directory that looks like a run.
        (replaced / CONFIG).unlink(missing_ok=True)
    shutil.rmtree(replaced, ignore_errors=True)


def restore_replaced(path: Path) -> None:
    """Delete a new run that has taken no step, and move back the run that it should replace."""
    shutil.rmtree(path / NEW, ignore_errors=True)
    (path / CONFIG).unlink()  # if this process is killed, `recover` finishes the remainder
    finish_or_undo(path)


def recover(path: Path) -> None:
    """Restore the old or the new run, if a process was killed while it replaced a run.

    Waits up to `REPLACING` seconds for a process that still replaces the run. Raises `UserError` if the directory cannot be
    written.
    """
    deadline = time.monotonic() + REPLACING
    while interrupted(path):
        try:
            with sole_writer(path), reported(f"cannot finish the interrupted replacement of {path}"):
                # Another process may have finished the replacement before this process has locked the run.
                if interrupted(path):
                    finish_or_undo(path)
        except Locked:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def interrupted(path: Path) -> bool:
    """Return whether the settings of an old run were moved out, and the new run's settings were not yet moved in."""
    with reported(f"cannot read {path}"):
        return (path / REPLACED / CONFIG).exists() and not (path / CONFIG).exists()


def finish_or_undo(path: Path) -> None:
    """Move the remainder of the new run in if all files of the old run were moved out; otherwise, move the old run back."""
    draft = path / NEW
    replaced = path / REPLACED
    is_moved = (replaced / MOVED).exists()
    if is_moved and (draft / CONFIG).exists():
        _move(draft, path, RUN_FILES[::-1])
        if not replaced_run(path):
            delete_replaced(path)
    else:
        if is_moved:
            _delete(path, RUN_FILES)  # files of the new run
            (replaced / MOVED).unlink()  # the files in `path` now belong to the old run
        _move(replaced, path, RUN_FILES[::-1])
        shutil.rmtree(replaced, ignore_errors=True)
    shutil.rmtree(draft, ignore_errors=True)


def _delete(path: Path, names: Sequence[str]) -> None:
    for name in names:
        if name == CHECKPOINTS:
            shutil.rmtree(path / name, ignore_errors=True)
        else:
            (path / name).unlink(missing_ok=True)
