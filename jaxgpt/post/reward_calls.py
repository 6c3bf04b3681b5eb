"""Calls of rewards, with a time limit and checks of the results."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, wait
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxgpt.errors import UserError, one_line, short_repr
from jaxgpt.post.reward_names import Reward
from jaxgpt.post.rewards import Rewards, WeightedSum, metric_of
from jaxgpt.time_limit import TimeLimitReached, call_within

LARGEST = 1e30  # largest absolute value of a reward, so that sums of float32 remain finite


class Answered(NamedTuple):
    """The arguments of a reward: answers, and the prompt and the record of each answer."""

    prompts: Sequence[Any]
    texts: Sequence[str]
    records: Sequence[Mapping[str, Any]]

    def copy(self) -> Answered:
        """Return a deep copy, which a reward may change."""
        return Answered(deepcopy(list(self.prompts)), list(self.texts), deepcopy(list(self.records)))


def rewards_of(reward: Reward, name: str, answered: Answered, seconds: float) -> Rewards:
    """Call a reward, and check its results.

    Args:
        reward: a single reward, or a weighted sum: each of its rewards is called.
        name: name of the reward, for error messages.
        answered: the arguments of the reward.
        seconds: time limit of each call.

    Raises:
        UserError: as in `checked_rewards`, with the name of the reward that failed.
    """
    if not isinstance(reward, WeightedSum):
        return Rewards(checked_rewards(reward, name, answered, seconds), {})
    values = {}
    for term, term_reward in reward.rewards.items():
        values[term] = checked_rewards(term_reward, term, answered, seconds)
    total_B = _checked(reward.add(values), name, answered.texts)
    return Rewards(total_B, {metric_of(term): value_B for term, value_B in values.items()})


def checked_rewards(reward: Reward, name: str, answered: Answered, seconds: float) -> np.ndarray:
    """Call one reward, and check its results, float32 `[n]`.

    Raises:
        UserError: if the reward raises an exception, takes longer than `seconds`, or does not return a finite number of
            magnitude 1e30 or less for each answer.
    """
    # Pass copies: the function may change its arguments, and later rollouts have the same records.
    call = partial(reward, *answered.copy())
    in_main_thread = threading.current_thread() is threading.main_thread()
    try:
        values = call_within(seconds, call) if in_main_thread else _in_thread(call, seconds)
    except TimeLimitReached:
        count = len(answered.texts)
        raise UserError(
            f"the reward {name} takes more than {seconds:g} seconds for {count:,} answers: make it faster, or raise "
            f"--post.reward-seconds"
        ) from None
    except (Exception, SystemExit) as e:
        kind = "" if isinstance(e, UserError) else f"{type(e).__name__}: "
        raise UserError(f"the reward {name} failed: {kind}{one_line(e, 200)}") from e
    return _checked(values, name, answered.texts)


def _in_thread(call: Callable[[], Any], seconds: float) -> Any:
    """Call a function in a new thread, because alarms need the main thread; raise `TimeLimitReached` after `seconds`."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as e:
            result.set_exception(e)

    # A thread that never returns must not keep the process alive.
    threading.Thread(target=run, daemon=True).start()
    if not wait([result], seconds).done:
        raise TimeLimitReached
    return result.result()


def _checked(values: Any, name: str, texts: Sequence[str]) -> np.ndarray:
    """Return the result of the reward `name` for these texts as float32 `[n]`; raise `UserError` if it is wrong."""
    # Texts and mappings have items of a different meaning, and sets have no order.
    is_list = not isinstance(values, (str, bytes, Mapping, Set))
    try:
        numbers = [float(value) for value in values] if is_list else None
    except (TypeError, ValueError):
        numbers = None
    if numbers is None:
        raise UserError(f"the reward {name} must return a number per answer, not {short_repr(values)}")
    if len(numbers) != len(texts):
        raise UserError(
            f"the reward {name} returned {len(numbers):,} numbers for {len(texts):,} answers: return one for each"
        )
    for number, text in zip(numbers, texts, strict=True):
        if not abs(number) <= LARGEST:
            kind = "number of magnitude 1e30 or less" if math.isfinite(number) else "finite number"
            raise UserError(f"the reward {name} returned {number} for the answer {short_repr(text)}: return a {kind}")
    return np.array(numbers, np.float32)
