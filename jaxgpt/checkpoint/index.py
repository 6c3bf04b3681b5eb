"""Checkpoint index: list checkpoints, resolve "last" and "best", seal a checkpoint and verify it.

`store.py` describes the files of a checkpoint, and writes and restores its arrays.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxgpt.checkpoint.paths import parse_checkpoint
from jaxgpt.checkpoint.run import open_run, replaced_note
from jaxgpt.config import Config
from jaxgpt.config_json import from_json
from jaxgpt.errors import UserError, reported
from jaxgpt.files import read_bytes, sha256_file, write_atomically
from jaxgpt.strict_json import parse_json

SEAL = "checkpoint.json"
PARTIAL = ".partial"
STEP = re.compile("0|[1-9][0-9]*")  # name of the directory of a checkpoint
PARTS = ("params", "opt_state", "skip", "ema")


@dataclass(frozen=True)
class Info:
    """Content of checkpoint.json."""

    step: int  # number of steps taken
    val_loss: float | None = None  # loss over the windows shared by all evaluations of the run; None: not evaluated
    tokens: int = 0  # number of tokens in the windows of all training steps so far
    temporary: bool = False  # whether written by a timer or when training stops; deleted after the next checkpoint
    about: Mapping[str, Any] = field(default_factory=dict)  # config, versions, digests, given parts, best loss
    sha256: Mapping[str, str] = field(default_factory=dict)  # file digests, keyed by path, including checkpoint.json

    @property
    def ranking(self) -> str | None:
        """Name of the evaluator given in Python that ranked the checkpoint; "": from the settings; None: not recorded."""
        given = self.about.get("given")
        return None if given is None else given.get("evaluators", "")

    @property
    def model(self) -> str:
        """Name of the subclass of GPT that was given in Python; "": none, or not recorded."""
        name: str = self.about.get("given", {}).get("model", "")
        return name

    def config(self) -> Config:
        """Return the settings of the run when the checkpoint was written."""
        return from_json(json.dumps(self.about.get("config")), f"the config in {SEAL}")


def ranked_on(infos: Mapping[int, Info], step: int) -> tuple[str, str]:
    """Return what a ranking depends on, the validation data and the evaluator: only equal ones are compared.

    Older versions did not record the evaluator: it is assumed to be the evaluator of the last checkpoint.
    """
    info = infos[step]
    ranking = info.ranking
    if ranking is None:
        ranking = infos[max(infos)].ranking
    return info.about.get("data", ""), ranking or ""


def seal(path: Path, info: Info) -> None:
    """Flush the files of a checkpoint to disk, and write checkpoint.json with their digests, atomically."""
    digests = {}
    files = sorted(file for file in path.rglob("*") if file.is_file())
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
        digests[file.relative_to(path).as_posix()] = sha256_file(file)
    write_atomically(path / SEAL, _render(replace(info, sha256=digests)))


def _render(info: Info) -> str:
    """Format the content of checkpoint.json, including its own digest."""
    values = asdict(info)
    values["sha256"].pop(SEAL, None)
    content = json.dumps(values, allow_nan=False)
    values["sha256"][SEAL] = hashlib.sha256(content.encode()).hexdigest()
    return json.dumps(values, indent=1) + "\n"


def read_info(path: Path) -> Info:
    """Read the checkpoint.json of a checkpoint; raise `UserError` if it is unreadable or has changed."""
    text = read_bytes(path / SEAL)
    with suppress(AttributeError, RecursionError, TypeError, ValueError):  # not JSON, or not an `Info`
        info = Info(**parse_json(text, SEAL))
        if info.step == int(path.name) and _render(info).encode() == text:
            return info
    raise UserError(f"{SEAL} has changed since it was written")


def replace_info(path: Path, info: Info) -> None:
    """Replace the checkpoint.json of a sealed checkpoint, except its digests, atomically."""
    digests = read_info(path).sha256
    write_atomically(path / SEAL, _render(replace(info, sha256=digests)))


def saved_steps(directory: Path) -> list[int]:
    """List the steps of the checkpoints, ascending; [] if the directory is missing.

    A checkpoint is a directory named by its step: files, broken links and names such as `007` are ignored.

    Raises:
        UserError: if the directory cannot be read: a run must not start from step 0 again because of its permissions.
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
    return infos[max(infos)].model if infos else ""


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
    """Resolve `last`, `best` (lowest validation loss; without losses: the last) or a number to a step.

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
            _check_deleted(directory, steps[-1])
            return resolve_step(directory, which)
        return best_step(infos)

    names = {"last": steps[-1]} | {str(step): step for step in steps}
    if which in names:
        return names[which]
    raise UserError(f"no checkpoint {which!r} in {directory}: use best, last or one of {', '.join(map(str, steps))}")


def _check_deleted(directory: Path, step: int) -> None:
    """Raise `UserError` if a checkpoint without a directory is still listed: resolving it again would not end."""
    if step in saved_steps(directory):
        raise UserError(f"cannot read {directory / str(step)}: it is listed, but is not a directory")


def best_step(infos: Mapping[int, Info]) -> int:
    """Return the step with the lowest validation loss; without losses, the last step.

    Losses on different validation data, or rankings of a different evaluator, than in the last checkpoint are not compared.
    """
    last = ranked_on(infos, max(infos))
    comparable = {step: info for step, info in infos.items() if ranked_on(infos, step) == last}
    losses = [(info.val_loss, step) for step, info in comparable.items() if info.val_loss is not None]
    if losses:
        _, step = min(losses)
        return step
    return max(infos)


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


def find_damage(path: Path, parts: tuple[str, ...] = PARTS) -> str:
    """Describe the first damaged file, at the top level or in `parts` of a checkpoint, or return "".

    A checkpoint that a training process deletes meanwhile is not damaged.
    """
    damage = _damage(path, parts)
    if damage and not path.is_dir():
        return ""
    return damage


def _damage(path: Path, parts: tuple[str, ...]) -> str:
    """Describe the first file that is damaged or missing."""
    _check_readable(path / SEAL)
    try:
        digests = read_info(path).sha256
    except UserError as e:
        return str(e)
    for name, digest in digests.items():
        part, separator, _ = name.partition("/")
        is_other_part = bool(separator) and part not in parts
        if name == SEAL or is_other_part:
            continue
        _check_readable(path / name)
        try:
            if sha256_file(path / name) != digest:
                return f"{name} has changed since it was written"
        except (OSError, ValueError) as e:  # ValueError: a null byte in a forged name
            return f"{name} cannot be read ({getattr(e, 'strerror', e)})"
    return ""


def _check_readable(file: Path) -> None:
    """Raise `UserError` if this user may not read a file; the checkpoint is not damaged then."""
    try:
        with file.open("rb"):
            pass
    except PermissionError as e:
        raise UserError(f"cannot read {file}: {e.strerror}") from None
    except (OSError, ValueError):  # damage
        return


def latest_valid(directory: Path, note: Callable[[str], None]) -> Info | None:
    """Return the `Info` of the last intact checkpoint; rename and report newer, damaged checkpoints.

    Without checkpoints, returns None. If all are damaged, renames nothing and raises `UserError`. Deletes partial checkpoints.
    """
    for path in directory.glob(f"*{PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)

    damaged: dict[int, str] = {}
    for step in reversed(saved_steps(directory)):
        damage = find_damage(directory / str(step))
        if damage:
            damaged[step] = damage
            continue
        for newer, reason in damaged.items():
            aside = directory / f"{newer}.damaged"
            shutil.rmtree(aside, ignore_errors=True)
            (directory / str(newer)).rename(aside)
            note(f"checkpoint {newer} is not used: {reason}; it is kept as {aside}")
        return read_info(directory / str(step))

    if damaged:
        reasons = "; ".join(f"{step}: {reason}" for step, reason in damaged.items())
        fix = f"restore a checkpoint, or start again from step 0: jaxgpt train {directory.parent} --out NEW"
        raise UserError(f"no valid checkpoint in {directory}: {reasons}; {fix}")
    return None


def resolve_weights(directory: Path, which: str, part: str = "params") -> int:
    """Resolve the checkpoint `which` to a step, and verify its `part` (params or ema); raise `UserError` if damaged.

    If a training process deletes the checkpoint meanwhile, `which` is resolved again.
    """
    while True:
        step = resolve_step(directory, which)
        path = directory / str(step)
        damage = find_damage(path, (part,))
        # `prune` renames a checkpoint before it deletes files, so the files of an existing directory are complete.
        if not path.is_dir():
            _check_deleted(directory, step)
            continue
        if not damage:
            return step
        others = [other for other in checkpoints(directory) if other != step]
        fix = f"try --checkpoint {others[-1]}, or --init-from RUN/checkpoints/{others[-1]}" if others else "restore it"
        raise UserError(f"checkpoint {path} is damaged: {damage}; {fix}")
