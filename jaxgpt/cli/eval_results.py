"""Results of `jaxgpt eval`: the loss, reward or divergence of a run, as lines and as values of a JSON object."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxgpt.cli.options import Weights
from jaxgpt.cli.output import Facts
from jaxgpt.config import Config
from jaxgpt.errors import plural

if TYPE_CHECKING:
    from jaxgpt.data import Data
    from jaxgpt.lm import LM
    from jaxgpt.post.held_out_divergence import DivergenceResult
    from jaxgpt.post.held_out_reward import RewardResult
    from jaxgpt.trainer.mean_loss import Evaluation

ERROR_OF_DATA = "+- is the standard error over windows of text, excluding variation between seeds"
ERROR_OF_PAIRS = "+- is the standard error over pairs, excluding variation between seeds"


class EvalResult(NamedTuple):
    """A result of `jaxgpt eval`, or a part of a result.

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
    change = _rounding_change(loss)
    if config.post.is_preference:
        unit = f", {config.post.objective} per pair"
        footnote = ERROR_OF_PAIRS
        details = _pair_details(result, config)
    else:
        unit = " nats per token"
        footnote = ERROR_OF_DATA
        details = _text_details(result, config, data)

    values = {**about, "weights": loss.weights, "loss": result.loss, "stderr": result.stderr}
    lines = [f"{result}{unit}", footnote if math.isfinite(result.stderr) else ""]
    return EvalResult(
        numbers=_finite({**values, **change.numbers, **details.numbers}),
        facts={**about, "loss": lines, **change.facts, **details.facts},
    )


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


def _rounding_change(loss: Loss) -> EvalResult:
    """Return the change in loss from rounding the weights, and its standard error; no values for float32."""
    from jaxgpt.trainer.mean_loss import loss_difference

    if loss.weights == "float32":
        return EvalResult({}, {})
    before = loss.as_trained.loss
    change = loss_difference(loss.as_trained, loss.rounded)
    error = f" +- {change.stderr:.5f}" if math.isfinite(change.stderr) else ""
    return EvalResult(
        numbers={"loss_float32": before, "loss_change": change.mean, "loss_change_stderr": change.stderr},
        facts={loss.weights: f"changes the loss by {change.mean:+.5f}{error}, from {before:.4f}"},
    )


def _pair_details(result: Evaluation, config: Config) -> EvalResult:
    """Return the accuracy and the rewards of an evaluation on preference pairs."""
    others = result.others
    return EvalResult(
        numbers={"objective": config.post.objective, "pairs": result.windows, **others},
        facts={
            "accuracy": f"{others['accuracy']:.4f} of the pairs have a higher reward for the chosen answer",
            "rewards": f"{others['reward_chosen']:.4f} chosen, {others['reward_rejected']:.4f} rejected",
            "pairs": f"{result.windows:,}, in windows of {config.window}",
        },
    )


def _text_details(result: Evaluation, config: Config, data: Data) -> EvalResult:
    """Return the perplexity, bits per byte (if the size in bytes is known) and size of an evaluation on text."""
    from jaxgpt.report.text_bytes import bytes_per_token

    perplexity = math.exp(min(result.loss, 700.0))  # math.exp overflows above 709
    ratio = bytes_per_token(data)
    bits_per_byte = result.loss / math.log(2) / ratio if ratio else math.nan
    return EvalResult(
        numbers={
            "perplexity": perplexity,
            "bits_per_byte": bits_per_byte,
            "tokens": result.tokens,
            "windows": result.windows,
        },
        facts={
            "perplexity": f"{perplexity:.3f}",
            "bits per byte": f"{bits_per_byte:.4f}" if ratio else "",
            "tokens": f"{result.tokens:,} in {plural(result.windows, 'window')} of {config.window}",
        },
    )


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Omit numbers that are NaN or infinite, which JSON cannot represent."""
    return {name: value for name, value in values.items() if not isinstance(value, float) or math.isfinite(value)}
