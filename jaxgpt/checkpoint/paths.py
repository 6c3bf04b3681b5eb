"""Paths of runs: split and check a path that a user passes, and suggest an existing run for a wrong path."""

from __future__ import annotations

import re
from pathlib import Path

from jaxgpt.directories import CHECKPOINTS, CONFIG, RUN_FILES
from jaxgpt.errors import UserError, short_repr
from jaxgpt.files import missing
from jaxgpt.suggestions import nearest


def parse_checkpoint(init_from: str) -> tuple[Path, str]:
    """Split `--init-from`, RUN or RUN/checkpoints/STEP, into the run and the checkpoint: `best` or STEP."""
    path = Path(init_from)
    if path.parent.name == CHECKPOINTS and path.name.isdecimal():
        return path.parent.parent, path.name
    return path, "best"


def runs_near(path: Path) -> str:
    """Return a hint for a path without a run: a similar run, otherwise the newest runs, or ""."""
    found = dict[Path, Path]()  # path of each run, keyed by its absolute path without links
    for home in (path.parent, Path("runs")):
        for file in home.glob("*/config.json"):
            if (file.parent / CHECKPOINTS).is_dir():
                found.setdefault(file.parent.resolve(), file.parent)
    newest = sorted(found.values(), key=_seconds_of_settings, reverse=True)

    # Compare names without their directory: runs/a and runs/b have little in common.
    similar = nearest(path.name, [run.name for run in newest])
    if similar:
        run = next(run for run in newest if run.name == similar[0])
        return f" (did you mean {run}?)"
    if newest:
        return f" (existing runs: {', '.join(map(str, newest[:5]))})"
    return ""


def _seconds_of_settings(run: Path) -> float:
    """Return when the settings of a run were written, in seconds; 0: they were deleted or replaced meanwhile."""
    try:
        return (run / CONFIG).stat().st_mtime
    except OSError:
        return 0.0


def check_path(path: Path) -> None:
    """Raise `UserError` if a run cannot be created at a path: a bucket, a glob pattern or a backslash."""
    absolute = f"{path.absolute()}/"
    has_bucket = re.search(r"/(gs|s3|az):/", absolute) is not None
    if has_bucket:
        raise UserError(
            f"cannot store a run at {path}: the settings, metrics and lock of a run are ordinary files; mount the bucket as a "
            f"directory (Cloud Storage: gcsfuse --rename-dir-limit 200000 BUCKET DIRECTORY)"
        )
    pattern = re.search(r"[*?[]", absolute)
    if pattern:
        raise UserError(f"cannot store a run at {path}: Orbax reads {pattern[0]!r} as a pattern: use a different path")
    check_backslash(path)


def check_link(path: Path) -> None:
    """Raise `UserError` if a path is a link to a missing directory."""
    if path.is_symlink() and not path.exists():
        raise missing(path)


def check_backslash(path: Path) -> None:
    """Raise `UserError` if a path contains a backslash: TensorStore would read and write a different path."""
    if "\\" in str(path.absolute()):
        raise UserError(
            f"cannot use {path}: TensorStore, which stores the weights, reads a backslash as a separator of directories: "
            f"rename the directory"
        )


def other_files(path: Path) -> list[str]:
    """Return the visible files of a directory that do not belong to a run, sorted; [] if it does not exist."""
    if not path.is_dir():
        return []
    return sorted(file.name for file in path.iterdir() if file.name not in RUN_FILES and not file.name.startswith("."))


def as_path(path: str | Path) -> Path:
    """Return the path of a run; raise `UserError` for other types."""
    if not isinstance(path, (str, Path)):
        raise UserError(f"the path of a run must be a string or a Path: {short_repr(path)}")
    return Path(path)
