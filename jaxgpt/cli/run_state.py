"""The state of a run, as `jaxgpt info` prints it: progress, checkpoints, data, changed settings and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxgpt.config import Config
from jaxgpt.config_changes import changes
from jaxgpt.presets import PRESETS, preset

if TYPE_CHECKING:
    from jaxgpt.checkpoint.info import Info
    from jaxgpt.checkpoint.run import Run
    from jaxgpt.tasks.record import TaskEntry

# Settings determined by the data and --init-from, not listed as changed.
OF_DATA = ("model.vocab_size", "init_from", "state_from")


class RunProgress(NamedTuple):
    """The progress of a run, with fields in the order of the JSON object."""

    step: int  # steps taken
    steps: int  # steps of the complete run; 0: the run was imported or saved from Python
    ended: str  # finished, stopped or failed; "": killed, still training, or never trained
    tokens: int  # tokens trained on
    seconds: float  # time spent training


class SavedStep(NamedTuple):
    """A checkpoint of a run.

    Attributes:
        step: steps taken.
        ranking: value that ranks the checkpoint, lower is better: by default its validation loss; with rewards, its negative
            reward; None: not evaluated.
        ranked_by: name of the evaluator that computed `ranking`, if given in Python; "": the settings determine the evaluator.
    """

    step: int
    ranking: float | None
    ranked_by: str

    def to_json(self) -> dict[str, Any]:
        """Return the values of the JSON object: `val_loss` is `ranking`; `ranking`, omitted if "", is `ranked_by`."""
        values = {"step": self.step, "val_loss": self.ranking}
        return values | {"ranking": self.ranked_by} if self.ranked_by else values


class RunState(NamedTuple):
    """The state of a run.

    Attributes:
        preset: name of the preset.
        init_from: checkpoint of the initial weights; "": random weights.
        data: `data.path`, the words of `data.mix` (PATH=WEIGHT, @TOKENS), or both; otherwise `data.dataset`.
        trained: steps, tokens and time of the training so far.
        checkpoints: the checkpoints, in the order of their steps.
        fewer_windows: number of windows of the checkpoints' losses, if a different evaluation, such as the last, used more;
            0: all evaluations used the same windows.
        damaged: steps of the checkpoints with a damaged checkpoint.json.
        best: step of the best checkpoint; None: no checkpoint, or some are damaged.
        changed: settings that differ from the preset.
        tasks: results of tasks.
        starts: lines of metrics.jsonl that record a start of the run, one for each start and each resume.
    """

    preset: str
    init_from: str
    data: str
    trained: RunProgress
    checkpoints: Sequence[SavedStep]
    fewer_windows: int
    damaged: Sequence[int]
    best: int | None
    changed: Mapping[str, Any]
    tasks: Sequence[TaskEntry]
    starts: Sequence[Mapping[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Return the values of the JSON object, where `fewer_windows` is `windows`."""
        return {
            "preset": self.preset,
            "init_from": self.init_from,
            "data": self.data,
            **self.trained._asdict(),
            "checkpoints": [saved.to_json() for saved in self.checkpoints],
            "windows": self.fewer_windows,
            "damaged": self.damaged,
            "best": self.best,
            "changed": self.changed,
            "tasks": [asdict(entry.result) | dict(entry.conditions) for entry in self.tasks],
            "starts": self.starts,
        }


def read_state(run: Run, config: Config) -> RunState:
    """Read the progress, checkpoints, data and results of a run, and the settings that differ from its preset."""
    from jaxgpt.checkpoint.index import best_step, read_checkpoints
    from jaxgpt.tasks.record import read_results
    from jaxgpt.trainer.metrics import read_metrics

    infos, damaged = read_checkpoints(run.checkpoints)
    lines = list(read_metrics(run.metrics)) if run.metrics.is_file() else []
    return RunState(
        preset=config.preset,
        init_from=config.init_from,
        data=_data(config),
        trained=_trained(lines, infos, config),
        checkpoints=[SavedStep(step, info.ranking, info.ranked_by or "") for step, info in infos.items()],
        fewer_windows=_fewer_windows(lines, config),
        damaged=damaged,
        best=best_step(infos) if infos and not damaged else None,
        changed=_changed_settings(config),
        tasks=read_results(run.path),
        starts=[line for line in lines if "started" in line],
    )


def _data(config: Config) -> str:
    """Return `data.path` and the words of `data.mix`; if both are empty, return `data.dataset`, which may be `none`."""
    paths = [path for path in (config.data.path, *config.data.mix) if path]
    return " ".join(paths) or config.data.dataset


def _fewer_windows(lines: Sequence[Mapping[str, Any]], config: Config) -> int:
    """Return `train.eval_windows` if an evaluation used more windows, otherwise 0."""
    limit = config.train.eval_windows
    has_more = any(line.get("val_windows", 0) > limit for line in lines)
    return limit if has_more else 0  # a limit of 0 means all windows, in every evaluation


def _trained(lines: Sequence[Mapping[str, Any]], infos: Mapping[int, Info], config: Config) -> RunProgress:
    """Return the progress of a run; its metrics may end before or after the last checkpoint."""
    from jaxgpt.trainer.metrics import how_ended

    is_trained = bool(lines)  # runs that are imported or saved from Python have no metrics
    logged = [line for line in lines if "loss" in line]
    steps = [line["step"] + 1 for line in logged] + list(infos)
    tokens = [line.get("tokens", 0) for line in logged] + [info.tokens for info in infos.values()]
    seconds = [line.get("elapsed_seconds", 0.0) for line in logged]
    return RunProgress(
        step=max(steps, default=0),
        steps=config.train.steps if is_trained else 0,
        ended=how_ended(lines, config.train.steps),
        tokens=max(tokens, default=0),
        seconds=max(seconds, default=0.0),
    )


def _changed_settings(config: Config) -> dict[str, Any]:
    """Return the settings that differ from the preset, keyed by dotted name; {} without a preset."""
    base = preset(config.preset) if config.preset in PRESETS else config
    return {name: value for name, (_, value) in changes(base, config).items() if name not in OF_DATA}
