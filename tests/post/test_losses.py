"""Laws of the losses of preference pairs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgpt.config import Config, PostConfig
from jaxgpt.errors import UserError
from jaxgpt.model import GPT
from jaxgpt.post.losses import dpo_loss, ipo_loss, log_complement, odds_ratio_loss, robust_loss, simpo_loss
from jaxgpt.train.loss import next_token_loss
from jaxgpt.trainer.build import build

MARGINS = jnp.linspace(-4, 4, 9)
numbers = st.floats(-50, 50, width=32)
fractions = st.floats(0, 0.45)


def log_sigmoid(x: np.ndarray) -> np.ndarray:
    return -np.logaddexp(0, -np.asarray(x, np.float64))


def test_without_a_preference_the_loss_is_log_2() -> None:
    np.testing.assert_allclose(dpo_loss(jnp.zeros(3), 0.3), np.log(2), rtol=1e-6)
    np.testing.assert_allclose(simpo_loss(jnp.zeros(3), 2.0), np.log(2), rtol=1e-6)
    half = jnp.log(jnp.full(3, 0.5))
    np.testing.assert_allclose(odds_ratio_loss(half, half), np.log(2), rtol=1e-6)


@given(numbers, st.floats(0.01, 2), fractions)
def test_robust_losses_are_unbiased(margin: float, beta: float, e: float) -> None:
    """The mean robust loss over pairs that are swapped with probability e is the DPO loss."""
    m = jnp.array([margin, -margin])
    right, swapped = np.asarray(robust_loss(m, beta, e), np.float64)
    expected = -log_sigmoid(beta * margin)
    assert (1 - e) * right + e * swapped == pytest.approx(expected, rel=1e-4, abs=1e-4)


@given(numbers, st.floats(0.01, 2), fractions)
def test_smoothed_losses_are_means_over_swapped_pairs(margin: float, beta: float, e: float) -> None:
    found = dpo_loss(jnp.array([margin]), beta, e)
    expected = -(1 - e) * log_sigmoid(beta * margin) - e * log_sigmoid(-beta * margin)
    assert float(found[0]) == pytest.approx(float(expected), rel=1e-4, abs=1e-5)


def test_ipo_is_least_at_its_target() -> None:
    assert float(ipo_loss(jnp.array([5.0]), 0.1)[0]) == 0.0
    slope = jax.vmap(jax.grad(lambda m: ipo_loss(m[None], 0.1)[0]))(jnp.array([4.0, 6.0]))
    assert slope.tolist() == [-2.0, 2.0]


def test_simpo_shifts_the_margin() -> None:
    np.testing.assert_allclose(simpo_loss(MARGINS, 2.0, 1.0), -log_sigmoid(2 * np.asarray(MARGINS) - 1), rtol=1e-5)


@given(st.floats(-30, -1e-3), st.floats(-30, -1e-3))
def test_odds_ratios(chosen: float, rejected: float) -> None:
    def log_odds(log_p: float) -> float:
        return log_p - float(np.log(-np.expm1(np.float64(log_p))))

    found = odds_ratio_loss(jnp.array([chosen]), jnp.array([rejected]))
    expected = -log_sigmoid(log_odds(chosen) - log_odds(rejected))
    assert float(found[0]) == pytest.approx(float(expected), rel=1e-3, abs=1e-4)


def test_certain_answers_have_finite_odds() -> None:
    value, slope = jax.value_and_grad(lambda x: log_complement(x))(jnp.float32(0.0))
    assert np.isfinite(value)
    assert np.isfinite(slope)


def test_a_program_has_one_objective() -> None:
    config = Config().with_model(vocab_size=8)
    with pytest.raises(UserError, match="the program has two objectives: pass objective or objective_of, not both"):
        build(
            config,
            objective=next_token_loss(GPT(config.model).apply),
            objective_of=lambda model: next_token_loss(model.apply),
        )


def test_a_program_needs_the_objective_of_its_settings() -> None:
    config = Config(post=PostConfig(objective="dpo"))
    with pytest.raises(
        UserError, match=r"post.objective dpo needs its objective: pass build=jaxgpt.post.start.build_program"
    ):
        build(config)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"beta": 0.0, "objective": "dpo"}, "post.beta must be above 0"),
        ({"beta": 0.2}, "post.beta has no effect on post.objective next-token: add --post.objective dpo, or omit"),
        ({"objective": "ipo", "label_smoothing": 0.1}, "post.label_smoothing has no effect on post.objective ipo"),
        ({"objective": "dpo", "label_smoothing": 0.5}, "post.label_smoothing must be at least 0 and below 0.5"),
        ({"objective": "simpo", "reference": "x"}, "post.reference has no effect on post.objective simpo"),
        (
            {"objective": "dop"},
            "post.objective must be one of next-token, distill, on-policy-distill, dpo, robust, ipo, ",
        ),
    ],
)
def test_settings_without_effect_are_errors(settings: dict, said: str) -> None:
    with pytest.raises(UserError) as error:
        PostConfig(**settings)
    assert said in str(error.value)
