"""Measure what changes when parts of a model are removed (ablation) or taken from a run on another prompt (patching)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import Config
from jaxgpt.errors import UserError, as_int, short_repr
from jaxgpt.lm import LM
from jaxgpt.study.lens import answer_ids
from jaxgpt.study.run import Edits, as_tokens, forward, on_tokens

Metric = Callable[[jax.Array], jax.Array]  # a pure function of logits [B, T, V], such as LogitDifference
Replacement = Literal["zero", "mean"]
AT_ONCE = 32  # edited runs computed as one batch


@dataclass(frozen=True)
class LogitDifference:
    """The mean over rows of `logits[:, position, right] - logits[:, position, wrong]`.

    Attributes:
        right: an id, or one per row, kept as a tuple.
        wrong: as `right`.
        position: position of the logits.

    Raises:
        UserError: when called, if a position or id is out of range, or there is neither one id nor one per row.
    """

    right: int | Sequence[int]
    wrong: int | Sequence[int]
    position: int = -1

    def __post_init__(self) -> None:
        """Make the metric hashable, as an argument of compiled programs."""
        for name in ("right", "wrong"):
            ids = np.asarray(getattr(self, name))
            object.__setattr__(self, name, tuple(ids.reshape(-1).tolist()) if ids.ndim else ids.item())

    def __call__(self, logits_BTV: jax.Array) -> jax.Array:
        """Compute the difference of two logits."""
        B, T, V = logits_BTV.shape
        logits_BV = logits_BTV[:, as_int("position", self.position, -T, T - 1)]

        def of(ids: int | Sequence[int]) -> jax.Array:
            return jnp.take_along_axis(logits_BV, answer_ids(V, ids, B)[:, None], -1).mean()

        return of(self.right) - of(self.wrong)


def _check_metric(metric: Any) -> None:
    """Check that a metric can be an argument of compiled programs.

    Raises:
        UserError: if the metric is not a function, or not hashable.
    """
    if not callable(metric):
        raise UserError(f"the metric must be a function of the logits [B, T, V]: {short_repr(metric)}")
    try:
        hash(metric)
    except TypeError:
        raise UserError("the metric is not hashable: wrap it in a function") from None


def _measure(metric: Metric, logits_BTV: jax.Array) -> jax.Array:
    """Compute a metric.

    Raises:
        UserError: if the result is not a scalar, or was not computed with JAX.
    """
    try:
        value = jnp.asarray(metric(logits_BTV))
    except jax.errors.JAXTypeError:  # NumPy functions, float(), and conditions on values
        raise UserError("the metric is compiled: compute it with jax.numpy, and without if or float()") from None
    if value.shape:
        raise UserError(f"the metric returned an array of shape {list(value.shape)}: return a scalar, such as its mean")
    return value


class Ablation(NamedTuple):
    """The effect of removing parts of a model, one at a time.

    Attributes:
        clean: the metric of the unchanged model.
        ablated: the metric without each part: `[L, N]` for heads, `[F]` for neurons.
    """

    clean: jax.Array
    ablated: jax.Array


def ablate_heads(lm: LM, ids: Any, metric: Metric, replacement: Replacement = "zero") -> Ablation:
    """Compute a metric without each attention head.

    Args:
        lm: the model.
        ids: a text, or ids `[B, T]`.
        metric: a function of the logits `[B, T, V]` that returns a scalar.
        replacement: replacement of the head's output: zero, or its mean over these rows and positions.

    Raises:
        UserError: as `run`, or if the replacement or the metric is invalid.
    """
    names = tuple(f"h.{layer}.attn.head_out" for layer in range(lm.config.model.n_layer))
    return _ablate(lm, ids, metric, replacement, names)


def ablate_neurons(lm: LM, ids: Any, layer: int, metric: Metric, replacement: Replacement = "zero") -> Ablation:
    """Compute a metric without each hidden unit of an MLP.

    Args:
        lm: the model.
        ids: a text, or ids `[B, T]`.
        layer: index of the layer, from 0.
        metric: a function of the logits `[B, T, V]` that returns a scalar.
        replacement: replacement of the unit's activation: zero, or its mean over these rows and positions.

    Raises:
        UserError: as `run`, or if the replacement or the metric is invalid.
    """
    layer = as_int("layer", layer, 0, lm.config.model.n_layer - 1)
    out = _ablate(lm, ids, metric, replacement, (f"h.{layer}.mlp.post",))
    return out._replace(ablated=out.ablated[0])


def _ablate(lm: LM, ids: Any, metric: Metric, replacement: Replacement, names: tuple[str, ...]) -> Ablation:
    _check_metric(metric)
    if replacement not in get_args(Replacement):
        raise UserError(f"replacement must be zero or mean: {short_repr(replacement)}")
    return on_tokens(_ablation, lm, ids, metric, replacement, names)


class Patching(NamedTuple):
    """The effect of patching single activations of a clean run into a corrupted run.

    Attributes:
        clean: the metric of the clean prompt.
        corrupted: the metric of the corrupted prompt.
        grid: the metric of the corrupted prompt with one clean activation: `[L, T]` over positions, `[L, N]` over heads.
    """

    clean: jax.Array
    corrupted: jax.Array
    grid: jax.Array


def patch(
    lm: LM,
    clean: Any,
    corrupted: Any,
    metric: Metric,
    site: str = "resid.pre",
    over: Literal["positions", "heads"] = "positions",
) -> Patching:
    """Run the corrupted prompt with single activations of the clean one, for each layer and position (or head).

    Args:
        lm: the model.
        clean: a text, or ids `[B, T]`.
        corrupted: a text or ids with the same shape.
        metric: a function of the logits `[B, T, V]` that returns a scalar, such as `LogitDifference(right, wrong)`.
        site: the activation of each layer: resid.pre, resid.mid, attn.out, mlp.out, attn.head_out, attn.q, ...
        over: patch one position at a time, or, for activations of heads, one head at all positions.

    Raises:
        UserError: as `run`, or if the prompts have different shapes, the site has no such axis, or the metric is invalid.

    Source: Meng et al. 2022 (causal tracing); Wang et al. 2022.
    """
    clean_BT, corrupted_BT = as_tokens(lm, clean), as_tokens(lm, corrupted)
    if clean_BT.shape != corrupted_BT.shape:
        raise UserError(
            f"the clean ids have shape {list(clean_BT.shape)} and the corrupted ids {list(corrupted_BT.shape)}: patching "
            f"needs prompts of the same number of tokens"
        )
    _check_metric(metric)
    if not isinstance(site, str) or "*" in site:
        raise UserError(f"site must be the name of one activation of a layer, such as attn.out: {short_repr(site)}")
    if over not in ("positions", "heads"):
        raise UserError(f"over must be positions or heads: {short_repr(over)}")
    layers, of_stream = range(lm.config.model.n_layer), site.startswith("resid.")
    names = tuple(f"{site}.{layer}" if of_stream else f"h.{layer}.{site}" for layer in layers)
    by_key = site.endswith((".scores", ".pattern"))  # [B, N, T, S]: T are the positions
    axis = {"positions": 1 + by_key, "heads": 2 - by_key}[over]
    heads = ("attn.q", "attn.k", "attn.v", "attn.rot_q", "attn.rot_k", "attn.head_out", "attn.scores", "attn.pattern")
    if over == "heads" and site not in heads:
        raise UserError(f"{short_repr(site)} has no heads: choose from {', '.join(heads)}")
    return on_tokens(_patching, lm, corrupted_BT, clean_BT, metric, names, axis)


@partial(jax.jit, static_argnums=(0, 3, 4, 5))
def _ablation(
    config: Config,
    params: Any,
    tokens_BT: jax.Array,
    metric: Metric,
    replacement: Replacement,
    names: tuple[str, ...],
) -> Ablation:
    out = forward(config, params, tokens_BT, names)
    values = [
        jnp.zeros_like(x) if replacement == "zero" else jnp.broadcast_to(x.mean((0, 1), keepdims=True), x.shape)
        for x in (out.taps[name] for name in names)
    ]
    measure = lambda edits: _measure(metric, forward(config, params, tokens_BT, (), edits).logits)  # noqa: E731
    return Ablation(_measure(metric, out.logits), _sweep(measure, names, values, 2))


@partial(jax.jit, static_argnums=(0, 4, 5, 6))
def _patching(
    config: Config,
    params: Any,
    corrupted_BT: jax.Array,
    clean_BT: jax.Array,
    metric: Metric,
    names: tuple[str, ...],
    axis: int,
) -> Patching:
    clean = forward(config, params, clean_BT, names)
    measure = lambda edits: _measure(metric, forward(config, params, corrupted_BT, (), edits).logits)  # noqa: E731
    grid = _sweep(measure, names, [clean.taps[name] for name in names], axis)
    return Patching(_measure(metric, clean.logits), measure(()), grid)


def _sweep(
    measure: Callable[[Edits], jax.Array], names: Sequence[str], values: Sequence[jax.Array], axis: int
) -> jax.Array:
    """Compute the metric with one slice of one activation replaced: `[len(names), n]`, n the size of the axis."""
    n = values[0].shape[axis]

    def replaced(cell: jax.Array) -> jax.Array:
        def edit(i: int, x: jax.Array) -> jax.Array:
            slices = jnp.arange(n).reshape([-1 if a == axis else 1 for a in range(x.ndim)])
            return jnp.where(slices + i * n == cell, values[i], x)

        return measure(tuple((name, partial(edit, i)) for i, name in enumerate(names)))

    cells = jnp.arange(len(names) * n)
    return jax.lax.map(replaced, cells, batch_size=AT_ONCE).reshape(len(names), n)
