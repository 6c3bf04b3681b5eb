"""What may be chosen, and how likely: each rule one pure function over logits. What is forbidden becomes -inf."""

from __future__ import annotations

import jax
import jax.numpy as jnp

NEVER = -jnp.inf
SLICE = 256  # likeliest ids that the nucleus is first looked for in; a sort of a whole vocabulary is slow on a CPU


def penalize_repeats(logits_BV: jax.Array, ids_BS: jax.Array, seen_BS: jax.Array, penalty: float) -> jax.Array:
    """Make what has been said less likely: `l / penalty` where l > 0, else `l * penalty`.

    Args:
        ids_BS: tokens so far.
        seen_BS: which of them count.
        penalty: 1 changes nothing, below 1 invites repetition.

    Source: Keskar et al. 2019 (CTRL), section 4.1.
    """
    said_BV = _marks(logits_BV, ids_BS, seen_BS)
    return jnp.where(said_BV, jnp.where(logits_BV < 0, logits_BV * penalty, logits_BV / penalty), logits_BV)


def forbid_repeated_ngrams(
    logits_BV: jax.Array, ids_BS: jax.Array, seen_BS: jax.Array, length: jax.Array, n: int
) -> jax.Array:
    """Forbid the ids that would make n tokens in a row that stood in a row before.

    Args:
        ids_BS: tokens so far, every row's last one at `length - 1`.
        seen_BS: which of them count.
        length: int32 scalar, slots in use.
        n: 1 forbids every token a second time.

    Source: Paulus et al. 2017, section 2.5.
    """
    S = ids_BS.shape[1]
    repeats_BS = seen_BS  # at slot s: whether s + n - 1 would be said again
    for i in range(n):
        # Beyond the end roll brings the beginning back, but there no token is in use or a row would have no room left.
        repeats_BS = repeats_BS & jnp.roll(seen_BS, -i, 1) & (jnp.arange(S) + i < S)[None, :]
        if i < n - 1:
            suffix_B1 = jax.lax.dynamic_slice_in_dim(ids_BS, jnp.maximum(length - n + 1 + i, 0), 1, 1)
            repeats_BS = repeats_BS & (jnp.roll(ids_BS, -i, 1) == suffix_B1)
    return jnp.where(_marks(logits_BV, jnp.roll(ids_BS, -(n - 1), 1), repeats_BS), NEVER, logits_BV)


def keep_likeliest(logits_BV: jax.Array) -> jax.Array:
    """All but one id become -inf: the likeliest, the first of equals."""
    best_B1 = jnp.argmax(logits_BV, axis=-1)[:, None]
    return jnp.where(jnp.arange(logits_BV.shape[-1])[None, :] == best_B1, logits_BV, NEVER)


def keep_top_k(logits_BV: jax.Array, k: int) -> jax.Array:
    """All but the k largest become -inf; what equals the k-th stays. Source: Fan et al. 2018."""
    kth_B1 = jax.lax.top_k(logits_BV, min(k, logits_BV.shape[-1]))[0][:, -1:]
    return jnp.where(logits_BV < kth_B1, NEVER, logits_BV)


def keep_top_p(logits_BV: jax.Array, p: float) -> jax.Array:
    """Keep the smallest set of likeliest ids whose probability is at least p; one is always kept.

    Of equals at the border the later ids stay. The set is looked for among the `SLICE` likeliest, and among all only
    where those do not reach p.

    Source: Holtzman et al. 2020 (nucleus sampling).
    """
    V = logits_BV.shape[-1]
    total_B1 = jax.nn.logsumexp(logits_BV, axis=-1, keepdims=True)

    def among(k: int) -> jax.Array:
        # Reversed, because top_k takes the first of equals.
        value_Bk, back_Bk = jax.lax.top_k(logits_BV[:, ::-1], k)
        probability_Bk = jnp.exp(value_Bk - total_B1)
        above_Bk = jnp.cumsum(probability_Bk, axis=-1) - probability_Bk
        drop_Bk = (above_Bk >= p).at[:, 0].set(False)
        rows_B1 = jnp.arange(logits_BV.shape[0])[:, None]
        kept_BV = jnp.zeros(logits_BV.shape, bool).at[rows_B1, V - 1 - back_Bk].set(~drop_Bk)
        return jnp.where(kept_BV, logits_BV, NEVER)

    if V <= SLICE:
        return among(V)
    mass_B = jnp.exp(jax.lax.top_k(logits_BV, SLICE)[0] - total_B1).sum(-1)
    return jax.lax.cond(jnp.all(mass_B >= p), lambda: among(SLICE), lambda: among(V))


def keep_min_p(logits_BV: jax.Array, p: float) -> jax.Array:
    """Keep what is at least p times as likely as the likeliest. Source: Nguyen et al. 2024 (min-p)."""
    probability_BV = jax.nn.softmax(logits_BV, axis=-1)
    return jnp.where(probability_BV < p * probability_BV.max(-1, keepdims=True), NEVER, logits_BV)


def draw(logits_BV: jax.Array, uniform_B: jax.Array) -> jax.Array:
    """The first id at which the probabilities, added up in the order of ids, exceed the random number.

    Sums run over 256 ids, then over their sums: a float32 sum over 50,000 small numbers one after the other would lose the
    last of them.

    Args:
        uniform_B: from [0, 1).

    Returns:
        int32 `[B]`.
    """
    B, V = logits_BV.shape
    width = 256
    weight_BV = jnp.exp(logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True, initial=jnp.finfo(jnp.float32).min))
    weight_BGW = jnp.pad(weight_BV, ((0, 0), (0, -V % width))).reshape(B, -1, width)
    groups_BG = weight_BGW.sum(-1)
    target_B = uniform_B * groups_BG.sum(-1)
    group_B, rest_B = _first_above(groups_BG, target_B)
    inside_BW = jnp.take_along_axis(weight_BGW, group_B[:, None, None], axis=1)[:, 0]
    place_B, _ = _first_above(inside_BW, rest_B)
    return (group_B * width + place_B).astype(jnp.int32)


def _first_above(weight_BN: jax.Array, target_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where the running sum first exceeds the target (rounding may leave none: then the last weight above zero), and how
    far beyond the sum before it the target lies."""
    sum_BN = jnp.cumsum(weight_BN, axis=-1)
    last_B = weight_BN.shape[-1] - 1 - jnp.argmax(weight_BN[:, ::-1] > 0, axis=-1)
    first_B = jnp.minimum((sum_BN <= target_B[:, None]).sum(-1), last_B)
    taken_BN = jnp.where(jnp.arange(weight_BN.shape[-1])[None, :] < first_B[:, None], weight_BN, 0.0)
    return first_B, target_B - taken_BN.sum(-1)


def _marks(logits_BV: jax.Array, ids_BS: jax.Array, which_BS: jax.Array) -> jax.Array:
    """bool `[B, V]`: true at the ids that are among `ids_BS` where `which_BS` holds."""
    B, V = logits_BV.shape
    ids_BS = jnp.where(which_BS, ids_BS, V)  # out of range: dropped
    return jnp.zeros((B, V), bool).at[jnp.arange(B)[:, None], ids_BS].set(True, mode="drop")
