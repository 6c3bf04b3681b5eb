"""Exercises on generation: greedy, top-p, sample, cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.decoding import filters
from jaxgpt.ops.attention import Positions, Visible, attend, row_positions
from jaxgpt_course.exercise import Exercise, normal

Array = np.ndarray


# greedy


def _model(seed: int) -> Callable[[Any], Array]:
    """Make a causal model with a vocabulary of 11; its logits depend on all tokens so far."""
    table_VD, head_DV = normal(seed, 11, 6), normal(seed + 1, 6, 11)

    def model(ids_T: Any) -> Any:
        xp, ids = (jnp, ids_T) if isinstance(ids_T, jax.core.Tracer) else (np, np.asarray(ids_T))
        if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
            raise TypeError(
                f"model takes one row of ids, integers [T]: it was called with {ids.dtype} {list(ids.shape)}"
            )
        distance_TT = np.arange(len(ids))[:, None] - np.arange(len(ids))[None, :]
        decay_TT = np.where(distance_TT >= 0, 0.9 ** np.abs(distance_TT), 0).astype(np.float32)
        return xp.tanh(decay_TT @ xp.asarray(table_VD)[ids]) @ head_DV

    return model


def greedy(model: Callable[[Any], Any], ids_T: Any, n: int) -> Any:
    return _generate(lambda logits_TV: int(filters.keep_argmax(jnp.asarray(logits_TV)[-1:])[0].argmax()))(
        model, ids_T, n
    )


def _generate(
    choose: Callable[[Array], int], see: Callable[[list[int]], list[int]] = lambda ids: ids
) -> Callable[..., Any]:
    """Build a generate function from a token chooser and a context selector."""

    def generate(model: Callable[[Any], Any], ids_T: Any, n: int) -> Any:
        ids = [int(i) for i in ids_T]
        for _ in range(n):
            ids.append(choose(model(np.array(see(ids)))))
        return np.array(ids[len(ids_T) :], np.int32)

    return generate


def _with_the_prompt(model: Callable[[Any], Any], ids_T: Any, n: int) -> Any:
    return np.concatenate([np.asarray(ids_T), greedy(model, ids_T, n)])


def _one_pass(model: Callable[[Any], Any], ids_T: Any, n: int) -> Any:
    return np.full(n, model(ids_T)[-1].argmax(), np.int32)


GREEDY = Exercise(
    name="greedy",
    page="generation",
    statement="Write greedy decoding: find the n ids that follow a prompt, each the most probable id given all previous ids. "
    "model(ids) takes ids [T] and returns logits [T, V]. Return the n new ids, without the prompt.",
    returns=("new_ids",),
    reference=greedy,
    inputs=lambda: {
        "6 tokens after 4": (_model(0), np.array([3, 1, 4, 1], np.int32), 6),
        "5 tokens after 1": (_model(2), np.array([7], np.int32), 5),
        "1 token after 9": (_model(4), np.array([2, 7, 1, 8, 2, 8, 1, 8, 2], np.int32), 1),
        "no tokens": (_model(0), np.array([5, 9], np.int32), 0),
    },
    mistakes=(
        ("the result contains the prompt: return the n new ids only", _with_the_prompt),
        ("the new tokens are not fed back: append each to the ids before the next call of the model", _one_pass),
        (
            "the model receives only the last token: pass all ids so far",
            _generate(lambda logits: int(logits[-1].argmax()), see=lambda ids: ids[-1:]),
        ),
        (
            "the function takes the least probable token: argmax, not argmin",
            _generate(lambda logits: int(logits[-1].argmin())),
        ),
        (
            "the function reads the logits of the first position: the last position (logits[-1]) predicts the next token",
            _generate(lambda logits: int(logits[0].argmax())),
        ),
        (
            "the function takes the maximum over all positions: only the last one (logits[-1]) predicts the next token",
            _generate(lambda logits: int(logits.max(0).argmax())),
        ),
    ),
)


# top-p

_keep_top_p = jax.jit(filters.keep_top_p)


def top_p(logits_V: Any, p: float) -> Any:
    return _keep_top_p(jnp.asarray(logits_V)[None], p)[0]


def _top_p(
    keep: Callable[[Array, float], Array], order: int = -1, removed: float = -np.inf
) -> Callable[[Array, float], Array]:
    """Make a filter from a rule that selects the sorted probabilities to keep."""

    def top_p(logits_V: Array, p: float) -> Array:
        p_V = np.exp(logits_V - logits_V.max()) / np.exp(logits_V - logits_V.max()).sum()
        sorted_ids = np.argsort(p_V, kind="stable")[::order]
        kept_V = np.zeros(len(p_V), bool)
        kept_V[sorted_ids[keep(p_V[sorted_ids], p)]] = True
        return np.where(kept_V, logits_V, np.float32(removed))

    return top_p


def _smallest_set(sorted_p: Array, p: float) -> Array:
    before: Array = np.cumsum(sorted_p) - sorted_p
    return before < p


def _in_sorted_order(logits_V: Array, p: float) -> Array:
    kept_V = _top_p(_smallest_set)(logits_V, p)
    return np.sort(kept_V)[::-1]


def _probabilities(logits_V: Array, p: float) -> Array:
    kept_V = np.exp(_top_p(_smallest_set)(logits_V, p))
    total: Array = kept_V / kept_V.sum()
    return total


def _is_the_smallest_set(out_V: Array, logits_V: Array, p: float) -> str | None:
    kept_V = out_V > -np.inf
    p_V = np.exp(logits_V - logits_V.max()) / np.exp(logits_V - logits_V.max()).sum()
    if np.isnan(out_V).any():
        return "some logits are NaN"
    if not kept_V.any():
        return "every token is removed: keep at least the most probable one"
    if not np.allclose(out_V[kept_V], logits_V[kept_V], atol=1e-5):
        return "the logits of tokens that are kept change: return them as they are, and -inf for the others"
    if p_V[kept_V].min() < p_V[~kept_V].max(initial=0):
        return f"the function keeps token {np.where(kept_V, p_V, 2).argmin()} and removes a more probable one"
    if p_V[kept_V].sum() < p - 1e-6:
        return f"the tokens that are kept have a probability of {p_V[kept_V].sum():.3f}, less than p = {p:g}: keep more tokens"
    if p_V[kept_V].sum() - p_V[kept_V].min() > p + 1e-6:
        return f"the function keeps {kept_V.sum()} tokens, but fewer reach p = {p:g}: stop when the sum reaches p"
    return None


TOP_P = Exercise(
    name="top-p",
    page="generation",
    aliases=("top_p", "nucleus"),
    statement="Filter logits to the nucleus: keep the smallest set of most probable tokens whose probabilities sum to at least "
    "p, and set the logits of all other tokens to -inf. At least one token is kept, and the kept logits do not change.",
    returns=("logits_V",),
    reference=top_p,
    inputs=lambda: {
        "p = 0.7": (normal(0, 6), 0.7),
        "p = 0.9, 300 tokens": (2 * normal(1, 300), 0.9),
        "p = 0.5, one token has 0.95": (np.array([0.3, 5.0, 1.0, 0.1, -0.4, 0.7], np.float32), 0.5),
        "p = 1": (normal(2, 6), 1.0),
        "p = 0.001": (normal(3, 6), 0.001),
        "p = 0.8, a token is removed already": (np.array([0.5, -np.inf, 1.0, 0.2, -0.1, 0.9], np.float32), 0.8),
    },
    mistakes=(
        (
            "the token that brings the sum to p is removed: the kept set must sum to at least p",
            _top_p(lambda sorted_p, p: np.cumsum(sorted_p) <= p),
        ),
        (
            "the function keeps tokens whose own probability is at least p: sum the probabilities in descending order",
            _top_p(lambda sorted_p, p: sorted_p >= p),
        ),
        (
            "the function keeps the least probable tokens: sort in descending order",
            _top_p(_smallest_set, order=1),
        ),
        (
            "the function keeps one token too many: stop when the sum reaches p",
            _top_p(lambda sorted_p, p: np.cumsum(sorted_p) - sorted_p - np.append(0, sorted_p[:-1]) < p),
        ),
        ("the result is in sorted order: put each logit back at its id", _in_sorted_order),
        ("removed logits are 0, and exp(0) is 1: set them to -inf", _top_p(_smallest_set, removed=0.0)),
        ("the function returns probabilities: return logits, -inf where a token is removed", _probabilities),
    ),
    laws=(_is_the_smallest_set,),
)


# sample


@jax.jit
def sample(logits_V: Any, temperature: float, p: float, u: float) -> Any:
    kept_1V = filters.keep_top_p(jnp.asarray(logits_V)[None] / temperature, p)
    return filters.inverse_cdf_sample(kept_1V, jnp.asarray(u, jnp.float32)[None])[0]


def _softmax(logits_V: Array) -> Array:
    exp_V: Array = np.exp(logits_V - logits_V.max())
    return exp_V / exp_V.sum()


def _sample(
    scale: Callable[[Array, float], Array] = lambda logits, temperature: logits / temperature,
    late: bool = False,
    keep: Callable[[Array, float], Array] = _smallest_set,
    weigh: Callable[[Array, Array], Array] = lambda kept_V, scaled_V: _softmax(kept_V),
    choose: Callable[[Array, float], Any] = lambda p_V, u: (np.cumsum(p_V) > u).argmax(),
) -> Callable[..., Any]:
    """Make a sampler, correct by default; an argument adds a deliberate bug."""

    def sample(logits_V: Array, temperature: float, p: float, u: float) -> Any:
        logits_V = logits_V.astype(np.float64)
        scaled_V = logits_V if late else scale(logits_V, temperature)
        kept_V = _top_p(keep)(scaled_V, p)
        kept_V = scale(kept_V, temperature) if late else kept_V
        return np.int32(choose(weigh(kept_V, scaled_V), u))

    return sample


SAMPLE = Exercise(
    name="sample",
    page="generation",
    aliases=("temperature",),
    statement="Draw a token: divide the logits by the temperature, keep the nucleus of p (as in top-p), and divide its "
    "probabilities by their sum. Return the first id whose cumulative probability, summed in the order of the ids, exceeds u, "
    "a random number in [0, 1).",
    returns=("id",),
    reference=sample,
    inputs=lambda: {
        f"temperature {temperature:g}, p = {p:g}, u = {u:g}": (2 * normal(seed, 8), temperature, p, u)
        for seed, (temperature, p, u) in enumerate(
            [
                (1, 1.0, 0.93),
                (0.5, 1.0, 0.7),
                (2, 1.0, 0.3),
                (2, 0.5, 0.6),
                (0.5, 0.7, 0.5),
                (3, 0.6, 0.4),
                (1.5, 0.5, 0.7),
                (2, 0.6, 0.2),
            ],
            start=7,
        )
    },
    mistakes=(
        ("the temperature is missing: divide the logits by it", _sample(scale=lambda logits, temperature: logits)),
        (
            "the logits are multiplied by the temperature: divide them",
            _sample(scale=lambda logits, temperature: logits * temperature),
        ),
        (
            "the temperature is applied after the nucleus: divide the logits first, then keep the nucleus of the result",
            _sample(late=True),
        ),
        ("all tokens are kept: keep the nucleus of p before the draw", _sample(keep=lambda p_V, p: p_V >= 0)),
        (
            "the probabilities of the nucleus are not divided by their sum: u can exceed the sum, so that no id is found",
            _sample(weigh=lambda kept_V, scaled_V: np.where(kept_V > -np.inf, _softmax(scaled_V), 0)),
        ),
        *(
            ("the exponentials are not divided by their sum: probabilities sum to 1", _sample(weigh=weigh))
            for weigh in (
                lambda kept_V, scaled_V: np.exp(kept_V),
                lambda kept_V, scaled_V: np.exp(kept_V - kept_V.max()),
            )
        ),
        (
            "the function takes the most probable token: u chooses the token",
            _sample(choose=lambda p_V, u: p_V.argmax()),
        ),
        (
            "the probabilities are summed in descending order: sum them in the order of the ids",
            _sample(choose=lambda p_V, u: np.argsort(-p_V)[(np.cumsum(np.sort(p_V)[::-1]) > u).argmax()]),
        ),
        (
            "the function returns the id before the right one: return the first id whose cumulative probability exceeds u",
            _sample(choose=lambda p_V, u: max((np.cumsum(p_V) > u).argmax() - 1, 0)),
        ),
    ),
)


# cache


@jax.jit
def extend(q_H: Any, k_H: Any, v_H: Any, cache: Any, length: int) -> Any:
    k_SH, v_SH = (
        jax.lax.dynamic_update_index_in_dim(jnp.asarray(old), jnp.asarray(new), length, 0)
        for old, new in zip(cache, (k_H, v_H), strict=True)
    )
    visible = Visible(Positions(jnp.full((1, 1), length)), row_positions(len(k_SH)))
    q_111H = jnp.asarray(q_H)[None, None, None]
    out_111H = attend(q_111H, k_SH[None, None], v_SH.T[None, None], visible, len(q_H) ** -0.5)
    return out_111H[0, 0, 0], (k_SH, v_SH)


def _extend(
    slot: Callable[[int], int] = lambda length: length,
    seen: Callable[[Array, int], Array] = lambda slots, length: slots <= length,
    scale: Callable[[int], float] = lambda H: H**-0.5,
    masked: float = -np.inf,
    shift: bool = True,
    old_cache: bool = False,
    keys_for_values: bool = False,
) -> Callable[..., Any]:
    """Make a decoding step with a cache, correct by default; an argument adds a deliberate bug."""

    def extend(q_H: Array, k_H: Array, v_H: Array, cache: Any, length: int) -> Any:
        k_SH, v_SH = (x.copy() for x in cache)
        k_SH[slot(length)], v_SH[slot(length)] = k_H, v_H
        scores_S = np.where(seen(np.arange(len(k_SH)), length), k_SH @ q_H * scale(len(q_H)), masked)
        exp_S = np.exp(scores_S - scores_S.max() if shift else scores_S)
        out_H = exp_S / exp_S.sum() @ (k_SH if keys_for_values else v_SH)
        return out_H, cache if old_cache else (k_SH, v_SH)

    return extend


def _not_written(q_H: Array, k_H: Array, v_H: Array, cache: Any, length: int) -> Any:
    return _extend(seen=lambda slots, length: slots < length)(q_H, k_H, v_H, cache, length)[0], cache


def _growing(q_H: Array, k_H: Array, v_H: Array, cache: Any, length: int) -> Any:
    out_H, (k_SH, v_SH) = _extend()(q_H, k_H, v_H, cache, length)
    return out_H, (k_SH[: length + 1], v_SH[: length + 1])


def _only_its_slot_changes(result: Any, q_H: Array, k_H: Array, v_H: Array, cache: Any, length: int) -> str | None:
    _, new_cache = result
    for name, token, old_SH, new_SH in zip("kv", (k_H, v_H), cache, new_cache, strict=True):
        changed = np.flatnonzero(~np.isclose(old_SH, new_SH, atol=1e-5).all(-1))
        if others := sorted(set(changed.tolist()) - {length}):
            return f"{name}_SH changes in slot {others[0]}: only slot {length} (length) may change"
        if not np.allclose(new_SH[length], token, atol=1e-5):
            return f"{name}_SH[{length}] is not the new {name}_H: write it to slot `length`"
    return None


def _cache(seed: int, S: int, H: int, length: int) -> tuple[Any, ...]:
    """Make the arguments of one call of `extend`. Unused slots hold random values."""
    q_H, k_H, v_H = normal(seed, 3, H)
    k_SH, v_SH = normal(seed + 1, 2, S, H)
    return q_H, k_H, v_H, (k_SH, v_SH), length


def _far_below_zero(S: int, H: int, length: int) -> tuple[Any, ...]:
    """Make the arguments of a call with scores far below 0."""
    _, _, v_H, (_, v_SH), _ = _cache(6, S, H, length)
    key_H = np.full(H, 100, np.float32)
    return -key_H, key_H, v_H, (np.tile(key_H, (S, 1)), v_SH), length


CACHE = Exercise(
    name="cache",
    page="generation",
    statement="Compute the attention of one new token with a KV cache. The cache is an argument and a result: (k_SH, v_SH) "
    "with S slots. The first `length` slots are filled, and the other slots hold arbitrary values. Write the new key and "
    "value to slot `length`, attend with the query to slots 0 to `length` (scale 1 / sqrt(H)), and return the output and the "
    "new cache. Other slots stay unchanged. The function is also called under jax.jit, with a traced length.",
    returns=("out_H", "cache"),
    reference=extend,
    inputs=lambda: {
        "three tokens in the cache": _cache(0, 6, 4, 3),
        "an empty cache": _cache(2, 6, 4, 0),
        "the last slot": _cache(4, 6, 4, 5),
        "scores far below 0": _far_below_zero(6, 4, 3),
    },
    mistakes=(
        (
            "the function attends to unused slots: mask the scores of slots beyond `length`",
            _extend(seen=lambda slots, length: slots >= 0),
        ),
        (
            "the token does not see itself: attend to slots 0 to `length`, both included",
            _extend(seen=lambda slots, length: slots < length),
        ),
        ("the old cache is returned: return the cache with the new key and value", _extend(old_cache=True)),
        ("the new key and value are not written: put them into slot `length`, then attend", _not_written),
        (
            "the function writes to slot `length - 1`, over the last token: the first free slot is `length`",
            _extend(slot=lambda length: length - 1),
        ),
        (
            "where scores are far below 0, the function attends to unused slots: set masked scores to -inf, not to -1e4",
            _extend(masked=-1e4),
        ),
        (
            "where scores are far below 0, the softmax is 0 / 0: subtract the maximum of the scores before the exponential",
            _extend(shift=False),
        ),
        ("the weights average keys: they average the values, weights @ v_SH", _extend(keys_for_values=True)),
        ("the scale 1 / sqrt(H) is missing", _extend(scale=lambda H: 1.0)),
        (
            "the cache grows with each token: return all S slots, so that shapes stay the same and nothing is compiled again",
            _growing,
        ),
    ),
    laws=(_only_its_slot_changes,),
    jit="length has no value there, so shapes must not depend on it: use all S slots, mask the scores with "
    "jnp.where(jnp.arange(S) <= length, scores_S, -jnp.inf), and write with .at[length].set",
)
