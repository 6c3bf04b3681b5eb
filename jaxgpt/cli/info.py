"""jaxgpt info RUN|PRESET"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxgpt.cli.options import Json
from jaxgpt.cli.output import aligned, columns, print_result
from jaxgpt.cli.settings import given_model, named_config, origin, with_vocab
from jaxgpt.config import Config, changes
from jaxgpt.errors import short_repr
from jaxgpt.presets import PRESETS, preset
from jaxgpt.progress import duration

if TYPE_CHECKING:
    from jaxgpt.checkpoint.info import Info
    from jaxgpt.checkpoint.run import Run

# Settings determined by the data and --init-from, not listed as changed.
OF_DATA = ("model.vocab_size", "init_from", "state_from")


def info(target: str, /, *, json: Json = False) -> int:
    """Print the parameters, FLOPs and bytes of a preset or run.

    For a run, also print the step, the checkpoints with their losses, data, time,
    and the settings that differ from the preset.

    jaxgpt info gpt2
    jaxgpt info runs/shakespeare
    jaxgpt info gpt2 --json

    Args:
        target: preset or run
    """
    config = with_vocab(named_config(target))
    from jaxgpt.counts import model_counts

    model = given_model(target)
    facts: dict[str, Any]
    results: dict[str, Any]
    if model:
        results = {"name": target} | stored_counts(Path(target))
        facts = {
            "model": f"{target}, {results['parameters']:,} parameters in its checkpoint, of {model} given in Python"
        }
    else:
        results = {"name": target} | model_counts(config)
        facts = {
            "model": f"{target}, {results['parameters']:,} parameters",
            "training": f"{results['flops_per_token']:,} FLOPs per token",
            "bytes": ", ".join(f"{kind} {count:,}" for kind, count in results["bytes"].items()),
        }
    if Path(target).is_dir() and target not in PRESETS:
        from jaxgpt.checkpoint.run import open_run

        run = open_run(Path(target))
        run.tokenizer()  # integrity check of the tokenizer
        state = read_state(run, config)
        results["run"] = state._asdict()
        trainable = results["parameters"] if model else results["trainable_parameters"]
        facts |= _run_facts(state, config, trainable)
    modules = columns(_module_rows(results["modules"], config.model.n_layer))
    return print_result(json, results, f"{aligned(facts)}\n\n{modules}")


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


def _run_facts(run: RunState, config: Config, trainable: int) -> dict[str, Any]:
    """Return the lines about a run, keyed by label; `trainable` is its number of trainable parameters."""
    facts: dict[str, Any] = {}
    if config.lora.rank:
        adapters = f"LoRA of rank {config.lora.rank}, alpha {config.lora.alpha:g}, on {config.lora.targets}"
        facts["adapters"] = f"{adapters}: {trainable:,} trainable parameters"
    facts["preset"] = run.preset
    facts["settings"] = [f"{name} {short_repr(value)}" for name, value in run.changed.items()]
    if config.init_from:
        facts["weights"] = f"started from {origin(config)}"
    facts["data"] = run.data
    facts["trained"] = _trained(run)
    facts["checkpoints"] = _checkpoint_lines(run, config.post.has_rewards) or "none yet"
    facts["tasks"] = [_task_line(each) for each in run.tasks]
    facts["started"] = [f"step {line['step']}: {line.get('command', '')}; {line['started']}" for line in run.starts]
    return facts


def _trained(run: RunState) -> str:
    """Describe how far a run was trained."""
    if not run.steps:
        return "no: imported or saved from Python"
    text = f"step {run.step}/{run.steps}, {run.tokens:,} tokens in {duration(run.seconds)}"
    if run.ended in ("stopped", "failed"):
        text += f", {run.ended}"
    return text


def _checkpoint_lines(run: RunState, has_rewards: bool) -> list[str]:
    """Return a line for each checkpoint of a run, with its loss or, with `has_rewards`, its reward."""
    lines = []
    for each in run.checkpoints:
        line = f"step {each['step']}"
        loss = each["val_loss"]
        if loss is not None:
            name = each.get("ranking", "loss")
            is_reward = has_rewards and name == "loss"
            line += f": reward {-loss:.4f}" if is_reward else f": {name} {loss:.4f}"
            if run.windows and name == "loss":
                line += f" on {run.windows} windows"
        if each["step"] == run.best:
            line += " (best)"
        lines.append(line)
    return lines + [f"step {step}: its checkpoint.json is damaged" for step in run.damaged]


def _task_line(result: dict[str, Any]) -> str:
    """Return a line for a result of `jaxgpt eval RUN --tasks`."""
    from jaxgpt.tasks.record import evaluation_settings, number

    value = number(result["value"])
    if result.get("stderr") is not None:
        value += f" +- {number(result['stderr'])}"
    parts = [f"step {result.get('step')}", f"{result['samples']:,} samples"]
    if result.get("shots"):
        parts.append(f"{result['shots']} shots")
    settings = evaluation_settings(result)
    if settings:
        parts.append(settings)
    return f"{result['task']} {result['metric']} {value} ({', '.join(parts)})"


def _module_rows(modules: dict[str, int], n_layer: int) -> list[list[str]]:
    """Return a row for each module, indented by depth; all layers have equal sizes, so only h_0 is listed."""
    rows = []
    for path, count in modules.items():
        names = path.split("/")
        if names[0] != "h_0" and re.fullmatch(r"h_\d+", names[0]):
            continue
        label = "  " * (len(names) - 1) + names[-1]
        if path == "h_0":
            label = f"h_0 .. h_{n_layer - 1}, each"
        rows.append([label, f"{count:,}"])
    return rows
