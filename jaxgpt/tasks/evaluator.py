"""Tasks during training: an evaluator of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, NamedTuple

from jaxgpt.config import LoraConfig
from jaxgpt.errors import UserError
from jaxgpt.lm import LM
from jaxgpt.model.scan import per_layer
from jaxgpt.progress import Progress
from jaxgpt.tasks.loaded import Interrupted, Tasks
from jaxgpt.tasks.results import TaskResult, number
from jaxgpt.trainer.evaluators import Watch
from jaxgpt.trainer.program import Program


class TaskMetrics(NamedTuple):
    """The result of an evaluation of tasks."""

    results: tuple[TaskResult, ...]

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics, `TASK/METRIC`, and their standard errors, `TASK/METRIC_stderr`."""
        metrics = {}
        for result in self.results:
            name = f"{result.task}/{result.metric}"
            metrics[name] = result.value
            if result.stderr is not None:
                metrics[f"{name}_stderr"] = result.stderr
        return metrics

    @property
    def ranking(self) -> float:
        """The negative mean of the metrics that are better if they are higher; lower is better.

        Without such metrics, the mean of the metrics that are better if they are lower, such as perplexities; NaN (no rank) if
        no metric has a known direction.
        """
        scores = [result.value for result in self.results if result.higher_is_better]
        if scores:
            return -mean(scores)
        losses = [result.value for result in self.results if result.higher_is_better is False]  # None: unknown
        return mean(losses) if losses else math.nan

    def __str__(self) -> str:
        """Format the metrics as `hellaswag acc 0.3120 +- 0.0046, hellaswag acc_norm 0.3380 +- 0.0047`."""
        parts = []
        for result in self.results:
            error = "" if result.stderr is None else f" +- {number(result.stderr)}"
            parts.append(f"{result.task} {result.metric} {number(result.value)}{error}")
        return ", ".join(parts)


@dataclass(frozen=True)
class TaskScores:
    """An evaluator: the metrics of tasks.

    Attributes:
        tasks: the loaded tasks.
        limit: maximum number of samples of each task; None: all.
        chat_template: render the prompts with the model's chat template.
    """

    tasks: Tasks
    limit: int | None = None
    chat_template: bool = False

    def __call__(self, program: Program, params: Any, watch: Watch) -> TaskMetrics | None:
        """Evaluate the weights where they are, in all processes together; None if interrupted.

        Raises:
            UserError: if a task does not fit the model, or the processes have different requests.
        """
        if watch.data is None:
            raise UserError("tasks need the tokenizer of the run: pass the data of the run in Watch(data=...)")
        config = program.config
        weights = per_layer(program.weights(params), config.model.n_layer)
        without_adapters = replace(config, lora=LoraConfig())  # `program.weights` has merged them
        lm = LM(without_adapters, weights, watch.data.tokenizer)
        progress = _WatchedProgress(watch)
        try:
            results = self.tasks.evaluate(lm, limit=self.limit, chat_template=self.chat_template, progress=progress)
        except Interrupted:
            return None
        return TaskMetrics(tuple(results))


class _WatchedProgress(Progress):
    """Passes on the progress of requests, and ends an evaluation that the run interrupts."""

    def __init__(self, watch: Watch) -> None:
        super().__init__("evaluating")
        self.watch = watch

    def __call__(self, done: int, total: int, detail: str = "") -> None:
        """Report the progress; raise `Interrupted` if the run stops."""
        self.watch.progress(done, total)
        if self.watch.interrupted():
            raise Interrupted
