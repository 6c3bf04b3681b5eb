"""The section of a model card about the losses or rewards of the exported checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxgpt.checkpoint.info import Info
from jaxgpt.checkpoint.run import Run
from jaxgpt.config import Config
from jaxgpt.errors import UserError
from jaxgpt.report.baselines import read_baselines
from jaxgpt.reward_words import shown_reward
from jaxgpt.trainer.metrics import read_metrics

Metrics = Sequence[dict[str, Any]]  # lines of a metrics.jsonl


def results_section(run: Path, metrics: Metrics, info: Info, config: Config) -> str:
    """Return the section, or "" if the exported checkpoint was not evaluated.

    The section has the loss and the baselines of the same data or, for a `post.objective` other than next-token, the reward,
    the divergence from the teacher, or the loss.
    """
    if config.post.objective != "next-token":
        return _post_results(metrics, info, config)
    evaluation = _evaluation(metrics, "val_loss", info.step)
    if evaluation is None:
        return ""

    error = f" +- {evaluation['val_stderr']:.4f}" if "val_stderr" in evaluation else ""
    text = "held-out text"
    if not _held_out(info, config):
        text = "the training text, because the run held out no text"
    lines = [
        "## Results\n",
        "| model | loss, nats per token |",
        "|---|---|",
        f"| this model, step {info.step:,} | {evaluation['val_loss']:.4f}{error} |",
        *[f"| {name} baseline | {loss:.4f} |" for name, loss in _baselines(run, evaluation.get("val_data")).items()],
        f"\nThe loss is on {text}; +- is the standard error over its windows.\n",
    ]
    return "\n".join(lines)


def _evaluation(metrics: Metrics, name: str, step: int) -> dict[str, Any] | None:
    """Return the last evaluation of the metric `name` at a step; None: no evaluation at this step."""
    evaluations = [line for line in metrics if name in line and line["step"] == step]
    return evaluations[-1] if evaluations else None


def _baselines(run: Path, data: Any) -> dict[str, float]:
    """Return the losses of a run's baselines, keyed by name, or {} if they are missing, damaged or of different data.

    `data` is the `val_data` of the evaluation to compare with.
    """
    try:
        stored = read_baselines(run)
    except UserError:
        return {}
    return stored["losses"] if stored.get("data", data) == data else {}


def _post_results(metrics: Metrics, info: Info, config: Config) -> str:
    """Return the results of a checkpoint trained with a `post.objective` other than next-token, or ""."""
    name = "val_reward" if config.post.has_rewards else "val_loss"
    evaluation = _evaluation(metrics, name, info.step)
    if evaluation is None:
        return ""

    value = evaluation[name]
    split = "held-out" if _held_out(info, config) else "training"
    if config.post.has_rewards:
        reward = " ".join(map(shown_reward, config.post.reward))
        text = f"The mean reward ({reward}) of the answers to {split} prompts is {value:.4f}."
    elif config.post.is_rollout:
        text = f"On its answers to {split} prompts, the divergence from the teacher is {value:.4f} nats per token."
    elif config.post.is_distillation:
        loss = evaluation["val_cross_entropy"]
        text = f"On {split} text, the divergence from the teacher is {value:.4f}, and the loss {loss:.4f} nats."
    else:
        text = f"The {config.post.objective} loss on {split} pairs is {value:.4f}."
        if "val_accuracy" in evaluation:
            text += f" The reward of the chosen answer is higher in {evaluation['val_accuracy']:.1%} of the pairs."
    return f"## Results\n\nTrained with {config.post.objective}. {text}\n"


def _held_out(info: Info, config: Config) -> bool:
    """Return whether a run was evaluated on held-out data."""
    has_validation_files = any(boundary is not None for boundary in info.about.get("boundaries", {}).values())
    # Checkpoints of older versions of jaxgpt do not record whether data were held out.
    return bool(info.about.get("held_out", has_validation_files or config.data.train_fraction < 1))


def run_metrics(run: Path) -> Metrics:
    """Return the lines of a run's metrics.jsonl; empty: the run has no such file."""
    path = Run(run).metrics
    if not path.is_file():
        return []
    return list(read_metrics(path))
