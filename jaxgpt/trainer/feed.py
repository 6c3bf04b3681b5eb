"""Feed: the batches of a run, and their preparation ahead of the devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from jaxgpt.checkpoint.info import Info
from jaxgpt.data import Batches, Data, Windows
from jaxgpt.errors import UserError
from jaxgpt.parallel.rows import row_spec
from jaxgpt.train.step import TrainState
from jaxgpt.trainer.prefetch import prefetched
from jaxgpt.trainer.program import Program

# A function from the state before a call to the batches of the call, on the devices.
Ready = Callable[[TrainState], Any]


class Feed(ABC):
    """The batches of a run: a pure function of (seed, step), or of (seed, step, state). A resumed run needs no other state.

    Attributes:
        spec: shapes and dtypes of the rows of a batch, from `row_spec`.
        reads_state: whether `at` reads the state, as for rollouts. If so, batches are not prefetched, and every call takes
            exactly `train.steps_per_call` steps, because all its batches may depend on the state before the call.
        interrupted: whether a signal has interrupted the work of the feed before the first step, equal in all processes; the
            run then takes no step.
    """

    spec: Any
    reads_state: bool = False
    interrupted: bool = False

    @abstractmethod
    def at(self, steps: range, state: TrainState | None) -> Sequence[Any]:
        """Return the batch of each step of a call; `state` is the state before the call if `reads_state`, otherwise None."""


def check_feed(feed: Any) -> Feed:
    """Return a feed; raise `UserError` if it lacks an attribute of `Feed`. `Feed` need not be its base class."""
    missing = [name for name in ("at", "spec", "reads_state", "interrupted") if not hasattr(feed, name)]
    if missing:
        raise UserError(
            f"the feed {type(feed).__name__} has no {', '.join(missing)}: inherit from jaxgpt.trainer.feed.Feed, define "
            "at, and set spec"
        )
    return feed  # type: ignore[no-any-return]


class FeedOfSettings(ABC):
    """A function that makes the feed of a run. The settings determine the feed, so checkpoints do not record its name."""

    @abstractmethod
    def __call__(self, program: Program, data: Data, last: Info | None) -> Feed:
        """Make the feed of a run; `last` is the checkpoint that the run resumes from, or None."""


class DataFeed(Feed):
    """The batches of `data.train`. A run resumed with a different batch size continues with its first unused row."""

    def __init__(self, program: Program, data: Data, last: Info | None) -> None:
        config = program.config
        used = last.tokens // config.row_tokens - last.step * config.train.batch_size if last else 0
        self.batches = Batches.of(config, data.train, used)
        self.spec = row_spec(Windows(data.train, np.zeros(0, np.int64), config.window))

    def at(self, steps: range, state: TrainState | None = None) -> Sequence[Any]:
        """Return the batch of each step."""
        return [self.batches.at(step) for step in steps]


@contextmanager
def batches_of(
    program: Program, feed: Feed, calls: Iterable[range], wait: Callable[[Future[Any]], None] = lambda future: None
) -> Iterator[Iterator[tuple[range, Ready]]]:
    """Yield an iterator of the calls and their batches, which are prepared in a thread unless they read the state.

    If the feed was interrupted by a signal, there are no calls. `wait` waits for the batches of a call, but may return
    earlier; the first use of the batches then blocks.
    """
    if feed.interrupted:
        yield iter(())
        return

    def put(steps: range, state: TrainState | None = None) -> Any:
        return program.batches.put_for_call(feed.at(steps, state)) if steps else None

    if feed.reads_state:
        yield ((steps, partial(put, steps)) for steps in calls)
        return
    with prefetched(put, calls) as prepared:
        yield _waited(prepared, wait)


def _waited(
    prepared: Iterator[tuple[range, Future[Any]]], wait: Callable[[Future[Any]], None]
) -> Iterator[tuple[range, Ready]]:
    """Call `wait` with the batches of each call before yielding the call."""
    for steps, future in prepared:
        wait(future)
        yield steps, partial(_prepared, future)


def _prepared(batches: Future[Any], state: TrainState) -> Any:
    """Return prefetched batches, which do not depend on the state."""
    return batches.result()
