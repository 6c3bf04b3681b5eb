"""loss.png and baselines.json of a run, written in the background while it trains."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from jaxgpt.checkpoint.run import Run
from jaxgpt.data import Data
from jaxgpt.errors import UserError
from jaxgpt.files import read_json, write_atomically, write_json
from jaxgpt.trainer.metrics import read_metrics


class Background:
    """Run a function in a thread, so that training does not wait for it.

    Args:
        work: the function.
        failed: called in the thread with the error if it fails. Training continues.
    """

    def __init__(self, work: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        self._work, self._failed = work, failed
        self._asked = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Run the function in the thread; if it is running, run it once more."""
        self._asked = True
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def close(self, seconds: float | None = None) -> None:
        """Wait for the thread, at most some seconds; None: until it has finished."""
        if self._thread is not None:
            self._thread.join(seconds)
            if not self._thread.is_alive():
                self._run()  # if the last request came when the thread was about to end

    def _run(self) -> None:
        while self._asked:
            self._asked = False
            try:
                self._work()
            except Exception as e:
                self._failed(e)


def plot_losses(run: Run, title: str) -> None:
    """Draw the losses of a run and the baselines of its data as loss.png."""
    # The first import of matplotlib on a machine scans all fonts and logs a message.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    from jaxgpt.study.plot import losses

    png = io.BytesIO()
    figure = losses({title: list(read_metrics(run.metrics))}, "step", baselines=read_baselines(run.baselines))
    figure.savefig(png, dpi=120, format="png")
    write_atomically(run.plot, png.getvalue())


def write_baselines(data: Data, path: Path) -> None:
    """Compute the baselines of the data of a run and write them to a file, unless it exists."""
    if path.exists():
        return
    if sys.platform.startswith("linux"):  # a thread can yield the processor to training
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    from jaxgpt.report.baselines import baselines

    with contextlib.suppress(UserError):  # an id outside the vocabulary, which training reports
        if found := baselines(data):
            write_json(path, found | {"held_out": data.held_out})


def read_baselines(path: Path) -> dict[str, float]:
    """Read the baselines of a run in nats per token, by name; {} if the file is missing or damaged."""
    with contextlib.suppress(UserError, OSError):
        losses = read_json(path).get("losses")
        if isinstance(losses, dict):
            return {n: float(loss) for n, loss in losses.items() if type(loss) in (int, float) and math.isfinite(loss)}
    return {}
