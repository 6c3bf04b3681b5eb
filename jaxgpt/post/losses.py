"""Losses of preference pairs: pure functions of log probabilities."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def dpo_loss(margin_B: jax.Array, beta: float, label_smoothing: float = 0.0) -> jax.Array:
    """Compute the DPO loss `-(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m)` of each pair, `[B]`.

    Direct preference optimization (Rafailov et al. 2023); with e > 0, conservative DPO (Mitchell 2023).

    Args:
        margin_B: m, `log p(answer) - log p_reference(answer)` of the chosen answer minus the same of the rejected answer.
        beta: strength of the KL constraint to the reference.
        label_smoothing: e, assumed fraction of swapped pairs.
    """
    right_B = -jax.nn.log_sigmoid(beta * margin_B)
    swapped_B = -jax.nn.log_sigmoid(-beta * margin_B)
    return (1 - label_smoothing) * right_B + label_smoothing * swapped_B


def robust_loss(margin_B: jax.Array, beta: float, label_smoothing: float = 0.0) -> jax.Array:
    """Compute the unbiased DPO loss of each pair, `[B]`: its expectation over swaps is the DPO loss without swaps.

    `(-(1 - e) log sigmoid(beta m) + e log sigmoid(-beta m)) / (1 - 2 e)` (Chowdhury et al. 2024). Arguments as for `dpo_loss`,
    with e below 0.5.
    """
    right_B = -jax.nn.log_sigmoid(beta * margin_B)
    swapped_B = -jax.nn.log_sigmoid(-beta * margin_B)
    unbiased_B = (1 - label_smoothing) * right_B - label_smoothing * swapped_B
    return unbiased_B / (1 - 2 * label_smoothing)


def ipo_loss(margin_B: jax.Array, beta: float) -> jax.Array:
    """Compute the IPO loss `(m - 1 / (2 beta))^2` of each pair, `[B]` (Azar et al. 2024).

    Args:
        margin_B: m as for `dpo_loss`, with log probabilities per token of the answer.
        beta: strength of the KL constraint to the reference.
    """
    return (margin_B - 1 / (2 * beta)) ** 2


def simpo_loss(margin_B: jax.Array, beta: float, target: float = 0.0) -> jax.Array:
    """Compute the SimPO loss `-log sigmoid(beta m - target)` of each pair, `[B]` (Meng et al. 2024).

    Args:
        margin_B: m, log p per token of the chosen answer minus log p per token of the rejected answer.
        beta: factor of the margin.
        target: target margin (gamma).
    """
    return -jax.nn.log_sigmoid(beta * margin_B - target)


def odds_ratio_loss(chosen_B: jax.Array, rejected_B: jax.Array) -> jax.Array:
    """Compute `-log sigmoid(log(odds(chosen) / odds(rejected)))` of each pair, `[B]`, with odds = p / (1 - p).

    ORPO adds beta times this loss to the cross entropy of the chosen answer (Hong et al. 2024).

    Args:
        chosen_B: log p per token of the chosen answers.
        rejected_B: log p per token of the rejected answers.
    """
    log_odds_B = chosen_B - log_complement(chosen_B) - (rejected_B - log_complement(rejected_B))
    return -jax.nn.log_sigmoid(log_odds_B)


def log_complement(log_p: jax.Array) -> jax.Array:
    """Compute `log(1 - p)` from `log p`; p is clipped to at most 1 - 1e-7, so that the result is finite."""
    log_p = jnp.minimum(log_p, -1e-7)
    return jnp.log(-jnp.expm1(log_p))
