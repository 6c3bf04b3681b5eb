"""The router's choice, its losses, and the definition of the experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgpt.ops.experts import ExpertWeights, balance_loss, bias_loss, expert_load, experts, route, z_loss

B, T, D, F, E = 2, 6, 8, 5, 4
ALL = jnp.ones((B, T), bool)


def logits(seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(0, 2, (B, T, E)), jnp.float32)


@given(seed=st.integers(0, 99), active=st.integers(1, E))
def test_normalized_softmax_scores_are_a_softmax_of_the_chosen_logits(seed: int, active: int) -> None:
    chosen, _ = jax.lax.top_k(logits(seed), active)
    np.testing.assert_allclose(route(logits(seed), active).share_BTA, jax.nn.softmax(chosen, axis=-1), rtol=1e-5)


def test_other_scores_are_not_read_as_sigmoid() -> None:
    with pytest.raises(KeyError, match="softmx"):
        route(logits(), 2, "softmx")


def test_a_bias_changes_the_choice_but_not_the_shares() -> None:
    bias_E = jnp.asarray([0.0, 9.0, 0.0, 0.0])
    routing = route(logits(), 2, "sigmoid", normalize=False, scale=2.5, bias_E=bias_E)
    assert (routing.choice_BTA[..., 0] == 1).all()
    score_BT = 2.5 * jax.nn.sigmoid(logits()[..., 1])
    np.testing.assert_allclose(routing.share_BTA[..., 0], score_BT, rtol=1e-6)


def test_the_balance_loss_is_1_for_equal_loads() -> None:
    choice = jnp.asarray([[[0], [1], [2], [3]]])
    routing = route(10 * jax.nn.one_hot(choice[..., 0], E), 1)
    np.testing.assert_allclose(balance_loss(routing, ALL[:1, :4]), [1.0], rtol=1e-6)


def test_the_balance_loss_by_hand() -> None:
    """Two tokens choose experts 0 and 1, and both of them expert 0."""
    score = np.asarray([[0.5, 0.3, 0.1, 0.1], [0.6, 0.1, 0.2, 0.1]])
    routing = route(jnp.log(jnp.asarray(score, jnp.float32))[None], 2)
    load = np.asarray([0.5, 0.25, 0.25, 0.0])
    np.testing.assert_allclose(balance_loss(routing, ALL[:1, :2]), [4 * (load * score.mean(0)).sum()], rtol=1e-6)


def test_padding_is_not_counted() -> None:
    """Padding does not change the losses of a row."""
    is_token_BT = jnp.asarray([[True] * 4 + [False] * 2] * B)
    padded = route(logits(), 2)
    short = route(logits()[:, :4], 2)
    np.testing.assert_allclose(balance_loss(padded, is_token_BT), balance_loss(short, ALL[:, :4]), rtol=1e-6)
    load_BE = expert_load(padded.choice_BTA, E, is_token_BT)
    np.testing.assert_allclose(load_BE, expert_load(short.choice_BTA, E, ALL[:, :4]), rtol=1e-6)


def test_a_row_of_padding_has_finite_losses() -> None:
    routing = route(logits(), 2)
    assert jnp.isfinite(balance_loss(routing, jnp.zeros((B, T), bool))).all()


@pytest.mark.parametrize("result", ["shares", "balance_loss"])
def test_scores_that_underflow_have_finite_results_and_gradients(result: str) -> None:
    def total(logits: jax.Array) -> jax.Array:
        routing = route(logits, 2, "sigmoid")
        values = routing.share_BTA if result == "shares" else balance_loss(routing, ALL)
        return values.sum()

    value, gradient = jax.value_and_grad(total)(jnp.full((B, T, E), -200.0))
    assert jnp.isfinite(value)
    assert jnp.isfinite(gradient).all()


def test_the_gradient_of_the_bias_is_the_error_of_the_load() -> None:
    load_BE = expert_load(route(logits(), 2).choice_BTA, E, ALL)
    value, gradient_E = jax.value_and_grad(lambda bias_E: bias_loss(bias_E, load_BE).sum())(jnp.ones(E))
    assert value == 0
    np.testing.assert_allclose(gradient_E, (load_BE - 0.25).sum(0), rtol=1e-6)


def test_the_z_loss_by_hand() -> None:
    np.testing.assert_allclose(z_loss(logits()), np.log(np.exp(logits()).sum(-1)) ** 2, rtol=1e-5)


@pytest.mark.parametrize("gated", [False, True])
def test_a_token_is_computed_by_its_experts(gated: bool) -> None:
    """Compare with each token computed alone, in NumPy."""
    rng = np.random.default_rng(0)
    up_EDF, gate_EDF = rng.normal(size=(2, E, D, F))
    down_EFD = rng.normal(size=(E, F, D))
    x_BTD = rng.normal(size=(B, T, D))
    routing = route(logits(), 2)
    weights = ExpertWeights(*(jnp.asarray(w, jnp.float32) for w in (up_EDF, down_EFD, gate_EDF)))
    if not gated:
        weights = weights._replace(gate_EDF=None)
    found = experts(
        jnp.asarray(x_BTD, jnp.float32), routing.choice_BTA, routing.share_BTA, weights, jnp.tanh, jnp.dtype("float32")
    )
    for row in range(B):
        for t in range(T):
            expected = np.zeros(D)
            for expert, share in zip(routing.choice_BTA[row, t], routing.share_BTA[row, t], strict=True):
                x_D = x_BTD[row, t]
                up_F = x_D @ up_EDF[expert]
                h_F = np.tanh(x_D @ gate_EDF[expert]) * up_F if gated else np.tanh(up_F)
                expected += float(share) * (h_F @ down_EFD[expert])
            np.testing.assert_allclose(found[row, t], expected, rtol=1e-4, atol=1e-5)
