"""An evaluator of on-policy distillation: the divergence from the teacher on answers to the held-out prompts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from jaxgpt.data.prompts import Prompt
from jaxgpt.lm.results import Generation
from jaxgpt.ops.random import named_key
from jaxgpt.post.held_out import answers_to, held_out_batches, held_out_prompts
from jaxgpt.post.rollout_batch import RolloutBatch, rollout_batch
from jaxgpt.trainer.evaluators import Watch
from jaxgpt.trainer.mean_loss import Evaluation, summarize
from jaxgpt.trainer.program import Program

# Sums over tokens to report besides the loss. Other sums of the objective are metrics of whole answers.
OTHERS = ("kl", "entropy")


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

        # Compute the sums of the objective over the tokens of each answer; there is at least one prompt.
        batches = held_out_batches(config, len(prompts))
        sums_of_batches = [_sums(program, params, prompts[batch], answers[batch]) for batch in batches]
        sums: dict[str, np.ndarray] = jax.tree.map(lambda *sums_B: np.concatenate(sums_B), *sums_of_batches)

        # Divide the sums by the number of tokens of all answers; each answer has a token. The first `train.eval_windows`
        # prompts (0: all), which are in every evaluation of the run, rank the checkpoints.
        tokens_B = sums["answer_tokens"]
        tokens = float(tokens_B.sum())
        in_every_evaluation = slice(config.train.eval_windows or None)
        return DivergenceResult(
            evaluation=summarize(sums["loss"], tokens_B, in_every_evaluation),
            others={name: float(sums[name].sum()) / tokens for name in OTHERS},
            answers=[answer.text for answer in answers],
            prompts=[prompt.prompt for prompt in prompts],
            seconds=time.perf_counter() - began,
        )


def _sums(
    program: Program, params: Any, prompts: Sequence[Prompt], answers: Sequence[Generation]
) -> dict[str, np.ndarray]:
    """Return the loss, `answer_tokens` and `OTHERS` of each answer as sums over its tokens, `[B]`, on the host."""
    rows = len(prompts)
    batch: RolloutBatch = {
        **rollout_batch(program.config, prompts, answers),
        "weight": np.ones(rows, np.float32),  # sums of the answers, not shares of a mean
    }
    sums = program.sums(params, program.put(batch))
    by_name = {"loss": sums.loss_B} | {name: sums.others[name] for name in ("answer_tokens", *OTHERS)}
    return {name: np.asarray(x_B)[:rows] for name, x_B in by_name.items()}


class DivergenceResult(NamedTuple):
    """The divergence between student and teacher on the student's answers to the held-out prompts.

    Attributes:
        evaluation: mean divergence per token, its standard error over answers, and the sum of each answer.
        others: means per token of the sums `OTHERS` of the objective.
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
        others = {f"val_{name}": value for name, value in self.others.items()}
        return others | {
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
