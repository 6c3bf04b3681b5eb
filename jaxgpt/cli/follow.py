"""jaxgpt follow RUN --to TRACKER"""

from __future__ import annotations

from pathlib import Path

from jaxgpt.cli.console import note
from jaxgpt.errors import plural


def follow(run: str, /, *, to: str) -> int:
    """Send the metrics of a run to a tracker, while the run trains or afterwards.

    The command ends when the run has ended and all lines of its metrics.jsonl have been sent. If the command is killed, run
    it again to send the remaining lines.

    jaxgpt follow runs/shakespeare --to tensorboard
    jaxgpt follow runs/shakespeare --to wandb

    Args:
        run: run directory
        to: tensorboard, wandb, mlflow or trackio
    """
    from jaxgpt.follow.following import follow as follow_run
    from jaxgpt.follow.trackers import tracker_of

    tracker = tracker_of(to)
    followed = follow_run(Path(run), tracker, note)
    print(f"sent {plural(followed.rows, 'line')} to {to}; the run is {followed.status}")
    if followed.place:
        print(f"see: {followed.place}")
    return 0
