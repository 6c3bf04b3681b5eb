"""The directory of a run during training: its newest checkpoint, its lock, and what has changed since the checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from jaxgpt.atomic import check_renames
from jaxgpt.checkpoint.index import saved_steps
from jaxgpt.checkpoint.info import FrozenPart, Info
from jaxgpt.checkpoint.intact import latest_valid
from jaxgpt.checkpoint.match import name_difference
from jaxgpt.checkpoint.new_run import new_run
from jaxgpt.checkpoint.paths import check_backslash, other_files
from jaxgpt.checkpoint.replacement import delete_replaced, replaced_note, replaced_run
from jaxgpt.checkpoint.run import Run, open_run, write_settings
from jaxgpt.checkpoint.space import check_space
from jaxgpt.checkpoint.store import stored_weights
from jaxgpt.config import Config
from jaxgpt.config_changes import changes
from jaxgpt.data import Data
from jaxgpt.directories import NEW
from jaxgpt.errors import UserError, short_repr
from jaxgpt.locks import sole_writer
from jaxgpt.parallel.processes import on_leader, same_on_all
from jaxgpt.trainer.given import RunParts, changed_ranking, check_given
from jaxgpt.trainer.phases import changed_sources
from jaxgpt.trainer.program import Program
from jaxgpt.trainer.resume import check_resume
from jaxgpt.trainer.start import Start, check_directory


def newest_checkpoint(start: Start, note: Callable[[str], None]) -> Info | None:
    """Check the directory of a run (`check_directory`); return the newest intact checkpoint to resume from, or None: step 0.

    Process 0 renames newer, damaged checkpoints, and reports them with `note`.

    Raises:
        UserError: if the directory cannot be used, the run is locked by another process, or all its checkpoints are damaged.
    """
    on_leader(lambda: check_directory(start))
    run = start.resumed
    if run is None:
        return None

    def on_disk() -> dict[str, Any] | None:
        with sole_writer(run.path):
            last = latest_valid(run.checkpoints, note)
        return asdict(last) if last else None

    last = on_leader(on_disk)
    return Info(**last) if last else None


@contextmanager
def opened_run(
    start: Start, program: Program, data: Data, last: Info | None, parts: RunParts, note: Callable[[str], None]
) -> Iterator[Run]:
    """Create the run, or open the run to resume at the checkpoint `last`; process 0 locks it for all processes.

    Raises:
        UserError: if a run cannot be created in `start.out`, is locked by another process, or cannot be resumed with these
            settings and data; or if the file system cannot store checkpoints.
    """
    resumed = start.resumed
    if resumed is None:
        on_leader(lambda: check_target(start, program, note))
    with ExitStack() as lock:

        def on_disk() -> str:
            if resumed is None:
                run = lock.enter_context(new_run(start.out, program.config, data.tokenizer, start.overwrite))
                return str(run.path)
            lock.enter_context(sole_writer(resumed.path))
            _reopen(resumed, program, last, parts, note)
            return str(resumed.path)

        path = on_leader(on_disk)
        run = same_on_all(lambda: open_run(Path(path)), lambda _: {})  # error if a process cannot read the directory
        if resumed is not None:
            on_leader(lambda: check_storage(run, program, note))
        yield run


def replace_settings(start: Start, run: Run, program: Program, data: Data) -> None:
    """Write the settings of a resumed run, which may have changed. A new run has been created with its settings."""
    if start.resumed is not None:
        on_leader(lambda: write_settings(run, program.config, data.tokenizer))


def check_target(start: Start, program: Program, note: Callable[[str], None]) -> None:
    """Check the space for a new run before its directory is created, and note that other files there are kept."""
    run = Run(Path(start.out or "runs"))  # without `out`, the directory of the run has no name yet
    check_space(run, program.abstract.state, program.config.train, note, start.overwrite)
    kept = replaced_note(run.path) if start.overwrite else ""
    if kept:
        note(f"{kept}, and is restored before {run.path} is replaced again")
    others = other_files(run.path) if start.out else []
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        note(f"keeping the files in {run.path} that are not part of a run: {others[0]}{more}")


def check_storage(run: Run, program: Program, note: Callable[[str], None]) -> None:
    """Check, before the first step of a resumed run, that its file system can store the next checkpoint."""
    check_backslash(run.path)
    check_renames(run.checkpoints, run.path)
    check_space(run, program.abstract.state, program.config.train, note)


def _reopen(run: Run, program: Program, last: Info | None, parts: RunParts, note: Callable[[str], None]) -> None:
    """Check that a run can continue from the checkpoint `last`, and report what has changed since."""
    # Delete the directories that a process left when it was killed while it replaced the run. The old run is kept, with a note,
    # until the first step of the new run.
    shutil.rmtree(run.path / NEW, ignore_errors=True)
    if replaced_run(run.path):
        note(replaced_note(run.path))
    else:
        delete_replaced(run.path)

    # Check the settings and the checkpoint.
    newest = max(saved_steps(run.checkpoints), default=None)
    if newest != (last.step if last else None):
        raise UserError(f"another process has trained {run.path} meanwhile: run the command again")
    old = last.config() if last else run.config()
    check_resume(old, program.config, last.step if last else 0)
    if last is not None:
        _check_parts(run, program, last, parts)

    # Report what has changed.
    for change in _resume_notes(run, old, program.config, last, parts):
        note(change)


def _check_parts(run: Run, program: Program, last: Info, parts: RunParts) -> None:
    """Check that the run has the parts of the checkpoint `last`: those given in Python, its weights and its frozen arrays."""
    check_given(run, last, parts)
    if "given" not in last.about:  # written by version 0.1.0, without the name of the model
        _check_names(run, last, program)
    for part in get_args(FrozenPart):
        if last.about.get(part, "") != parts.checksums.get(part, ""):
            raise UserError(f"the frozen weights of {run.path} have changed since step {last.step}: restore them")


def _resume_notes(run: Run, old: Config, new: Config, last: Info | None, parts: RunParts) -> Iterator[str]:
    """Yield notes: the checkpoint that training continues from, and the sources, ranking and settings that have changed."""
    steps = new.train.steps
    if last is None:
        yield f"{run.path} has no checkpoint yet: starting again from step 0/{steps}"
    else:
        yield f"resuming from {run.checkpoints / str(last.step)} at step {last.step}/{steps}"
        yield from filter(None, (changed_sources(new.data, last), changed_ranking(last, parts)))
    changed = changes(old, new)
    if changed:
        settings = (f"{name} {short_repr(was)} -> {short_repr(now)}" for name, (was, now) in changed.items())
        yield f"changed settings: {', '.join(settings)}"


def _check_names(run: Run, last: Info, program: Program) -> None:
    """Check that a checkpoint of an older version has the model's weights; older versions recorded no subclass of GPT."""
    stored = stored_weights(run.checkpoints, last.step)
    difference = name_difference(stored, program.abstract.checkpoint.params, type(program.model))
    if difference:
        raise UserError(
            f"{run.path} {difference}: resume it in Python with the class that it was trained with, "
            f'Start(config, run="{run.path}", build=partial(build, model=...))'
        )
