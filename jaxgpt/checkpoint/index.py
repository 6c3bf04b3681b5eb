"""Checkpoint index: list checkpoints, and resolve "last", "best" and steps; `intact.py` verifies their files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from jaxgpt.checkpoint.info import SEAL, Info, read_info
from jaxgpt.checkpoint.paths import parse_checkpoint
from jaxgpt.checkpoint.replacement import replaced_note
from jaxgpt.checkpoint.run import Run, open_run
from jaxgpt.errors import UserError, reported

PARTIAL = ".partial"
STEP = re.compile("0|[1-9][0-9]*")  # name of the directory of a checkpoint


def saved_steps(directory: Path) -> list[int]:
    """List the steps of the checkpoints, ascending; [] if the directory is missing.

    A checkpoint is a directory named by its step: files, broken links and names such as `007` are ignored.

    Raises:
        UserError: if the directory cannot be read: the run must not start again from step 0, because checkpoints may exist.
    """
    steps = []
    with (
        reported(f"cannot read {directory}"),
        suppress(FileNotFoundError, NotADirectoryError),
        os.scandir(directory) as entries,
    ):
        for entry in entries:
            if STEP.fullmatch(entry.name) and entry.is_dir():
                steps.append(int(entry.name))
    return sorted(steps)


def checkpoints(directory: Path) -> dict[int, Info]:
    """Return the `Info` of each checkpoint, keyed by step, ascending; skip damaged checkpoint.json files."""
    infos, _ = read_checkpoints(directory)
    return infos


def model_of(directory: Path) -> str:
    """Return the name of the subclass of GPT that the last checkpoint of a run records, or ""."""
    infos = checkpoints(directory)
    if not infos:
        return ""
    return infos[max(infos)].model or ""


def read_checkpoints(directory: Path) -> tuple[dict[int, Info], list[int]]:
    """Return the `Info` of each checkpoint, keyed by step, and the steps with a damaged checkpoint.json, ascending.

    A training process may delete checkpoints meanwhile: deleted checkpoints are omitted. `find_damage` describes the damage.
    """
    infos: dict[int, Info] = {}
    damaged: list[int] = []
    for step in saved_steps(directory):
        path = directory / str(step)
        try:
            infos[step] = read_info(path)
        except UserError:
            if path.is_dir():
                damaged.append(step)
    return infos, damaged


def resolve_step(directory: Path, which: str) -> int:
    """Resolve `last`, `best` (lowest ranking; without rankings: the last) or a number to a step.

    Raises:
        UserError: if the checkpoint does not exist, or the best is unknown because a checkpoint.json is damaged.
    """
    steps = saved_steps(directory)
    if not steps:
        message = f"no complete checkpoint in {directory}: training saves at evaluations and when it stops"
        kept = replaced_note(directory.parent)
        raise UserError(f"{message}; {kept}" if kept else message)
    if which == "best":
        infos, damaged = read_checkpoints(directory)
        if damaged:
            path = directory / str(max(damaged)) / SEAL
            raise UserError(
                f"{path} is damaged: restore it, or choose a step with --checkpoint, or --init-from RUN/checkpoints/STEP"
            )
        if not infos:  # a training process has deleted the listed checkpoints
            check_deleted(directory, steps[-1])
            return resolve_step(directory, which)
        return best_step(infos)

    names = {"last": steps[-1]} | {str(step): step for step in steps}
    if which in names:
        return names[which]
    raise UserError(f"no checkpoint {which!r} in {directory}: use best, last or one of {', '.join(map(str, steps))}")


def info_of(run: Run, which: str) -> Info:
    """Read the checkpoint.json of the checkpoint `which`; values and errors as in `resolve_step`."""
    step = resolve_step(run.checkpoints, which)
    return read_info(run.checkpoints / str(step))


def check_deleted(directory: Path, step: int) -> None:
    """Raise `UserError` if a checkpoint is listed, but is not a directory: callers would resolve it again forever."""
    if step in saved_steps(directory):
        raise UserError(f"cannot read {directory / str(step)}: it is listed, but is not a directory")


def best_step(infos: Mapping[int, Info]) -> int:
    """Return the step with the lowest ranking; without rankings, the last step.

    Only checkpoints with the validation data and the evaluator of the last checkpoint are compared.
    """
    last = ranked_on(infos, max(infos))
    comparable = {step: info for step, info in infos.items() if ranked_on(infos, step) == last}
    rankings = [(info.ranking, step) for step, info in comparable.items() if info.ranking is not None]
    if rankings:
        _, step = min(rankings)
        return step
    return max(infos)


def ranked_on(infos: Mapping[int, Info], step: int) -> tuple[str, str]:
    """Return the validation data and the evaluator of a ranking: only rankings with equal data and evaluator are compared.

    Older versions did not record the evaluator: it is assumed to be the evaluator of the last checkpoint.
    """
    info = infos[step]
    ranking = info.ranked_by
    if ranking is None:
        ranking = infos[max(infos)].ranked_by
    return info.about.get("data", ""), ranking or ""


def weights_at(init_from: str) -> Path:
    """Return the checkpoint of `--init-from`: the best checkpoint of RUN, or RUN/checkpoints/STEP."""
    path, which = parse_checkpoint(init_from)
    directory = open_run(path).checkpoints
    return directory / str(resolve_step(directory, which))


def kept_checkpoint_message(directory: Path) -> str:
    """Describe the checkpoint that a failed run can resume from."""
    try:
        steps = saved_steps(directory)
    except UserError as e:  # the reason of the failure must still be reported
        return str(e)
    return f"the checkpoint of step {steps[-1]} is kept" if steps else "there is no checkpoint yet"
