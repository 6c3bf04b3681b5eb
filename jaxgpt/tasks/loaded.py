"""Loaded tasks of lm-evaluation-harness: evaluate a model on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxgpt.errors import UserError, one_line
from jaxgpt.lm import LM
from jaxgpt.progress import NO_PROGRESS, Progress
from jaxgpt.tasks.quiet import FEWSHOT_SEED, quiet
from jaxgpt.tasks.results import TaskResult, results_of

BOOTSTRAPS = 1000  # resamples for standard errors without a formula, such as the error of a perplexity


class Interrupted(Exception):
    """The caller ended an evaluation."""


@dataclass(frozen=True)
class Tasks:
    """Loaded tasks, which can be evaluated several times.

    Attributes:
        names: names of tasks, groups and files, without patterns.
        loaded: the harness' own `tasks`, `groups` and `group_map`, each keyed by name.
    """

    names: tuple[str, ...]
    loaded: Mapping[str, Mapping[str, Any]]

    def evaluate(
        self,
        lm: LM,
        *,
        limit: int | None = None,
        chat_template: bool = False,
        progress: Progress = NO_PROGRESS,
    ) -> list[TaskResult]:
        """Evaluate a model, in memory.

        Args:
            lm: model; its weights may be on a mesh.
            limit: maximum number of samples of each task; None: all.
            chat_template: render the prompts with the model's chat template, and examples as earlier turns.
            progress: called with the number of finished requests of a kind, and the total.

        Raises:
            UserError: if a task does not fit the model, or the harness rejects it.
        """
        return results_of(self.details(lm, limit=limit, chat_template=chat_template, progress=progress))

    def details(
        self,
        lm: LM,
        *,
        limit: int | None = None,
        chat_template: bool = False,
        progress: Progress = NO_PROGRESS,
        samples: bool = False,
    ) -> Mapping[str, Any]:
        """Return the results of the harness' own `evaluate`; with `samples`, also all prompts and answers."""
        from lm_eval.evaluator import evaluate

        from jaxgpt.tasks.harness import TaskModel

        for task in self.loaded["tasks"].values():
            task.set_fewshot_seed(seed=FEWSHOT_SEED)  # every evaluation has the same examples
        try:
            with quiet():
                return evaluate(
                    TaskModel(lm, progress),
                    self.loaded,
                    limit=limit,
                    bootstrap_iters=BOOTSTRAPS,
                    log_samples=samples,
                    apply_chat_template=chat_template,
                    fewshot_as_multiturn=chat_template,
                )
        except (UserError, Interrupted, jax.errors.JaxRuntimeError):
            raise
        except Exception as e:  # any error of a task's definition
            raise self._error(e) from e

    def _error(self, e: Exception) -> UserError:
        """Return the error for an exception of the harness during an evaluation."""
        names = ", ".join(self.names)
        if "Sample larger than population" in str(e):  # from `random.sample`, which chooses the examples
            return UserError(f"{names}: a prompt has more examples than the task has samples: lower --shots")
        return UserError(f"lm-evaluation-harness cannot evaluate {names}: {type(e).__name__}: {one_line(e, 300)}")
