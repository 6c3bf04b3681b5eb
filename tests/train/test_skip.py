"""Skipping bad updates."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given
from hypothesis import strategies as st

from jaxgpt.train.loss import next_token_loss
from jaxgpt.train.skip import HORIZON, SkipStatistics, init_statistics, should_apply
from jaxgpt.train.step import TrainState, init_state, train_step

BAD = 9  # the model below returns NaN for this id


def logits(variables: Any, tokens_BT: jax.Array, *_: Any) -> jax.Array:
    params = variables["params"]
    logits_BTV: jax.Array = params["wte"]["embedding"][tokens_BT] @ params["h_0"]["kernel"]
    return logits_BTV + jnp.where(tokens_BT == BAD, jnp.nan, 0.0)[..., None]


OBJECTIVE = next_token_loss(logits)
OPTIMIZER = optax.adam(optax.linear_schedule(0.1, 0.0, 10))
STEP = jax.jit(partial(train_step, objective=OBJECTIVE, optimizer=OPTIMIZER, ema_decay=0.9))
GOOD_BATCH = jnp.array([[1, 2, 3]])
BAD_BATCH = jnp.array([[1, BAD, 3]])


def start(skip: bool = True) -> TrainState:
    params = {"wte": {"embedding": jnp.ones((10, 4)) / 7}, "h_0": {"kernel": jnp.arange(40.0).reshape(4, 10) / 40}}
    return init_state(params, OPTIMIZER, ema=True, skip=skip)


def bits(tree: object) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def kept(state: TrainState) -> list[bytes]:
    """Return the bits of all that a skipped update leaves unchanged."""
    return bits((state.params, state.opt_state, state.ema))


def test_a_skipped_update_leaves_the_state_unchanged() -> None:
    """A run with bad batches ends with the same state as one without them, except for step and statistics."""
    state = start()
    clean = start()
    for batch in (BAD_BATCH, GOOD_BATCH, BAD_BATCH, GOOD_BATCH, BAD_BATCH, BAD_BATCH, GOOD_BATCH):
        before = state
        state, metrics = STEP(state, batch)
        if batch is BAD_BATCH:
            assert kept(state) == kept(before)
    for _ in range(3):
        clean, _ = STEP(clean, GOOD_BATCH)
    assert kept(state) == kept(clean)
    assert int(state.step) == 7
    assert state.skip is not None
    assert state.skip[:3] == (0, 4, 3)
    assert metrics["skipped"] == 4


def test_good_updates_do_not_depend_on_skipping() -> None:
    skipping = start()
    plain = start(skip=False)
    for _ in range(3):
        skipping, metrics = STEP(skipping, GOOD_BATCH)
        plain, plain_metrics = STEP(plain, GOOD_BATCH)
    assert bits(skipping._replace(skip=None)) == bits(plain)
    assert bits({name: metrics[name] for name in plain_metrics}) == bits(plain_metrics)


def test_a_skipped_update_changes_no_bit_of_the_weights() -> None:
    """Even the sign of a zero does not change."""
    state = start()
    state = state._replace(params=jax.tree.map(lambda leaf: leaf.at[0].set(-0.0), state.params))
    after, _ = STEP(state, BAD_BATCH)
    assert kept(after) == kept(state)


def test_consecutive_skips_are_counted() -> None:
    state = start()
    seen = []
    for batch in (BAD_BATCH, BAD_BATCH, GOOD_BATCH, BAD_BATCH):
        state, metrics = STEP(state, batch)
        seen.append(int(metrics["skipped_in_a_row"]))
    assert seen == [1, 2, 0, 1]


def test_any_optimizer_can_skip() -> None:
    """A transformation may itself need the loss."""
    optimizer = optax.chain(optax.clip(1.0), optax.contrib.reduce_on_plateau(factor=0.5), optax.sgd(0.1))
    state = init_state(start().params, optimizer, skip=True)
    for batch in (GOOD_BATCH, BAD_BATCH):
        state, metrics = jax.jit(partial(train_step, objective=OBJECTIVE, optimizer=optimizer))(state, batch)
    assert (metrics["skipped"], metrics["skipped_in_a_row"]) == (1, 1)
    assert np.isfinite(state.params["wte"]["embedding"]).all()


def after(values: list[float], factor: float) -> tuple[list[bool], SkipStatistics]:
    statistics = init_statistics()
    applied = []
    for value in values:
        ok, statistics = should_apply(statistics, jnp.float32(value), jnp.float32(1.0), factor)
        applied.append(bool(ok))
    return applied, statistics


def test_spikes() -> None:
    applied, statistics = after([2.0] * HORIZON + [5.9, 7.0, np.inf, 2.0], 3.0)
    assert applied[HORIZON:] == [True, False, False, True]
    assert 2.0 < float(statistics.loss) < 2.4
    assert after([2.0] * (HORIZON - 1) + [100.0], 3.0)[0][-1], "too early to tell"
    assert after([2.0] * HORIZON + [100.0], 0.0)[0][-1], "spikes are skipped only if configured"


def test_a_lasting_increase_is_accepted() -> None:
    applied, _ = after([1.0] * HORIZON + [4.0] * HORIZON, 2.0)
    assert not applied[HORIZON]
    assert applied[-1]


@given(st.lists(st.floats(width=32, allow_subnormal=False), min_size=1, max_size=8), st.sampled_from([0.0, 2.0]))
def test_running_means_are_finite(values: list[float], factor: float) -> None:
    """Means are finite for any input, and the mean of finite values lies between their extremes."""
    values = [v if abs(v) < 1e30 else np.inf for v in values]
    applied, statistics = after(values, factor)
    finite = [v for v in values if np.isfinite(v)]
    assert applied == [bool(np.isfinite(v)) for v in values]
    assert int(statistics.seen) == len(finite)
    if finite:
        slack = 1e-5 * max(map(abs, finite))
        assert min(finite) - slack <= float(statistics.loss) <= max(finite) + slack
