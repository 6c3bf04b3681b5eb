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


def needed_runs(run: Run | None) -> set[Path]:
    """Return the paths of a run and of the bases of its adapters: loading the run reads them all."""
    paths = set[Path]()
    while run and run.path.resolve() not in paths:
        paths.add(run.path.resolve())
        config = run.config() if run.exists() else None
        base = recorded_checkpoint(run, config.init_from) if config and config.lora.rank else None
        run = Run(base.parent.parent) if base else None
    return paths
