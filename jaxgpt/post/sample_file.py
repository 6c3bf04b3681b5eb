"""samples.jsonl of a run: the answers of each evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxgpt.atomic import write_atomically
from jaxgpt.checkpoint.index import checkpoints
from jaxgpt.checkpoint.run import Run
from jaxgpt.data import Data
from jaxgpt.directories import SAMPLES
from jaxgpt.parallel.processes import is_leader
from jaxgpt.trainer.evaluators import Result
from jaxgpt.trainer.events import Listener
from jaxgpt.trainer.metrics import parse_line
from jaxgpt.trainer.program import Program


@runtime_checkable
class HasSamples(Protocol):
    """A result of an evaluator that includes the judged answers."""

    @property
    def samples(self) -> Iterable[dict[str, Any]]:
        """The lines of samples.jsonl, without the step."""
        ...


class SampleFile(Listener):
    """Writes the answers of each evaluation, with their rewards or divergences (`HasSamples`), to samples.jsonl in the run."""

    path: Path

    def started(self, program: Program, data: Data, run: Run, step: int) -> None:
        self.path = run.path / SAMPLES
        if not is_leader() or not self.path.is_file():
            return
        # A resumed run repeats the evaluations after its checkpoint, and the evaluation of its checkpoint unless the checkpoint
        # records the result. A killed run may leave an incomplete line.
        last = checkpoints(run.checkpoints).get(step)
        is_evaluated = last is not None and last.ranking is not None
        last_kept = step if is_evaluated else step - 1
        kept = b""
        for line in self.path.read_bytes().splitlines(keepends=True):
            values = parse_line(line)
            if values is not None and values["step"] <= last_kept:
                kept += line
        write_atomically(self.path, kept)

    def evaluated(self, step: int, result: Result) -> None:
        if not isinstance(result, HasSamples) or not is_leader():
            return
        with self.path.open("a", encoding="utf-8") as file:
            for sample in result.samples:
                line = {"step": step, **sample}
                # Messages from Parquet files may have other values, such as times.
                file.write(json.dumps(line, default=repr) + "\n")
