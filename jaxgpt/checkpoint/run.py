"""Run directory: created and replaced so that no crash loses weights, and locked by its writer.

config.json             settings; moved in last, so it marks a complete run
tokenizer.json
generation_config.json  ids of special tokens, if any; tokenizer_config.json: their text and the chat template
checkpoints/            see store.py
metrics.jsonl           losses and speed of logged steps, and evaluations
evaluation.json         loss of each validation window in the last evaluation
baselines.json          losses of the uniform and the n-gram models, bytes of text per token
samples.jsonl           answers of each evaluation, with their rewards
loss.png
profile/                traces of `jaxgpt train --profile`
trackers/               what `jaxgpt follow` has sent to each tracker
.lock                   locked by the writing process
.new/                   a new run while it is written
.replaced/              the old run, until the new run that replaces it has taken a step (train) or is complete (import)

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from jaxgpt.checkpoint.paths import check_link, check_path, runs_near
from jaxgpt.config import Config
from jaxgpt.config_json import from_json, to_json
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.data.tokenizer_files import load_saved_tokenizer, save_tokenizer
from jaxgpt.directories import NEW, REPLACED, RUN_FILES, RUN_NEEDED
from jaxgpt.errors import TrainingFailed, UserError, WriteFailed, full_disk_fix, reported
from jaxgpt.files import JSON_BYTES, check_renames, read_bytes, write_atomically
from jaxgpt.locks import LOCK, Locked, sole_writer
from jaxgpt.strict_json import parse_json

REPLACING = 5.0  # maximum seconds to wait for a process that replaces a run
# Files in REPLACED.
MOVED = "moved"  # all files of the old run have been moved there
KEPT = "kept"  # the old run is kept until the new run has taken a step


class NotReplaced(TrainingFailed):
    """A new run failed before its first step, and the run that it should replace is restored."""


@dataclass(frozen=True, init=False)
class Run:
    """Paths of a run."""

    path: Path

    def __init__(self, path: str | Path) -> None:
        object.__setattr__(self, "path", Path(path))

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def config(self) -> Config:
        """Read the settings of the run. Version 0.1.0 recorded `directory` only in metrics.jsonl."""
        path = self.path / "config.json"
        config = from_json(read_bytes(path), str(path))
        if config.directory:
            return config
        return replace(config, directory=_started_in(self.metrics))

    def tokenizer(self) -> Tokenizer:
        """Read the tokenizer of the run."""
        return load_saved_tokenizer(self.path / "tokenizer.json")

    def exists(self) -> bool:
        """Return whether the directory contains a run; call `recover` first if a process may have been killed there."""
        return (self.path / "config.json").exists()


def _started_in(metrics: Path) -> str:
    """Return the directory in the first line of metrics.jsonl, or "" if it is missing."""
    with suppress(OSError, UserError), metrics.open("rb") as file:
        line = parse_json(file.readline(JSON_BYTES), str(metrics))
        directory = line.get("directory", "") if isinstance(line, dict) else ""
        if isinstance(directory, str):
            return directory
    return ""


def open_run(path: Path) -> Run:
    """Open an existing run, after `recover`. Raises `UserError` if `path` is not a run."""
    recover(path)
    run = Run(path)
    check_link(path)
    if not path.is_dir():
        raise UserError(f"no run at {path}{runs_near(path)}: expected a run directory, as written by `jaxgpt train`")
    absent = [name for name in RUN_NEEDED if not (path / name).exists()]
    if absent:
        raise _not_a_run(run, absent)
    return run


def _not_a_run(run: Run, absent: Sequence[str]) -> UserError:
    """Return the error for a directory without some files of a run, which may be a model, or a run without its weights."""
    path = run.path
    if any(path.glob("*.safetensors")):
        base = " --init-from BASE" if (path / "adapter_config.json").exists() else ""
        return UserError(f"{path} is a model of a different library, not a run: use jaxgpt import {path} RUN{base}")
    if absent == ["checkpoints"]:
        fix = f"restore it, or start again from step 0: jaxgpt train {path / 'config.json'} --out NEW"
        return UserError(f"{run.checkpoints} is missing: {fix}")
    return UserError(f"{path} is not a run: it has no {absent[0]} (expected: {', '.join(RUN_NEEDED)})")


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
    with _locked(path, overwrite):
        with _replacing(path):
            draft = _write_draft(path, config, tokenizer)
            _swap_in(draft, path, keep=True)
        try:
            yield Run(path)
        except Exception as e:
            if replaced_run(path):
                with reported(f"cannot restore {path / REPLACED}"):
                    _restore(path)
                _add_restored(e, path)
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
        _swap_in(draft, path)


def replaced_run(path: Path) -> Path | None:
    """Return the directory of the old run that a new run in `path` replaces, or None once the new run has taken a step."""
    replaced = path / REPLACED
    is_kept = all((replaced / name).exists() for name in ("config.json", MOVED, KEPT))
    return replaced if is_kept and Run(path).exists() else None


def replaced_note(path: Path) -> str:
    """Return a note with the directory of the old run that a new run in `path` replaces (`replaced_run`), or ""."""
    replaced = replaced_run(path)
    return f"the run that {path} replaces is in {replaced} until the first step" if replaced else ""


def delete_replaced(path: Path) -> None:
    """Delete an old run that a new run has replaced, or the remainder of it; it cannot be restored afterwards."""
    replaced = path / REPLACED
    with suppress(OSError):
        # Delete config.json first, so that a killed process leaves no directory that looks like a run.
        (replaced / "config.json").unlink(missing_ok=True)
    shutil.rmtree(replaced, ignore_errors=True)


def _restore(path: Path) -> None:
    """Delete a new run that has taken no step, and move back the run that it should replace."""
    shutil.rmtree(path / NEW, ignore_errors=True)
    (path / "config.json").unlink()  # `recover` finishes the rest, if this process is killed
    _recover(path)


def _add_restored(error: Exception, path: Path) -> None:
    """Report that the old run is restored: raise a new `TrainingFailed` or `UserError`; add a note to any other error."""
    restored = f"the old run in {path} is kept"
    if isinstance(error, TrainingFailed):
        raise NotReplaced(f"{error}; {restored}") from None
    if isinstance(error, UserError):
        raise UserError(f"{error}; {restored}") from None
    error.add_note(f"jaxgpt: {restored}")


def check_free(path: Path, overwrite: bool) -> None:
    """Raise `UserError` if a run cannot be created in a directory; unrelated files are allowed."""
    check_path(path)
    check_link(path)
    recover(path)
    if Run(path).exists():
        if not overwrite:
            fix = "replace it with --overwrite (in Python: overwrite=True); jaxgpt import needs a different path"
            raise UserError(f"{path} already holds a run: resume it with --resume, or {fix}")
    elif (path / "checkpoints").exists() and not (path / NEW).exists():  # NEW: left by an interrupted move
        raise UserError(f"{path} holds checkpoints but no config.json: restore it, or choose a different path")


def check_new_run(path: Path) -> None:
    """Raise `UserError` if a path exists, unless it is an empty directory or has only the remains of a killed process.

    Also raises `UserError` if a process is writing a run there.
    """
    if not path.exists():
        return
    remains = {LOCK, NEW, REPLACED}
    if (path / NEW).exists():  # the process was moving files
        remains |= set(RUN_FILES) - {"config.json"}
    if not path.is_dir() or {file.name for file in path.iterdir()} - remains:
        raise UserError(f"{path} already exists: choose a different name, or remove it")
    if (path / LOCK).exists():
        with sole_writer(path):
            pass


def _new_directory(preset: str) -> Path:
    number = 1
    while True:
        path = Path("runs", f"{preset}-{number}" if number > 1 else preset)
        with reported("cannot create a run in runs"), suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
        number += 1


@contextmanager
def _locked(path: Path, overwrite: bool) -> Iterator[None]:
    """Create the directory of a run if missing, and lock it; on exit, delete it if it is new and empty."""
    check_link(path)
    is_new = not path.exists()
    if is_new:
        with reported(f"cannot write the run to {path}"):
            path.mkdir(parents=True, exist_ok=True)
    with sole_writer(path):
        try:
            if _interrupted(path):
                _recover(path)
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
            if _interrupted(path):
                _recover(path)


def _write_draft(path: Path, config: Config, tokenizer: Tokenizer) -> Path:
    """Write a draft of a run, with settings and tokenizer, and return its directory.

    A run in `path` that has not taken a step since it replaced an old run is deleted first, and the old run restored.
    """
    draft = path / NEW
    if replaced_run(path):
        _restore(path)
    shutil.rmtree(draft, ignore_errors=True)
    (draft / "checkpoints").mkdir(parents=True)
    check_renames(draft / "checkpoints", path)
    write_settings(Run(draft), config, tokenizer)
    return draft


def _swap_in(draft: Path, path: Path, keep: bool = False) -> None:
    """Move a draft to `path`, and any run there to `.replaced`, where `keep` leaves it until a step (`replaced_run`)."""
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


def recover(path: Path) -> None:
    """Restore the old or the new run, if a process was killed while it replaced a run.

    Waits up to `REPLACING` seconds for a process that still replaces the run. Raises `UserError` if the directory cannot be
    written.
    """
    deadline = time.monotonic() + REPLACING
    while _interrupted(path):
        try:
            with sole_writer(path), reported(f"cannot finish the interrupted replacement of {path}"):
                # Another process may have finished the replacement before the lock: then the run is complete.
                if _interrupted(path):
                    _recover(path)
        except Locked:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _interrupted(path: Path) -> bool:
    """Return whether the settings of an old run were moved out, and the new run's settings were not yet moved in."""
    with reported(f"cannot read {path}"):
        return (path / REPLACED / "config.json").exists() and not (path / "config.json").exists()


def _recover(path: Path) -> None:
    """Move the remainder of the new run in if all files of the old run were moved out; otherwise, move the old run back."""
    draft = path / NEW
    replaced = path / REPLACED
    is_moved = (replaced / MOVED).exists()
    if is_moved and (draft / "config.json").exists():
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
        if name == "checkpoints":
            shutil.rmtree(path / name, ignore_errors=True)
        else:
            (path / name).unlink(missing_ok=True)


def write_settings(run: Run, config: Config, tokenizer: Tokenizer) -> None:
    """Write the settings and the tokenizer of a run, each file atomically."""
    save_tokenizer(run.path, tokenizer)
    write_atomically(run.path / "config.json", to_json(config))
