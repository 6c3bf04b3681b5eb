"""jaxgpt info RUN|PRESET"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxgpt.cli.options import Json
from jaxgpt.cli.output import Facts, aligned, columns, print_result
from jaxgpt.cli.run_state import RunProgress, RunState, read_state
from jaxgpt.cli.settings import given_model, named_config, origin, with_vocab
from jaxgpt.config import Config
from jaxgpt.errors import short_repr
from jaxgpt.presets import PRESETS
from jaxgpt.progress import duration

if TYPE_CHECKING:
    from jaxgpt.tasks.record import TaskEntry


def info(target: str, /, *, json: Json = False) -> int:
    """Print the parameters, FLOPs and bytes of a preset or run.

    For a run, also print the step, the checkpoints with their losses or rewards,
    data, time, results of tasks, and the settings that differ from the preset.

    jaxgpt info gpt2
    jaxgpt info runs/shakespeare
    jaxgpt info gpt2 --json

    Args:
        target: preset or run
    """
    config = with_vocab(named_config(target))
    given = given_model(target)
    described = _given_model(target, given) if given else _own_model(target, config)
    results: dict[str, Any] = {"name": target, **described.counts}
    facts = described.facts

    is_run = Path(target).is_dir() and target not in PRESETS
    if is_run:
        from jaxgpt.checkpoint.run import open_run

        run = open_run(Path(target))
        run.tokenizer()  # integrity check of the tokenizer
        state = read_state(run, config)
        results["run"] = state.to_json()
        facts = {**facts, **_run_facts(state, config, described.trainable)}

    modules = columns(_module_rows(described.counts["modules"], config.model.n_layer))
    return print_result(json, results, f"{aligned(facts)}\n\n{modules}")


class ModelDescription(NamedTuple):
    """The size of a model.

    Attributes:
        counts: values for JSON; `modules` holds the number of parameters of each module, keyed by path.
        facts: lines, keyed by label.
        trainable: number of trainable parameters.
    """

    counts: Mapping[str, Any]
    facts: Facts
    trainable: int


def _own_model(target: str, config: Config) -> ModelDescription:
    """Describe a model of jaxgpt from its settings."""
    from jaxgpt.counts import model_counts

    counts = model_counts(config)
    facts = {
        "model": f"{target}, {counts['parameters']:,} parameters",
        "training": f"{counts['flops_per_token']:,} FLOPs per token",
        "bytes": ", ".join(f"{kind} {count:,}" for kind, count in counts["bytes"].items()),
    }
    return ModelDescription(counts, facts, counts["trainable_parameters"])


def _given_model(run: str, name: str) -> ModelDescription:
    """Describe a model given in Python, a class with this name, from the last checkpoint of its run."""
    from jaxgpt.checkpoint.index import saved_steps
    from jaxgpt.checkpoint.run import Run
    from jaxgpt.checkpoint.store import stored_weights
    from jaxgpt.counts import parameter_count, parameter_table

    directory = Run(Path(run)).checkpoints
    *_, last = saved_steps(directory)
    stored = stored_weights(directory, last)
    parameters = parameter_count(stored)
    return ModelDescription(
        counts={"parameters": parameters, "modules": parameter_table(stored)},
        facts={"model": f"{run}, {parameters:,} parameters in its checkpoint, of {name} given in Python"},
        trainable=parameters,
    )


def _run_facts(run: RunState, config: Config, trainable: int) -> Facts:
    """Return the facts of a run; `trainable` is its number of trainable parameters."""
    lora = config.lora
    adapters = ""
    if lora.rank:
        kind = f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}, on {lora.targets}"
        adapters = f"{kind}: {trainable:,} trainable parameters"
    return {
        "adapters": adapters,
        "preset": run.preset,
        "settings": [f"{name} {short_repr(value)}" for name, value in run.changed.items()],
        "weights": f"started from {origin(config)}" if config.init_from else "",
        "data": run.data,
        "trained": _trained(run.trained),
        "checkpoints": _checkpoint_lines(run, config.post.has_rewards),
        "tasks": [_task_line(entry) for entry in run.tasks],
        "started": [f"step {line['step']}: {line.get('command', '')}; {line['started']}" for line in run.starts],
    }


def _trained(run: RunProgress) -> str:
    """Describe how far a run was trained."""
    if not run.steps:
        return "no: imported or saved from Python"
    text = f"step {run.step}/{run.steps}, {run.tokens:,} tokens in {duration(run.seconds)}"
    if run.ended in ("stopped", "failed"):
        text += f", {run.ended}"
    return text


def _checkpoint_lines(run: RunState, has_rewards: bool) -> Sequence[str]:
    """Return a line for each checkpoint of a run, with the value that ranks it, by default its loss or reward."""
    lines = []
    for saved in run.checkpoints:
        line = f"step {saved.step}"
        if saved.ranking is not None:
            line += f": {_value(saved.ranking, saved.ranked_by, has_rewards)}"
            if run.fewer_windows and not saved.ranked_by:
                line += f" on {run.fewer_windows} windows"
        if saved.step == run.best:
            line += " (best)"
        lines.append(line)
    lines += [f"step {step}: its checkpoint.json is damaged" for step in run.damaged]
    return lines or ["none yet"]


def _value(ranking: float, ranked_by: str, has_rewards: bool) -> str:
    """Format the value that ranks a checkpoint; arguments as in `SavedStep`. With rewards, `ranking` is a negative reward."""
    if ranked_by:
        return f"{ranked_by} {ranking:.4f}"
    return f"reward {-ranking:.4f}" if has_rewards else f"loss {ranking:.4f}"


def _task_line(entry: TaskEntry) -> str:
    """Return a line for a result of `jaxgpt eval RUN --tasks`."""
    from jaxgpt.tasks.record import evaluation_settings
    from jaxgpt.tasks.results import number

    result = entry.result
    value = number(result.value)
    if result.stderr is not None:
        value += f" +- {number(result.stderr)}"
    parts = [f"step {entry.conditions.get('step')}", f"{result.samples:,} samples"]
    if result.shots:
        parts.append(f"{result.shots} shots")
    settings = evaluation_settings(entry.conditions)
    if settings:
        parts.append(settings)
    return f"{result.task} {result.metric} {value} ({', '.join(parts)})"


def _module_rows(modules: Mapping[str, int], n_layer: int) -> list[list[str]]:
    """Return a row for each module, indented by depth; all layers have equal sizes, so only h_0 is listed."""
    not_listed = {f"h_{i}" for i in range(1, n_layer)}
    rows = []
    for path, count in modules.items():
        names = path.split("/")
        if names[0] in not_listed:
            continue
        label = "  " * (len(names) - 1) + names[-1]
        if path == "h_0":
            label = f"h_0 .. h_{n_layer - 1}, each"
        rows.append([label, f"{count:,}"])
    return rows
