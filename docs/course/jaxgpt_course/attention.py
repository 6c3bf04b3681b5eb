"""Exercises on attention and the block: softmax, mask, attention, block."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.ops.attention import Visible, row_positions
from jaxgpt.ops.attention import attend as attend_heads
from jaxgpt.ops.norms import layer_norm
from jaxgpt_course.exercise import Exercise, normal

Array = np.ndarray
_EPS = 1e-5


def _softmax(scores: Array, axis: int = -1, shift: bool = True) -> Array:
    exp = np.exp(scores - scores.max(axis, keepdims=True) if shift else scores)
    weights: Array = exp / exp.sum(axis, keepdims=True)
    return weights


# softmax


@jax.jit
def softmax(scores_TS: Any) -> Any:
    return jax.nn.softmax(scores_TS, axis=-1)


def _rows_sum_to_one(weights_TS: Array, scores_TS: Array) -> str | None:
    if np.isnan(weights_TS).any():
        return "some weights are NaN: subtract the maximum of each row before the exponential, to prevent overflow and 0 / 0"
    if (weights_TS < 0).any():
        return "some weights are negative: the exponential is missing"
    wrong = np.flatnonzero(np.abs(weights_TS.sum(-1) - 1) > 1e-3)
    if len(wrong):
        return f"the rows do not sum to 1 (row {wrong[0]} sums to {weights_TS[wrong[0]].sum():.3g}): divide by the row's sum"
    return None


SOFTMAX = Exercise(
    name="softmax",
    page="attention",
    statement="Compute the softmax of each row of scores [T, S]: non-negative weights that sum to 1 over the last axis, "
    "proportional to exp(score). Scores may be large, or -inf.",
    returns=("weights_TS",),
    reference=softmax,
    inputs=lambda: {
        "random scores": (normal(0, 4, 6),),
        "one column": (normal(1, 3, 1),),
        "large scores": (np.array([[1000, 0, -1000], [999, 1000, 0]], np.float32),),
        "large scores of both signs": (np.array([[1000, 999, 0], [-1000, -999, -2000]], np.float32),),
        "masked scores (-inf)": (np.where(np.tri(4, 6, dtype=bool), normal(2, 4, 6), -np.inf).astype(np.float32),),
    },
    mistakes=(
        (
            "softmax overflows for large scores: subtract the maximum of each row before the exponential",
            lambda x: _softmax(x, shift=False),
        ),
        (
            "a row far below the largest score becomes 0 / 0: subtract the maximum of each row, not of the whole array",
            lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum(-1, keepdims=True),
        ),
        (
            "the function normalizes columns, not rows: take the maximum and sum over the last axis (axis=-1, keepdims=True)",
            lambda x: _softmax(x, axis=0),
        ),
        (
            "all weights together sum to 1, not each row: sum over the last axis (axis=-1, keepdims=True)",
            lambda x: np.exp(x - x.max(-1, keepdims=True)) / np.exp(x - x.max(-1, keepdims=True)).sum(),
        ),
        (
            "the rows do not sum to 1: divide the exponentials by their sum",
            lambda x: np.exp(x - x.max(-1, keepdims=True)),
        ),
    ),
    laws=(_rows_sum_to_one,),
)


# mask


@partial(jax.jit, static_argnums=0)
def causal_mask(T: int) -> Any:
    return Visible(row_positions(T)).mask()[0, 0]


def _sees_itself_and_the_past(mask_TT: Array, T: int) -> str | None:
    future = np.argwhere(np.triu(mask_TT, 1))
    if len(future):
        query, key = future[0]
        return f"future positions are allowed: query {query} sees key {key}; query t may see keys 0 to t"
    if not mask_TT.diagonal().all():
        return "a position does not see itself: query t may see keys 0 to t, both included"
    return None


MASK = Exercise(
    name="mask",
    page="attention",
    statement="Return the causal mask of T positions, booleans [T, T]: true where the query of the row may see the key of "
    "the column, that is, at the query's own position and earlier positions.",
    returns=("mask_TT",),
    reference=causal_mask,
    inputs=lambda: {"T = 5": (5,), "T = 1": (1,), "T = 8": (8,)},
    mistakes=(
        (
            "the mask is transposed: queries see the future; rows are queries, so keep the lower triangle",
            lambda T: np.triu(np.ones((T, T), bool)),
        ),
        (
            "a position does not see itself: keep the diagonal, too (position 0 has nothing else to see)",
            lambda T: np.tril(np.ones((T, T), bool), -1),
        ),
        (
            "true and false are exchanged: true is where attention is allowed",
            lambda T: np.triu(np.ones((T, T), bool), 1),
        ),
        ("everything is allowed: queries see the future", lambda T: np.ones((T, T), bool)),
        (
            "the function returns the numbers 0 and 1: make the lower triangle of an array of booleans (dtype=bool)",
            lambda T: np.tril(np.ones((T, T))),
        ),
        (
            "the function returns the integers 0 and 1: make the lower triangle of an array of booleans (dtype=bool)",
            lambda T: np.tril(np.ones((T, T), int)),
        ),
        (
            "the function returns 0 and -inf, to be added to scores: return booleans, true where attention is allowed",
            lambda T: np.where(np.tri(T, dtype=bool), 0.0, -np.inf),
        ),
    ),
    laws=(_sees_itself_and_the_past,),
)


# attention


@jax.jit
def attend(q_TH: Any, k_TH: Any, v_TH: Any) -> Any:
    q, k, v = (jnp.asarray(x)[None, None] for x in (q_TH, k_TH, v_TH))
    T, H = q_TH.shape
    out_1T1H = attend_heads(q.swapaxes(1, 2), k, v.mT, Visible(row_positions(T)), 1 / H**0.5)
    return out_1T1H[0, :, 0]


def _head(
    scale: Callable[[int, int], float] = lambda T, H: H**-0.5,
    mask: Callable[[Array], Array] = lambda scores: np.where(np.tri(len(scores), dtype=bool), scores, -np.inf),
    softmax: Callable[[Array], Array] = _softmax,
    after: Callable[[Array], Array] = lambda weights: weights,
    swap: bool = False,
    keys_for_values: bool = False,
) -> Callable[..., Any]:
    """Make an attention head, correct by default; an argument adds a deliberate bug."""

    def attend(q_TH: Array, k_TH: Array, v_TH: Array) -> Array:
        k_TH, v_TH = (v_TH, k_TH) if keys_for_values else (k_TH, v_TH)
        scores_TT = (k_TH @ q_TH.T if swap else q_TH @ k_TH.T) * scale(*q_TH.shape)
        out: Array = after(softmax(mask(scores_TT))) @ v_TH
        return out

    return attend


def _far_below_the_future(T: int) -> tuple[Array, Array, Array]:
    """Make queries and keys with scores of 0 at future positions and far below 0 at other positions.

    The values are the identity, so the output equals the weights.
    """
    eye = np.eye(T, dtype=np.float32)
    return -300 * np.tri(T, dtype=np.float32), 300 * eye, eye


def _weights_are_causal(out_TH: Array, q_TH: Array, k_TH: Array, v_TH: Array) -> str | None:
    """Return why the weights (the output, if the values are the identity) are wrong, or None."""
    if np.isnan(out_TH).any():
        return (
            "some results are NaN: does the softmax subtract the maximum of each row, does position 0 see itself, and are "
            "masked scores replaced by -inf (0 * -inf is NaN)?"
        )
    if not np.array_equal(v_TH, np.eye(*v_TH.shape)):
        return None
    future = np.argwhere(np.abs(np.triu(out_TH, 1)) > 1e-6)
    if len(future):
        query, key = future[0]
        weight = out_TH[query, key]
        return f"weights at future positions are not zero: query {query} gives key {key} the weight {weight:.2g}"
    if not (np.abs(out_TH.diagonal()) > 0).all():
        return "a position does not see itself: query t sees keys 0 to t, both included"
    sums = out_TH.sum(-1)
    wrong = np.flatnonzero(np.abs(sums - 1) > 1e-3)
    if len(wrong):
        return f"the weights of a query do not sum to 1: the weights of query {wrong[0]} sum to {sums[wrong[0]]:.3g}"
    return None


ATTENTION = Exercise(
    name="attention",
    aliases=("head",),
    page="attention",
    statement="Compute one head of causal attention: softmax(q k^T / sqrt(H)) v, where position t sees positions 0 to t. "
    "Queries, keys, values and the result are [T, H].",
    returns=("out_TH",),
    reference=attend,
    inputs=lambda: {
        "random vectors": (normal(0, 6, 4), normal(1, 6, 4), normal(2, 6, 4)),
        "values that show the weights": (normal(3, 5, 5), normal(4, 5, 5), np.eye(5, dtype=np.float32)),
        "one position": (normal(5, 1, 3), normal(6, 1, 3), normal(7, 1, 3)),
        "queries of zeros": (np.zeros((5, 5), np.float32), normal(9, 5, 5), np.eye(5, dtype=np.float32)),
        "large scores": (300 * np.eye(5, dtype=np.float32), 300 * np.eye(5, dtype=np.float32), normal(8, 5, 5)),
        "scores far below those of the future": _far_below_the_future(5),
    },
    mistakes=(
        (
            "the scale 1 / sqrt(H) is missing: divide the scores by the square root of the width of the head",
            _head(scale=lambda T, H: 1.0),
        ),
        ("the scores are divided by H: divide them by sqrt(H)", _head(scale=lambda T, H: 1 / H)),
        (
            "the scores are divided by sqrt(T): divide them by sqrt(H), the width of the head",
            _head(scale=lambda T, H: T**-0.5),
        ),
        (
            "weights at future positions are not zero: the causal mask is missing",
            _head(mask=lambda scores: scores),
        ),
        (
            "weights at future positions are not zero: the mask is transposed (rows are queries, columns keys)",
            _head(mask=lambda scores: np.where(np.tri(len(scores), dtype=bool).T, scores, -np.inf)),
        ),
        (
            "weights at future positions are not zero: masked scores are 0, and exp(0) is 1; set them to -inf",
            _head(mask=np.tril),
        ),
        (
            "the weights of a query do not sum to 1: mask the scores before the softmax, not the weights after it",
            _head(mask=lambda scores: scores, after=np.tril),
        ),
        (
            "where future scores are the largest, the weights are 0 / 0: set future scores to -inf before the softmax and its "
            "maximum, instead of removing weights after it",
            _head(
                mask=lambda scores: scores,
                after=lambda weights: np.tril(weights) / np.tril(weights).sum(-1, keepdims=True),
            ),
        ),
        (
            "where all other scores are far below 0, weights at future positions are not zero: set masked scores to -inf, not "
            "to a number such as -1e4",
            _head(mask=lambda scores: np.where(np.tri(len(scores), dtype=bool), scores, -1e4)),
        ),
        (
            "a position does not see itself: query t sees keys 0 to t, both included",
            _head(mask=lambda scores: np.where(np.tri(len(scores), k=-1, dtype=bool), scores, -1e9)),
        ),
        (
            "the softmax runs over the queries: normalize over the keys, the last axis",
            _head(softmax=lambda scores: _softmax(scores, axis=0)),
        ),
        (
            "the weights are not normalized: the softmax divides by the sum over the keys",
            _head(softmax=lambda scores: np.exp(scores - scores.max(-1, keepdims=True))),
        ),
        (
            "softmax overflows for large scores: subtract the maximum of each row before the exponential",
            _head(softmax=lambda scores: _softmax(scores, shift=False)),
        ),
        ("keys and values are exchanged: the scores are q k^T, and the weights average v", _head(keys_for_values=True)),
        ("queries and keys are exchanged: the scores are q k^T, a row for each query", _head(swap=True)),
    ),
    laws=(_weights_are_causal,),
)


# block


@partial(jax.jit, static_argnums=(1, 2))
def block(x_TD: Any, attend: Callable[[Any], Any], mlp: Callable[[Any], Any]) -> Any:
    y_TD = x_TD + attend(layer_norm(jnp.asarray(x_TD), _EPS))
    return y_TD + mlp(layer_norm(y_TD, _EPS))


@cache
def _sublayers(D: int) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Make attention and an MLP, functions [T, D] -> [T, D]."""
    w_q, w_k, w_v, w_1, w_2 = (normal(seed, D, D) / D**0.5 for seed in range(5))

    @jax.jit
    def attention(x_TD: jax.Array) -> jax.Array:
        out_TD: jax.Array = attend(x_TD @ w_q, x_TD @ w_k, x_TD @ w_v)
        return out_TD

    @jax.jit
    def mlp(x_TD: jax.Array) -> jax.Array:
        return jax.nn.gelu(x_TD @ w_1) @ w_2

    return attention, mlp


