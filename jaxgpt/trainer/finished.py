"""The end of a run: whether it is finished, and the checkpoints that a finished run keeps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from jaxgpt.checkpoint.index import checkpoints
from jaxgpt.checkpoint.intact import find_damage
from jaxgpt.checkpoint.retention import prune
from jaxgpt.checkpoint.run import Run
from jaxgpt.config import Config
from jaxgpt.errors import UserError
from jaxgpt.locks import sole_writer
from jaxgpt.parallel.processes import is_leader
from jaxgpt.trainer.best import evaluations_since_best, is_out_of_patience
from jaxgpt.trainer.resume import check_resume


def why_finished(run: Run, config: Config) -> str:
    """Return why a run is finished, or "" if steps remain or the last checkpoint is damaged.

    With `train.epochs`, the result is "", because the number of steps depends on the data. It is also "" if the last
    checkpoint still needs its evaluation.

    Raises:
        UserError: as in `check_resume`.
    """
    step, last = max(checkpoints(run.checkpoints).items(), default=(0, None))
    if last is None:
        return ""
    check_resume(last.config(), config, step)
    train = config.train
    if train.epochs or last.ranking is None:
        return ""
    if step >= train.steps:
        reason = f"already at {train.steps}/{train.steps}: {run.path} is finished; raise --train.steps to train longer"
    elif is_out_of_patience(evaluations_since_best(last), train):
        early = f"stopped early at {step}/{train.steps}: {run.path} is finished"
        reason = f"{early} (--train.patience {train.patience}); raise --train.patience to train longer"
    else:
        return ""
    is_damaged = bool(find_damage(run.checkpoints / str(step)))
    return "" if is_damaged else reason


def prune_finished(run: Run, note: Callable[[str], None]) -> None:
    """Delete checkpoints that a finished run does not keep, left by a kill at the end of the run."""
    if not is_leader():
        return
    with suppress(UserError), sole_writer(run.path):  # error if a different process still writes
        _, last = max(checkpoints(run.checkpoints).items())
        not_deleted = prune(run.checkpoints, last.config().train)
        if not_deleted:
            note(not_deleted)
