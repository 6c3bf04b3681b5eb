"""Learning-rate schedules, weight decay masks, and optimizers by name, from optax."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxgpt.config import Config, OptimConfig
from jaxgpt.model.scan import STACKED
from jaxgpt.train.clip import clip_by_global_norm
from jaxgpt.train.muon import MATRICES, muon, names_of
from jaxgpt.train.skip import skip_bad_updates


def schedule(config: Config, peak: float | None = None) -> optax.Schedule:
    """Make the learning-rate schedule that `config.optim` describes.

    Warm-up: `peak (step + 1) / (warmup + 1)` up to `warmup`. Then, with p from 0 to 1 between `warmup` and
    `decay_steps`, and `low = min_lr / learning_rate * peak`:
    cosine `low + (peak - low) (1 + cos(pi p)) / 2`; linear `peak + (low - peak) p`; wsd: `peak`, and linear to `low` over
    the last `cooldown_steps`; constant `peak`.

    Args:
        config: the run; `optim`, and `train.steps` where `optim.decay_steps` is 0.
        peak: the highest rate, for another group of weights (Muon's); None: optim.learning_rate.

    Returns:
        A function of the step (int or int32 array) that gives the rate, a float32 scalar.
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
    """Mark the weights that decay: kernels, embeddings and adapters; not the gains and offsets of norms, nor biases."""
    return jax.tree_util.tree_map_with_path(lambda path, _: names_of(path)[-1] not in ("scale", "bias"), params)


def groups(params: Any) -> Any:
    """`muon` for the kernels of the blocks' matrices, `adam` for all else: embeddings, head, norms and biases."""

    def group(path: tuple[Any, ...], _: Any) -> str:
        names = names_of(path)
        return "muon" if names[-1] == "kernel" and names[-2] in MATRICES else "adam"

    return jax.tree_util.tree_map_with_path(group, params)


# Settings that each optimizer reads, besides those that all read: the schedule, weight_decay and grad_clip.
READS = {
    "adamw": ("beta1", "beta2", "eps", "momentum_dtype"),
    "muon": ("beta1", "beta2", "eps", "momentum_dtype", "muon_learning_rate", "muon_momentum", "muon_steps"),
    "lion": ("beta1", "beta2", "momentum_dtype"),
    "sgd": ("beta1", "momentum_dtype"),
    "adafactor": (),
}


def make_optimizer(
    config: Config, optimizer: optax.GradientTransformation | None = None
) -> optax.GradientTransformation:
    """Make the optimizer that `config.optim` describes: clip by the global norm, then update by optax's transformation.

    With learning rate `r` (`schedule`), decoupled weight decay `d` (for `decay_mask`'s weights, else 0) and gradient `g`:

    - adamw: `w <- w - r (m / (sqrt(v) + eps) + d w)`, bias-corrected moments `m`, `v` (Loshchilov & Hutter 2019).
    - muon: `train/muon.py` for the matrices of the blocks (`groups`), AdamW for the rest (Jordan et al. 2024).
    - lion: `w <- w - r (sign(beta1 m + (1 - beta1) g) + d w)`, `m <- beta2 m + (1 - beta2) g` (Chen et al. 2023).
    - sgd: `w <- w - r (m + d w)`, `m <- beta1 m + g` (Sutskever et al. 2013).
    - adafactor: `w <- w - r (rms(w) clip(g / sqrt(v)) + d w)`, `v` the product of row and column means where two axes are
      at least 128 long, `beta2 = 1 - t^-0.8`, no momentum (Shazeer & Stern 2018).

    `optim.momentum_dtype` is that of `m`. Second moments are always float32: they change by a fraction `1 - beta2` per
    step, which bfloat16, with a resolution of 1/256, would round away.

    Args:
        config: the run; `optim`, and `train.steps` for the schedule.
        optimizer: used instead of the one that `optim.name` names; its own settings are then not read.

    Returns:
        The transformation, with `skip_bad_updates` around it if `optim.not_finite` or `optim.spike_factor` asks for that.
    """
    optimizer = _named(config) if optimizer is None else optimizer
    return skip_bad_updates(optimizer, config.optim.spike_factor) if config.optim.skips_updates else optimizer


def _named(config: Config) -> optax.GradientTransformation:
    o = config.optim
    rate, momentum_dtype = schedule(config), jnp.dtype(o.momentum_dtype)
    adamw = partial(
        optax.adamw,
        rate,
        b1=o.beta1,
        b2=o.beta2,
        eps=o.eps,
        weight_decay=o.weight_decay,
        mask=decay_mask,
        mu_dtype=momentum_dtype,
    )
    match o.name:
        case "adamw":
            update = adamw()
        case "muon":
            muon_rate = schedule(config, o.muon_learning_rate)
            matrices = muon(muon_rate, o.muon_steps, o.muon_momentum, o.weight_decay, momentum_dtype)
            update = optax.partition({"muon": matrices, "adam": adamw()}, groups)
        case "lion":
            update = optax.lion(rate, o.beta1, o.beta2, momentum_dtype, o.weight_decay, decay_mask)
        case "sgd":
            momentum = optax.sgd(rate, o.beta1, accumulator_dtype=momentum_dtype)
            decay = optax.add_decayed_weights(lambda step: -o.weight_decay * rate(step), decay_mask)
            update = optax.chain(momentum, decay)
        case "adafactor":
            # optax does not multiply weight_decay_rate by the learning rate; here it is, as in the other optimizers.
            update = per_layer(
                optax.adafactor(
                    rate, weight_decay_rate=lambda step: o.weight_decay * rate(step), weight_decay_mask=decay_mask
                )
            )
    clip = clip_by_global_norm(o.grad_clip) if o.grad_clip else optax.identity()
    return optax.chain(clip, update)


def ignored_settings(optim: OptimConfig) -> str:
    """Name the settings that differ from their defaults and that the chosen optimizer does not read; "" if none does."""
    of_some = {name for names in READS.values() for name in names}
    changed = [f.name for f in fields(optim) if f.name in of_some and getattr(optim, f.name) != f.default]
    ignored = [f"optim.{name}" for name in changed if name not in READS[optim.name]]
    return f"{optim.name} does not use {', '.join(ignored)}" if ignored else ""


def per_layer(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply a transformation to each layer of stacked weights (`train.scan_layers`) separately.

    For a transformation that reduces over a whole weight, as Adafactor does: over a stacked leaf it would reduce over all
    layers. The state is stacked as well.
    """

    def axes(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: 0 if STACKED in names_of(path) else None, tree)

    def init(params: Any) -> Any:
        if STACKED not in params:
            return optimizer.init(params)
        state = jax.eval_shape(optimizer.init, params)
        return jax.vmap(optimizer.init, in_axes=(axes(params),), out_axes=axes(state))(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if STACKED not in updates:
            return optimizer.update(updates, state, params)
        trees = updates, state, params
        return jax.vmap(optimizer.update, in_axes=axes(trees), out_axes=axes(trees[:2]))(*trees)

    return optax.GradientTransformation(init, update)
