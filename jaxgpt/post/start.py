"""Complete a training job with the parts that its objective determines: program, frozen arrays, feed and evaluators."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jaxgpt.config import Config, ModelConfig, PostConfig
from jaxgpt.errors import UserError
from jaxgpt.post.frozen_reference import open_reference
from jaxgpt.post.held_out_divergence import HeldOutDivergence
from jaxgpt.post.held_out_reward import HeldOutReward
from jaxgpt.post.objective import objective_of
from jaxgpt.post.reference_once import BuildBesideReference, ReferencedFeeds, ReferencedLoss
from jaxgpt.post.reward_names import Reward, check_file
from jaxgpt.post.rewards import open_rewards
from jaxgpt.post.rollouts import Rollouts
from jaxgpt.progress import NO_PROGRESS, Progress
from jaxgpt.reward_words import is_own_code
from jaxgpt.trainer.build import build
from jaxgpt.trainer.program import Program
from jaxgpt.trainer.start import Start


def build_program(config: Config, teacher: ModelConfig | None = None, **parts: Any) -> Program:
    """Build the program of a config with the objective of `config.post`.

    Args:
        config: settings of the run.
        teacher: architecture of the teacher; None: the objective is not distillation.
        **parts: other arguments of `build`.
    """
    post = config.post
    if post.objective == "next-token":
        return build(config, **parts)

    return build(config, objective_of=objective_of(config, teacher), frozen_model=teacher, **parts)


def with_objective(
    start: Start,
    named: Sequence[str],
    note: Callable[[str], None] = print,
    progress: Progress = NO_PROGRESS,
) -> Start:
    """Return a training job with the parts that its objective determines: program, frozen arrays, feed and evaluators.

    Args:
        start: a training job with default parts.
        named: rewards that the user has named on the command line, as in `post.reward`.
        note: called with a line before the user's own code is run.
        progress: called during the work before the first step, as in `ReferencedFeeds`.

    Raises:
        UserError: if a reward, the reference or the teacher cannot be opened.
    """
    config = start.config
    post = config.post

    # Open the frozen arrays: a reference with the model of the run, or a teacher with a different model.
    teacher: ModelConfig | None = None
    reference = open_reference(config, start.resumed)
    if reference is not None:
        start = start._replace(frozen=reference)
        if post.is_distillation:
            teacher = reference.config.model

    # Choose the program, the batches and the evaluators; by default, batches of the data and their loss.
    if config.computes_reference_once:
        beside_reference = BuildBesideReference(build_program)
        feeds = ReferencedFeeds(beside_reference, progress)
        return start._replace(build=beside_reference, feed=feeds, evaluators=(ReferencedLoss(feeds),))
    start = start._replace(build=partial(build_program, teacher=teacher))
    if post.has_rewards:
        reward = named_reward(post, named, note)
        return start._replace(feed=partial(Rollouts, reward=reward), evaluators=(HeldOutReward(reward),))
    if post.is_rollout:
        return start._replace(feed=partial(Rollouts, reward=None), evaluators=(HeldOutDivergence(),))
    return start


def named_reward(post: PostConfig, named: Sequence[str], note: Callable[[str], None]) -> Reward:
    """Open the rewards of a run. The user's code is run only if the command line, not only config.json, names it.

    Raises:
        UserError: if a reward is code that the command line does not name, or cannot be opened.
    """
    own = own_code(post)
    if own and tuple(named) != post.reward:
        raise UserError(
            f"the run uses the reward {own[0]}, which is Python code: to run it, add --post.reward {shlex.join(post.reward)}"
        )
    for name in own:
        check_file(name)
        note(f"running {name}, your own code, as the reward")
    return open_rewards(post.reward_weights)


def own_code(post: PostConfig) -> list[str]:
    """Return the names of the rewards that are code of the user."""
    return [name for name in post.reward_weights if is_own_code(name)]
