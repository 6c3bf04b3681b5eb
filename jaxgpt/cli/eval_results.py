"""Results of `jaxgpt eval`: the loss, reward or divergence of a run, as lines and as values of a JSON object."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxgpt.cli.options import Weights
from jaxgpt.cli.output import ERROR_OF_DATA, ERROR_OF_PAIRS, Facts
from jaxgpt.config import Config
from jaxgpt.errors import plural

if TYPE_CHECKING:
    from jaxgpt.data import Data
    from jaxgpt.lm import LM
    from jaxgpt.post.held_out import RewardResult
    from jaxgpt.post.on_policy import DivergenceResult
    from jaxgpt.trainer.mean_loss import Evaluation


class EvalResult(NamedTuple):
    """A result of `jaxgpt eval`.

    Attributes:
        numbers: values of the JSON object.
        facts: the same result as text.
    """

    numbers: dict[str, Any]
    facts: Facts


class Loss(NamedTuple):
    """The loss of a model on a split, before and after its weights are rounded.

    Attributes:
        weights: type of the rounded weights; float32: not rounded.
        as_trained: evaluation of the weights as trained.
        rounded: evaluation of the rounded weights.
    """

    weights: Weights
    as_trained: Evaluation
    rounded: Evaluation


def report_loss(about: dict[str, str], loss: Loss, config: Config, data: Data) -> EvalResult:
    """Return the loss of a run, with the numbers that follow from it.

    Args:
        about: model and text, keyed by label.
        loss: loss of the run, before and after rounding its weights.
        config: settings of the model, and the objective of the loss.
        data: evaluated data.
    """
    result = loss.rounded
    change = _change(loss) if loss.weights != "float32" else {}
    effect = _describe_change(change) if change else ""
    if config.post.is_preference:
        numbers = {"objective": config.post.objective, "pairs": result.windows, **result.others}
        unit = f", {config.post.objective} per pair"
        details = _pair_facts(result, config)
        explanation = ERROR_OF_PAIRS
    else:
        numbers = _text_numbers(result, data)
        unit = " nats per token"
        details = _text_facts(numbers, config)
        explanation = ERROR_OF_DATA

    values = {**about, "weights": loss.weights, "loss": result.loss, "stderr": result.stderr, **change, **numbers}
    has_stderr = math.isfinite(result.stderr)
    lines = [f"{result}{unit}", explanation if has_stderr else ""]
    return EvalResult(_finite(values), {**about, "loss": lines, loss.weights: effect, **details})


def report_reward(lm: LM, data: Data, result: RewardResult) -> EvalResult:
    """Return the reward of a run."""
    values = {
        "model": lm.source,
        "text": data.source,
        "reward": result.reward,
        "stderr": result.stderr,
        "prompts": len(result.rewards),
        "answer_tokens": result.tokens,
        **result.part_means,
    }
    facts = {
        "model": lm.source,
        "prompts": data.source,
        "reward": f"{str(result).removeprefix('reward ')}, {' '.join(lm.config.post.reward)}",
        "rewards": ", ".join(f"{name.removeprefix('reward_')} {mean:.4f}" for name, mean in result.part_means.items()),
        "answers": f"{result.tokens:.1f} tokens on average, the most probable token at each position",
    }
    return EvalResult(_finite(values), facts)


def report_divergence(lm: LM, data: Data, result: DivergenceResult) -> EvalResult:
    """Return the divergence of a run from its teacher."""
    post = lm.config.post
    evaluation = result.evaluation
    metrics = result.metrics
    values = {
        "model": lm.source,
        "text": data.source,
        "divergence": evaluation.loss,
        "stderr": evaluation.stderr,
        "kl": metrics["val_kl"],
        "entropy": metrics["val_entropy"],
        "prompts": evaluation.windows,
        "answer_tokens": metrics["val_answer_tokens"],
    }
    facts = {
        "model": lm.source,
        "prompts": data.source,
        "divergence": f"{evaluation} nats per token, {post.divergence} divergence from {post.reference}",
        "KL": f"{metrics['val_kl']:.4f} nats per token, from the student to the teacher",
        "answers": f"{metrics['val_answer_tokens']:.1f} tokens on average, sampled at temperature 1",
    }
    return EvalResult(_finite(values), facts)


def _change(loss: Loss) -> dict[str, float]:
    """Compute the change in loss from rounding the weights, and its standard error."""
    from jaxgpt.trainer.mean_loss import loss_difference

    change = loss_difference(loss.as_trained, loss.rounded)
    return {"loss_float32": loss.as_trained.loss, "loss_change": change.mean, "loss_change_stderr": change.stderr}


def _describe_change(change: dict[str, float]) -> str:
    """Return a line for the result of `_change`."""
    stderr = change["loss_change_stderr"]
    error = f" +- {stderr:.5f}" if math.isfinite(stderr) else ""
    return f"changes the loss by {change['loss_change']:+.5f}{error}, from {change['loss_float32']:.4f}"


def _pair_facts(result: Evaluation, config: Config) -> dict[str, str]:
    """Return the lines about an evaluation on preference pairs, keyed by label."""
    chosen = f"{result.others['reward_chosen']:.4f} chosen"
    rejected = f"{result.others['reward_rejected']:.4f} rejected"
    return {
        "accuracy": f"{result.others['accuracy']:.4f} of the pairs have a higher reward for the chosen answer",
        "rewards": f"{chosen}, {rejected}",
        "pairs": f"{result.windows:,}, in windows of {config.window}",
    }


def _text_numbers(result: Evaluation, data: Data) -> dict[str, Any]:
    """Return the numbers of an evaluation on text; `bits_per_byte` is NaN if the number of bytes is unknown."""
    from jaxgpt.report.baselines import bytes_per_token

    ratio = bytes_per_token(data)
    return {
        "perplexity": math.exp(min(result.loss, 700.0)),  # math.exp overflows above 709
        "bits_per_byte": result.loss / math.log(2) / ratio if ratio else math.nan,
        "tokens": result.tokens,
        "windows": result.windows,
    }


def _text_facts(numbers: dict[str, Any], config: Config) -> dict[str, str]:
    """Return the lines about an evaluation on text, keyed by label; `numbers` are the result of `_text_numbers`."""
    bits_per_byte = numbers["bits_per_byte"]
    return {
        "perplexity": f"{numbers['perplexity']:.3f}",
        "bits per byte": "" if math.isnan(bits_per_byte) else f"{bits_per_byte:.4f}",
        "tokens": f"{numbers['tokens']:,} in {plural(numbers['windows'], 'window')} of {config.window}",
    }


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Omit numbers that are NaN or infinite, which JSON cannot represent."""
    return {name: value for name, value in values.items() if not isinstance(value, float) or math.isfinite(value)}
