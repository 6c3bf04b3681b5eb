"""Learning-rate schedules, and the hyperparameters that are arguments of the step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxgpt.config import Config, OptimConfig


class Hyperparameters(NamedTuple):
    """Hyperparameters in `config.optim` that are arguments of the step: a change of their values needs no compilation.

    Betas and epsilons are constants of the program: as float32 arguments, their rounding would change `1 - beta` and
    every moment.

    Each field is named like its setting in `config.optim`. Whether gradients are clipped is constant too: it depends only on
    `config.optim.grad_clip`.
    """

    learning_rate: float | jax.Array
    min_lr: float | jax.Array
    muon_ratio: float | jax.Array
    weight_decay: float | jax.Array
    grad_clip: float | jax.Array


def hyperparameters_of(optim: OptimConfig) -> Hyperparameters:
    """Return the `Hyperparameters` of an optimizer config, as Python floats."""
    o = optim
    return Hyperparameters(
        learning_rate=o.learning_rate,
        min_lr=o.min_lr,
        muon_ratio=o.muon_ratio,
        weight_decay=o.weight_decay,
        grad_clip=o.grad_clip,
    )


def schedule(config: Config, hyperparameters: Hyperparameters | None = None) -> optax.Schedule:
    """Make the learning-rate schedule that `config.optim` describes.

    With `peak` = `learning_rate` and `low` = `min_lr`:

    - Warm-up, before step `warmup` = `warmup_steps`: `peak * (step + 1) / (warmup + 1)`.
    - Then, with p from 0 to 1 between `warmup` and `decay_steps` (0: `train.steps`), and p = 1 afterwards:
      cosine: `low + (peak - low) * (1 + cos(pi * p)) / 2`; linear: `peak - (peak - low) * p`; wsd: `peak`, falling linearly to
      `low` over `cooldown_steps` (0: a fifth of `decay_steps`; at most the steps after warm-up) until `decay_steps`; constant:
      `peak`.

    Args:
        config: settings of the run; reads `optim`, and `train.steps` if `optim.decay_steps` is 0.
        hyperparameters: hyperparameters to use instead of the values in `config.optim`; may be traced.

    Returns:
        A function from the number of updates so far (int or int32 array) to rates, float32 of the same shape.
    """
    o = config.optim
    hyperparameters = hyperparameters or hyperparameters_of(o)
    peak = hyperparameters.learning_rate
    low = hyperparameters.min_lr
    warmup = o.warmup_steps
    end = config.decay_steps
    after_warmup = max(end - warmup, 1)
    cooldown = o.cooldown_steps or max(end // 5, 1)
    cooldown = min(cooldown, after_warmup)

    def rate(step: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        progress = jnp.clip((step - warmup) / after_warmup, 0.0, 1.0)
        match o.schedule:
            case "cosine":
                after = low + (peak - low) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
            case "linear":
                after = peak - (peak - low) * progress
            case "wsd":
                cooled = jnp.clip((step - (end - cooldown)) / cooldown, 0.0, 1.0)
                after = peak - (peak - low) * cooled
            case _:
                after = jnp.full_like(step, peak)
        warming = peak * (step + 1) / (warmup + 1)
        return jnp.where(step < warmup, warming, after)

    return rate


def schedule_states(opt_state: Any) -> list[Any]:
    """Return the parts of an optimizer's state that count the updates of a schedule (learning rate or weight decay)."""
    leaves = jax.tree.leaves(opt_state, is_leaf=_is_scheduled)
    return [leaf for leaf in leaves if _is_scheduled(leaf)]


def restart_schedules(opt_state: Any) -> Any:
    """Return the state of an optimizer with its schedules at update 0, and unchanged moments.

    The counts of the moments, for their bias corrections, are kept.
    """

    def restart(state: Any) -> Any:
        if not _is_scheduled(state):
            return state
        return state._replace(count=jnp.zeros_like(state.count))

    return jax.tree.map(restart, opt_state, is_leaf=_is_scheduled)


def _is_scheduled(state: Any) -> bool:
    """Return whether a state only counts updates, like `optax.ScaleByScheduleState` and the state of scheduled decay."""
    return getattr(state, "_fields", ()) == ("count",)
