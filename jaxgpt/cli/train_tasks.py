"""The options of `jaxgpt train` for tasks of lm-evaluation-harness, which are evaluated during a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from jaxgpt.cli.checks import check_unused
from jaxgpt.errors import UserError

if TYPE_CHECKING:
    from jaxgpt.trainer.start import Start


class TrainTasks(NamedTuple):
    """The options --tasks, --tasks-every, --tasks-limit and --tasks-path.

    Attributes:
        names: names or YAML files, separated by commas; "": no tasks.
        every: steps between evaluations; 0: only after the last step.
        limit: number of samples of each task; 0: all.
        path: directory with YAML files of further tasks.
    """

    names: str
    every: int
    limit: int
    path: str

    def check(self) -> None:
        """Raise `UserError` if an option is given without tasks."""
        if not self.names:
            check_unused(self._details, "without --tasks")

    def words(self) -> list[str]:
        """Return the options that are set, as on a command line."""
        details = [f"{option}={value}" for option, value in self._details.items() if value]
        return [f"--tasks={self.names}", *details]

    def added_to(self, start: Start) -> Start:
        """Load the tasks, and return a training job that also evaluates them.

        Raises:
            UserError: if a task does not exist, or `every` is not a multiple of `train.eval_every`.
        """
        from jaxgpt.tasks.evaluator import TaskScores
        from jaxgpt.tasks.load import open_tasks, split_names
        from jaxgpt.trainer.evaluation import ValidationLoss
        from jaxgpt.trainer.evaluators import Every

        eval_every = start.config.train.eval_every
        if self.every % eval_every:
            raise UserError(
                f"--tasks-every {self.every} is not a multiple of train.eval_every {eval_every}: change one of them"
            )
        scores = TaskScores(open_tasks(split_names(self.names), self.path), self.limit or None)
        evaluators = start.evaluators or (ValidationLoss(),)
        return start._replace(evaluators=(*evaluators, Every(scores, self.every)))

    @property
    def _details(self) -> dict[str, int | str]:
        """The values of all options except --tasks."""
        return {"--tasks-every": self.every, "--tasks-limit": self.limit, "--tasks-path": self.path}