def _layer_norm(
    x: Any, axis: int | None = -1, ddof: int = 0, center: bool = True, eps_outside: bool = False, eps: float = _EPS
) -> Any:
    x = np.asarray(x)
    centered = x - x.mean(axis, keepdims=True)
    variance = centered.var(axis, ddof=ddof, keepdims=True) if center else np.square(x).mean(axis, keepdims=True)
    scale = np.sqrt(variance) + eps if eps_outside else np.sqrt(variance + eps)
    return (centered if center else x) / scale


def _block_with(**options: Any) -> Callable[..., Any]:
    """Make a pre-norm block; `options` are passed to `_layer_norm`."""

    def block(x: Any, attend: Callable[[Any], Any], mlp: Callable[[Any], Any]) -> Any:
        y = x + attend(_layer_norm(x, **options))
        return y + mlp(_layer_norm(y, **options))

    return block


def _post_norm(x: Any, attend: Callable[[Any], Any], mlp: Callable[[Any], Any]) -> Any:
    y = _layer_norm(x + attend(x))
    return _layer_norm(y + mlp(y))


def _second_without_residual(x: Any, attend: Callable[[Any], Any], mlp: Callable[[Any], Any]) -> Any:
    return mlp(_layer_norm(x + attend(_layer_norm(x))))


