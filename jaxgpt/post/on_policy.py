"""On-policy distillation: the divergence from a teacher on answers that the student generates (Agarwal et al. 2024)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.data.prompts import Prompt
from jaxgpt.lm.generation import Generation
from jaxgpt.ops.random import named_key
from jaxgpt.post.held_out import answers_to, held_out_prompts
from jaxgpt.post.rollout_batch import RolloutBatch, rollout_batch
from jaxgpt.train.loss import Objective, RowSums
from jaxgpt.trainer.evaluators import Watch
from jaxgpt.trainer.mean_loss import Evaluation, summarize
from jaxgpt.trainer.program import Program


def on_policy_objective(distillation: Objective) -> Objective:
    """Make the objective of rollouts from the distillation objective: the mean divergence over the answer tokens.

    The drawn tokens are constants in the gradient.

    A batch is a `RolloutBatch`. Only its `windows`, `weight` and `metrics` are used.

    The metrics of the given objective are means over tokens; `cross_entropy` becomes `entropy`, because the mean `-log p` of
    tokens that the student draws estimates the student's entropy. `answer_tokens` and the `metrics` of the batch are means over
    answers.

    Args:
        distillation: objective of windows, from `distillation_objective`.
    """

    def objective(params: Any, batch: RolloutBatch, key: jax.Array | None, frozen: Any) -> RowSums:
        sums = distillation(params, batch["windows"], key, frozen)
        tokens_B = sums.count_B

        # Rows without answers are padding.
        is_answer_B = tokens_B > 0
        weight_B = jnp.where(is_answer_B, batch["weight"], 0.0)

        def weighted(x_B: jax.Array) -> jax.Array:
            return x_B * weight_B.reshape(-1, *(1,) * (x_B.ndim - 1))

        token_metrics = {name: weighted(x_B) for name, x_B in sums.others.items()}
        token_metrics["entropy"] = token_metrics.pop("cross_entropy")
        answer_metrics = {**batch["metrics"], "answer_tokens": tokens_B}
        answer_metrics = {name: jnp.where(is_answer_B, x_B, 0.0) for name, x_B in answer_metrics.items()}
        return RowSums(
            loss_B=weighted(sums.loss_B),
            count_B=is_answer_B.astype(jnp.float32),
            others=token_metrics | answer_metrics,
            penalty_B=None if sums.penalty_B is None else weighted(sums.penalty_B),
        )

    return objective


class DivergenceResult(NamedTuple):
    """The divergence between student and teacher on the student's answers to the held-out prompts.

    Attributes:
        evaluation: mean divergence per token, its standard error over answers, and the sum of each answer.
        others: means per token of the other sums of the objective, such as `kl`.
        answers: generated texts.
        prompts: prompts, as in their records.
        seconds: wall time of the evaluation.
    """

    evaluation: Evaluation
    others: Mapping[str, float]
    answers: Sequence[str]
    prompts: Sequence[Any]
    seconds: float

    @property
    def metrics(self) -> Mapping[str, float]:
        """The numbers in `metrics.jsonl`."""
        return {f"val_{name}": value for name, value in self.others.items()} | {
            "val_loss": self.evaluation.loss,
            "val_stderr": self.evaluation.stderr,
            "val_windows": self.evaluation.windows,
            "val_answer_tokens": float(self.evaluation.counts.mean()),
            "val_seconds": self.seconds,
        }

    @property
    def ranking(self) -> float:
        """The value that ranks checkpoints; lower is better."""
        return self.evaluation.ranking

    @property
    def samples(self) -> Iterator[dict[str, Any]]:
        """The lines of samples.jsonl, without the step; `divergence` is the mean per token of the answer."""
        sums_B = self.evaluation.sums
        counts_B = self.evaluation.counts
        for row, (prompt, answer) in enumerate(zip(self.prompts, self.answers, strict=True)):
            yield {"prompt": prompt, "answer": answer, "divergence": float(sums_B[row] / counts_B[row])}

    def __str__(self) -> str:
        """Format the divergence and its standard error, as `divergence 0.1470 +- 0.0068 (32 prompts)`."""
        return f"divergence {self.evaluation} ({len(self.answers)} prompts)"


@dataclass(frozen=True)
class HeldOutDivergence:
    """An evaluator: the divergence per token on answers to held-out prompts, the validation split of `Watch.data`.

    The last evaluation uses all prompts, earlier evaluations up to `train.eval_windows` (0: all). The answers are drawn at
    temperature 1, with the same random key in every evaluation.
    """

    ranks_by: ClassVar[str] = "loss"

    def __call__(self, program: Program, params: Any, watch: Watch) -> DivergenceResult | None:
        """Answer the prompts (`answers_to`), and compare the models on the answers."""
        began = time.perf_counter()
        config = program.config
        prompts = held_out_prompts(config, watch)
        key = named_key(config.train.seed, "held-out answers")
        answers = answers_to(prompts, program, params, watch, key)
        if answers is None:
            return None

        size = config.train.eval_batch_size or config.rollout_answers
        parts = []
        for first in range(0, len(prompts), size):
            part = slice(first, first + size)
            parts.append(_sums(program, params, prompts[part], answers[part]))
        sums: dict[str, np.ndarray] = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)

        tokens_B = sums["answer_tokens"]
        shared = slice(config.train.eval_windows or None)  # the prompts of all evaluations of a run
        result = summarize(sums["loss"], tokens_B, shared)
        tokens = float(tokens_B.sum())
        others = {name: float(sums[name].sum()) / tokens for name in ("kl", "entropy")}
        texts = [answer.text for answer in answers]
        originals = [prompt.prompt for prompt in prompts]
        return DivergenceResult(result, others, texts, originals, time.perf_counter() - began)


def _sums(
    program: Program, params: Any, prompts: Sequence[Prompt], answers: Sequence[Generation]
) -> dict[str, np.ndarray]:
    """Return the sums of the objective over the tokens of each answer, `[B]`, keyed by name, on the host."""
    rows = len(prompts)
    batch = rollout_batch(program.config, prompts, answers, None, {})
    batch["weight"] = np.ones(rows, np.float32)
    sums = program.sums(params, program.put(batch))
    by_name = {"loss": sums.loss_B, **sums.others}
    return {name: np.asarray(x_B)[:rows] for name, x_B in by_name.items()}
