"""From gradients to updates: the schedule, which weights decay, which go to Muon, and the optax chain of them all."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxgpt.config import Config
from jaxgpt.train.muon import MATRICES, muon, names_of


def schedule(config: Config, peak: float | None = None) -> optax.Schedule:
    """The learning rate of a step.

    Warm-up: `peak (step + 1) / (warmup + 1)` up to `warmup`. Then, with p from 0 to 1 between `warmup` and
    `decay_steps`, and `low = min_lr / learning_rate * peak`:
    cosine `low + (peak - low) (1 + cos(pi p)) / 2`; linear `peak + (low - peak) p`; wsd: `peak`, and linear to `low` over
    the last `cooldown_steps`; constant `peak`.

    Args:
        config: the run.
        peak: of another group of weights (Muon's); None: optim.learning_rate.
    """
    o = config.optim
    top = o.learning_rate if peak is None else peak
    low = o.min_lr / o.learning_rate * top
    warmup, end = o.warmup_steps, config.decay_steps
    cooldown = min(o.cooldown_steps or max(end // 5, 1), max(end - warmup, 1))

    def rate(step: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        progress = jnp.clip((step - warmup) / max(end - warmup, 1), 0.0, 1.0)
        match o.schedule:
            case "cosine":
                after = low + (top - low) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
            case "linear":
                after = top + (low - top) * progress
            case "wsd":
                after = top + (low - top) * jnp.clip((step - (end - cooldown)) / cooldown, 0.0, 1.0)
            case _:
                after = jnp.full_like(step, top)
        return jnp.where(step < warmup, top * (step + 1) / (warmup + 1), after)

    return rate


def decay_mask(params: Any) -> Any:
    """True for the weights that decay: kernels and embeddings. Gains and offsets of norms, and biases, are spared."""
    return jax.tree_util.tree_map_with_path(lambda path, _: names_of(path)[-1] in ("kernel", "embedding"), params)


def groups(params: Any) -> Any:
    """`muon` for the kernels of the blocks' matrices, `adam` for all else: embeddings, head, norms and biases."""

    def group(path: tuple[Any, ...], _: Any) -> str:
        names = names_of(path)
        return "muon" if names[-1] == "kernel" and names[-2] in MATRICES else "adam"

    return jax.tree_util.tree_map_with_path(group, params)


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Clip by the global norm, then AdamW (Loshchilov & Hutter 2019), or Muon (Jordan 2024) for `groups`' matrices.

    `optim.momentum_dtype` is that of Adam's first moment and of Muon's momentum. The second moment is float32 always: it
    changes by `1 - beta2` of itself a step, which bfloat16, with steps of 1/256, would round away.
    """
    o = config.optim
    momentum_dtype = jnp.dtype(o.momentum_dtype)
    adamw = optax.adamw(
        schedule(config),
        b1=o.beta1,
        b2=o.beta2,
        eps=o.eps,
        weight_decay=o.weight_decay,
        mask=decay_mask,
        mu_dtype=momentum_dtype,
    )
    update = adamw
    if o.name == "muon":
        rate = schedule(config, o.muon_learning_rate)
        matrices = muon(rate, o.muon_steps, o.muon_momentum, o.weight_decay, momentum_dtype)
        update = optax.partition({"muon": matrices, "adam": adamw}, groups)
    clip = optax.clip_by_global_norm(o.grad_clip) if o.grad_clip else optax.identity()
    return optax.chain(clip, update)
