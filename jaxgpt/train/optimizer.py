"""From gradients to updates: the schedule, which weights decay, which go to Muon, and the optax chain of them all."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from jaxgpt.config import Config
from jaxgpt.model.layers import STACKED

# Input and output axes of a block's kernel, over which it is a matrix; heads and head widths belong together.
MATRICES = {
    "q_proj": ((0,), (1, 2)),
    "k_proj": ((0,), (1, 2)),
    "v_proj": ((0,), (1, 2)),
    "o_proj": ((0, 1), (2,)),
    "up_proj": ((0,), (1,)),
    "gate_proj": ((0,), (1,)),
    "down_proj": ((0,), (1,)),
}


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
    return jax.tree_util.tree_map_with_path(lambda path, _: _names(path)[-1] in ("kernel", "embedding"), params)


def groups(params: Any) -> Any:
    """`muon` for the kernels of the blocks' matrices, `adam` for all else: embeddings, head, norms and biases."""

    def group(path: tuple[Any, ...], _: Any) -> str:
        names = _names(path)
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
        muon = optax.contrib.muon(
            schedule(config, o.muon_learning_rate),
            ns_steps=o.muon_steps,
            beta=o.muon_momentum,
            weight_decay=o.weight_decay,
            mu_dtype=momentum_dtype,
            muon_weight_dimension_numbers=_matrices,
        )
        update = optax.partition({"muon": muon, "adam": adamw}, groups)
    clip = optax.clip_by_global_norm(o.grad_clip) if o.grad_clip else optax.identity()
    return optax.chain(clip, update)


def _matrices(params: Any) -> Any:
    def dimensions(path: tuple[Any, ...], _: Any) -> MuonDimensionNumbers:
        names = _names(path)
        skip = names[0] == STACKED  # the axis of layers: a matrix each
        inputs, outputs = (tuple(axis + skip for axis in axes) for axes in MATRICES[names[-2]])
        return MuonDimensionNumbers(inputs, outputs)

    return jax.tree_util.tree_map_with_path(dimensions, params)


def _names(path: tuple[Any, ...]) -> list[str]:
    """Names of a leaf from the root of the parameters; linen's boxes around leaves are not counted."""
    return [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
