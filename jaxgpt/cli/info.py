"""jaxgpt info RUN|PRESET"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jaxgpt.cli.options import Json
from jaxgpt.cli.output import aligned, columns, print_result
from jaxgpt.cli.run_state import RunState, read_state, stored_counts
from jaxgpt.cli.settings import given_model, named_config, origin, with_vocab
from jaxgpt.config import Config
from jaxgpt.errors import short_repr
from jaxgpt.presets import PRESETS
from jaxgpt.progress import duration


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
    if model:
        counts = stored_counts(Path(target))
        facts = _stored_facts(target, counts, model)
    else:
        counts = model_counts(config)
        facts = _facts(target, counts)
    results = {"name": target, **counts}

    is_run = Path(target).is_dir() and target not in PRESETS
    if is_run:
        from jaxgpt.checkpoint.run import open_run

        run = open_run(Path(target))
        run.tokenizer()  # integrity check of the tokenizer
        state = read_state(run, config)
        results["run"] = state._asdict()
        trainable = counts.get("trainable_parameters", counts["parameters"])
        facts |= _run_facts(state, config, trainable)

    modules = columns(_module_rows(counts["modules"], config.model.n_layer))
    return print_result(json, results, f"{aligned(facts)}\n\n{modules}")


def _facts(target: str, counts: dict[str, Any]) -> dict[str, Any]:
    """Return the lines about the counts of a config, keyed by label."""
    return {
        "model": f"{target}, {counts['parameters']:,} parameters",
        "training": f"{counts['flops_per_token']:,} FLOPs per token",
        "bytes": ", ".join(f"{kind} {count:,}" for kind, count in counts["bytes"].items()),
    }


def _stored_facts(target: str, counts: dict[str, Any], model: str) -> dict[str, Any]:
    """Return the line about the counts of a run whose model, given in Python, has the name `model`."""
    return {"model": f"{target}, {counts['parameters']:,} parameters in its checkpoint, of {model} given in Python"}


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
