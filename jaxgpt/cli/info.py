"""jaxgpt info RUN|PRESET"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxgpt.cli.options import Json
from jaxgpt.cli.output import aligned, columns, print_result
from jaxgpt.cli.settings import named_config, origin, with_vocab
from jaxgpt.config import Config, changes
from jaxgpt.errors import short_repr
from jaxgpt.presets import PRESETS, preset
from jaxgpt.progress import duration

if TYPE_CHECKING:
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
        results |= {"run": state_of(run, config)}
        facts |= _run_facts(results, config)
    modules = columns(_module_rows(results["modules"], config.model.n_layer))
    return print_result(json, results, f"{aligned(facts)}\n\n{modules}")


def state_of(run: Run, config: Config) -> dict[str, Any]:
    """Describe a run: its step, checkpoints, data, time, and the settings that differ from its preset."""
    from jaxgpt.checkpoint.store import best_step, read_checkpoints
    from jaxgpt.tasks.record import read_results
    from jaxgpt.trainer.metrics import how_ended, read_metrics

    infos, damaged = read_checkpoints(run.checkpoints)
    best = best_step(infos) if infos and not damaged else None

    # The metrics may end before or after the last checkpoint.
    lines = list(read_metrics(run.metrics)) if run.metrics.is_file() else []
    logged = [line for line in lines if "loss" in line]
    steps = [line["step"] + 1 for line in logged] + list(infos)
    tokens = [line.get("tokens", 0) for line in logged] + [each.tokens for each in infos.values()]
    seconds = [line.get("elapsed_seconds", 0.0) for line in logged]

    # `windows` counts the windows in a checkpoint's loss; 0 (not printed): no evaluation used more windows.
    windows = config.train.eval_windows
    has_larger = any(line.get("val_windows", 0) > windows for line in lines)

    paths = [path for path in (config.data.path, *config.data.mix) if path]
    base = preset(config.preset) if config.preset in PRESETS else config
    changed = {name: value for name, (_, value) in changes(base, config).items() if name not in OF_DATA}
    return {
        "preset": config.preset,
        "init_from": config.init_from,
        "data": " ".join(paths) or config.data.dataset,
        "step": max(steps, default=0),
        "steps": config.train.steps if lines else 0,
        "ended": how_ended(lines, config.train.steps),
        "tokens": max(tokens, default=0),
        "seconds": max(seconds, default=0.0),
        "checkpoints": [{"step": step, "val_loss": each.val_loss} for step, each in infos.items()],
        "windows": windows if has_larger else 0,
        "damaged": damaged,
        "best": best,
        "changed": changed,
        "tasks": [asdict(result) | facts for result, facts in read_results(run.path)],
        "starts": [line for line in lines if "started" in line],
    }


def _run_facts(results: dict[str, Any], config: Config) -> dict[str, Any]:
    run = results["run"]
    facts: dict[str, Any] = {}
    if config.lora.rank:
        adapters = f"LoRA of rank {config.lora.rank}, alpha {config.lora.alpha:g}, on {config.lora.targets}"
        facts["adapters"] = f"{adapters}: {results['trainable_parameters']:,} trainable parameters"
    facts["preset"] = run["preset"]
    facts["settings"] = [f"{name} {short_repr(value)}" for name, value in run["changed"].items()]
    if config.init_from:
        facts["weights"] = f"started from {origin(config)}"
    facts["data"] = run["data"]
    facts["trained"] = "no: imported or saved from Python"
    if run["steps"]:
        time = duration(run["seconds"])
        facts["trained"] = f"step {run['step']}/{run['steps']}, {run['tokens']:,} tokens in {time}"
        if run["ended"] in ("stopped", "failed"):
            facts["trained"] += f", {run['ended']}"
    facts["checkpoints"] = _checkpoint_lines(run, config.post.is_rollout) or "none yet"
    facts["tasks"] = [_task_line(each) for each in run["tasks"]]
    facts["started"] = [f"step {line['step']}: {line.get('command', '')}; {line['started']}" for line in run["starts"]]
    return facts


def _task_line(result: dict[str, Any]) -> str:
    """Return a line for a result of `jaxgpt eval RUN --tasks`."""
    from jaxgpt.tasks.record import number, setting

    error = "" if result.get("stderr") is None else f" +- {number(result['stderr'])}"
    parts = [f"step {result.get('step')}", f"{result['samples']:,} samples"]
    if result.get("shots"):
        parts.append(f"{result['shots']} shots")
    if setting(result):
        parts.append(setting(result))
    return f"{result['task']} {result['metric']} {number(result['value'])}{error} ({', '.join(parts)})"


def _checkpoint_lines(run: dict[str, Any], has_rewards: bool) -> list[str]:
    """Return a line for each checkpoint of a run, with its loss or reward."""
    lines = []
    for each in run["checkpoints"]:
        line = f"step {each['step']}"
        if each["val_loss"] is not None:
            line += f": reward {-each['val_loss']:.4f}" if has_rewards else f": loss {each['val_loss']:.4f}"
            if run["windows"]:
                line += f" on {run['windows']} windows"
        if each["step"] == run["best"]:
            line += " (best)"
        lines.append(line)
    return lines + [f"step {step}: its checkpoint.json is damaged" for step in run["damaged"]]


def _module_rows(modules: dict[str, int], n_layer: int) -> list[list[str]]:
    """Return a row for each module, indented by depth; all layers have equal sizes, so only h_0 is listed."""
    rows = []
    for name, count in modules.items():
        if name == "h_0":
            rows.append([f"h_0 .. h_{n_layer - 1}, each", f"{count:,}"])
        elif name.startswith("h_0/") or not re.match(r"h_\d+(/|$)", name):
            rows.append(["  " * name.count("/") + name.split("/")[-1], f"{count:,}"])
    return rows
