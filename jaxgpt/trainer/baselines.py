"""baselines.json: the losses to compare a run with, computed in the background when it starts."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from jaxgpt.config import UserError
from jaxgpt.data import Dataset
from jaxgpt.files import parse_json, read_bytes, write_atomically

WAIT = 10.0  # seconds to wait for the thread at the end of a run


class Baselines:
    """Compute the baselines of a run and write them to a file, in another thread, unless the file exists.

    On Linux the thread yields the processor to training.

    Args:
        data: of the run.
        path: the file to write.
        failed: called, in that thread, with the error if the file cannot be written. Training continues.
    """

    def __init__(self, data: Dataset, path: Path, failed: Callable[[Exception], None]) -> None:
        self.data, self.path, self.failed = data, path, failed
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, once."""
        if self._thread is None and not self.path.exists():
            self._thread = threading.Thread(target=self._compute, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait for the thread, at most `WAIT` seconds. A resumed run computes what is missing."""
        if self._thread is not None:
            self._thread.join(WAIT)

    def _compute(self) -> None:
        if sys.platform.startswith("linux"):
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        from jaxgpt.data.report import baselines

        data = self.data
        try:
            with contextlib.suppress(UserError):  # an id outside the vocabulary, which training reports
                if found := baselines(data.train, data.val, data.tokenizer.vocab_size):
                    write_atomically(self.path, json.dumps(found | {"held_out": data.held_out}, indent=2) + "\n")
        except Exception as e:
            self.failed(e)


def read_baselines(path: Path) -> dict[str, float]:
    """Read the baselines of a run in nats per token, by name; {} if the file is missing or damaged."""
    with contextlib.suppress(UserError, OSError):
        found = parse_json(read_bytes(path), str(path))
        losses = found.get("losses") if isinstance(found, dict) else None
        if isinstance(losses, dict):
            return {
                name: float(loss) for name, loss in losses.items() if type(loss) in (int, float) and math.isfinite(loss)
            }
    return {}
