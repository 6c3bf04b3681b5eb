"""List the checkpoints of a run, check that they are intact, and resolve `last` and `best`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxgpt.checkpoint import manifest
from jaxgpt.config import Config, UserError
from jaxgpt.errors import short_repr
from jaxgpt.files import read_json

# Files that Orbax writes last, and its file of metrics.
METADATA = "_CHECKPOINT_METADATA"
COMMIT = "commit_success.txt"
MARKERS = (METADATA, COMMIT, "params/_METADATA")
METRICS = "metrics/metrics"


def steps(directory: Path) -> list[int]:
    """List the steps with a complete checkpoint, ascending."""
    return [step for step in _folders(directory) if not _unfinished(directory / str(step))]


def last_saved(directory: Path) -> str:
    """Say which checkpoint a run that has failed can resume from."""
    there = steps(directory)
    return f"the checkpoint of step {there[-1]} is kept" if there else "there is no checkpoint yet"


def val_losses(directory: Path) -> dict[int, float]:
    """Read the validation loss of the steps that have one, over the windows that all evaluations of the run share."""
    losses = {}
    for step in steps(directory):
        try:
            loss = read_json(directory / str(step) / METRICS).get("val_loss")
        except UserError:
            continue  # saved without an evaluation; or damaged, which is reported when the checkpoint is read
        if isinstance(loss, float):
            losses[step] = loss
    return losses


def resolve_step(directory: Path, which: str) -> int:
    """Resolve `last`, `best` (lowest validation loss; last if none is known) or a number to the step of a checkpoint.

    Raises:
        UserError: there is no such checkpoint.
    """
    there = steps(directory)
    if not there:
        raise UserError(f"no whole checkpoint in {directory}: a run writes its first at its first evaluation")
    if which == "last":
        return there[-1]
    if which == "best":
        losses = val_losses(directory)
        return min(losses, key=losses.__getitem__) if losses else there[-1]
    if which.isdecimal() and len(which) < 20 and int(which) in there:
        return int(which)
    raise UserError(f"no checkpoint {which!r} in {directory}: best, last or one of {', '.join(map(str, there))}")


def latest_valid(directory: Path, config: Config, tell: Callable[[str], None]) -> int | None:
    """Find the last checkpoint that is whole, unchanged and of this run; None if the run has written none yet.

    Later ones, which are not, are renamed, and `tell` is called for each.

    Raises:
        UserError: there are checkpoints, but no valid one. All stay where they are, as the fault may lie in config.json.
    """
    wrong: list[tuple[int, str]] = []
    for step in reversed(_folders(directory)):
        path = directory / str(step)
        why = damage(path) or _difference(noted(path).get("config"), asdict(config))
        if not why:
            for bad, reason in wrong:
                tell(f"checkpoint {bad} is not used: {reason}; it is kept as {_set_aside(directory / str(bad))}")
            return step
        wrong.append((step, why))
    if not wrong:
        return None
    reasons = "; ".join(f"{step}: {why}" for step, why in wrong)
    raise UserError(f"no valid checkpoint in {directory}: {reasons}; restore one or config.json, or start a new run")


def damage(path: Path, parts: Sequence[str] | None = None) -> str:
    """Say what is wrong with a checkpoint on disk; "" if it is intact.

    Checkpoints of older versions have no manifest: only the files that mark them as complete are checked.

    Args:
        path: the checkpoint.
        parts: those of its parts that matter (`params`, ...); None: all.
    """
    if why := _unfinished(path):
        return why
    try:
        sums = manifest.read(path)
    except FileNotFoundError:
        return f"{manifest.NAME} is missing" if noted(path).get("manifest") else ""
    except (OSError, ValueError) as e:
        return str(e)
    wanted = {n: s for n, s in sums.items() if parts is None or "/" not in n or n.split("/")[0] in parts}
    return manifest.first_change(path, wanted)


def _folders(directory: Path) -> list[int]:
    if not directory.is_dir():
        return []
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdecimal() and p.is_dir())


def _unfinished(path: Path) -> str:
    missing = [marker for marker in MARKERS if not (path / marker).is_file()]
    if len(missing) == len(MARKERS) and not (path.is_dir() and any(path.iterdir())):
        return "it is empty"
    return f"{missing[0]} is missing" if missing else ""


def noted(path: Path) -> dict[str, Any]:
    """Read the metadata of a checkpoint; empty where there is none."""
    try:
        metadata = read_json(path / METADATA).get("custom_metadata")
    except UserError:
        return {}
    return metadata if isinstance(metadata, dict) else {}


def _difference(there: Any, here: dict[str, Any]) -> str:
    """Name the first setting that differs and changes the saved arrays; settings that an older version lacked are ignored."""
    if not isinstance(there, dict):
        return ""  # weights from elsewhere: their shapes tell
    parts = {name: part if isinstance(part := there.get(name), dict) else {} for name in ("model", "lora", "optim")}
    optim = parts.pop("optim")
    for part, values in parts.items():
        for name, value in values.items():
            if name in here[part] and here[part][name] != value:
                return f"its {part}.{name} is {short_repr(value)}, the run's is {here[part][name]!r}"
    if optim.get("name", here["optim"]["name"]) != here["optim"]["name"]:
        return f"its optim.name is {short_repr(optim['name'])}, the run's is {here['optim']['name']!r}"
    if bool(optim.get("ema_decay", here["optim"]["ema_decay"])) != bool(here["optim"]["ema_decay"]):
        return f"its optim.ema_decay is {short_repr(optim['ema_decay'])}, the run's is {here['optim']['ema_decay']:g}"
    return ""


def _set_aside(path: Path) -> Path:
    number = 1
    while True:
        aside = path.with_name(f"{path.name}.damaged" + (f"-{number}" if number > 1 else ""))
        if not aside.exists():
            return path.rename(aside)
        number += 1
