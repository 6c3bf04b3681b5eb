"""`jaxgpt sample --check-memorized`: the spans of samples that occur verbatim in the training data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxgpt.cli.console import progress
from jaxgpt.cli.output import aligned
from jaxgpt.errors import UserError

if TYPE_CHECKING:
    from jaxgpt.data import Data
    from jaxgpt.lm import LM, Generation
    from jaxgpt.report.training_spans import TrainingSpans


def open_training_data(lm: LM, run: str, checkpoint: str) -> Data:
    """Open the data that a run has used up to a checkpoint.

    Raises:
        UserError: if the run has no record of its data, or the data have changed since.
    """
    from jaxgpt.checkpoint.data import open_run_data
    from jaxgpt.checkpoint.index import info_of
    from jaxgpt.checkpoint.run import Run

    data = lm.config.data
    if data.dataset == "none" and not (data.path or data.mix):
        raise UserError(f"--check-memorized does not apply to {run}: the run has no record of its training data")
    trained = Run(Path(run))
    info = info_of(trained, checkpoint)
    config = replace(lm.config, data=data.with_mixtures_before(info.tokens))
    with progress("tokenizing") as activity:
        _, opened, change = open_run_data(trained, info, config, lm.tokenizer, activity)
    if change:
        raise UserError(f"{change}; restore it")
    return opened


def find_in_training(samples: Sequence[Generation], data: Data) -> TrainingSpans:
    """Find the longest span of each sample in the training data."""
    from jaxgpt.report.training_spans import find_memorized

    with progress("searching the training data") as activity:
        return find_memorized([sample.ids for sample in samples], data, activity)


def memorized_text(found: TrainingSpans) -> str:
    """Describe the longest span of each sample, and the median of validation texts, if any."""
    from jaxgpt.report.training_spans import PIECES

    lines = []
    for number, span in enumerate(found.spans, 1):
        size = f"{span.tokens:,} of {span.of:,} tokens, {span.characters:,} characters"
        lines.append(
            f"longest span of sample {number} in the training data: {size}, at {span.location or 'no location'}"
        )
        texts = {"  text": span.text, "  before": span.before, "  after": span.after}
        lines.append(aligned({label: repr(text) for label, text in texts.items()}))
    if found.validation is not None:
        length = f"{found.validation:g} tokens"
        lines.append(f"median longest span of {PIECES} validation texts as long as the longest sample: {length}")
    return "\n".join(lines)
