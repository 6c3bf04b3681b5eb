"""Skipping bad updates."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgpt.train.loss import cross_entropy
from jaxgpt.train.skip import HORIZON, first_bad, init_guard, judge, squares
from jaxgpt.train.step import TrainState, init_state, train_step

BAD = 9  # an id on which the model below fails


def loss_fn(params: Any, tokens_BT: jax.Array, targets_BT: jax.Array, key: jax.Array | None) -> jax.Array:
    logits_BTV = params["wte"]["embedding"][tokens_BT] @ params["h_0"]["kernel"]
    return cross_entropy(logits_BTV + jnp.where(tokens_BT == BAD, jnp.nan, 0.0)[..., None], targets_BT)


OPTIMIZER = optax.adam(optax.linear_schedule(0.1, 0.0, 10))
STEP = jax.jit(
    partial(
        train_step,
        loss_fn=loss_fn,
        optimizer=OPTIMIZER,
        learning_rate=optax.linear_schedule(0.1, 0.0, 10),
        seed=0,
        ema_decay=0.9,
    )
)
GOOD_BATCH, BAD_BATCH = jnp.array([[1, 2, 3]]), jnp.array([[1, BAD, 3]])


def start(guard: bool) -> TrainState:
    params = {"wte": {"embedding": jnp.ones((10, 4)) / 7}, "h_0": {"kernel": jnp.arange(40.0).reshape(4, 10) / 40}}
    return init_state(params, OPTIMIZER, ema=True, guard=guard)


def bits(tree: object) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_a_skipped_update_leaves_the_state_unchanged() -> None:
    """A run with bad batches ends with the same state as one without them, except for step and counts."""
    state, clean = start(True), start(True)
    for batch in (GOOD_BATCH, BAD_BATCH, GOOD_BATCH, BAD_BATCH, BAD_BATCH, GOOD_BATCH):
        state, metrics = STEP(state, batch)
    for _ in range(3):
        clean, metrics_clean = STEP(clean, GOOD_BATCH)
    assert bits(state[1:4]) == bits(clean[1:4])
    assert (int(state.step), int(state.guard.total), int(state.guard.in_a_row)) == (6, 3, 0)
    assert metrics["lr"] == metrics_clean["lr"]
    assert metrics["skipped"] == 3


def test_a_guard_does_not_change_good_updates() -> None:
    with_guard, without = start(True), start(False)
    for _ in range(3):
        with_guard, _ = STEP(with_guard, GOOD_BATCH)
        without, _ = STEP(without, GOOD_BATCH)
    assert bits(with_guard[:4]) == bits(without[:4])


def test_consecutive_skips_are_counted() -> None:
    state, seen = start(True), []
    for batch in (BAD_BATCH, BAD_BATCH, GOOD_BATCH, BAD_BATCH):
        state, metrics = STEP(state, batch)
        seen.append(int(metrics["skipped_in_a_row"]))
    assert seen == [1, 2, 0, 1]


def after(values: list[float], factor: float):  # type: ignore[no-untyped-def]
    guard, made = init_guard(), []
    for value in values:
        ok, guard = judge(guard, jnp.float32(value), jnp.float32(1.0), factor)
        made.append(bool(ok))
    return made, guard


def test_spikes() -> None:
    made, guard = after([2.0] * HORIZON + [5.9, 7.0, np.inf, 2.0], 3.0)
    assert made[HORIZON:] == [True, False, False, True]
    assert 2.0 < float(guard.loss) < 2.4
    assert after([2.0] * (HORIZON - 1) + [100.0], 3.0)[0][-1], "too few losses for a mean"
    assert after([2.0] * HORIZON + [100.0], 0.0)[0][-1], "spike detection is off"


def test_a_lasting_increase_is_accepted() -> None:
    made, _ = after([1.0] * HORIZON + [4.0] * HORIZON, 2.0)
    assert not made[HORIZON]
    assert made[-1]


@given(st.lists(st.floats(width=32, allow_subnormal=False), min_size=1, max_size=8), st.sampled_from([0.0, 2.0]))
def test_running_means_are_finite(values: list[float], factor: float) -> None:
    """For any input; and the mean of finite values lies between their extremes."""
    values = [v if abs(v) < 1e30 else np.inf for v in values]
    made, guard = after(values, factor)
    finite = [v for v in values if np.isfinite(v)]
    assert made == [bool(np.isfinite(v)) for v in values]
    assert int(guard.seen) == len(finite)
    if finite:
        slack = 1e-5 * max(map(abs, finite))
        assert min(finite) - slack <= float(guard.loss) <= max(finite) + slack


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ([], ""),
        (["h_0/attn/kernel", "wte/embedding"], "h_0/attn/kernel (2 of 6 gradients)"),
        (["h_0/attn/kernel", "h_2/attn/kernel", "h_10/attn/kernel"], "h_10/attn/kernel"),
        (["h_10/attn/kernel", "h_10/mlp/kernel"], "h_10/mlp/kernel"),
        (["h_10/mlp/kernel", "ln_f/scale", "wte/embedding"], "ln_f/scale"),
    ],
)
def test_the_first_bad_gradient_is_named(bad: list[str], name: str) -> None:
    """The backward pass propagates non-finite values from the output towards the input."""
    paths = ["h_0/attn/kernel", "h_10/attn/kernel", "h_10/mlp/kernel", "h_2/attn/kernel", "ln_f/scale", "wte/embedding"]
    grads: dict = {}  # type: ignore[type-arg]
    for path in paths:
        node = grads
        *parents, last = path.split("/")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = jnp.array([1.0, jnp.inf if path in bad else 2.0])
    assert name in first_bad(grads, np.asarray(squares(grads)))
    assert bool(first_bad(grads, np.asarray(squares(grads)))) == bool(bad)
