"""loss.png and baselines.json of a run, written in the background while it trains."""

from __future__ import annotations

import contextlib
import io
import json
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
from jaxgpt.files import read_json, write_atomically
from jaxgpt.trainer.metrics import read_metrics

WAIT = 10.0  # seconds to wait for the baselines at the end of a run


class LossPlot:
    """Keep loss.png up to date in a thread, so that training does not wait for matplotlib.

    Args:
        run: the run.
        title: its name in the plot.
        failed: called in the thread with the error if the plot cannot be drawn. Training continues.
    """

    def __init__(self, run: Run, title: str, failed: Callable[[Exception], None]) -> None:
        self.run, self.title, self.failed = run, title, failed
        self._drawn = 0  # bytes of the metrics file in the last plot
        self._thread: threading.Thread | None = None
        # The first import of matplotlib on a machine scans all fonts and logs a message.
        logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

    def update(self) -> None:
        """Draw the plot in the thread. If it is still drawing, the next update includes the new lines."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._draw, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Draw the final plot."""
        if self._thread is not None:
            self._thread.join()
        self._draw()

    def _draw(self) -> None:
        try:
            size = self.run.metrics.stat().st_size
            if size != self._drawn:
                plot_losses(self.run, self.title)
                self._drawn = size
        except Exception as e:
            self.failed(e)


def plot_losses(run: Run, title: str) -> None:
    """Draw the losses of a run and the baselines of its data as loss.png."""
    from jaxgpt.study.plot import losses

    png = io.BytesIO()
    figure = losses({title: list(read_metrics(run.metrics))}, "step", baselines=read_baselines(run.baselines))
    figure.savefig(png, dpi=120, format="png")
    write_atomically(run.plot, png.getvalue())


class Baselines:
    """Compute the baselines of a run in a thread and write them to a file, unless the file exists.

    Args:
        data: data of the run.
        path: the file to write.
        failed: called in the thread with the error if the file cannot be written. Training continues.
    """

    def __init__(self, data: Data, path: Path, failed: Callable[[Exception], None]) -> None:
        self.data, self.path, self.failed = data, path, failed
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, once."""
        if self._thread is None and not self.path.exists():
            self._thread = threading.Thread(target=self._compute, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait for the thread, at most `WAIT` seconds. A resumed run computes missing baselines."""
        if self._thread is not None:
            self._thread.join(WAIT)

    def _compute(self) -> None:
        if sys.platform.startswith("linux"):  # a thread can yield the processor to training
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        from jaxgpt.report.baselines import baselines

        data = self.data
        try:
            with contextlib.suppress(UserError):  # an id outside the vocabulary, which training reports
                if found := baselines(data):
                    write_atomically(self.path, json.dumps(found | {"held_out": data.held_out}, indent=2) + "\n")
        except Exception as e:
            self.failed(e)


def read_baselines(path: Path) -> dict[str, float]:
    """Read the baselines of a run in nats per token, by name; {} if the file is missing or damaged."""
    with contextlib.suppress(UserError, OSError):
        losses = read_json(path).get("losses")
        if isinstance(losses, dict):
            return {n: float(loss) for n, loss in losses.items() if type(loss) in (int, float) and math.isfinite(loss)}
    return {}
