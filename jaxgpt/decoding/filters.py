"""Logit filters (`[B, V] -> [B, V]`; removed tokens get -inf), and inverse CDF sampling."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxgpt.decoding.buffer import TokenBuffer

NEVER = -jnp.inf
TINY = float(jnp.finfo(jnp.float32).tiny)  # smallest normal float32; compiled code may flush smaller numbers to zero


def penalize_repeats(logits_BV: jax.Array, text: TokenBuffer, penalty: float) -> jax.Array:
    """Penalize tokens that occur in the text: `l / penalty` if l > 0, otherwise `l * penalty`.

    Args:
        logits_BV: logits of the next token, float32.
        text: the tokens so far.
        penalty: factor; above 1 discourages repetition, 1 has no effect, below 1 encourages repetition.

    Source: Keskar et al. 2019 (CTRL), section 4.1.
    """
    seen_BV = _marks(logits_BV, text.ids_BS, text.seen_BS)
    penalized_BV = jnp.where(logits_BV < 0, logits_BV * penalty, logits_BV / penalty)
    return jnp.where(seen_BV, penalized_BV, logits_BV)


def forbid_repeated_ngrams(logits_BV: jax.Array, text: TokenBuffer, n: int) -> jax.Array:
    """Forbid tokens that would repeat an n-gram of the text: tokens after earlier occurrences of the last n - 1 tokens.

    Args:
        logits_BV: logits of the next token, float32.
        text: the tokens so far.
        n: size of the n-gram; 1 forbids every token of the text.

    Source: Paulus et al. 2017, section 2.5.
    """
    after_BS = jnp.roll(text.ids_BS, -(n - 1), 1)
    repeats_BV = _marks(logits_BV, after_BS, text.matches(n - 1))
    return jnp.where(repeats_BV, NEVER, logits_BV)


def keep_argmax(logits_BV: jax.Array) -> jax.Array:
    """Keep the most probable token; among ties, the first."""
    best_B = jnp.argmax(logits_BV, axis=-1)
    id_V = jnp.arange(logits_BV.shape[-1])
    return jnp.where(id_V[None, :] == best_B[:, None], logits_BV, NEVER)


def divide_by_temperature(logits_BV: jax.Array, temperature: float) -> jax.Array:
    """Compute `(l - max l) / temperature`: the probabilities of `l / temperature`, without overflow of the top tokens."""
    # With these bounds, neither the temperature nor its reciprocal is 0: 0 / 0 and -inf * 0 would be NaN.
    temperature = min(max(temperature, TINY), 1 / TINY)
    return _below_max(logits_BV) / temperature


def keep_top_k(logits_BV: jax.Array, k: int) -> jax.Array:
    """Keep the k most probable tokens and ties with the k-th. Source: Fan et al. 2018."""
    top_Bk, _ = jax.lax.top_k(logits_BV, min(k, logits_BV.shape[-1]))
    smallest_B1 = top_Bk.min(-1, keepdims=True)
    return jnp.where(logits_BV < smallest_B1, NEVER, logits_BV)


def keep_top_p(logits_BV: jax.Array, p: float) -> jax.Array:
    """Keep the smallest set of tokens with total probability >= p, at least one token.

    If several tokens have the smallest probability of the set, the largest ids are kept.

    Example: p = 0.7; two of the three tokens with 0.2 are kept.

        probability_BV  0.4  0.2  0.2  0.2    sorted_BR  0.2  0.2  0.2  0.4
        place_BV        0    3    2    1      above_BR   0.8  0.6  0.4  0
        removed_BV      no   yes  no   no     kept_BR    no   yes  yes  yes

    Source: Holtzman et al. 2020 (nucleus sampling).
    """
    probability_BV = jax.nn.softmax(logits_BV, axis=-1)
    # Sort the bits as integers, which is faster: nonnegative floats have the same order as their bits. Ranks R ascend.
    bits_BR = jnp.sort(jax.lax.bitcast_convert_type(probability_BV, jnp.int32), axis=-1)
    sorted_BR = jax.lax.bitcast_convert_type(bits_BR, jnp.float32)
    above_BR = jax.lax.cumsum(sorted_BR, 1, reverse=True) - sorted_BR  # total probability of the higher ranks
    kept_BR = above_BR < jnp.maximum(p, TINY)

    # If several tokens have the smallest kept probability, keep one per rank, the largest ids first.
    least_B1 = jnp.min(jnp.where(kept_BR, sorted_BR, jnp.inf), -1, keepdims=True)
    ties_B1 = jnp.sum(kept_BR & (sorted_BR == least_B1), -1, keepdims=True)
    tie_BV = probability_BV == least_B1
    place_BV = jax.lax.cumsum(tie_BV.astype(jnp.int32), 1, reverse=True)  # place among the ties; 1: the largest id
    removed_BV = (probability_BV < least_B1) | (tie_BV & (place_BV > ties_B1))
    return jnp.where(removed_BV, NEVER, logits_BV)


def keep_min_p(logits_BV: jax.Array, p: float) -> jax.Array:
    """Drop tokens with a probability below p times the maximum. Source: Nguyen et al. 2024 (min-p)."""
    probability_BV = jax.nn.softmax(logits_BV, axis=-1)
    highest_B1 = probability_BV.max(-1, keepdims=True)
    return jnp.where(probability_BV < p * highest_B1, NEVER, logits_BV)


def inverse_cdf_sample(logits_BV: jax.Array, uniform_B: jax.Array) -> jax.Array:
    """Sample by inverse CDF: return the first id with a cumulative probability above the random number.

    Args:
        logits_BV: float32; -inf for removed tokens; at least one token must remain.
        uniform_B: float32, random numbers in [0, 1).

    Returns:
        Token ids, int32 `[B]`.
    """
    weight_BV = jnp.exp(_below_max(logits_BV))
    # Rounded cumulative sums may decrease, so the total is the maximum of the sums at remaining tokens.
    sum_BV = jnp.where(weight_BV > 0, jnp.cumsum(weight_BV, axis=-1), 0.0)
    total_B1 = sum_BV.max(-1, keepdims=True)
    above_BV = sum_BV > uniform_B[:, None] * total_B1
    return jnp.argmax(above_BV, axis=-1).astype(jnp.int32)


def _below_max(logits_BV: jax.Array) -> jax.Array:
    """Compute `l - max l` for each row; the largest logit becomes exactly 0, even if it is infinite."""
    max_B1 = jnp.max(logits_BV, axis=-1, keepdims=True, initial=jnp.finfo(jnp.float32).min)
    return jnp.where(logits_BV >= max_B1, 0.0, logits_BV - max_B1)


def _marks(logits_BV: jax.Array, ids_BS: jax.Array, which_BS: jax.Array) -> jax.Array:
    """Mark the ids in `ids_BS` at the slots selected by `which_BS`: bool `[B, V]`."""
    B, V = logits_BV.shape
    row_B1 = jnp.arange(B)[:, None]
    ids_BS = jnp.where(which_BS, ids_BS, V)  # out of range: dropped
    marks_BV = jnp.zeros((B, V), bool)
    return marks_BV.at[row_B1, ids_BS].set(True, mode="drop")
