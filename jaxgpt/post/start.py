"""Start runs with the objective of their settings: the program, and the frozen reference."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from jaxgpt.checkpoint.index import weights_at
from jaxgpt.checkpoint.paths import parse_checkpoint
from jaxgpt.checkpoint.run import Run, open_run
from jaxgpt.checkpoint.source import open_source, recorded_checkpoint
from jaxgpt.config import Config, ModelConfig, PostConfig
from jaxgpt.data.batches import Windows
from jaxgpt.data.preferences import Preferences
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.data.tokens import Split
from jaxgpt.errors import UserError
from jaxgpt.model import GPT
from jaxgpt.parallel.rows import row_spec
from jaxgpt.post.distill import distillation_objective
from jaxgpt.post.held_out import HeldOutReward
from jaxgpt.post.on_policy import HeldOutDivergence, on_policy_objective
from jaxgpt.post.policy import policy_objective
from jaxgpt.post.preference import preference_objective
from jaxgpt.post.reference import ReferencedLoss, ReferencedPairs, ReferenceOnce, is_once
from jaxgpt.post.reward_names import Reward, check_file
from jaxgpt.post.rewards import open_rewards
from jaxgpt.post.rollout_batch import empty_rollout
from jaxgpt.post.rollouts import Rollouts
from jaxgpt.progress import NO_PROGRESS, Progress
from jaxgpt.reward_words import is_own_code
from jaxgpt.train.loss import Objective
from jaxgpt.train.side_outputs import router_penalties
from jaxgpt.trainer.build import build
from jaxgpt.trainer.frozen_sources import BASE, NEXT_TO_BASE, FrozenWeights
from jaxgpt.trainer.program import Program

# Settings of the model that do not change its logits, or only the largest number of positions.
WITHOUT_EFFECT = ("dropout", "init", "init_std", "block_size")


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


@dataclass(frozen=True)
class ObjectiveOf:
    """A function from a model to the objective of some settings; it compares by value, so that plans can be cached."""

    post: PostConfig
    chunk: int  # as `train.loss_chunk`
    teacher: ModelConfig | None = None  # architecture of the teacher of distillation
    penalties: tuple[tuple[str, float], ...] | None = None  # penalties of the routers; None: no experts

    def __call__(self, model: GPT) -> Objective:
        """Make the objective."""
        penalties = None if self.penalties is None else dict(self.penalties)
        if self.post.is_distillation:
            assert self.teacher is not None
            teacher = type(model)(self.teacher, model.ops)
            objective = distillation_objective(model.apply, teacher.apply, self.post, self.chunk, penalties)
            return on_policy_objective(objective) if self.post.is_rollout else objective
        make = policy_objective if self.post.is_rollout else preference_objective
        return make(model.apply, self.post, self.chunk, penalties=penalties)


def objective_of(config: Config, teacher: ModelConfig | None = None) -> ObjectiveOf:
    """Return the objective of `config.post`; models with experts also minimize the penalties of their routers."""
    penalties = tuple(router_penalties(config).items()) if config.model.n_experts else None
    return ObjectiveOf(config.post, config.train.loss_chunk, teacher, penalties)


def batch_rows(config: Config) -> Any:
    """Return a batch without rows for the objective of a config, in the form of `parallel.rows.row_spec`."""
    if config.post.is_rollout:
        return row_spec(empty_rollout(config))
    pairs: Split = Preferences(())
    if is_once(config):
        pairs = ReferencedPairs(pairs, np.zeros(0, np.int64), np.zeros((0, 2), np.float32))
    return row_spec(Windows(pairs, np.zeros(0, np.int64), config.window))


def with_reference(config: Config, tokenizer: Tokenizer) -> Config:
    """Check the settings of a new run, and resolve `post.reference` to an absolute RUN/checkpoints/STEP.

    Args:
        config: settings of the run.
        tokenizer: tokenizer of the initial weights.

    Raises:
        UserError: if the reference is missing, or has a different vocabulary, tokenizer or model than the initial weights.
    """
    path = config.post.reference
    if not path:
        return config
    place, _ = parse_checkpoint(path)
    run = open_run(place)
    model = run.config().model
    size = config.model.vocab_size
    if model.vocab_size != size:
        raise UserError(
            f"post.reference {path} has a vocabulary of {model.vocab_size:,}, but the weights of --init-from have {size:,}: "
            f"choose a reference with the same tokenizer"
        )
    if run.tokenizer().to_json() != tokenizer.to_json():
        raise UserError(
            f"post.reference {path} has a different tokenizer than the weights of --init-from, so its ids have different "
            f"meanings: choose a reference with the same tokenizer"
        )
    check_reference(config, model)
    reference = str(weights_at(path).absolute())
    return replace(config, post=replace(config.post, reference=reference))


def check_reference(config: Config, model: ModelConfig) -> None:
    """Raise `UserError` if a reference computes a different function; a teacher only needs the context of the run."""
    if config.post.is_distillation:
        if config.window > model.block_size:
            raise UserError(
                f"{config.window_setting} exceeds the context of the teacher, {model.block_size} tokens: lower --data.window"
            )
        return
    name = different_setting(model, config.model)
    if name:
        raise UserError(
            f"post.reference {config.post.reference} has model.{name} {getattr(model, name)!r}, but the trained model has "
            f"{getattr(config.model, name)!r}: choose a reference with the same model settings"
        )


def different_setting(a: ModelConfig, b: ModelConfig) -> str:
    """Return the name of a setting with an effect on logits that differs between two models, or ""."""
    free = WITHOUT_EFFECT if a.positions != "learned" else [name for name in WITHOUT_EFFECT if name != "block_size"]
    for name in vars(a):
        if name not in free and getattr(a, name) != getattr(b, name):
            return name
    return ""


def frozen_of(config: Config, run: Run | None = None) -> Any:
    """Return `Start.frozen` of a run: the path of the reference, RUN/checkpoints/STEP, or `()`.

    With adapters, the trainer freezes their base, which is also the reference, except in distillation.

    Args:
        config: settings of the run.
        run: the run, if it exists: a reference that has moved is also found next to it.

    Raises:
        UserError: if the reference of the run is missing.
    """
    is_base = bool(config.lora.rank) and not config.post.is_distillation
    if is_base or not config.post.has_reference:
        return ()
    path = config.post.reference or config.init_from
    if run is None:
        return path
    found = recorded_checkpoint(run, path)
    if found is None:
        raise UserError(
            f"{run.path} needs its reference {path}, which is missing: restore it, or move it next to {run.path}"
        )
    return str(found)


def parts_of(
    config: Config,
    named: Sequence[str],
    run: Run | None = None,
    note: Callable[[str], None] = print,
    progress: Progress = NO_PROGRESS,
) -> dict[str, Any]:
    """Return the fields of `Start` that the objective determines: program, frozen arrays, feed and evaluators.

    Args:
        config: settings of the run.
        named: rewards that the user has named on the command line, as in `post.reward`.
        run: the run, if it exists.
        note: receives a line before code of the user is run.
        progress: called during the work before the first step, as in `ReferenceOnce`.

    Raises:
        UserError: if the reward or the reference cannot be opened.
    """
    parts: dict[str, Any] = {"build": build_program, "frozen": frozen_of(config, run)}
    if config.post.is_distillation:
        teacher = open_source(*parse_checkpoint(parts["frozen"]))
        parts = {"build": partial(build_program, teacher=teacher.config.model), "frozen": teacher}
    if is_once(config):
        once = ReferenceOnce(build_program, progress)
        parts |= {"build": once.build, "feed": once, "evaluators": (ReferencedLoss(once),)}
    if config.post.has_rewards:
        reward = named_reward(config.post, named, note)
        parts |= {"feed": partial(Rollouts, reward=reward), "evaluators": (HeldOutReward(reward),)}
    elif config.post.is_rollout:
        parts |= {"feed": Rollouts, "evaluators": (HeldOutDivergence(),)}
    return parts


def named_reward(post: PostConfig, named: Sequence[str], note: Callable[[str], None]) -> Reward:
    """Open the rewards of a run. Code of the user is run only if it is named on the command line, not by a config.json.

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


def reference_of(config: Config, run: Run) -> FrozenWeights | None:
    """Open the reference of an existing run, to evaluate its merged weights; None: the objective has no reference.

    Reading it raises `UserError` if its weights are not those of the training.

    Args:
        config: settings of the evaluation.
        run: the run.
    """
    path = frozen_of(config, run)
    if not path:
        return None
    is_next_to_base = bool(run.config().lora.rank) and config.post.is_distillation
    source = open_source(*parse_checkpoint(path))
    return FrozenWeights(source, run, NEXT_TO_BASE if is_next_to_base else BASE)
