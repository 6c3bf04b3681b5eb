"""Measure the effect of removing heads (ablation), or of replacing activations (patching)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.errors import UserError, short_repr
from jaxgpt.lm import LM
from jaxgpt.lm.model import check_lm
from jaxgpt.model import GPT
from jaxgpt.settings import as_int
from jaxgpt.study.activation_names import layer_names
from jaxgpt.study.observer import Edits, forward
from jaxgpt.study.run import run
from jaxgpt.study.token_ids import answer_ids, as_tokens, on_tokens

Metric = Callable[[jax.Array], jax.Array]  # a pure function from logits [B, T, V] to a scalar, such as LogitDifference
AT_ONCE = 32  # maximum number of edited forward passes per batch


@dataclass(frozen=True)
class LogitDifference:
    """The mean over rows of `logits[:, position, right] - logits[:, position, wrong]`.

    Attributes:
        right: id of the correct token, or one id per row; a sequence is stored as a tuple.
        wrong: id of the incorrect token, or one id per row.
        position: position of the compared logits; negative: counted from the end.

    Raises:
        UserError: when called, if a position or id is out of range, or the number of ids is neither 1 nor the number of
            rows.
    """

    right: int | Sequence[int]
    wrong: int | Sequence[int]
    position: int = -1

    def __post_init__(self) -> None:
        """Make the metric hashable, so that it can be a static argument of compiled programs."""
        for name in ("right", "wrong"):
            ids = np.asarray(getattr(self, name))
            hashable = tuple(ids.reshape(-1).tolist()) if ids.ndim else ids.item()
            object.__setattr__(self, name, hashable)

    def __call__(self, logits_BTV: jax.Array) -> jax.Array:
        """Compute the mean difference of the two logits."""
        B, T, V = logits_BTV.shape
        logits_BV = logits_BTV[:, as_int("position", self.position, -T, T - 1)]

        def mean_logit(ids: int | Sequence[int]) -> jax.Array:
            ids_B = answer_ids(V, ids, B)
            return jnp.take_along_axis(logits_BV, ids_B[:, None], -1).mean()

        return mean_logit(self.right) - mean_logit(self.wrong)


def _measure(metric: Metric, logits_BTV: jax.Array) -> jax.Array:
    """Compute a metric; raise `UserError` if it is not a scalar."""
    value = jnp.asarray(metric(logits_BTV))
    if value.shape:
        raise UserError(f"the metric returned an array of shape {list(value.shape)}: return a scalar, such as its mean")
    return value


class Ablation(NamedTuple):
    """The effect of removing heads, one at a time.

    Attributes:
        clean: the metric of the unchanged model.
        ablated: the metric with each head ablated in turn, `[L, N]`.
    """

    clean: jax.Array
    ablated: jax.Array


def ablate_heads(lm: LM, ids: Any, metric: Metric, replacement: Literal["zero", "mean"] = "zero") -> Ablation:
    """Compute a metric with each attention head ablated in turn.

    Args:
        ids: a text, or ids `[B, T]`.
        metric: a function of the logits `[B, T, V]`, computed with JAX, that returns a scalar.
        replacement: value that replaces the head's output: zero, or the output's mean over the rows and positions of `ids`.

    Raises:
        UserError: as in `run`, or if the replacement is unknown, or the metric is not a scalar.
    """
    check_lm(lm)
    if replacement not in ("zero", "mean"):
        raise UserError(f"replacement must be zero or mean: {short_repr(replacement)}")
    names = tuple(layer_names(lm.config.model, "attn.head_out"))
    factor = 1 if replacement == "mean" else 0
    values = []
    for output_BTNH in run(lm, ids, names).taps.values():
        mean_NH = output_BTNH.mean((0, 1))
        values.append(jnp.broadcast_to(factor * mean_NH, output_BTNH.shape))
    heads = _axis_of("attn.head_out", over="heads")
    found = on_tokens(_sweep, lm, ids, tuple(values), names, heads, metric)
    return Ablation(clean=found.unedited, ablated=found.edited)


class Patching(NamedTuple):
    """The effect of patching single activations of a clean prompt into a corrupted prompt.

    Attributes:
        clean: the metric of the clean prompt.
        corrupted: the metric of the corrupted prompt.
        grid: the metric of the corrupted prompt with one clean activation: `[L, T]` over positions, `[L, N]` over
            heads (`[L, K]` for keys and values).
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
    """Patch activations of a clean prompt into a corrupted prompt, one at a time, and compute a metric.

    Args:
        clean: prompt that provides the activations: a text, or ids `[B, T]`.
        corrupted: prompt to patch: a text, or ids with the same shape.
        metric: a function of the logits `[B, T, V]` that returns a scalar, such as `LogitDifference(right, wrong)`.
        site: name of the activation to patch in each layer: resid.pre, resid.mid, attn.out, mlp.out, attn.head_out, attn.q, ...
        over: patch one position at a time, or, for activations of heads, one head at all positions.

    Raises:
        UserError: as in `run`, or if the prompts have different shapes, the site has no axis `over`, or the metric is
            invalid.

    Source: Meng et al. 2022 (causal tracing); Wang et al. 2022.
    """
    clean_BT = as_tokens(lm, clean)
    corrupted_BT = as_tokens(lm, corrupted)
    if clean_BT.shape != corrupted_BT.shape:
        raise UserError(
            f"the clean ids have shape {list(clean_BT.shape)} and the corrupted ids {list(corrupted_BT.shape)}: patching "
            f"needs equal numbers of rows and of tokens"
        )
    if over not in ("positions", "heads"):
        raise UserError(f"over must be positions or heads: {short_repr(over)}")
    names = tuple(layer_names(lm.config.model, site))
    out = run(lm, clean_BT, names)
    values = tuple(out.taps[name] for name in names)
    if over == "heads" and values[0].ndim != 4:
        raise UserError(f"{short_repr(site)} has no heads: choose attn.head_out, attn.q, attn.pattern, ...")

    clean_value = _measure(metric, out.logits)
    found = on_tokens(_sweep, lm, corrupted_BT, values, names, _axis_of(site, over), metric)
    return Patching(clean=clean_value, corrupted=found.unedited, grid=found.edited)


