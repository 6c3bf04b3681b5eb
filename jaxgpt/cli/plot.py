"""jaxgpt plot RUN ... [--x step] [--out FILE] [--follow]"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from jaxgpt.atomic import check_writable
from jaxgpt.cli.console import note
from jaxgpt.cli.draw import Axis, distinct_baselines, draw
from jaxgpt.cli.plot_table import table
from jaxgpt.cli.recorded_run import Lines, RecordedRun, read_recorded
from jaxgpt.errors import UserError, plural
from jaxgpt.locks import has_writer

if TYPE_CHECKING:
    from jaxgpt.checkpoint.run import Run

FORMATS = (".png", ".svg", ".pdf")
EVERY = 10.0  # seconds between two plots of a run in training


def plot(
    *runs: str,
    out: str = "losses.png",
    x: Axis = "all",
    follow: bool = False,
) -> int:
    """Draw the losses of runs against steps, tokens and time, with the baselines of their data.

    Runs with rewards have plots of reward, tokens per answer, entropy and, with
    post.kl, KL to the reference instead.

    Prints a table of the runs: the lowest validation loss, its bits per byte of
    text and its step, tokens/s, and the settings that differ. Use bits per byte
    to compare runs with different tokenizers. If runs differ only in their seed,
    also prints the comparison of `jaxgpt compare`. Training losses, each of a single
    batch, are thin lines; validation losses are marked by dots. The baselines are
    the uniform and n-gram losses that training stores in the run; they are omitted
    if they differ between runs.

    jaxgpt plot runs/shakespeare
    jaxgpt plot runs/shakespeare runs/shakespeare-2 --out compare.svg
    jaxgpt plot runs/* --x tokens
    jaxgpt plot runs/shakespeare --follow

    Args:
        runs: runs to draw
        out: file to write: .png, .svg or .pdf
        x: horizontal axis; all: three plots side by side (with rewards: steps)
        follow: draw again every 10 seconds while a run trains
    """
    path = Path(out)
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"--out {out} must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if not runs:
        raise UserError("missing argument: the runs to draw, as in jaxgpt plot runs/shakespeare")
    check_writable(path)
    from jaxgpt.checkpoint.run import open_run
    from jaxgpt.report.baselines import read_baselines

    opened = {name: open_run(Path(name)) for name in runs}
    if follow:
        draw_while_training(opened, path, x)

    recorded = read_recorded(opened)
    baselines = {name: read_baselines(run.path) for name, run in recorded.items()}
    if len(distinct_baselines(baselines.values())) > 1:
        note("baselines omitted: the runs have different data or tokenizers")
    draw({name: run.lines for name, run in recorded.items()}, baselines.values(), path, x)

    ratios = {name: each.get("bytes_per_token", 0) for name, each in baselines.items()}
    print(table(recorded, ratios))
    print_seed_groups(recorded)
    print(f"wrote {path}: {plural(len(opened), 'run')}")
    return 0


def print_seed_groups(runs: Mapping[str, RecordedRun]) -> None:
    """Print the comparison of `jaxgpt compare`, or a note with the reason for no comparison.

    Prints nothing if no runs differ only in their seed, or if no run has a validation loss, as with rewards.
    """
    from jaxgpt.cli.compare import describe, seed_groups
    from jaxgpt.study.seeds import has_seeds
    from jaxgpt.trainer.metrics import evaluations

    has_losses = any(evaluations(run.lines) for run in runs.values())
    if not has_losses or not has_seeds(run.settings for run in runs.values()):
        return
    try:
        groups = seed_groups(runs)
    except UserError as e:  # for example, a run has not finished, or evaluation.json is damaged
        note(f"seeds are not compared: {e}")
        return
    print(describe(groups))


def draw_while_training(runs: Mapping[str, Run], path: Path, x: Axis) -> None:
    """Once all runs have losses, draw the losses or rewards every `EVERY` seconds until no run trains."""
    from jaxgpt.report.baselines import read_baselines
    from jaxgpt.trainer.metrics import read_metrics

    is_noted = False
    while True:
        lines: dict[str, Lines] = {}
        for name, run in runs.items():
            lines[name] = list(read_metrics(run.metrics)) if run.metrics.is_file() else []
        training = [name for name, run in runs.items() if still_trains(run, lines[name])]
        if not training:
            return
        if not is_noted:
            verb = "trains" if len(training) == 1 else "train"
            note(f"drawing {path} every {EVERY:.0f} seconds while {', '.join(training)} {verb}")
            is_noted = True

        has_losses = [any("loss" in line for line in each) for each in lines.values()]
        if all(has_losses):
            baselines = [read_baselines(run.path) for run in runs.values()]
            draw(lines, baselines, path, x)
        time.sleep(EVERY)


def still_trains(run: Run, lines: Lines) -> bool:
    """Return whether a process trains the run.

    If the last process was on a different host, the run is assumed to train unless the last line of its metrics records an
    end. A killed process records no end.
    """
    from jaxgpt.trainer.metrics import how_ended

    writer = has_writer(run.path)
    if writer is None:
        return not how_ended(lines, run.config().train.steps)
    return writer
