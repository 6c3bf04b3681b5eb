"""Laws of advantages, divergences and clipping."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxgpt.post.policy import advantages, clipped_loss, kl_estimate

rewards = arrays(np.float32, (3, 4), elements=st.floats(-10, 10, width=32))


@given(rewards, st.floats(-5, 5), st.sampled_from(["normalized", "centered", "leave-one-out"]))
def test_advantages_of_a_group_ignore_a_constant(reward_PG: np.ndarray, constant: float, kind: str) -> None:
    """They sum to 0 in each group."""
    found = advantages(reward_PG, kind)
    np.testing.assert_allclose(found.sum(1), 0, atol=1e-2 if kind == "normalized" else 1e-4)
    shifted = advantages(reward_PG + np.float32(constant), kind)
    if kind != "normalized":
        np.testing.assert_allclose(shifted, found, atol=1e-4)


@given(st.floats(-1e5, 1e5, width=32), st.integers(2, 12), st.sampled_from(["normalized", "centered", "leave-one-out"]))
def test_equal_rewards_teach_nothing(reward: float, group: int, kind: str) -> None:
    """The mean of equal numbers may be rounded, so that the normalized advantages would be as large as useful ones."""
    assert not advantages(np.full((2, group), reward, np.float32), kind).any()


def test_leave_one_out_compares_with_the_other_answers() -> None:
    reward_PG = np.array([[1.0, 0.0, 0.5, 0.25]])
    expected = [r - (reward_PG.sum() - r) / 3 for r in reward_PG[0]]
    np.testing.assert_allclose(advantages(reward_PG, "leave-one-out")[0], expected, rtol=1e-6)


def test_estimates_of_the_divergence() -> None:
    """k1 and k3 are unbiased, and all are 0 for equal policies."""
    log_p = np.log(np.array([0.5, 0.3, 0.2]))
    log_q = np.log(np.array([0.4, 0.4, 0.2]))
    divergence = float((np.exp(log_p) * (log_p - log_q)).sum())
    for kind in ("k1", "k3"):
        estimates = np.asarray(kl_estimate(jnp.asarray(log_q - log_p), kind))
        assert float((np.exp(log_p) * estimates).sum()) == pytest.approx(divergence, rel=1e-4)
    for kind in ("k1", "k2", "k3"):
        assert float(kl_estimate(jnp.zeros(()), kind)) == 0.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"), [(1.5, 1.0, False), (0.5, 1.0, True), (1.5, -1.0, True), (0.5, -1.0, False)]
)
def test_clipping_stops_only_gains(ratio: float, advantage: float, moves: bool) -> None:
    """Outside the range, the gradient is zero where the loss would fall further, and whole where it would rise."""
    slope = jax.grad(lambda r: clipped_loss(r, jnp.float32(advantage), 0.2, 0.28))(jnp.float32(ratio))
    assert float(slope) == (-advantage if moves else 0.0)