def _axis_of(site: str, over: Literal["positions", "heads"]) -> int:
    """Return the axis of positions or heads of an activation: `[B, T, N, H]`, but `[B, N, T, S]` for scores and patterns."""
    if site.endswith((".scores", ".pattern")):
        return 1 if over == "heads" else 2
    return 2 if over == "heads" else 1


class Sweep(NamedTuple):
    """A metric without edits, and with one slice of one activation replaced.

    Attributes:
        unedited: the metric without edits.
        edited: the metric with each slice of each activation replaced, `[activations, slices]`.
    """

    unedited: jax.Array
    edited: jax.Array


def sweep(
    model: GPT,
    params: Any,
    tokens_BT: jax.Array,
    values: tuple[jax.Array, ...],
    names: tuple[str, ...],
    axis: int,
    metric: Metric,
) -> Sweep:
    """Compute a metric without edits, and with single slices of `values` patched into the activations.

    Args:
        model: the model.
        params: weights of the model.
        tokens_BT: ids of the forward passes.
        values: an array for each activation, with the shape of the activation.
        names: names of the activations.
        axis: the axis of slices: a slice contains all elements at one index of this axis.
        metric: a function of the logits that returns a scalar.
    """
    n = values[0].shape[axis]  # cell i * n + j is slice j of activation i

    def measure(edits: Edits = ()) -> jax.Array:
        return _measure(metric, forward(model, params, tokens_BT, (), edits).logits)

    def replaced(cell: jax.Array) -> jax.Array:
        def edit(i: int, x: jax.Array) -> jax.Array:
            along_axis = [-1 if a == axis else 1 for a in range(x.ndim)]
            slices = jnp.arange(n).reshape(along_axis)
            return jnp.where(slices + i * n == cell, values[i], x)

        return measure(tuple((name, partial(edit, i)) for i, name in enumerate(names)))

    cells = jnp.arange(len(names) * n)
    unedited = measure()
    edited = jax.lax.map(replaced, cells, batch_size=AT_ONCE)
    return Sweep(unedited, edited.reshape(len(names), n))


_sweep = jax.jit(sweep, static_argnums=(0, 4, 5, 6))
