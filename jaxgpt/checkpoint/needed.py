"""Runs that a run needs: the checkpoints that it records, such as the base of its adapters, found even after a move."""

from __future__ import annotations

from pathlib import Path

from jaxgpt.checkpoint.paths import parse_checkpoint
from jaxgpt.checkpoint.run import Run
from jaxgpt.directories import CHECKPOINTS


def recorded_checkpoint(run: Run, path: str) -> Path | None:
    """Return the checkpoint that a run records as RUN/checkpoints/STEP: at this path, or next to the run; None if missing."""
    recorded, step = parse_checkpoint(path)
    next_to_run = run.path.absolute().parent / recorded.name
    for base in (recorded, next_to_run):
        checkpoint = base / CHECKPOINTS / step
        if checkpoint.is_dir():
            return checkpoint
    return None


def needed_runs(run: Run) -> set[Path]:
    """Return the paths of a run and of the bases of its adapters: loading the run reads them all."""
    paths = set[Path]()
    needed: Run | None = run
    while needed is not None and needed.path.resolve() not in paths:  # otherwise, a run is its own base
        paths.add(needed.path.resolve())
        needed = _run_of_base(needed)
    return paths


def _run_of_base(run: Run) -> Run | None:
    """Return the run with the base of a run's adapters; None: no adapters, or one of the two runs is missing."""
    if not run.exists():
        return None
    config = run.config()
    if not config.lora.rank:
        return None
    checkpoint = recorded_checkpoint(run, config.init_from)
    if checkpoint is None:
        return None
    base, _ = parse_checkpoint(str(checkpoint))
    return Run(base)