def _first_without_residual(x: Any, attend: Callable[[Any], Any], mlp: Callable[[Any], Any]) -> Any:
    y = attend(_layer_norm(x))
    return y + mlp(_layer_norm(y))


def _mlp_added_to_x(x: Any, attend: Callable[[Any], Any], mlp: Callable[[Any], Any]) -> Any:
    return x + _second_without_residual(x, attend, mlp)


def _none_with_residual(x: Any, attend: Callable[[Any], Any], mlp: Callable[[Any], Any]) -> Any:
    return mlp(_layer_norm(attend(_layer_norm(x))))


def _second_without_norm(x: Any, attend: Callable[[Any], Any], mlp: Callable[[Any], Any]) -> Any:
    y = x + attend(_layer_norm(x))
    return y + mlp(y)


def _first_without_norm(x: Any, attend: Callable[[Any], Any], mlp: Callable[[Any], Any]) -> Any:
    y = x + attend(x)
    return y + mlp(_layer_norm(y))


def _parallel(x: Any, attend: Callable[[Any], Any], mlp: Callable[[Any], Any]) -> Any:
    return x + attend(_layer_norm(x)) + mlp(_layer_norm(x))


def _without_norm(x: Any, attend: Callable[[Any], Any], mlp: Callable[[Any], Any]) -> Any:
    y = x + attend(x)
    return y + mlp(y)


