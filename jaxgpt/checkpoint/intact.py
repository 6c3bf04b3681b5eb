"""Verify the files of checkpoints by their digests, and find intact checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from jaxgpt.checkpoint.index import PARTIAL, check_deleted, checkpoints, resolve_step, saved_steps
from jaxgpt.checkpoint.info import SEAL, Info, read_info
from jaxgpt.errors import UserError
from jaxgpt.files import sha256_file

PARTS = ("params", "opt_state", "skip", "ema")  # directories of a checkpoint, see store.py


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
    _check_permission(path / SEAL)
    try:
        digests = read_info(path).sha256
    except UserError as e:
        return str(e)
    for name, digest in digests.items():
        part, separator, _ = name.partition("/")
        is_other_part = bool(separator) and part not in parts
        if name == SEAL or is_other_part:
            continue
        _check_permission(path / name)
        try:
            if sha256_file(path / name) != digest:
                return f"{name} has changed since it was written"
        except (OSError, ValueError) as e:  # ValueError: a null byte in a forged name
            return f"{name} cannot be read ({getattr(e, 'strerror', e)})"
    return ""


def _check_permission(file: Path) -> None:
    """Raise `UserError` if this user may not read a file: the checkpoint is not damaged then, and must not be renamed."""
    try:
        with file.open("rb"):
            pass
    except PermissionError as e:
        raise UserError(f"cannot read {file}: {e.strerror}") from None
    except (OSError, ValueError):  # damage, which the caller describes
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
            check_deleted(directory, step)
            continue
        if not damage:
            return step
        others = [other for other in checkpoints(directory) if other != step]
        fix = f"try --checkpoint {others[-1]}, or --init-from RUN/checkpoints/{others[-1]}" if others else "restore it"
        raise UserError(f"checkpoint {path} is damaged: {damage}; {fix}")
