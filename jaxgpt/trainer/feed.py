"""Feed: the batches of a run, and their preparation ahead of the devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np

from jaxgpt.checkpoint.info import Info
from jaxgpt.data import Batches, Data, Windows
from jaxgpt.errors import UserError
from jaxgpt.parallel.rows import row_spec
from jaxgpt.train.step import TrainState
from jaxgpt.trainer.prefetch import prefetched
from jaxgpt.trainer.program import Program


class Feed(Protocol):
    """The batches of a run: a pure function of (seed, step), or of (seed, step, state). A resumed run needs no other state.

    Any object with these attributes is a feed; a subclass inherits the defaults.

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


# A function that makes the feed of a run; its last argument is the checkpoint that the run resumes from, or None.
MakeFeed = Callable[[Program, Data, Info | None], Feed]


class FeedOfSettings(ABC):
    """A `MakeFeed` whose feed the settings of the run determine, so that a resumed run makes the same feed.

    For other functions, except `DataFeed` and the feeds of rollouts, `Start.parts` records the name in the checkpoints, and a
    resumed run must receive the function again.
    """

    @abstractmethod
    def __call__(self, program: Program, data: Data, last: Info | None) -> Feed:
        """Make the feed of a run."""


def check_feed(feed: Feed) -> Feed:
    """Return a feed; raise `UserError` if it lacks an attribute of `Feed`."""
    missing = [name for name in ("at", "spec", "reads_state", "interrupted") if not hasattr(feed, name)]
    if missing:
        raise UserError(
            f"the feed {type(feed).__name__} has no {', '.join(missing)}: inherit from jaxgpt.trainer.feed.Feed, define "
            "at, and set spec"
        )
    return feed


class DataFeed(Feed):
    """The batches of `data.train`. A run resumed with a different batch size continues with its first unused row."""

    def __init__(self, program: Program, data: Data, last: Info | None) -> None:
        config = program.config
        first_row = 0
        if last:
            # Compute the row at which step 0 would have to begin, so that step `last.step` begins with the first unused row.
            # For example, 5 steps of 8 rows, resumed with 6 rows per step: row 40 - 5 * 6 = 10.
            used_rows = last.tokens // config.row_tokens
            first_row = used_rows - last.step * config.train.batch_size
        self.batches = Batches.of(config, data.train, first_row)
        self.spec = row_spec(Windows(data.train, np.zeros(0, np.int64), config.window))

    def at(self, steps: range, state: TrainState | None = None) -> Sequence[Any]:
        """Return the batch of each step."""
        return [self.batches.at(step) for step in steps]


# The batches of a call on the devices, as a function of the state before the call; None for a call without steps.
Ready = Callable[[TrainState], Any]


@contextmanager
def batches_of(
    program: Program, feed: Feed, calls: Iterable[range], wait: Callable[[Future[Any]], None]
) -> Iterator[Iterator[tuple[range, Ready]]]:
    """Yield an iterator of the calls and their batches, which are prepared in a thread unless they read the state.

    Args:
        program: program of the run.
        feed: the batches. If a signal has interrupted the feed, there are no calls.
        calls: steps of each call, from `plan_calls`.
        wait: waits for batches from the thread, but may return earlier; the first use of the batches then blocks.
    """

    def put(steps: range, state: TrainState | None) -> Any:
        if not steps:
            return None  # the call only evaluates the state that a run resumes from (`plan_calls`)
        return program.batches.put_for_call(feed.at(steps, state))

    if feed.interrupted:
        yield iter(())
    elif feed.reads_state:
        yield ((steps, partial(put, steps)) for steps in calls)
    else:
        with prefetched(partial(put, state=None), calls) as prefetched_calls:
            yield _after_waiting(prefetched_calls, wait)


def _after_waiting(
    calls: Iterator[tuple[range, Future[Any]]], wait: Callable[[Future[Any]], None]
) -> Iterator[tuple[range, Ready]]:
    """Yield each call after `wait` for its batches, which do not depend on the state."""

    def batches(future: Future[Any], state: TrainState) -> Any:
        return future.result()

    for steps, future in calls:
        wait(future)
        yield steps, partial(batches, future)
