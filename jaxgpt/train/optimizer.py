"""Optimizers by name, built with optax, and the weights that they decay or update differently."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey

from jaxgpt.config import Config
from jaxgpt.model.params import Model, Weight, map_weights
from jaxgpt.model.scan import STACKED
from jaxgpt.train.muon import muon
from jaxgpt.train.schedule import Hyperparameters, hyperparameters_of, schedule


def decay_mask(params: Any, model: Model) -> Any:
    """Mark the weights that decay: matrices, embedding tables and adapters, but not gains and biases."""

    def decays(weight: Weight | None, leaf: Any) -> bool:
        if weight is None:  # a leaf outside the model's weights, such as an adapter
            return leaf.ndim > 1
        return weight.kind != "vector"

    return map_weights(decays, params, model)


def muon_labels(params: Any, model: Model) -> Any:
    """Label the matrices of the blocks `muon`, and all other leaves `adam`."""
    return map_weights(lambda weight, _: "muon" if weight and weight.in_block else "adam", params, model)


def make_optimizer(
    config: Config, hyperparameters: Hyperparameters | None = None, model: Model | None = None
) -> optax.GradientTransformation:
    """Make the optimizer of `config.optim`: clip by global norm (`grad_clip`; 0: off), then update.

    With learning rate `r` (`schedule`), decoupled weight decay `d` (for `decay_mask`'s weights, otherwise 0) and
    gradient `g`:

    - adamw: `w <- w - r * (m / (sqrt(v) + eps) + d * w)`, bias-corrected moments `m`, `v` (Loshchilov & Hutter 2019).
    - muon: `train/muon.py` for the matrices of the blocks (`muon_labels`), AdamW for all other weights (Jordan et al. 2024).
    - lion: `w <- w - r * (sign(beta1 * m + (1 - beta1) * g) + d * w)`, `m <- beta2 * m + (1 - beta2) * g` (Chen et al. 2023).
    - sgd: `m <- beta1 * m + g`, then `w <- w - r * (m + d * w)` (Sutskever et al. 2013).
    - adafactor: `w <- w - r * (max(rms(w), 1e-3) * u / max(rms(u), 1) + d * w)`, `u = g / sqrt(v)`, `v` factored into row and
      column means where two axes are at least 128 long, `beta2 = 1 - t^-0.8` at update t, no momentum (Shazeer & Stern 2018).

    The biases of routers (`model.router_bias`) are not part of the global norm, and their update is
    `b <- b - router_bias_rate * sign(g)`, where g is the error of an expert's load (`ops.experts.bias_loss`).

    `optim.momentum_dtype` is the dtype of `m`. Second moments are always float32: a step adds
    `(1 - beta2) * (g^2 - v)`, which bfloat16, with relative rounding errors of up to 1/256, can round away.

    Args:
        config: settings of the run; reads `optim`, `model` (kinds of weights), and `train.steps` for the schedule.
        hyperparameters: hyperparameters to use instead of the values in `config.optim`; may be traced.
        model: the trained module, if it is a subclass of GPT with additional weights; None: `config.model`.
    """
    hyperparameters = hyperparameters or hyperparameters_of(config.optim)
    model = model or config.model
    clip = optax.identity()
    if config.optim.grad_clip:
        clip = optax.clip_by_global_norm(hyperparameters.grad_clip)
    update = optax.chain(clip, _update_rule(config, hyperparameters, model))
    if not config.model.router_bias:
        return update
    biases = optax.chain(optax.stateless(_signs), optax.scale(-config.optim.router_bias_rate))
    return optax.partition({"router bias": biases, "rest": update}, partial(router_labels, model=model))


def _update_rule(config: Config, hyperparameters: Hyperparameters, model: Model) -> optax.GradientTransformation:
    """Make the update of `config.optim.name`, without clipping; see `make_optimizer`."""
    o = config.optim
    decay = hyperparameters.weight_decay
    rate = schedule(config, hyperparameters)
    momentum_dtype = jnp.dtype(o.momentum_dtype)
    decays = partial(decay_mask, model=model)
    adamw = partial(
        optax.adamw,
        rate,
        b1=o.beta1,
        b2=o.beta2,
        eps=o.eps,
        weight_decay=decay,
        mask=decays,
        mu_dtype=momentum_dtype,
    )

    match o.name:
        case "adamw":
            return adamw()
        case "muon":
            matrices = muon(
                lambda step: hyperparameters.muon_ratio * rate(step),
                steps=o.muon_steps,
                momentum=o.muon_momentum,
                weight_decay=decay,
                momentum_dtype=momentum_dtype,
                model=model,
            )
            return optax.partition({"muon": matrices, "adam": adamw()}, partial(muon_labels, model=model))
        case "lion":
            return optax.lion(
                rate,
                b1=o.beta1,
                b2=o.beta2,
                mu_dtype=momentum_dtype,
                weight_decay=decay,
                mask=decays,
            )
        case "sgd":
            momentum = optax.sgd(rate, momentum=o.beta1, accumulator_dtype=momentum_dtype)
            decayed = optax.add_decayed_weights(lambda step: decay * -rate(step), decays)  # sgd has applied -rate
            return optax.chain(momentum, decayed)
        case "adafactor":
            # optax does not multiply weight_decay_rate by the learning rate; multiply here, as the other optimizers do.
            rule = optax.adafactor(rate, weight_decay_rate=lambda step: decay * rate(step), weight_decay_mask=decays)
            return per_layer(rule)


def router_labels(params: Any, model: Model) -> Any:
    """Label the biases of routers `router bias`, and all other leaves `rest`."""
    return map_weights(
        lambda weight, _: "router bias" if weight and weight.axes == ("router",) else "rest", params, model
    )


def _signs(updates: Any, _: Any) -> Any:
    return jax.tree.map(jnp.sign, updates)


def per_layer(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply a transformation to each layer of stacked weights (`train.scan_layers`) separately.

    Transformations that reduce over a complete weight, such as Adafactor, need this function. Otherwise, they would reduce a
    stacked leaf over all layers. The state is stacked as well.
    """

    def axes(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: 0 if DictKey(STACKED) in path else None, tree)

    def init(params: Any) -> Any:
        if STACKED not in params:
            return optimizer.init(params)
        state = jax.eval_shape(optimizer.init, params)
        init_layers = jax.vmap(optimizer.init, in_axes=(axes(params),), out_axes=axes(state))
        return init_layers(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if STACKED not in updates:
            return optimizer.update(updates, state, params)
        update_layers = jax.vmap(
            optimizer.update,
            in_axes=axes((updates, state, params)),
            out_axes=axes((updates, state)),
        )
        return update_layers(updates, state, params)

    return optax.GradientTransformation(init, update)
