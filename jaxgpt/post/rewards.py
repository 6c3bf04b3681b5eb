"""Rewards of generated answers: the sum of several rewards, and calls with a time limit and checks of the results."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from concurrent.futures import Future, wait
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxgpt.errors import UserError, one_line, short_repr
from jaxgpt.post.reward_names import Reward, open_reward
from jaxgpt.reward_words import shown_reward
from jaxgpt.time_limit import TimeLimitReached, call_within

TOTAL = "reward"  # metric of the reward of an answer
LARGEST = 1e30  # largest absolute value of a reward, so that sums of float32 remain finite


class Rewards(NamedTuple):
    """The rewards of answers.

    Attributes:
        total_B: reward of each answer, float32.
        parts: values of each of several rewards, without its weight, and of the penalty for long answers, float32 `[B]`, keyed
            by metric; empty: a single reward.
    """

    total_B: np.ndarray
    parts: Mapping[str, np.ndarray]

    @property
    def metrics(self) -> dict[str, np.ndarray]:
        """The total and the parts, keyed by metric."""
        return {TOTAL: self.total_B, **self.parts}


@dataclass(frozen=True)
class WeightedSum:
    """A reward: the sum of rewards, each times its weight. The value of each reward without its weight is a metric.

    Attributes:
        rewards: the rewards, keyed by name.
        weights: factor of each reward.
    """

    rewards: Mapping[str, Reward]
    weights: Mapping[str, float]

    def __call__(
        self, prompts: Sequence[Any], texts: Sequence[str], records: Sequence[Mapping[str, Any]]
    ) -> list[float]:
        """Return the sum for each text."""
        return self.add({name: reward(prompts, texts, records) for name, reward in self.rewards.items()})

    def add(self, values: Mapping[str, Sequence[float] | np.ndarray]) -> list[float]:
        """Return the weighted sum for each text, from the values of each reward, keyed by name."""
        sums = []
        for row in zip(*values.values(), strict=True):
            terms = [self.weights[name] * float(value) for name, value in zip(values, row, strict=True)]
            sums.append(sum(terms))
        return sums


def open_rewards(weights: Mapping[str, float]) -> Reward:
    """Return the sum of the named rewards, with a weight for each name; a single reward is returned without its weight.

    Raises:
        UserError: as in `open_reward`, or if two rewards have the same metric.
    """
    rewards = {name: open_reward(name) for name in weights}
    if len(rewards) == 1:
        return rewards.popitem()[1]
    named: dict[str, str] = {}
    for name in rewards:
        other = named.setdefault(metric_of(name), name)
        if other != name:
            raise UserError(f"{other} and {name} have the same metric, {metric_of(name)}: rename a function or a file")
    return WeightedSum(rewards, weights)


def metric_of(name: str) -> str:
    """Return the metric of one of several rewards: its name, without the directory of a file."""
    return f"reward_{shown_reward(name)}"


def metrics_of(names: Collection[str]) -> list[str]:
    """Return the keys of `Rewards.metrics` for named rewards: the total and, if there are several, each reward."""
    parts = [metric_of(name) for name in names]
    return [TOTAL, *parts] if len(parts) > 1 else [TOTAL]


def overlong_penalty(lengths: Sequence[int], longest: int, overlong: int) -> np.ndarray:
    """Compute the reward for the length of answers, float32 `[n]`: 0 up to `longest - overlong` tokens, then linear to -1.

    Soft overlong punishment (Yu et al. 2025, equation 13).

    Args:
        lengths: number of tokens of each answer, including the token that ends it.
        longest: maximum number of tokens of an answer.
        overlong: number of tokens over which the penalty grows.
    """
    beyond = np.array(lengths, np.float32) - (longest - overlong)
    return -np.clip(beyond / overlong, 0, 1).astype(np.float32)


def rewards_of(
    reward: Reward,
    name: str,
    prompts: Sequence[Any],
    texts: Sequence[str],
    records: Sequence[Mapping[str, Any]],
    seconds: float,
) -> Rewards:
    """Call a reward, and check its results.

    Args:
        reward: a single reward, or a weighted sum of rewards, each of which is called.
        name: name of the reward, for error messages.
        prompts: prompt of each answer.
        texts: answers.
        records: record of each answer.
        seconds: time limit of each call.

    Raises:
        UserError: as in `checked_rewards`, with the name of the reward that failed.
    """
    if not isinstance(reward, WeightedSum):
        return Rewards(checked_rewards(reward, name, prompts, texts, records, seconds), {})
    values = {}
    for term, term_reward in reward.rewards.items():
        values[term] = checked_rewards(term_reward, term, prompts, texts, records, seconds)
    total_B = _checked(reward.add(values), name, texts)
    return Rewards(total_B, {metric_of(term): value_B for term, value_B in values.items()})


def checked_rewards(
    reward: Reward,
    name: str,
    prompts: Sequence[Any],
    texts: Sequence[str],
    records: Sequence[Mapping[str, Any]],
    seconds: float,
) -> np.ndarray:
    """Call one reward, and check its results, float32 `[n]`.

    Raises:
        UserError: if the reward raises an exception, takes longer than `seconds`, or returns a wrong number of values, NaN or
            infinity.
    """
    # Pass copies: the function may change its arguments, and later rollouts have the same records.
    call = partial(reward, deepcopy(list(prompts)), list(texts), deepcopy(list(records)))
    in_main_thread = threading.current_thread() is threading.main_thread()
    try:
        values = call_within(seconds, call) if in_main_thread else _in_thread(call, seconds)
    except TimeLimitReached:
        raise UserError(
            f"the reward {name} takes more than {seconds:g} seconds for {len(texts):,} answers: make it faster, or raise "
            f"--post.reward-seconds"
        ) from None
    except (Exception, SystemExit) as e:
        kind = "" if isinstance(e, UserError) else f"{type(e).__name__}: "
        raise UserError(f"the reward {name} failed: {kind}{one_line(e, 200)}") from e
    return _checked(values, name, texts)


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
            kind = "number of at most 1e30" if math.isfinite(number) else "finite number"
            raise UserError(f"the reward {name} returned {number} for the answer {short_repr(text)}: return a {kind}")
    return np.array(numbers, np.float32)
