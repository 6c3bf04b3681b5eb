"""The progress line of a training run: the step, its metrics, and the stage between steps."""

from __future__ import annotations

from collections.abc import Mapping

from jaxgpt.progress import Progress, duration


class ProgressLine:
    """The progress of a training run; `str` formats it as one line. A thread can display it while the run changes it.

    Attributes:
        step: number of steps taken.
        total: number of steps of the run; 0: not known yet.
        metrics: metrics of the last step, as for `Listener.progress`; {}: no step was taken.
        stage: stage between steps, such as an evaluation; None: steps are taken.
    """

    def __init__(self) -> None:
        self.step = 0
        self.total = 0
        self.metrics: Mapping[str, float] = {}
        self.stage: Progress | None = Progress("starting")

    def __str__(self) -> str:
        """Format step, loss, accuracy or reward; then the stage or, without a stage, learning rate, MFU, speed, time left."""
        # Read these once, because the training thread may replace them meanwhile.
        metrics = self.metrics
        stage = self.stage
        parts = []
        if self.total:
            parts.append(f"step {self.step:>5}/{self.total}")
        if metrics:
            parts.append(f"loss {metrics['loss']:.4f}")
        for name in ("accuracy", "reward"):
            if name in metrics:
                parts.append(f"{name} {metrics[name]:.2f}")
        if stage:
            return "  ".join([*parts, str(stage)])

        if "lr" in metrics:
            parts.append(f"lr {metrics['lr']:.2e}")
        if "mfu" in metrics:
            parts.append(f"mfu {metrics['mfu']:.0%}")
        if "tokens_per_second" in metrics:
            parts.append(f"{metrics['tokens_per_second']:,.0f} tok/s")
            parts.append(f"{duration(metrics['seconds_left'])} left")
        return "  ".join(parts)
