"""Runs that compute the log probabilities of their reference before training, which then needs no reference.

Three parts of the training job cooperate, in this order: `BuildBesideReference` reads the reference, `ReferencedFeeds` computes
the log probabilities of the pairs of the run and deletes the reference, and `ReferencedLoss` evaluates the held-out pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from jaxgpt.checkpoint.info import Info
from jaxgpt.config import Config
from jaxgpt.data import Data, Windows
from jaxgpt.parallel.rows import row_spec
from jaxgpt.post.reference import MicrobatchLogP
from jaxgpt.post.referenced_pairs import ReferencedPairs, without_log_p
from jaxgpt.post.used_pairs import held_out_starts, microbatches_of, used_microbatches
from jaxgpt.progress import NO_PROGRESS, Progress
from jaxgpt.train.step import TrainState
from jaxgpt.trainer.evaluation import evaluate
from jaxgpt.trainer.evaluators import Watch
from jaxgpt.trainer.feed import DataFeed, Feed, FeedOfSettings
from jaxgpt.trainer.mean_loss import Evaluation
from jaxgpt.trainer.program import Program


class BuildBesideReference:
    """The build of a run: the reference is read onto the devices, but is not part of the program.

    With adapters, the reference is their base, which is part of the program and stays in memory during training.

    Args:
        build: function from a config to a program, `post.start.build_program`.

    Attributes:
        reference: weights of the reference, after a call; None: no call yet, or taken (`take_reference`).
    """

    def __init__(self, build: Callable[..., Program]) -> None:
        self._build = build
        self.reference: Any = None

    def __call__(self, config: Config, frozen: Any = None, **parts: Any) -> Program:
        """Build the program of a config, and read the reference; arguments as for `trainer.build.build`."""
        if config.lora.rank:
            program = self._build(config, frozen=frozen, **parts)
            self.reference = program.reference
            return program

        program = self._build(config, **parts)
        arrays = frozen(program.place) if callable(frozen) else frozen
        self.reference = program.put_params(arrays)
        return program

    def take_reference(self) -> Any:
        """Return the weights of the reference and forget them, so that the caller's deletion frees their memory."""
        reference = self.reference
        self.reference = None
        return reference


class PairFeed(DataFeed):
    """The batches of `DataFeed` on preference pairs, with the log probabilities of the reference.

    Attributes:
        pairs: pairs of the rows; None: log probabilities are not yet computed, or a signal has stopped their computation.
    """

    def __init__(self, program: Program, data: Data, last: Info | None) -> None:
        super().__init__(program, data, last)
        self.pairs: ReferencedPairs | None = None
        self.spec = row_spec(Windows(without_log_p(data.train), np.zeros(0, np.int64), program.config.window))

    def at(self, steps: range, state: TrainState | None = None) -> Sequence[Any]:
        """Return the batch of each step."""
        assert self.pairs is not None
        return [replace(self.batches.at(step), split=self.pairs) for step in steps]


class ReferencedFeeds(FeedOfSettings):
    """A function that makes the feed of a run (`Start.feed`): it computes the log probabilities of the pairs of the run.

    A call computes these log probabilities before the state of the run exists. When it returns, the memory of the reference
    is freed, except with adapters: their base stays in memory.

    Pairs are computed in microbatches, in the order of their first use in the run (`used_microbatches`). If the
    microbatches are the same, a resumed run computes bit-for-bit equal values. After a signal, the run stops at the next
    microbatch, and a resumed run computes all microbatches again.

    Args:
        build: the build of the run, which holds the reference.
        progress: called with the number of computed pairs and the total.

    Attributes:
        val: held-out pairs, after a call without an interruption.
    """

    def __init__(self, build: BuildBesideReference, progress: Progress = NO_PROGRESS) -> None:
        self._build = build
        self._progress = progress
        self.val: ReferencedPairs | None = None

    def __call__(self, program: Program, data: Data, last: Info | None) -> Feed:
        """Compute the log probabilities of the pairs of a run, and return its batches."""
        rows = program.batches.microbatches.rows
        feed = PairFeed(program, data, last)
        train = used_microbatches(feed.batches, program.config, last, rows)
        val = microbatches_of(held_out_starts(data.val, program.config), rows)

        total = sum(map(len, [*train, *val]))
        log_p = MicrobatchLogP(program, self._build.take_reference(), total, self._progress)
        feed.pairs = log_p.compute(data.train, train)
        self.val = None
        if feed.pairs is not None:
            self.val = log_p.compute(data.val, val)
        feed.interrupted = self.val is None
        return feed


@dataclass(frozen=True)
class ReferencedLoss:
    """The evaluator of a run that computes its reference once: like `ValidationLoss`, but on the held-out pairs of the feed."""

    feeds: ReferencedFeeds
    ranks_by: ClassVar[str] = "loss"

    def __call__(self, program: Program, params: Any, watch: Watch) -> Evaluation | None:
        """Compute the loss."""
        pairs = self.feeds.val
        if pairs is None:  # interrupted
            return None
        result = evaluate(program, params, pairs, watch)
        if result is None or result.rows is None:
            return result
        # The windows of the pairs identify the rows, regardless of the reference.
        return result._replace(rows=replace(result.rows, split=pairs.pairs))