def _residual_of_the_norm(x: Any, attend: Callable[[Any], Any], mlp: Callable[[Any], Any]) -> Any:
    x = _layer_norm(x)
    y = _layer_norm(x + attend(x))
    return y + mlp(y)


def _normed_at_the_end(x: Any, attend: Callable[[Any], Any], mlp: Callable[[Any], Any]) -> Any:
    return _layer_norm(_block_with()(x, attend, mlp))


def _with_an_equal_row(x_TD: Array) -> Array:
    x_TD[1] = 2.0
    return x_TD


BLOCK = Exercise(
    name="block",
    page="block",
    statement="Compute a pre-norm block: y = x + attend(norm(x)), then y + mlp(norm(y)). attend and mlp are arguments: "
    "functions [T, D] -> [T, D]. Implement norm as well: (x - mean) / sqrt(variance + 1e-5) over the last "
    "axis, without gain and bias.",
    returns=("out_TD",),
    reference=block,
    inputs=lambda: {
        "random vectors": (3 * normal(0, 5, 8) + 1, *_sublayers(8)),
        "small vectors, where the 1e-5 matters": (1e-3 * normal(1, 5, 8), *_sublayers(8)),
        "a vector of equal numbers": (_with_an_equal_row(normal(2, 5, 8)), *_sublayers(8)),
        "one position": (normal(3, 1, 8), *_sublayers(8)),
    },
    mistakes=(
        ("this is a post-norm block, norm(x + f(x)): normalize the input of each sublayer, x + f(norm(x))", _post_norm),
        ("both residuals are missing: add the output of each sublayer to the stream", _none_with_residual),
        ("the residual of attention is missing: y = x + attend(norm(x))", _first_without_residual),
        ("the residual of the MLP is missing: y + mlp(norm(y))", _second_without_residual),
        (
            "the output of the MLP is added to x: add it to y, the stream after attention, y + mlp(norm(y))",
            _mlp_added_to_x,
        ),
        ("the MLP reads x instead of y: its input is norm(y), after attention was added", _parallel),
        ("the norms are missing: each sublayer reads the norm of the stream", _without_norm),
        ("the norm before the MLP is missing: y + mlp(norm(y))", _second_without_norm),
        ("the norm before attention is missing: y = x + attend(norm(x))", _first_without_norm),
        ("the stream itself is normalized: x + attend(norm(x)) adds to x, not to norm(x)", _residual_of_the_norm),
        ("the result is normalized once more: the last step is y + mlp(norm(y))", _normed_at_the_end),
        ("the norm runs over the positions: take mean and variance over the last axis", _block_with(axis=0)),
        (
            "the norm runs over the whole array: take mean and variance over the last axis (axis=-1, keepdims=True)",
            _block_with(axis=None),
        ),
        ("the variance divides by D - 1 (ddof=1): divide by D", _block_with(ddof=1)),
        (
            "the mean is not subtracted: the function computes RMSNorm; for LayerNorm, subtract the mean",
            _block_with(center=False),
        ),
        (
            "1e-5 is missing: divide by sqrt(variance + 1e-5), which also prevents 0 / 0 for equal numbers",
            _block_with(eps=0.0),
        ),
        ("1e-5 is added to the standard deviation: divide by sqrt(variance + 1e-5)", _block_with(eps_outside=True)),
    ),
)
