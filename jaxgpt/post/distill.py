"""Distillation: the divergence between the distributions of a student and of a frozen teacher at each position."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxgpt.config import PostConfig
from jaxgpt.post.losses import log_complement
from jaxgpt.train.at_positions import at_positions
from jaxgpt.train.loss import Objective, RowSums, cross_entropy, split_windows
from jaxgpt.train.side_outputs import penalty_of, side_metrics, side_sums


def kl_divergence(log_a: jax.Array, log_b: jax.Array) -> jax.Array:
    """Compute `KL(a || b) = sum_v a_v (log a_v - log b_v)` over the last axis, in nats."""
    return (jnp.exp(log_a) * (log_a - log_b)).sum(-1)


def divergence(
    log_p: jax.Array, log_q: jax.Array, kind: Literal["forward", "reverse", "jsd"], beta: float = 0.5
) -> jax.Array:
    """Compute the divergence between a student p and a teacher q over the last axis, in nats.

    forward: `KL(q || p)` (Hinton et al. 2015), with the gradient of the cross entropy with the targets q; reverse: `KL(p || q)`
    (Gu et al. 2024), where tokens that only the teacher finds probable count little; jsd: the generalized Jensen-Shannon
    divergence `beta KL(q || m) + (1 - beta) KL(p || m)`, with the mixture `m = beta q + (1 - beta) p` (Agarwal et al. 2024).
    """
    if kind == "forward":
        return kl_divergence(log_q, log_p)
    if kind == "reverse":
        return kl_divergence(log_p, log_q)
    log_m = jnp.logaddexp(jnp.log(beta) + log_q, jnp.log1p(-beta) + log_p)
    return beta * kl_divergence(log_q, log_m) + (1 - beta) * kl_divergence(log_p, log_m)


def top_and_rest(log_p: jax.Array, log_q: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return the log probabilities of the k tokens that q finds most probable, and of all others together, each `[..., k + 1]`.

    Their divergence is a lower bound on the divergence over all tokens, and equal distributions have the divergence 0. If only
    the k probabilities were compared, renormalized, the loss would not limit the student's probability of the other tokens.
    """
    top_q, ids = jax.lax.top_k(log_q, k)
    top_p = jnp.take_along_axis(log_p, ids, -1)

    def with_rest(top: jax.Array) -> jax.Array:
        return jnp.concatenate([top, log_complement(jax.nn.logsumexp(top, -1, keepdims=True))], -1)

    return with_rest(top_p), with_rest(top_q)


def position_losses(
    student_logits_BTV: jax.Array, teacher_logits_BTV: jax.Array, targets_BT: jax.Array, settings: PostConfig
) -> dict[str, jax.Array]:
    """Compute the losses of each position, `[B, T]`, in nats; 0 without a target.

    loss: the divergence of `settings`; kl: `KL(student || teacher)` over all tokens, without a gradient; cross_entropy: the
    loss of language models.
    """
    log_p_BTV = jax.nn.log_softmax(student_logits_BTV)
    log_q_BTV = jax.nn.log_softmax(teacher_logits_BTV)
    kl_BT = kl_divergence(jax.lax.stop_gradient(log_p_BTV), log_q_BTV)
    if settings.top_k:
        log_p_BTV, log_q_BTV = top_and_rest(log_p_BTV, log_q_BTV, settings.top_k)
    loss_BT = divergence(log_p_BTV, log_q_BTV, settings.divergence, settings.jsd_beta)
    is_target_BT = targets_BT >= 0
    return {
        "loss": jnp.where(is_target_BT, loss_BT, 0.0),
        "kl": jnp.where(is_target_BT, kl_BT, 0.0),
        "cross_entropy": cross_entropy(student_logits_BTV, targets_BT),
    }


def distillation_objective(
    apply_fn: Callable[..., Any],
    teacher_fn: Callable[..., Any],
    settings: PostConfig,
    chunk: int = 0,
    penalties: Mapping[str, float] | None = None,
) -> Objective:
    """Make the objective of distillation: the divergence at each position with a target, for batches of windows.

    The argument `frozen` of the objective holds the weights of the teacher. The metric `cross_entropy` is the loss of language
    models, and `kl` is `KL(student || teacher)` over all tokens, regardless of the divergence; both in nats per token.

    Args:
        apply_fn: `apply` of the student.
        teacher_fn: `apply` of the teacher, a model with the same vocabulary.
        settings: `divergence`, `jsd_beta`, and `top_k` to compare only the teacher's most probable tokens. In rollouts, the
            targets of a row are at most `max_new_tokens` consecutive positions, and only these have logits.
        chunk: positions of each window per chunk of logits, to save memory (`train.at_positions.chunked`); 0: all.
        penalties: the student's penalties, as in `train.loss.next_token_loss`.
    """
    longest = settings.max_new_tokens if settings.is_rollout else 0

    def objective(params: Any, windows: jax.Array, key: jax.Array | None, frozen: Any) -> RowSums:
        inputs_BT, targets_BT, positions = split_windows(windows)
        student = partial(apply_fn, {"params": params})
        teacher = partial(teacher_fn, {"params": frozen})
        student_BTD, sides = student(inputs_BT, key, positions, method="hidden_and_sides")
        teacher_BTD, _ = teacher(inputs_BT, None, positions, method="hidden_and_sides")
        D = student_BTD.shape[-1]

        def losses(x_BTD: jax.Array, targets_BT: jax.Array) -> dict[str, jax.Array]:
            student_logits_BTV = student(x_BTD[..., :D], method="head")
            # The states of both models are one array. Without `stop_gradient`, gradients would flow through the teacher's head.
            teacher_logits_BTV = teacher(jax.lax.stop_gradient(x_BTD[..., D:]), method="head")
            return position_losses(student_logits_BTV, teacher_logits_BTV, targets_BT, settings)

        # Join the hidden states of both models, so that one pass over the positions computes both logits.
        x_BTD = jnp.concatenate([student_BTD, teacher_BTD], -1)
        losses_BT = at_positions(losses, x_BTD, targets_BT, chunk, longest)
        sums = {name: loss_BT.sum(-1) for name, loss_BT in losses_BT.items()}
        count_B = (targets_BT >= 0).sum(-1, dtype=jnp.float32)
        loss_B = sums.pop("loss")
        if penalties is None:
            return RowSums(loss_B, count_B, sums)
        side_sums_B = side_sums(sides, targets_BT)
        return RowSums(loss_B, count_B, sums | side_metrics(side_sums_B), penalty_of(side_sums_B, penalties))

    return objective
