"""The state of a run, as `jaxgpt info` prints it: progress, checkpoints, data, changed settings and results."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxgpt.config import Config, changes
from jaxgpt.presets import PRESETS, preset

if TYPE_CHECKING:
    from jaxgpt.checkpoint.info import Info
    from jaxgpt.checkpoint.run import Run

# Settings determined by the data and --init-from, not listed as changed.
OF_DATA = ("model.vocab_size", "init_from", "state_from")


def stored_counts(path: Path) -> dict[str, Any]:
    """Count the parameters in the last checkpoint of a run, in total and by module, for a model given in Python."""
    from jaxgpt.checkpoint.index import saved_steps
    from jaxgpt.checkpoint.run import Run
    from jaxgpt.checkpoint.store import stored_weights
    from jaxgpt.counts import parameter_count, parameter_table

    directory = Run(path).checkpoints
    *_, last = saved_steps(directory)
    stored = stored_weights(directory, last)
    return {"parameters": parameter_count(stored), "modules": parameter_table(stored)}


class RunState(NamedTuple):
    """The state of a run, in the order of the JSON object."""

    preset: str
    init_from: str
    data: str  # paths of the training data, or the name of a built-in text
    step: int  # steps taken
    steps: int  # steps of the complete run; 0: it was imported or saved from Python
    ended: str  # finished, stopped or failed; "": killed, or still training
    tokens: int  # tokens trained on
    seconds: float  # time spent training
    checkpoints: list[dict[str, Any]]  # as from `_checkpoint`
    windows: int  # windows of the losses of checkpoints; 0: no evaluation used more
    damaged: list[int]  # steps of the checkpoints with a damaged checkpoint.json
    best: int | None  # step of the best checkpoint; None: no checkpoint, or some are damaged
    changed: dict[str, Any]  # settings that differ from the preset
    tasks: list[dict[str, Any]]  # results of `jaxgpt eval RUN --tasks`
    starts: list[dict[str, Any]]  # lines of metrics.jsonl about each process that trained the run


def read_state(run: Run, config: Config) -> RunState:
    """Read the step, checkpoints, data and time of a run, and the settings that differ from its preset."""
    from jaxgpt.checkpoint.index import best_step, read_checkpoints
    from jaxgpt.tasks.record import read_results
    from jaxgpt.trainer.metrics import how_ended, read_metrics

    infos, damaged = read_checkpoints(run.checkpoints)
    best = best_step(infos) if infos and not damaged else None

    # The metrics may end before or after the last checkpoint: progress is the maximum of both.
    lines = list(read_metrics(run.metrics)) if run.metrics.is_file() else []
    logged = [line for line in lines if "loss" in line]
    steps = [line["step"] + 1 for line in logged] + list(infos)
    tokens = [line.get("tokens", 0) for line in logged] + [each.tokens for each in infos.values()]
    seconds = [line.get("elapsed_seconds", 0.0) for line in logged]

    # The losses of checkpoints are on `eval_windows` windows. The number is printed only if an evaluation used more.
    windows = config.train.eval_windows
    has_larger = any(line.get("val_windows", 0) > windows for line in lines)

    # Data, and settings that differ from the preset.
    paths = [path for path in (config.data.path, *config.data.mix) if path]
    base = preset(config.preset) if config.preset in PRESETS else config
    changed = {name: value for name, (_, value) in changes(base, config).items() if name not in OF_DATA}
    return RunState(
        preset=config.preset,
        init_from=config.init_from,
        data=" ".join(paths) or config.data.dataset,
        step=max(steps, default=0),
        steps=config.train.steps if lines else 0,
        ended=how_ended(lines, config.train.steps),
        tokens=max(tokens, default=0),
        seconds=max(seconds, default=0.0),
        checkpoints=[_checkpoint(step, each) for step, each in infos.items()],
        windows=windows if has_larger else 0,
        damaged=damaged,
        best=best,
        changed=changed,
        tasks=[asdict(result) | facts for result, facts in read_results(run.path)],
        starts=[line for line in lines if "started" in line],
    )


def _checkpoint(step: int, info: Info) -> dict[str, Any]:
    """Return the `step` and `val_loss` of a checkpoint, and `ranking`, the name of an evaluator given in Python."""
    entry: dict[str, Any] = {"step": step, "val_loss": info.val_loss}
    if info.ranking:
        entry["ranking"] = info.ranking
    return entry
