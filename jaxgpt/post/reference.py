"""Log probabilities of preference pairs under the reference, computed before training, which then needs no reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import numpy as np

from jaxgpt.checkpoint.info import Info
from jaxgpt.config import Config
from jaxgpt.data import Batches, Data, Split, Windows
from jaxgpt.parallel.processes import Poll
from jaxgpt.parallel.rows import row_spec
from jaxgpt.post.preference import pair_log_p
from jaxgpt.progress import NO_PROGRESS, Progress
from jaxgpt.signals import is_stop_requested
from jaxgpt.train.step import TrainState
from jaxgpt.trainer.evaluation import evaluate
from jaxgpt.trainer.evaluators import Watch
from jaxgpt.trainer.feed import DataFeed, Feed, FeedOfSettings
from jaxgpt.trainer.mean_loss import Evaluation
from jaxgpt.trainer.program import Program


def is_once(config: Config) -> bool:
    """Return whether the reference of pairs is computed once per pair, before training (`post.reference_log_p`)."""
    post = config.post
    if not (post.is_preference and post.has_reference):
        return False
    if post.reference_log_p == "auto":
        return not config.lora.rank
    return post.reference_log_p == "once"


@dataclass(frozen=True)
class ReferencedPairs:
    """Preference pairs with the log probabilities of their answers under the reference, as a split.

    Attributes:
        pairs: the split of preference pairs.
        starts_N: starts of the rows with log probabilities, ascending.
        log_p_N2: log probabilities of the chosen and the rejected answer, float32.
    """

    pairs: Split
    starts_N: np.ndarray
    log_p_N2: np.ndarray
    has_documents: ClassVar[bool] = True
    indexed: ClassVar[bool] = True

    def __len__(self) -> int:
        """Return the number of ids."""
        return len(self.pairs)

    def take(self, start: int, n: int) -> np.ndarray:
        """Return a copy of n ids from index `start`, int32."""
        return self.pairs.take(start, n)

    def starts(self, block_size: int) -> int:
        """Count the possible starts of rows."""
        return self.pairs.starts(block_size)

    def eval_starts(self, block_size: int, stride: int) -> Sequence[int] | np.ndarray:
        """Return the starts of the evaluated rows."""
        return self.pairs.eval_starts(block_size, stride)

    def windows(self, starts: np.ndarray, block_size: int) -> dict[str, np.ndarray]:
        """Read rows of `post.preference.preference_objective`: `windows` `[B, 2, T, 3]` and `reference_log_p` `[B, 2]`."""
        places = np.searchsorted(self.starts_N, starts)
        assert np.array_equal(self.starts_N[places], starts), "a pair without log probabilities"
        return {"windows": self.pairs.windows(starts, block_size), "reference_log_p": self.log_p_N2[places]}


class PairFeed(DataFeed):
    """The batches of `DataFeed` on preference pairs, with the log probabilities of the reference.

    Attributes:
        pairs: pairs of the rows; None: log probabilities are not yet computed.
        interrupted: whether a signal has stopped their computation.
    """

    def __init__(self, program: Program, data: Data, last: Info | None) -> None:
        super().__init__(program, data, last)
        self.pairs: ReferencedPairs | None = None
        none = ReferencedPairs(data.train, np.zeros(0, np.int64), np.zeros((0, 2), np.float32))
        self.spec = row_spec(Windows(none, np.zeros(0, np.int64), program.config.window))

    def at(self, steps: range, state: TrainState | None = None) -> Sequence[Any]:
        """Return the batch of each step."""
        assert self.pairs is not None
        return [replace(self.batches.at(step), split=self.pairs) for step in steps]


class ReferenceOnce(FeedOfSettings):
    """The build, feed and evaluator of a run that computes the log probabilities of its reference before training.

    `build` reads the reference onto the devices. The value itself is the feed (`Start.feed`): a call computes the log
    probabilities of the pairs that the run uses, before the state of the run exists, and deletes the reference. With adapters,
    the reference is their base, which training keeps.

    Pairs are computed in the order of their first use in the run, in microbatches, so a resumed run has the same bits. After a
    signal, the run stops at the next microbatch, and a resumed run computes all of them.

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
        config = program.config
        T = config.window
        rows = program.microbatches.rows
        feed = PairFeed(program, data, last)

        # The microbatches have the pairs in the order of their first use since step 0, which a resume does not change. If it
        # changes the batch size or the mixture, the order begins at the checkpoint. Microbatches that no step after the
        # checkpoint uses are omitted.
        step = last.step if last else 0
        end = config.train.steps
        has_changed = feed.batches.first != 0 or len(config.data.phases) > 1
        order = first_uses(feed.batches, range(step if has_changed else 0, end))
        later = first_uses(feed.batches, range(step, end))
        train = [each for each in microbatches_of(order, rows) if np.isin(each, later).any()]
        val = microbatches_of(np.asarray(data.val.eval_starts(T, max(config.data.stride, T))), rows)

        log_p = partial(reference_log_p, program.model.apply, config.train.loss_chunk)
        poll = Poll(program.mesh, lag=0)
        total = sum(map(len, [*train, *val]))
        done = 0

        def referenced(pairs: Split, parts: Sequence[np.ndarray]) -> ReferencedPairs | None:
            """Compute the log probabilities of these starts of rows; return None if a signal requests a stop."""
            nonlocal done
            found = [np.zeros((0, 2), np.float32)]
            for starts in parts:
                feed.interrupted = feed.interrupted or bool(poll.ask(is_stop_requested()))
                if feed.interrupted:
                    return None
                self._progress(done, total)
                full = starts[np.minimum(np.arange(rows), len(starts) - 1)]  # one shape: the last pair is repeated
                log_p_B2 = program.call(log_p, self._reference, Windows(pairs, full, T))
                found.append(np.asarray(log_p_B2)[: len(starts)])
                done += len(starts)
            starts_N = np.concatenate([np.zeros(0, np.int64), *parts])
            ascending = np.argsort(starts_N)
            return ReferencedPairs(pairs, starts_N[ascending], np.concatenate(found)[ascending])

        feed.pairs = referenced(data.train, train)
        self.val = referenced(data.val, val)
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


def reference_log_p(apply_fn: Callable[..., Any], chunk: int, weights: Any, windows_B2T3: jax.Array) -> jax.Array:
    """Compute the log probabilities of both answers of each pair, float32 `[B, 2]`; arguments as for `pair_log_p`."""
    return pair_log_p(apply_fn, weights, windows_B2T3, chunk=chunk).log_p_B2


def first_uses(batches: Batches, steps: range) -> np.ndarray:
    """Return the starts of the rows of these steps, int64, in the order of their first use."""
    every = batches.split.starts(batches.block_size)
    starts: dict[int, None] = {}
    for step in steps:
        starts.update(dict.fromkeys(batches.at(step).starts_B.tolist()))
        if len(starts) == every:
            break
    return np.array([*starts], np.int64)


def microbatches_of(starts: np.ndarray, rows: int) -> list[np.ndarray]:
    """Divide starts into microbatches of `rows`; the last one may be smaller."""
    return [starts[first : first + rows] for first in range(0, len(starts), rows)]
