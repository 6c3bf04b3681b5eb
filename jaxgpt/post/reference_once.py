"""Runs that compute the log probabilities of their reference before training, which then needs no reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from jaxgpt.checkpoint.info import Info
from jaxgpt.config import Config
from jaxgpt.data import Batches, Data, Split, Windows
from jaxgpt.parallel.rows import row_spec
from jaxgpt.post.reference import MicrobatchLogP, microbatches_of
from jaxgpt.post.referenced_pairs import ReferencedPairs, without_log_p
from jaxgpt.progress import NO_PROGRESS, Progress
from jaxgpt.train.step import TrainState
from jaxgpt.trainer.evaluation import evaluate
from jaxgpt.trainer.evaluators import Watch
from jaxgpt.trainer.feed import DataFeed, Feed, FeedOfSettings
from jaxgpt.trainer.mean_loss import Evaluation
from jaxgpt.trainer.program import Program


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


class ReferenceOnce(FeedOfSettings):
    """The build, feed and evaluator of a run that computes the log probabilities of its reference before training.

    `build` reads the reference onto the devices. The object itself is the feed (`Start.feed`): a call computes the log
    probabilities of the pairs that the run uses, before the state of the run exists, and deletes the reference. With
    adapters, the reference is their base, which training keeps.

    Pairs are computed in microbatches, in the order of their first use in the run (`used_microbatches`). If the
    microbatches are the same, a resumed run computes bit-for-bit equal values. After a signal, the run stops at the next
    microbatch, and a resumed run computes all microbatches again.

    Args:
        build: function from a config to a program, `post.start.build_program`.
        progress: called with the number of computed pairs and the total.

    Attributes:
        val: held-out pairs, after a call without an interruption.
    """

    def __init__(self, build: Callable[..., Program], progress: Progress = NO_PROGRESS) -> None:
        self._build = build
        self._progress = progress
        self._reference: Any = None
        self.val: ReferencedPairs | None = None

    def build(self, config: Config, frozen: Any = None, **parts: Any) -> Program:
        """Build the program of a config, and read the reference; arguments as for `trainer.build.build`."""
        if config.lora.rank:
            program = self._build(config, frozen=frozen, **parts)
            self._reference = program.reference
            return program

        program = self._build(config, **parts)
        arrays = frozen(program.place) if callable(frozen) else frozen
        self._reference = program.put_params(arrays)
        return program

    def __call__(self, program: Program, data: Data, last: Info | None) -> Feed:
        """Compute the log probabilities of the pairs of a run, and return its batches."""
        rows = program.microbatches.rows
        feed = PairFeed(program, data, last)
        train = used_microbatches(feed.batches, program.config, last, rows)
        val = microbatches_of(held_out_starts(data.val, program.config), rows)

        total = sum(map(len, [*train, *val]))
        log_p = MicrobatchLogP(program, self._reference, total, self._progress)
        feed.pairs = log_p.compute(data.train, train)
        self.val = None
        if feed.pairs is not None:
            self.val = log_p.compute(data.val, val)
        feed.interrupted = self.val is None
        self._reference = None
        return feed


@dataclass(frozen=True)
class ReferencedLoss:
    """The evaluator of a run that computes its reference once: like `ValidationLoss`, but on the held-out pairs of the feed."""

    once: ReferenceOnce
    ranks_by: ClassVar[str] = "loss"

    def __call__(self, program: Program, params: Any, watch: Watch) -> Evaluation | None:
        """Compute the loss."""
        pairs = self.once.val
        if pairs is None:  # interrupted
            return None
        result = evaluate(program, params, pairs, watch)
        if result is None or result.rows is None:
            return result
        # The windows of the pairs identify the rows, regardless of the reference.
        return result._replace(rows=replace(result.rows, split=pairs.pairs))


def held_out_starts(val: Split, config: Config) -> np.ndarray:
    """Return the starts of the rows of an evaluation of all held-out pairs, int64."""
    return np.asarray(val.eval_starts(config.window, max(config.data.stride, config.window)))


def used_microbatches(batches: Batches, config: Config, last: Info | None, rows: int) -> list[np.ndarray]:
    """Return the starts of the rows of training, in microbatches of `rows`.

    The microbatches have the pairs in the order of their first use since step 0, so that a resumed run has the same
    microbatches. If the run has changed its batch size, or its mixtures follow a schedule (`@TOKENS`), the order begins at
    the checkpoint. Microbatches that no step after the checkpoint uses are omitted.

    Args:
        batches: batches of the run.
        config: settings of the run.
        last: the checkpoint to continue from; None: a new run.
        rows: number of pairs of a microbatch.
    """
    step = last.step if last else 0
    end = config.train.steps
    has_changed = batches.first != 0 or len(config.data.phases) > 1
    order = first_uses(batches, range(step if has_changed else 0, end))
    later = first_uses(batches, range(step, end))
    return [starts for starts in microbatches_of(order, rows) if np.isin(starts, later).any()]


def first_uses(batches: Batches, steps: range) -> np.ndarray:
    """Return the starts of the rows of these steps, int64, in the order of their first use."""
    every = batches.split.window_count(batches.block_size)
    starts: dict[int, None] = {}
    for step in steps:
        starts.update(dict.fromkeys(batches.at(step).starts_B.tolist()))
        if len(starts) == every:
            break
    return np.array([*starts], np.int64)
